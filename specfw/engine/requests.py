"""One request's life: its tokens, settings, memory, counts, and the pieces it has streamed."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from specfw.contracts import DraftLimits, RequestView
from specfw.decoding.grammar import Grammars
from specfw.decoding.probabilities import NodeLaws, SamplingState
from specfw.decoding.stopping import Stopper
from specfw.engine.memory import KVSequence
from specfw.types import (
    FinishReason,
    Guarantee,
    Output,
    Piece,
    SamplingParams,
    SpeculationStats,
    TokenLogprob,
    Usage,
)

__all__ = ["Request"]

_UNLIMITED = 1 << 30


class Request(RequestView):
    """A request inside the engine."""

    def __init__(
        self,
        id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        tokenizer: Any,
        vocab_size: int,
        device: torch.device,
        grammars: Grammars,
        guarantee: Guarantee,
        index: int = 0,
        streams: bool = False,
    ) -> None:
        self.id = id
        self.index = index
        self._streams = streams
        self.params = params
        self.prompt_length = len(prompt)
        self.tokens: list[int] = list(prompt)
        self.seed = secrets.randbits(63) if params.seed is None else params.seed & (2**63 - 1)
        self.stopper = Stopper(params, eos_token_ids, tokenizer, prompt)
        stop_ids = [*params.stop_token_ids, *([] if params.ignore_eos else eos_token_ids)]
        matcher = grammars.matcher(params, stop_ids)
        self.sampling = SamplingState(params, prompt, [], stop_ids, vocab_size, device, matcher)
        self.stats = SpeculationStats(guarantee=guarantee)
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob] | None = (
            None if params.prompt_logprobs is None else []
        )
        self.sequence: KVSequence | None = None
        self.drafting = params.speculation.enabled
        self.begun = False
        self.overtaken = 0
        self.output: Output | None = None
        self.pieces: deque[Piece] = deque()

    @property
    def emitted(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def uncomputed(self) -> int:
        """Committed tokens without KV; one while decoding, more before."""
        return len(self.tokens) - (self.sequence.n_kv if self.sequence else 0)

    @property
    def reusable(self) -> int:
        """How many tokens may take their KV from the prefix cache: not those that are to be scored."""
        scored = self.prompt_logprobs
        if scored is None or len(scored) == self.prompt_length - 1:
            return len(self.tokens)
        return len(scored)

    def draft_cap(self) -> DraftLimits:
        """The most that could be of use: one token less than may still be emitted, within the request's own limits."""
        remaining = self.params.max_new_tokens - len(self.emitted) - 1
        wish = self.params.speculation
        if not self.drafting or remaining <= 0:
            return DraftLimits()
        return DraftLimits(
            max_nodes=_UNLIMITED if wish.max_nodes is None else wish.max_nodes,
            max_depth=min(remaining, _UNLIMITED if wish.max_depth is None else wish.max_depth),
            max_width=_UNLIMITED if wish.max_width is None else wish.max_width,
        )

    def emit(self, tokens: Sequence[int], kept: int) -> tuple[int, FinishReason | None]:
        """Commit tokens of which the first `kept` were drafted, cut at the first stop.

        Returns:
            How many tokens were taken, and why the request ends, if it does.
        """
        taken, reason = self.stopper.extend(tokens)
        tokens = tokens[:taken]
        self.tokens.extend(tokens)
        self.sampling.advance(tokens)
        if self._streams:
            accepted = [place < kept for place in range(taken)]
            self.pieces.append(Piece(self.stopper.take(), list(tokens), accepted, self.index))
        return taken, reason

    def count(self, drafted: int, extra: int, tested: int, kept: int, emitted: int) -> None:
        """Add one target pass to the statistics; `tested` depths had a draft token that was tested."""
        stats = self.stats
        stats.target_passes += 1
        stats.drafted += drafted
        stats.accepted += kept
        stats.emitted += emitted
        stats.extra_rows += extra
        if drafted:
            stats.drafted_rounds += 1
            stats.accepted_histogram[kept] = stats.accepted_histogram.get(kept, 0) + 1
        missing = tested - len(stats.tested_by_depth)
        stats.tested_by_depth += [0] * missing
        stats.accepted_by_depth += [0] * missing
        for depth in range(tested):
            stats.tested_by_depth[depth] += 1
            stats.accepted_by_depth[depth] += depth < kept

    def add_logprobs(self, laws: NodeLaws, b: int, nodes: Sequence[int]) -> None:
        """Note the target's log-probabilities of the last emitted tokens, drawn after `nodes`."""
        if self.logprobs is None or not nodes:
            return
        emitted = self.tokens[-len(nodes) :]
        wanted = self.params.logprobs or 0
        self.logprobs += _token_logprobs(laws.raw_logprobs(b, nodes), emitted, wanted)

    def unscored_prompt(self, context: int) -> tuple[int, int]:
        """Which of the next `context` tokens' rows give log-probabilities of the prompt: from, to."""
        if self.prompt_logprobs is None or self.sequence is None:
            return 0, 0
        first = len(self.prompt_logprobs) - self.sequence.n_kv
        last = min(context, self.prompt_length - 1 - self.sequence.n_kv)
        return (first, last) if first < last else (0, 0)

    def add_prompt_logprobs(self, logits: torch.Tensor) -> None:
        """Note the log-probabilities of the next prompt tokens, from the rows before them: [n, V]."""
        assert self.prompt_logprobs is not None
        rows = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        first = len(self.prompt_logprobs) + 1
        tokens = self.tokens[first : first + len(rows)]
        self.prompt_logprobs += _token_logprobs(rows, tokens, self.params.prompt_logprobs or 0)

    def finish(self, reason: FinishReason, error: str | None = None) -> Output:
        """Make the output; the last streamed piece carries it."""
        if self.stopper.finish_reason is None:
            self.stopper.finish(reason)
        self.output = Output(
            text=self.stopper.text,
            token_ids=self.emitted,
            finish_reason=reason,
            usage=Usage(self.prompt_length, len(self.emitted)),
            speculation=self.stats,
            seed=self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stop_reason=self.stopper.stop_reason,
            error=error,
        )
        if self._streams:
            self.pieces.append(Piece(self.stopper.take(), [], [], self.index, self.output))
        return self.output


def _token_logprobs(rows: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The log-probabilities of `tokens` and of the `top` best, from rows [n, V]."""
    chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
    best = rows.topk(min(top, rows.shape[1]), -1)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, values, ids in zip(
            tokens, chosen, best.values.tolist(), best.indices.tolist(), strict=True
        )
    ]
