"""The target's law at a draft node: logits, then the request's own settings with the node's own history.

Every rule works on rows only, so that a row's law never depends on its batch-mates. Which rows a rule
touches is known on the host. Orders and formulas follow transformers' logits processors and warpers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.decoding.draft import Draft, nothing
from specfw.types import SamplingParams

__all__ = ["NodeLaws", "SamplingBatch", "SamplingState"]


class SamplingState:
    """What one request's law depends on beyond the logits: settings, stop tokens, token counts.

    Token counts live on the device and exist only if a penalty is set.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params = params
        self.emitted = len(output)
        self.penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.stop_ids = [token for token in stop_ids if token < vocab_size]
        self.bias: Tensor | None = None
        if params.logit_bias:
            self.bias = torch.zeros(vocab_size, dtype=torch.float64, device=device)
            for token, value in params.logit_bias.items():
                self.bias[token] = value
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
        if self.counts is not None:
            self._count(tokens)

    def _count(self, tokens: Sequence[int]) -> None:
        assert self.counts is not None
        index = torch.tensor(list(tokens), dtype=torch.long, device=self.counts.device)
        self.counts.index_add_(0, index, torch.ones_like(index, dtype=self.counts.dtype))


class SamplingBatch:
    """The sampling settings of the B requests of a step."""

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self._states = states
        params = [state.params for state in states]
        self.greedy = np.array([p.temperature == 0.0 for p in params], np.bool_)
        self.penalised = any(state.penalised for state in states)
        """Whether any law depends on the drafted path, so that it must be looked up."""
        self._biased = np.array([state.bias is not None for state in states], np.bool_)
        self._penalised = np.array([state.penalised for state in states], np.bool_)
        self._emitted = np.array([state.emitted for state in states], np.int64)
        self._minimum = np.array([p.min_new_tokens for p in params], np.int64)
        self._temperature = np.array([p.temperature or 1.0 for p in params])
        self._top_k = np.array([p.top_k or 0 for p in params], np.int64)
        self._top_p = np.array([1.0 if p.top_p is None else p.top_p for p in params])
        self._min_p = np.array([p.min_p or 0.0 for p in params])

    def scores(
        self, logits: Tensor, request: NDArray[np.int64], path: Tensor, depth: Tensor
    ) -> Tensor:
        """Logits after bias, penalties and minimum length, in float32 at least: [M, V].

        Args:
            logits: [M, V].
            request: which of the B requests each row belongs to, [M].
            path: the draft tokens between the committed text and the row, int64 [M, D], -1 padded
                (on any side); read only where `penalised`.
            depth: how many draft tokens that are, int64 [M].
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        scores = self._add_bias(scores, request)
        scores = self._penalise(scores, request, path)
        return self._forbid_early_stop(scores, request, depth)

    def laws(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        """Probabilities of score rows [M, V] after temperature, top-k, top-p and min-p.

        Temperature 0 gives the one-hot law of the highest score (the lowest id on ties).
        """
        greedy = self.greedy[request]
        if greedy.all():
            return _one_hot(scores)
        if not greedy.any():
            return self._warp(scores, request)
        law = torch.empty_like(scores)
        for rows, shape in ((np.flatnonzero(greedy), None), (np.flatnonzero(~greedy), request)):
            part = scores[_index(rows, scores)]
            law[_index(rows, scores)] = (
                _one_hot(part) if shape is None else self._warp(part, shape[rows])
            )
        return law

    def _add_bias(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        rows = np.flatnonzero(self._biased[request])
        if not len(rows):
            return scores
        bias = torch.stack([self._states[request[row]].bias for row in rows])
        return scores.index_add(0, _index(rows, scores), bias.to(scores.dtype))

    def _penalise(self, scores: Tensor, request: NDArray[np.int64], path: Tensor) -> Tensor:
        rows = np.flatnonzero(self._penalised[request])
        if not len(rows):
            return scores
        index = _index(rows, scores)
        states = [self._states[request[row]] for row in rows]
        counts = torch.stack([state.counts for state in states])
        tokens = path[index]
        counts.scatter_add_(1, tokens.clamp_min(0), (tokens >= 0).to(counts.dtype))
        seen = torch.stack([state.prompt_seen for state in states]) | (counts > 0)
        repetition = self._column([state.params.repetition_penalty for state in states], scores)
        frequency = self._column([state.params.frequency_penalty for state in states], scores)
        presence = self._column([state.params.presence_penalty for state in states], scores)
        part = scores[index]
        repeated = torch.where(part < 0, part * repetition, part / repetition)
        part = torch.where(seen, repeated, part)
        counts = counts.to(part.dtype)
        part = part - frequency * counts - presence * (counts > 0)
        return scores.index_copy(0, index, part)

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

    def _warp(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        temperature = self._column(self._temperature[request], scores)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature
        scores = self._keep_top_k(scores, self._top_k[request])
        law = scores.softmax(-1)
        filtered = self._keep_min_p(
            self._keep_top_p(law, self._top_p[request]), self._min_p[request]
        )
        return law if filtered is law else filtered / filtered.sum(-1, keepdim=True)

    def _keep_top_k(self, scores: Tensor, top_k: NDArray[np.int64]) -> Tensor:
        top_k = np.minimum(top_k, scores.shape[-1])
        rows = np.flatnonzero(top_k)
        if not len(rows):
            return scores
        index = _index(rows, scores)
        part = scores[index]
        best = part.topk(int(top_k.max()), -1).values
        kth = best.gather(1, _index(top_k[rows] - 1, scores)[:, None])
        return scores.index_copy(0, index, part.masked_fill(part < kth, -torch.inf))

    def _keep_top_p(self, law: Tensor, top_p: NDArray[np.float64]) -> Tensor:
        rows = np.flatnonzero(top_p < 1.0)
        if not len(rows):
            return law
        index = _index(rows, law)
        return law.index_copy(0, index, _nucleus(law[index], self._column(top_p[rows], law)))

    def _keep_min_p(self, law: Tensor, min_p: NDArray[np.float64]) -> Tensor:
        rows = np.flatnonzero(min_p)
        if not len(rows):
            return law
        index = _index(rows, law)
        part = law[index]
        least = self._column(min_p[rows], law) * part.amax(-1, keepdim=True)
        return law.index_copy(0, index, torch.where(part >= least, part, 0))

    @staticmethod
    def _column(values: Sequence[float] | NDArray[np.float64], like: Tensor) -> Tensor:
        return torch.tensor(np.asarray(values), dtype=like.dtype, device=like.device)[:, None]


def _index(rows: NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(like.device)


_MOST_LIKELY = 1024
"""Tokens that are tried first for a nucleus on CPUs, where sorting a whole vocabulary takes long."""


def _nucleus(law: Tensor, mass: Tensor) -> Tensor:
    """`law` [M, V] with zeros outside the smallest set of most likely tokens of at least `mass` [M, 1]."""
    if law.device.type == "cpu" and law.shape[-1] > _MOST_LIKELY:
        ordered, order = law.topk(_MOST_LIKELY, -1)
        enough = ordered.sum(-1, keepdim=True) >= mass
        kept = _keep_mass(law, ordered, order, mass)
        if bool(enough.all()):
            return kept
        return torch.where(
            enough, kept, _keep_mass(law, *law.sort(dim=-1, descending=True, stable=True), mass)
        )
    return _keep_mass(law, *law.sort(dim=-1, descending=True, stable=True), mass)


def _keep_mass(law: Tensor, ordered: Tensor, order: Tensor, mass: Tensor) -> Tensor:
    above = ordered.cumsum(-1) - ordered
    return torch.zeros_like(law).scatter_(1, order, torch.where(above < mass, ordered, 0))


def _one_hot(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)


class NodeLaws:
    """p at the nodes that a verifier reaches, computed when asked for."""

    def __init__(self, logits: Tensor, draft: Draft, sampling: SamplingBatch) -> None:
        """Bind the scored rows of a step.

        Args:
            logits: the target's rows, [R, V]: every request's nodes in index order, request by request.
            draft: the draft that was scored.
            sampling: the settings of its requests, in its order.
        """
        self._logits = logits
        sizes = draft.sizes
        self._first_row = torch.from_numpy(sizes.cumsum() - sizes).to(logits.device)
        self._draft = draft
        self._sampling = sampling
        self._every = np.arange(draft.batch)
        self.failed_at = torch.full_like(draft.start, -1)
        """int64 [B]: the first reached position with NaN or infinite logits or none left by the settings, else -1."""

    def rows(self, node: Tensor) -> Tensor:
        """The law of the token after `node`, int64 [B], of each request: float [B, V]."""
        logits = self._logits.index_select(0, self._first_row + node)
        depth, path = self._draft.history(node, with_path=self._sampling.penalised)
        scores = self._sampling.scores(logits, self._every, path, depth)
        bad = ~scores.amax(-1).isfinite()  # NaN and infinity pass through the settings
        self.failed_at = torch.where(
            bad & (self.failed_at < 0), self._draft.start + depth + 1, self.failed_at
        )
        if not nothing(bad):
            scores = torch.where(bad[:, None], 0, scores)
        return self._sampling.laws(scores, self._every)

    def raw_logprobs(self, request: int, nodes: Sequence[int]) -> Tensor:
        """The target's own log-probabilities after some nodes of one request: [len(nodes), V]."""
        rows = self._first_row[request] + torch.tensor(nodes, device=self._logits.device)
        logits = self._logits.index_select(0, rows)
        return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
