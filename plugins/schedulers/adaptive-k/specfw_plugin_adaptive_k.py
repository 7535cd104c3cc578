"""The scheduler `adaptive-k`: each request drafts as deep as brings most tokens a second.

Acceptance is estimated by depth from tested tokens, costs are measured while running, and the depth is
the best of the formula in Leviathan et al., arXiv 2211.17192, with both in place of constants. Where no
depth pays, nothing is drafted but for a probe now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Annotated
from weakref import WeakKeyDictionary

from pydantic import Field, model_validator

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

__all__ = ["AdaptiveKOptions", "AdaptiveKScheduler", "specfw_api", "specfw_schedulers"]

specfw_api = API_VERSION

_MEASURED = 3
"""Plain steps whose time must be known before drafting can be compared with it."""


class AdaptiveKOptions(Options):
    """The bounds of the depth, and how quickly it follows."""

    max_depth: Annotated[int, Field(ge=1)] = 8
    """Draft nodes on one path, at most."""
    min_depth: Annotated[int, Field(ge=0)] = 0
    """The same, at least; 0 lets drafting be switched off."""
    start: Annotated[int, Field(ge=0)] = 4
    """The depth of a request's first drafts."""
    warmup: Annotated[int, Field(ge=0)] = 4
    """Drafts of a request before its depth changes."""
    width: Annotated[int, Field(ge=1)] = 1
    """Siblings; 1 allows chains only. The draft nodes are the depth times this."""
    memory: Annotated[float, Field(gt=1.0)] = 32.0
    """Drafts after which evidence counts 1/e."""
    margin: Annotated[float, Field(ge=0.0)] = 0.02
    """The share by which drafting must be faster than with `min_depth`."""
    probe_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    """The most time that drafts may take, as a share, while drafting is switched off."""
    carry_over: bool = False
    """Whether a new request starts from what the others showed instead of from `start`."""
    profile: str | None = None
    """A file with the output of `specfw profile --json`, to know costs from the first step."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> AdaptiveKOptions:
        if not self.min_depth <= self.start <= self.max_depth:
            raise ValueError(
                f"start={self.start} is not between min_depth={self.min_depth} and "
                f"max_depth={self.max_depth}; change one of them"
            )
        return self


class AdaptiveKScheduler(Scheduler):
    """Chooses each request's depth as if all requests drafted as deep as it does.

    What it knows of a request ends with the request.
    """

    def __init__(self, options: AdaptiveKOptions | None = None) -> None:
        self._options = options = options or AdaptiveKOptions()
        self._costs = StepCosts(read_profile(options.profile) if options.profile else None)
        self._all = AcceptanceByDepth(memory=options.memory)
        self._known: WeakKeyDictionary[RequestView, AcceptanceByDepth] = WeakKeyDictionary()
        self._probe = Probe(options.probe_share)
        self._probed: list[RequestView] = []

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        count = len(view.requests)
        seconds = [
            self._costs(
                view.rows + count * depth * self._options.width, depth * self._options.width
            )
            for depth in range(self._options.max_depth + 1)
        ]
        can_draft = [bool(cap.max_nodes and cap.max_depth) for cap in view.caps]
        depths = [self._depth(request, view.rows, seconds) for request in view.requests]
        off = [i for i in range(count) if can_draft[i] and depths[i] == 0]
        self._probed = []
        if off and self._probe.due(seconds[1] / seconds[0] - 1):
            self._probed = [view.requests[i] for i in off]
            for i in off:
                depths[i] = 1
        return [self._limits(depth) & cap for depth, cap in zip(depths, view.caps, strict=True)]

    def observe(self, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        gained = 0
        for request, tested, kept in zip(
            feedback.requests, feedback.tested, feedback.kept, strict=False
        ):
            self._of(request).add(tested, len(kept))
            self._all.add(tested, len(kept))
            gained += len(kept) if request in self._probed else 0
        if self._probed and feedback.requests:
            self._probe.learn(gained / len(feedback.requests))
        self._probed = []

    def _of(self, request: RequestView) -> AcceptanceByDepth:
        if request not in self._known:
            carried = self._options.carry_over
            self._known[request] = (
                self._all.copy() if carried else AcceptanceByDepth(memory=self._options.memory)
            )
        return self._known[request]

    def _depth(self, request: RequestView, rows: int, seconds: Sequence[float]) -> int:
        options, acceptance = self._options, self._of(request)
        if acceptance.steps < options.warmup:
            return options.start
        if not options.min_depth and self._costs.target.measurements(rows) < _MEASURED:
            return 0
        tokens = accumulate(islice(acceptance.reaches(), options.max_depth), initial=1.0)
        rates = [emitted / cost for emitted, cost in zip(tokens, seconds, strict=True)]
        allowed = range(options.min_depth, options.max_depth + 1)
        best = max(allowed, key=lambda depth: (rates[depth], -depth))
        pays = rates[best] > (1 + options.margin) * rates[options.min_depth]
        return best if pays else options.min_depth

    def _limits(self, depth: int) -> DraftLimits:
        return DraftLimits(depth * self._options.width, depth, self._options.width)


@hookimpl
def specfw_schedulers() -> dict[str, Component[Scheduler]]:
    return {
        "adaptive-k": Component(
            AdaptiveKScheduler,
            AdaptiveKOptions,
            "Drafts as deep as is measured to be fastest, for each request; not at all where it does not pay.",
            example={"start": 2, "max_depth": 3, "warmup": 2, "width": 2, "memory": 2},
        )
    }
