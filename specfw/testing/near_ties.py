"""Why greedy texts with and without drafts part: near-ties that another shape of pass decides otherwise.

Each difference is looked at without any drafter: the text is fed to the model again, in passes over as many
rows as a step with a draft has. If these choose the token of the speculative text, or move logits as far,
rounding did it; if not, the engine is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specfw.bench.shapes import chunked_logits
from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, RequestView, TargetInfo
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.random import KeyedSource
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.runner import KVMemory, ModelRunner
from specfw.types import SamplingParams

__all__ = ["GreedyDifference", "greedy_differences"]


@dataclass(frozen=True, slots=True)
class GreedyDifference:
    """The first token in which a speculative greedy text differs from the plain one."""

    place: int
    """Of the token, among those emitted."""
    gap: float
    """Between the logits of the two tokens in a one-row pass, in standard deviations of the logits."""
    shift: float
    """The largest change of a logit of this text between passes over one row and over several, likewise."""
    reproduced: bool
    """Whether passes over several rows choose the other token without any drafter, or move logits by the gap."""


def greedy_differences(
    runner: ModelRunner, prompt: Sequence[int], new: int, rows: int
) -> Iterator[GreedyDifference]:
    """The first difference between `new` greedy tokens without drafts and with `rows - 1` draft tokens, if any.

    Two of three draft tokens are those of the plain text, so that steps begin at all places.
    """
    plain = _decode(runner, NoDrafter(), prompt, new, rows)
    text = [*prompt, *plain]
    drafted = _decode(runner, _Remembers(text, rows - 1), prompt, new, rows)
    place = next(
        (n for n, pair in enumerate(zip(plain, drafted, strict=True)) if pair[0] != pair[1]), None
    )
    if place is None:
        return
    end = len(prompt) + place
    text = text[: end + rows]
    single = chunked_logits(runner, text, len(prompt), 1).double()
    spread, at = single.std(), place - 1
    if at < 0:  # the prompt's own pass decides
        at, single = 0, chunked_logits(runner, text, len(prompt) - 1, 1).double()
    shifts, chosen = [0.0], set()
    for before in range(rows):  # where the passes begin
        context = len(prompt) - (place == 0) + before
        several = chunked_logits(runner, text, context, rows).double()
        shifts.append(
            float((several - single[before : before + len(several)]).abs().max() / spread)
        )
        if at >= before:
            chosen.add(int(several[at - before].argmax()))
    gap = float((single[at, plain[place]] - single[at, drafted[place]]) / spread)
    yield GreedyDifference(place, gap, max(shifts), drafted[place] in chosen or gap <= max(shifts))


class _Remembers(Drafter):
    """Drafts what comes next in a text that it knows; every third token is another one."""

    def __init__(self, text: Sequence[int], depth: int) -> None:
        self._text, self._depth = text, depth
        self._vocab_size = 1

    def attach(self, target: TargetInfo) -> None:
        self._vocab_size = target.vocab_size

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, request in zip(builder.roots, requests, strict=True):
            at = len(request.tokens)
            tokens = [
                token if (at + n) % 3 else (token + 1) % self._vocab_size
                for n, token in enumerate(self._text[at : at + self._depth])
            ]
            builder.guess(int(root), tokens)


def _decode(
    runner: ModelRunner, drafter: Drafter, prompt: Sequence[int], new: int, rows: int
) -> list[int]:
    info = TargetInfo(
        "target",
        runner.vocab_size,
        runner.max_length,
        (),
        None,
        runner.model,
        runner.device,
        runner.dtype,
    )
    memory = KVMemory(-(-(len(prompt) + new + rows) // 16) + 1, 16, prefix_cache=False)
    scheduler = FixedScheduler(rows - 1, rows - 1, 1)
    engine = Engine(runner, memory, info, drafter, CoupledVerifier(), [scheduler], KeyedSource())
    params = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    request = engine.add(list(prompt), params)
    with torch.inference_mode():
        while engine.has_work:
            engine.step()
    return list(request.emitted)
