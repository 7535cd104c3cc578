"""The target's law at a draft node: logits, then the request's own settings with the node's own history.

Every rule works on rows only, so that a row's law never depends on its batch-mates. Which rows a rule
touches is known on the host. Orders and formulas follow transformers' logits processors and warpers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.decoding.draft import Draft, everything, nothing
from specfw.decoding.grammar import Matcher
from specfw.decoding.history import Cells, History, RuleError
from specfw.decoding.warping import Warping, column, index_of
from specfw.types import SamplingParams

__all__ = ["NodeLaws", "SamplingBatch", "SamplingState"]


class SamplingState:
    """What one request's law depends on beyond the logits: settings, stop tokens, its tokens so far.

    Whatever rows of the vocabulary's width that takes live on the device, and exist only if a
    setting needs them.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        matcher: Matcher | None = None,
    ) -> None:
        def mask(tokens: Sequence[int]) -> Tensor | None:
            if not tokens:
                return None
            row = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            row[torch.tensor(list(tokens), dtype=torch.long, device=device)] = True
            return row

        self.params = params
        self.emitted = len(output)
        self.penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.stop_ids = [token for token in stop_ids if token < vocab_size]
        self.bias = _bias_row(params, vocab_size, device)
        self.bad = mask([ids[0] for ids in params.bad_words_ids if len(ids) == 1])
        self.suppressed = mask(params.suppress_tokens)
        self.begin_suppressed = mask(params.begin_suppress_tokens)
        self.forced = mask(params.forced_eos_token_id)
        self.history = History(params, prompt, output, matcher) if History.needed(params) else None
        """What is read on the host; None if nothing is."""
        self.prompt_seen: Tensor | None = None
        self.counts: Tensor | None = None
        if self.penalised:
            self.prompt_seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.prompt_seen[torch.tensor(list(prompt), dtype=torch.long, device=device)] = True
            self.counts = torch.zeros(vocab_size, dtype=torch.float64, device=device)
            self._count(output)

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        self.emitted += len(tokens)
        if self.history is not None:
            self.history.advance(tokens)
        if self.counts is not None:
            self._count(tokens)

    def _count(self, tokens: Sequence[int]) -> None:
        assert self.counts is not None
        index = torch.tensor(list(tokens), dtype=torch.long, device=self.counts.device)
        self.counts.index_add_(0, index, torch.ones_like(index, dtype=self.counts.dtype))


def _bias_row(params: SamplingParams, vocab_size: int, device: torch.device) -> Tensor | None:
    """What is added to the scores whatever came before, float64 [V]; None if nothing is."""
    single = [(ids[0], bias) for ids, bias in params.sequence_bias if len(ids) == 1]
    if not params.logit_bias and not single:
        return None
    row = torch.zeros(vocab_size, dtype=torch.float64, device=device)
    for token, bias in [*params.logit_bias.items(), *single]:
        row[token] += bias
    return row


Failures = dict[int, tuple[int, str]]
"""Requests whose own rule failed at a node: that node's depth, the smallest there is, and a sentence."""


def _note(failures: Failures, request: int, depth: int, error: RuleError) -> None:
    if request not in failures or failures[request][0] > depth:
        failures[request] = depth, str(error)


