"""The scheduler `adaptive-k`: each request drafts the tree that brings most tokens a second.

Acceptance is estimated by depth and sibling from tested tokens, apart for drafts after one that was
kept whole, and gives the best tree of each size by dynamic programming; costs are measured while running.
That size is taken which brings most tokens beyond what its time is worth. Drafts differ, and one that
offers much is rare: the most tokens a second of a drafted step, as in Leviathan et al., arXiv 2211.17192,
would value the time at what it brings in a good step, and draft too little in that one. Where no size
pays, nothing is drafted but for a probe now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from specfw.acceptance import Acceptance, AcceptanceByRequest
from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    DraftLimits,
    Feedback,
    RequestView,
    Scheduler,
    SchedulerView,
    TargetInfo,
)
from specfw.costs import Pace, StepCosts
from specfw.hookspecs import hookimpl
from specfw.probing import Probe
from specfw.shapes import Shape

__all__ = ["AdaptiveKOptions", "AdaptiveKScheduler", "specfw_api", "specfw_schedulers"]

specfw_api = API_VERSION


class AdaptiveKOptions(Options):
    """The bounds of the tree, and how quickly it follows."""

    max_nodes: Annotated[int, Field(ge=1)] = 16
    """Draft nodes, at most."""
    max_depth: Annotated[int, Field(ge=1)] = 8
    """The same on one path."""
    max_width: Annotated[int, Field(ge=1)] = 4
    """Siblings, at most; 1 allows chains only."""
    min_depth: Annotated[int, Field(ge=0)] = 0
    """Draft nodes on one path, at least; 0 lets drafting be switched off."""
    start: Annotated[int, Field(ge=0)] = 8
    """The nodes of a request's first drafts, unless those of all requests show that none pays."""
    warmup: Annotated[int, Field(ge=0)] = 2
    """Drafts of a request before their size changes."""
    memory: Annotated[float, Field(gt=1.0)] = 32.0
    """Drafts after which evidence counts 1/e."""
    margin: Annotated[float, Field(ge=0.0)] = 0.02
    """Tokens a step that drafts must bring, beyond what their time is worth, over those of `min_depth`."""
    probe_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.01
    """The most time that drafts may take, as a share, while drafting is switched off."""
    carry_over: bool = False
    """Whether a new request starts from what the others showed instead of from `start`."""
    profile: str | None = "auto"
    """What is known of costs before the first step: `auto` times passes at start, once for each model and
    machine; or a file with the output of `specfw profile --json`; None learns while running only."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> AdaptiveKOptions:
        if not self.min_depth <= self.start <= self.max_nodes:
            raise ValueError(
                f"start={self.start} is not between min_depth={self.min_depth} and "
                f"max_nodes={self.max_nodes}; change one of them"
            )
        if self.min_depth > self.max_depth:
            raise ValueError(
                f"min_depth={self.min_depth} exceeds max_depth={self.max_depth}; change one of them"
            )
        return self


class AdaptiveKScheduler(Scheduler):
    """Chooses each request's tree as if all requests drafted as much as it does.

    What it knows of a request ends with the request.
    """

    def __init__(self, options: AdaptiveKOptions | None = None) -> None:
        self._options = options = options or AdaptiveKOptions()
        self._most = DraftLimits(options.max_nodes, options.max_depth, options.max_width)
        self._costs = StepCosts()
        self._acceptance = AcceptanceByRequest(options.memory, options.carry_over)
        self._pace = Pace()
        self._probe = Probe(options.probe_share)
        self._probed: list[RequestView] = []

    def attach(self, target: TargetInfo) -> None:
        self._costs.learn_of(target, self._options.profile)

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        count = len(view.requests)
        seconds = [
            self._costs(view.rows, count * nodes, nodes)
            for nodes in range(self._options.max_nodes + 1)
        ]
        limits = [
            self._limits(request, cap & self._most, view.rows, seconds)
            for request, cap in zip(view.requests, view.caps, strict=True)
        ]
        off = [
            i
            for i, cap in enumerate(view.caps)
            if cap.max_nodes and cap.max_depth and not limits[i].max_nodes
        ]
        self._probed = []
        if off and self._costs.measured(view.rows) and self._probe.due():
            self._probed = [view.requests[i] for i in off]
            for i in off:
                limits[i] = DraftLimits(1, 1, 1)
        return [limit & cap for limit, cap in zip(limits, view.caps, strict=True)]

    def observe(self, feedback: Feedback) -> None:
        self._costs.observe(feedback)
        self._pace.observe(feedback, self._costs)
        self._acceptance.observe(feedback)
        if self._probed and feedback.requests:
            probed = [i for i, one in enumerate(feedback.requests) if one in self._probed]
            self._probe.learn(
                self._costs.extra(feedback),
                sum(len(feedback.kept[i]) for i in probed) / len(feedback.requests),
                any(feedback.drafted[i] for i in probed),
            )
        self._probed = []

    def _limits(
        self, request: RequestView, most: DraftLimits, rows: int, seconds: Sequence[float]
    ) -> DraftLimits:
        """What one request should draft, of at most `most`; `seconds` by nodes."""
        options = self._options
        if self._acceptance.steps_of(request) < options.warmup:
            if not self._best(self._acceptance.of_all, self._most, seconds).nodes:
                return DraftLimits()  # probes must show that this request is unlike all others
            depth = min(options.start, options.max_depth)
            return DraftLimits(options.start, depth, options.max_width)
        if not options.min_depth and not self._costs.measured(rows):
            return DraftLimits()
        return self._best(self._acceptance.of(request), most, seconds).limits

    def _best(self, acceptance: Acceptance, most: DraftLimits, seconds: Sequence[float]) -> Shape:
        """The tree that brings most tokens beyond what its time is worth; the least one if none pays."""

        def worth(shape: Shape) -> float:
            return shape.tokens - self._pace.now * seconds[shape.nodes] / seconds[0]

        shapes = acceptance.shapes(most)
        least, *deeper = [s for s in shapes if s.depth >= self._options.min_depth] or shapes[-1:]
        best = max((least, *deeper), key=worth)  # the smallest of equals
        return best if worth(best) > worth(least) + self._options.margin else least


@hookimpl
def specfw_schedulers() -> dict[str, Component[Scheduler]]:
    return {
        "adaptive-k": Component(
            AdaptiveKScheduler,
            AdaptiveKOptions,
            "Drafts the tree that is measured to be fastest, for each request; none where it does not pay.",
            example={"max_nodes": 4, "max_depth": 3, "max_width": 2}
            | {"start": 3, "warmup": 2, "memory": 2},
        )
    }
