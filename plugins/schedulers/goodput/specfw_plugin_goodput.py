"""The scheduler `goodput`: draft nodes go where they bring most, as long as the batch gets faster.

Each further node of a request is worth what the best tree with it emits more than the best one without.
The most valuable nodes of all requests are taken together, as many as make the most expected tokens a
second by the measured time of a pass. So drafts shrink, to nothing in the end, while requests fill the
machine. Liu et al., "Optimizing speculative decoding for serving large language models using goodput",
arXiv 2406.14066.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated

from pydantic import Field

from specfw.acceptance import AcceptanceByRequest
from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    DraftLimits,
    Feedback,
    Scheduler,
    SchedulerView,
    TargetInfo,
)
from specfw.costs import Gain, StepCosts
from specfw.hookspecs import hookimpl
from specfw.probing import Probe
from specfw.shapes import Shape

__all__ = ["GoodputOptions", "GoodputScheduler", "specfw_api", "specfw_schedulers"]

specfw_api = API_VERSION


class GoodputOptions(Options):
    """Bounds for each request, and how quickly they are followed."""

    max_nodes: Annotated[int, Field(ge=1)] = 16
    """Draft nodes, at most."""
    max_depth: Annotated[int, Field(ge=1)] = 8
    """The same on one path."""
    max_width: Annotated[int, Field(ge=1)] = 4
    """Siblings, at most; 1 allows chains only."""
    start: Annotated[int, Field(ge=0)] = 4
    """The nodes of each request's first drafts, at most."""
    warmup: Annotated[int, Field(ge=0)] = 4
    """Drafts before plain steps are timed."""
    memory: Annotated[float, Field(gt=1.0)] = 32.0
    """Drafts after which evidence counts 1/e."""
    margin: Annotated[float, Field(ge=0.0)] = 0.03
    """The share by which drafting must be faster than not drafting."""
    probe_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.005
    """The most time that drafts may take, as a share, while drafting is switched off."""
    profile: str | None = "auto"
    """What is known of costs before the first step: `auto` times passes at start, once for each model and
    machine; or a file with the output of `specfw profile --json`; None learns while running only."""


class GoodputScheduler(Scheduler):
    """Divides among all requests the number of draft nodes that makes the batch fastest.

    A request without evidence of its own is taken to be like all others so far.
    """

    def __init__(self, options: GoodputOptions | None = None) -> None:
        self._options = options = options or GoodputOptions()
        self._most = DraftLimits(options.max_nodes, options.max_depth, options.max_width)
        self._costs = StepCosts()
        self._gain = Gain()
        self._acceptance = AcceptanceByRequest(options.memory, carry_over=True)
        self._probe = Probe(options.probe_share)
        self._probing = False

    def attach(self, target: TargetInfo) -> None:
        self._costs.learn_of(target, self._options.profile)

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        self._probing = False
        slows = self._slows()
        if self._wants_plain(view.rows) or (slows and not self._probe.due()):
            return [DraftLimits()] * len(view.requests)
        shapes = [
            self._acceptance.of(request).shapes(cap & self._most)
            for request, cap in zip(view.requests, view.caps, strict=True)
        ]
        chosen = self._divide(view, shapes)
        can_draft = [len(several) > 1 for several in shapes]
        if any(can_draft) and not any(chosen) and (slows or self._probe.due()):
            chosen = [int(can) for can in can_draft]
            self._probing = True
        self._probing |= slows
        return [
            several[nodes].limits & cap
            for several, nodes, cap in zip(shapes, chosen, view.caps, strict=True)
        ]

    def observe(self, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        self._gain.observe(feedback, self._costs)
        self._acceptance.observe(feedback)
        if self._probing and feedback.requests:
            gained = sum(map(len, feedback.kept)) / len(feedback.requests)
            if self._slows():  # one probe that paid does not outweigh many steps that did not
                gained = 0.0
            self._probe.learn(self._costs.extra(feedback), gained, any(feedback.drafted))
        self._probing = False

    def _slows(self) -> bool:
        """Whether drafts are known to have made the batch slower of late, or hardly faster."""
        gain = self._gain.now
        return gain is not None and gain <= 1 + self._options.margin

    def _wants_plain(self, rows: int) -> bool:
        """Whether a step without drafts is needed to compare with."""
        settled = self._acceptance.steps >= self._options.warmup
        return settled and (not self._costs.measured(rows) or self._gain.wants_plain)

    def _divide(self, view: SchedulerView, shapes: Sequence[Sequence[Shape]]) -> list[int]:
        """The nodes of each request's draft."""
        none = [0] * len(shapes)
        settled = self._acceptance.steps >= self._options.warmup
        most = None if settled else self._options.start
        worth = [(gain, i) for i, several in enumerate(shapes) for gain in _gains(several)[:most]]
        worth.sort(key=lambda node: -node[0])  # a request's own nodes stay in order
        nodes, best = [*none], none
        tokens = float(len(shapes))
        highest = tokens / self._costs(view.rows, 0, 0) * (1 + self._options.margin)
        for total, (gain, i) in enumerate(worth, 1):
            tokens += gain
            nodes[i] += 1
            rate = tokens / self._costs(view.rows, total, max(nodes))
            if rate > highest:
                highest, best = rate, [*nodes]
        return best


def _gains(shapes: Sequence[Shape]) -> list[float]:
    """What each further node brings, at most what the one before it does."""
    return list(accumulate((b.tokens - a.tokens for a, b in pairwise(shapes)), min))


@hookimpl
def specfw_schedulers() -> dict[str, Component[Scheduler]]:
    return {
        "goodput": Component(
            GoodputScheduler,
            GoodputOptions,
            "Divides draft nodes among all requests for the most tokens a second; none where the batch fills the machine.",
            example={"max_nodes": 4, "max_depth": 3, "max_width": 2, "warmup": 3, "memory": 2},
        )
    }