class SamplingBatch:
    """The sampling settings of the B requests of a step."""

    def __init__(self, states: Sequence[SamplingState]) -> None:
        def where(has: Callable[[SamplingState], bool]) -> NDArray[np.bool_]:
            return np.array([has(state) for state in states], np.bool_)

        self._states = states
        self._warping = Warping([state.params for state in states])
        self.greedy = self._warping.greedy
        self._biased = where(lambda state: state.bias is not None)
        self._penalised = where(lambda state: state.penalised)
        self._bad = where(lambda state: state.bad is not None)
        self._suppressed = where(lambda state: state.suppressed is not None)
        self._begin_suppressed = where(
            lambda state: state.begin_suppressed is not None and state.emitted == 0
        )
        self._forced = where(lambda state: state.forced is not None)
        self._hastened = where(
            lambda state: state.params.exponential_decay_length_penalty is not None
        )
        self._remembers = where(lambda state: state.history is not None)
        self._constrained = where(
            lambda state: state.history is not None and state.history.constrains
        )
        self._processes = where(lambda state: state.history is not None and state.history.processes)
        self._emitted = np.array([state.emitted for state in states], np.int64)
        self._minimum = np.array([state.params.min_new_tokens for state in states], np.int64)
        self._last = np.array([state.params.max_new_tokens - 1 for state in states], np.int64)

    def part(self, rows: Sequence[int]) -> SamplingBatch:
        """The settings of some of the requests."""
        return SamplingBatch([self._states[row] for row in rows])

    @property
    def reads_path(self) -> bool:
        """Whether any law depends on the drafted path, so that it must be looked up."""
        return bool(self._penalised.any() or self._remembers.any())

    def scores(
        self,
        logits: Tensor,
        request: NDArray[np.int64],
        path: Tensor,
        depth: Tensor,
        failures: Failures | None = None,
    ) -> Tensor:
        """Logits after everything but temperature and filters, in float32 at least: [M, V].

        Args:
            logits: [M, V].
            request: which of the B requests each row belongs to, [M].
            path: the draft tokens between the committed text and the row, in order, int64 [M, D],
                -1 padded (on any side); read only if `reads_path`.
            depth: how many draft tokens that are, int64 [M].
            failures: gets what failed of the requests' own rules, a grammar or a processor; such
                rows are left as they were before that rule.
        """
        failures = {} if failures is None else failures
        scores = logits if logits.dtype == torch.float64 else logits.float()
        paths = self._host_paths(request, path)
        scores = self._add_bias(scores, request)
        scores = self._add_cells(scores, request, paths, History.biases)
        scores = self._penalise(scores, request, path)
        scores = self._add_cells(scores, request, paths, History.bans)
        scores = self._ban(scores, request, self._bad, lambda state: state.bad)
        scores = self._forbid_early_stop(scores, request, depth)
        scores = self._force_end(scores, request, depth)
        scores = self._hasten_end(scores, request, depth)
        scores = self._ban(scores, request, self._suppressed, lambda state: state.suppressed)
        scores = self._suppress_first(scores, request, depth)
        scores = self._constrain(scores, request, paths, failures)
        processed = self._process(scores, request, paths, failures)
        if processed is scores:
            return scores
        return self._constrain(processed, request, paths, failures)  # whatever a processor brings

    def constrains(self, request: int) -> bool:
        """Whether a request has a grammar."""
        return bool(self._constrained[request])

    def allows(self, request: int, path: Sequence[int], token: int) -> bool:
        """Whether a request's grammar lets a token follow a drafted path."""
        return self._history(request).allows(path, token)

    def forced(self, request: int, most: int) -> list[int]:
        """The next tokens that a request's grammar leaves no choice about, `most` at most."""
        return self._history(request).forced(most) if self.constrains(request) else []

    def laws(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        """Probabilities of score rows [M, V] after temperature and filters.

        Temperature 0 gives the one-hot law of the highest score (the lowest id on ties).
        """
        return self._warping.laws(scores, request)

    def _host_paths(self, request: NDArray[np.int64], path: Tensor) -> dict[int, list[int]]:
        """The paths of the rows that need them on the host; on an accelerator this waits."""
        rows = np.flatnonzero(self._remembers[request])
        if not len(rows):
            return {}
        tokens = path[index_of(rows, path)].tolist()
        return {
            int(row): [token for token in one if token >= 0]
            for row, one in zip(rows, tokens, strict=True)
        }

    def _add_bias(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        rows = np.flatnonzero(self._biased[request])
        if not len(rows):
            return scores
        bias = torch.stack([self._states[request[row]].bias for row in rows])
        return scores.index_add(0, index_of(rows, scores), bias.to(scores.dtype))

    def _add_cells(
        self,
        scores: Tensor,
        request: NDArray[np.int64],
        paths: dict[int, list[int]],
        rule: Callable[[History, Sequence[int]], Cells],
    ) -> Tensor:
        """Add what a rule of histories says."""
        cells = [
            (row, token, value)
            for row, path in paths.items()
            for token, value in rule(self._history(request[row]), path)
        ]
        if not cells:
            return scores
        rows, tokens, values = zip(*cells, strict=True)
        index = (
            torch.tensor(rows, device=scores.device),
            torch.tensor(tokens, device=scores.device),
        )
        added = torch.tensor(values, dtype=scores.dtype, device=scores.device)
        return scores.index_put(index, added, accumulate=True)

    def _penalise(self, scores: Tensor, request: NDArray[np.int64], path: Tensor) -> Tensor:
        rows = np.flatnonzero(self._penalised[request])
        if not len(rows):
            return scores
        index = index_of(rows, scores)
        states = [self._states[request[row]] for row in rows]
        counts = torch.stack([state.counts for state in states])
        tokens = path[index]
        counts.scatter_add_(1, tokens.clamp_min(0), (tokens >= 0).to(counts.dtype))
        seen = torch.stack([state.prompt_seen for state in states]) | (counts > 0)
        repetition = column([state.params.repetition_penalty for state in states], scores)
        frequency = column([state.params.frequency_penalty for state in states], scores)
        presence = column([state.params.presence_penalty for state in states], scores)
        part = scores[index]
        repeated = torch.where(part < 0, part * repetition, part / repetition)
        part = torch.where(seen, repeated, part)
        counts = counts.to(part.dtype)
        part = part - frequency * counts - presence * (counts > 0)
        return scores.index_copy(0, index, part)

    def _ban(
        self,
        scores: Tensor,
        request: NDArray[np.int64],
        chosen: NDArray[np.bool_],
        mask_of: Callable[[SamplingState], Any],
        only: Tensor | None = None,
    ) -> Tensor:
        """Forbid the tokens of a mask [V] in the rows of chosen requests (where `only` [M] is set)."""
        rows = np.flatnonzero(chosen[request])
        if not len(rows):
            return scores
        index = index_of(rows, scores)
        mask = torch.stack([mask_of(self._states[request[row]]) for row in rows])
        if only is not None:
            mask = mask & only[index][:, None]
        return scores.index_copy(0, index, scores[index].masked_fill(mask, -torch.inf))

    def _forbid_early_stop(
        self, scores: Tensor, request: NDArray[np.int64], depth: Tensor
    ) -> Tensor:
        missing = (self._minimum - self._emitted)[request]
        cells = [
            (row, token)
            for row in np.flatnonzero(missing > 0)
            for token in self._states[request[row]].stop_ids
        ]
        if not cells:
            return scores
        rows, tokens = torch.tensor(cells, device=scores.device).T
        early = depth < torch.from_numpy(missing).to(scores.device)
        return scores.index_put(
            (rows, tokens), torch.where(early[rows], -torch.inf, scores[rows, tokens])
        )

    def _force_end(self, scores: Tensor, request: NDArray[np.int64], depth: Tensor) -> Tensor:
        """At the last position, leave the forced tokens only, all alike."""
        rows = np.flatnonzero(self._forced[request])
        if not len(rows):
            return scores
        index = index_of(rows, scores)
        forced = torch.stack([self._states[request[row]].forced for row in rows])
        left = index_of((self._last - self._emitted)[request[rows]], scores)
        part = torch.zeros_like(scores[index]).masked_fill(~forced, -torch.inf)
        last = (depth[index] == left)[:, None]
        return scores.index_copy(0, index, torch.where(last, part, scores[index]))

    def _hasten_end(self, scores: Tensor, request: NDArray[np.int64], depth: Tensor) -> Tensor:
        """Raise the scores of stop tokens, exponentially from some length on."""
        rows = np.flatnonzero(self._hastened[request])
        cells = [(row, token) for row in rows for token in self._states[request[row]].stop_ids]
        if not cells:
            return scores
        start, factor = np.zeros(len(request)), np.ones(len(request))
        for row in rows:
            given = self._states[request[row]].params.exponential_decay_length_penalty
            start[row], factor[row] = given or (0, 1.0)
        over = depth - index_of((start - self._emitted[request]).astype(np.int64), scores)
        growth = column(factor, scores)[:, 0].double() ** over.clamp_min(0) - 1
        at, tokens = torch.tensor(cells, device=scores.device).T
        old = scores[at, tokens]
        raised = old + (old.abs() * growth[at].to(old.dtype)).masked_fill(~old.isfinite(), 0)
        return scores.index_put((at, tokens), raised)

    def _suppress_first(self, scores: Tensor, request: NDArray[np.int64], depth: Tensor) -> Tensor:
        """Forbid some tokens as the first of the text."""
        return self._ban(
            scores,
            request,
            self._begin_suppressed,
            lambda state: state.begin_suppressed,
            only=depth == 0,
        )

    def _constrain(
        self,
        scores: Tensor,
        request: NDArray[np.int64],
        paths: dict[int, list[int]],
        failures: Failures,
    ) -> Tensor:
        """Leave only tokens that the requests' own grammars allow."""
        masks: dict[int, NDArray[np.bool_]] = {}
        for row in np.flatnonzero(self._constrained[request]).tolist():
            try:
                allowed = self._history(request[row]).allowed(paths[row])
            except RuleError as error:
                _note(failures, int(request[row]), len(paths[row]), error)
            else:
                if allowed is not None:
                    masks[row] = allowed
        if not masks:
            return scores
        index = index_of(np.array(list(masks)), scores)
        mask = torch.from_numpy(np.stack(list(masks.values()))).to(scores.device)
        return scores.index_copy(0, index, scores[index].masked_fill(~mask, -torch.inf))

    def _process(
        self,
        scores: Tensor,
        request: NDArray[np.int64],
        paths: dict[int, list[int]],
        failures: Failures,
    ) -> Tensor:
        """Call the requests' own logits processors, a row at a time."""
        rows = np.flatnonzero(self._processes[request])
        if len(rows):
            scores = scores.clone()
        for row in rows.tolist():
            try:
                history = self._history(request[row])
                scores[row] = history.process(scores[row], paths[row])
            except RuleError as error:
                _note(failures, int(request[row]), len(paths[row]), error)
        return scores

    def _history(self, request: int) -> History:
        history = self._states[request].history
        assert history is not None
        return history


class NodeLaws:
    """p at the nodes that a verifier reaches, computed when asked for."""

    def __init__(
        self,
        logits: Tensor,
        draft: Draft,
        sampling: SamplingBatch,
        roots: NDArray[np.int64] | None = None,
    ) -> None:
        """Bind the scored rows of a step.

        Args:
            logits: the target's rows, [R, V]; those of a request's nodes lie together, in index order.
            draft: the draft that was scored.
            sampling: the settings of its requests, in its order.
            roots: the row of each request's root, [B]; None if there are no rows but the nodes'.
        """
        self._logits = logits
        first = draft.sizes.cumsum() - draft.sizes if roots is None else roots
        self._first_row = torch.from_numpy(first).to(logits.device)
        self._draft = draft
        self._sampling = sampling
        self._every = np.arange(draft.batch)
        self.failures: Failures = {}
        self.failed_at = torch.full_like(draft.start, -1)
        """int64 [B]: the first reached position with NaN or infinite logits or none left by the settings, else -1."""

    def rows(self, node: Tensor, live: Tensor | None = None) -> Tensor:
        """The law of the token after `node`, int64 [B], of each request: float [B, V].

        Args:
            node: one of each request.
            live: bool [B], whose laws are wanted; the rows of others may hold anything.
        """
        if live is None or everything(live):
            return self._laws(node, slice(None))
        wanted = np.flatnonzero(live.numpy())
        laws = self._laws(node, wanted)
        return laws.new_zeros(len(node), laws.shape[-1]).index_copy_(
            0, index_of(wanted, laws), laws
        )

    def _laws(self, node: Tensor, wanted: slice | NDArray[np.int64]) -> Tensor:
        """The laws of some requests, [n, V]."""
        request = self._every[wanted]
        logits = self._logits.index_select(0, (self._first_row + node)[wanted])
        depth, path = self._draft.history(node, with_path=self._sampling.reads_path)
        depth, path = depth[wanted], path[wanted]
        scores = self._sampling.scores(logits, request, path, depth, self.failures)
        bad = ~scores.amax(-1).isfinite()  # NaN and infinity pass through the settings
        failed_at = self.failed_at.clone()
        first = bad & (failed_at[wanted] < 0)
        place = self._draft.start[wanted] + depth + 1
        failed_at[wanted] = torch.where(first, place, failed_at[wanted])
        self.failed_at = failed_at
        if not nothing(bad):
            scores = torch.where(bad[:, None], 0, scores)
        return self._sampling.laws(scores, request)

    def raw_logprobs(self, request: int, nodes: Sequence[int]) -> Tensor:
        """The target's own log-probabilities after some nodes of one request: [len(nodes), V]."""
        rows = self._first_row[request] + torch.tensor(nodes, device=self._logits.device)
        logits = self._logits.index_select(0, rows)
        return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
