"""The scheduler `goodput`: draft nodes go where they bring most, as long as the batch gets faster.

Each further node of a request is worth the chance that it is kept. The most valuable nodes of all requests
are taken together, as many as make the most expected tokens a second by the measured time of a pass. So
drafts shrink, to nothing in the end, while requests fill the machine. Liu et al., "Optimizing speculative
decoding for serving large language models using goodput", arXiv 2406.14066.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Annotated
from weakref import WeakKeyDictionary

from pydantic import Field

from specfw.acceptance import AcceptanceByDepth
from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    DraftLimits,
    Feedback,
    RequestView,
    Scheduler,
    SchedulerView,
)
from specfw.costs import StepCosts, read_profile
from specfw.hookspecs import hookimpl
from specfw.probing import Probe

__all__ = ["GoodputOptions", "GoodputScheduler", "specfw_api", "specfw_schedulers"]

specfw_api = API_VERSION

_MEASURED = 3
"""Plain steps whose time must be known before drafting can be compared with it."""


class GoodputOptions(Options):
    """Bounds for each request, and how quickly they are followed."""

    max_depth: Annotated[int, Field(ge=1)] = 8
    """Draft nodes on one path, at most."""
    width: Annotated[int, Field(ge=1)] = 1
    """Siblings; 1 allows chains only. The draft nodes are the depth times this."""
    warmup: Annotated[int, Field(ge=0)] = 4
    """Drafts before plain steps are timed."""
    memory: Annotated[float, Field(gt=1.0)] = 32.0
    """Drafts after which evidence counts 1/e."""
    margin: Annotated[float, Field(ge=0.0)] = 0.02
    """The share by which drafting must be faster than not drafting."""
    probe_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    """The most time that drafts may take, as a share, while drafting is switched off."""
    profile: str | None = None
    """A file with the output of `specfw profile --json`, to know costs from the first step."""


class GoodputScheduler(Scheduler):
    """Divides among all requests the number of draft nodes that makes the batch fastest.

    A request without evidence of its own is taken to be like all others so far.
    """

    def __init__(self, options: GoodputOptions | None = None) -> None:
        self._options = options = options or GoodputOptions()
        self._costs = StepCosts(read_profile(options.profile) if options.profile else None)
        self._all = AcceptanceByDepth(memory=options.memory)
        self._known: WeakKeyDictionary[RequestView, AcceptanceByDepth] = WeakKeyDictionary()
        self._probe = Probe(options.probe_share)
        self._probing = False

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        width = self._options.width
        reachable = [
            min(self._options.max_depth, cap.max_depth, -(-cap.max_nodes // width))
            for cap in view.caps
        ]
        depths = self._divide(view, reachable)
        self._probing = False
        if any(reachable) and not any(depths):
            probes = sum(map(bool, reachable))
            extra = self._seconds(view, probes, 1) / self._seconds(view, 0, 0) - 1
            self._probing = self._probe.due(extra)
            depths = [min(depth, self._probing) for depth in reachable]
        return [
            DraftLimits(depth * width, depth, width) & cap
            for depth, cap in zip(depths, view.caps, strict=True)
        ]

    def observe(self, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        outcomes = list(
            zip(feedback.requests, feedback.tested, map(len, feedback.kept), strict=False)
        )
        for request, tested, kept in outcomes:
            self._of(request).add(tested, kept)
            self._all.add(tested, kept)
        if self._probing and outcomes:
            self._probe.learn(sum(kept for *_, kept in outcomes) / len(outcomes))
        self._probing = False

    def _of(self, request: RequestView) -> AcceptanceByDepth:
        if request not in self._known:
            self._known[request] = self._all.copy()
        return self._known[request]

    def _divide(self, view: SchedulerView, reachable: Sequence[int]) -> list[int]:
        """The depth of each request's draft."""
        none = [0] * len(reachable)
        settled = self._all.steps >= self._options.warmup
        if settled and self._costs.target.measurements(view.rows) < _MEASURED:
            return none
        worth = [
            (reach, i)
            for i, request in enumerate(view.requests)
            for reach in islice(self._of(request).reaches(), reachable[i])
        ]
        worth.sort(key=lambda node: -node[0])  # a request's own nodes stay in order of depth
        depths, best = [*none], none
        tokens = float(len(view.requests))
        highest = tokens / self._seconds(view, 0, 0) * (1 + self._options.margin)
        for levels, (reach, i) in enumerate(worth, 1):
            tokens += reach
            depths[i] += 1
            rate = tokens / self._seconds(view, levels, max(depths))
            if rate > highest:
                highest, best = rate, [*depths]
        return best

    def _seconds(self, view: SchedulerView, levels: int, deepest: int) -> float:
        """A step with this many levels of nodes, all drafts together, and in the deepest draft."""
        width = self._options.width
        return self._costs(view.rows + levels * width, deepest * width)


@hookimpl
def specfw_schedulers() -> dict[str, Component[Scheduler]]:
    return {
        "goodput": Component(
            GoodputScheduler,
            GoodputOptions,
            "Divides draft nodes among all requests for the most tokens a second; none where the batch fills the machine.",
            example={"max_depth": 3, "width": 2, "warmup": 3, "memory": 2},
        )
    }
