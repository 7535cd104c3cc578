"""The combinators: drafters made of drafters, as `merge(suffix, recycling(k=8))`.

All inner drafters follow every request, so that any of them can draft in any step. What they may add
is set by a view of the builder; nothing that one of them added is ever taken out.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from specfw.combining import Combined, Member
from specfw.components import Component, NestedDrafter, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    DraftLimits,
    Feedback,
    RequestAhead,
    RequestView,
    Scorer,
    TargetInfo,
)
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = [
    "Bandit",
    "BanditOptions",
    "Cascade",
    "CascadeOptions",
    "CombinedOptions",
    "Extend",
    "First",
    "Merge",
    "Route",
    "RouteOptions",
    "SharedOptions",
]

specfw_api = API_VERSION

_RECENT = 1 / 4
"""Weight of the newest step in the running mean of accepted tokens."""

Attribute = Literal["prompt_length", "temperature"]

_ATTRIBUTES: Mapping[str, Callable[[RequestView], float]] = {
    "prompt_length": lambda request: request.prompt_length,
    "temperature": lambda request: request.params.temperature,
}

_Share = Annotated[float, Field(gt=0.0)]


class CombinedOptions(Options):
    """The drafters that are combined."""

    drafters: Annotated[tuple[NestedDrafter, ...], Field(min_length=2)]
    """At least two drafters, in order; in an expression, simply the arguments without a name."""


class SharedOptions(CombinedOptions):
    """The drafters that are combined, and how they share the nodes."""

    shares: tuple[_Share, ...] | None = None
    """How the nodes are divided, one number for each drafter. What a drafter leaves over goes to those
    after it; with None, each may take all that those before it have left."""

    @field_validator("shares")
    @classmethod
    def _one_each(
        cls, shares: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        drafters = info.data.get("drafters", ())
        if shares is not None and drafters and len(shares) != len(drafters):
            raise ValueError(f"there must be one share for each of the {len(drafters)} drafters")
        return shares


def _check_rising(bounds: tuple[float, ...]) -> tuple[float, ...]:
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError("bounds must rise")
    return bounds


class RouteOptions(CombinedOptions):
    """What decides, and where one drafter's range ends and the next one's begins."""

    by: Attribute | Literal["acceptance"] = "acceptance"
    """A request's prompt length in tokens, its temperature, or how many of its draft tokens were
    accepted in a step, as a running mean."""
    bounds: tuple[float, ...]
    """One fewer than drafters, rising: the first drafter serves what is below the first bound, the
    second what is from there to below the next bound, and so on."""

    _rising = field_validator("bounds")(_check_rising)

    @model_validator(mode="after")
    def _between_drafters(self) -> RouteOptions:
        if len(self.bounds) != len(self.drafters) - 1:
            raise ValueError(
                f"{len(self.drafters)} drafters need {len(self.drafters) - 1} bounds, got "
                f"{len(self.bounds)}"
            )
        return self


class BanditOptions(CombinedOptions):
    """What is measured, and for which classes of requests apart."""

    measure: Literal["time", "passes"] = "time"
    """Emitted tokens are counted for each second, or for each target pass, which is reproducible."""
    explore: Annotated[float, Field(ge=0.0)] = 0.1
    """How much a drafter's rate is raised for being little known; 0 takes what was best so far."""
    by: Attribute | None = None
    """What divides requests into classes that are measured apart; None makes one class of all."""
    bounds: tuple[float, ...] = ()
    """Where one class ends and the next begins, rising."""

    _rising = field_validator("bounds")(_check_rising)

    @model_validator(mode="after")
    def _bounds_of_something(self) -> BanditOptions:
        if (self.by is None) != (not self.bounds):
            raise ValueError("by and bounds make classes only together; give both or neither")
        return self


class First(Combined):
    """For each request, the draft of the first drafter that has one."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        waiting = [i for i, limit in enumerate(builder.limits) if limit.max_nodes]
        for index, member in enumerate(self.members):
            if not waiting:
                return
            view = builder.for_rows(waiting)
            member.propose([requests[i] for i in waiting], view.as_drafter(index))
            added = view.added
            waiting = [i for i, nodes in zip(waiting, added, strict=True) if not nodes]


class _Sharing(Combined):
    """Drafters that add to one tree, one after the other."""

    def __init__(self, drafters: Sequence[Drafter], shares: Sequence[float] | None = None) -> None:
        super().__init__(drafters)
        self._up_to = [1.0] * len(drafters)
        """The part of the nodes that is used at most after each drafter's turn."""
        if shares is not None:
            self._up_to = [upto / sum(shares) for upto in accumulate(shares)]

    def _budgets(self, index: int, builder: DraftBuilder) -> list[int]:
        """Nodes that drafter `index` may add for each request, when those before it have had their turn."""
        return [
            math.ceil(round(limit.max_nodes * self._up_to[index], 6)) - int(spent)
            for limit, spent in zip(builder.limits, builder.spent, strict=True)
        ]


class Merge(_Sharing):
    """One tree from all drafters; a guess that is there already is gone through, not doubled."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for index, member in enumerate(self.members):
            limits = [
                replace(limit, max_nodes=nodes)
                for limit, nodes in zip(builder.limits, self._budgets(index, builder), strict=True)
            ]
            member.propose(requests, builder.limited(limits).as_drafter(index))


class Extend(_Sharing):
    """Each drafter continues the leaves that those before it have left, the root if there are none.

    A leaf that was drawn, not guessed, is not continued: the host does not know its token.
    """

    def __init__(self, drafters: Sequence[Drafter], shares: Sequence[float] | None = None) -> None:
        """Combine.

        Raises:
            ConfigError: a drafter after the first cannot draft after tokens that are only guessed.
        """
        super().__init__(drafters, shares)
        for drafter in drafters[1:]:
            if not drafter.reads_ahead:
                raise ConfigError(
                    f"drafter extend: expected drafters after the first that read ahead (reads_ahead is "
                    f"true), as ngram, suffix and recycling do, got {type(drafter).__name__}, whose state "
                    "would take guesses for text; put it first, or use merge"
                )

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for index, member in enumerate(self.members):
            leaves = _Leaves(requests, builder, self._budgets(index, builder))
            if leaves.requests:
                view = builder.limited(leaves.limits, np.array(leaves.nodes, np.int64))
                member.propose(leaves.requests, view.as_drafter(index))


class _Leaves:
    """The leaves of all requests that can be continued, with the nodes of each request divided."""

    def __init__(
        self, requests: Sequence[RequestView], builder: DraftBuilder, budgets: Sequence[int]
    ) -> None:
        self.nodes: list[int] = []
        self.requests: list[RequestView] = []
        self.limits: list[DraftLimits] = []
        leaves = builder.leaves()
        by_request: list[list[int]] = [[] for _ in requests]
        for node, i, more in zip(
            leaves.tolist(),
            builder.request_of(leaves).tolist(),
            builder.wants_more(leaves).tolist(),
            strict=True,
        ):
            if more:
                by_request[i].append(node)
        for i, nodes in enumerate(by_request):
            self._divide(requests[i], nodes, budgets[i], builder)

    def _divide(
        self, request: RequestView, nodes: Sequence[int], budget: int, builder: DraftBuilder
    ) -> None:
        """Give each leaf its part of the budget, the first ones what does not come out even."""
        paths = [(node, path) for node in nodes if (path := builder.guessed_path(node)) is not None]
        for place, (node, path) in enumerate(paths):
            part = (budget + len(paths) - 1 - place) // len(paths)
            if part:
                self.nodes.append(node)
                self.requests.append(RequestAhead.after(request, path))
                self.limits.append(DraftLimits(part, part, part))


class _Choosing(Combined):
    """For each request one of the drafters, chosen before anything is drafted."""

    @abstractmethod
    def _choose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> Sequence[int]:
        """Which drafter is to serve each request."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        chosen = self._choose(requests, builder)
        for index, member in enumerate(self.members):
            rows = [i for i, choice in enumerate(chosen) if choice == index]
            if rows:
                view = builder.for_rows(rows).as_drafter(index)
                member.propose([requests[i] for i in rows], view)


class Route(_Choosing):
    """The drafter in whose range an attribute of the request, or its recent acceptance, is.

    The running mean of accepted tokens is a statistic that is learned on purpose; a request starts
    with the last drafter, and where a drafter is `none`, its mean can only fall.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        bounds: Sequence[float],
        by: Attribute | Literal["acceptance"] = "acceptance",
    ) -> None:
        super().__init__(drafters)
        self._bounds = list(bounds)
        self._value = _ATTRIBUTES.get(by, self._acceptance)
        self._accepted: dict[int, float] = {}

    def observe(self, feedback: Feedback) -> None:
        super().observe(feedback)
        for request, kept in zip(feedback.requests, feedback.kept, strict=True):
            mean = self._accepted.get(request.id, float(len(kept)))
            self._accepted[request.id] = mean + _RECENT * (len(kept) - mean)

    def end(self, request: RequestView) -> None:
        self._accepted.pop(request.id, None)
        super().end(request)

    def _choose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> Sequence[int]:
        return [bisect_right(self._bounds, self._value(request)) for request in requests]

    def _acceptance(self, request: RequestView) -> float:
        return self._accepted.get(request.id, math.inf)


@dataclass(slots=True)
class _Arm:
    """What one drafter has brought one class of requests."""

    steps: int = 0
    emitted: float = 0.0
    cost: float = 0.0

    @property
    def rate(self) -> float:
        return self.emitted / self.cost if self.cost else 0.0


@dataclass(slots=True)
class _Class:
    """The drafters as one class of requests knows them."""

    arms: list[_Arm]

    def best(self, explore: float) -> int:
        """The drafter with the highest upper confidence bound (UCB1, on rates relative to the best)."""
        unknown = [index for index, arm in enumerate(self.arms) if not arm.steps]
        if unknown:
            return unknown[0]
        top = max(arm.rate for arm in self.arms) or 1.0
        total = math.log(sum(arm.steps for arm in self.arms))
        bounds = [arm.rate / top + explore * math.sqrt(total / arm.steps) for arm in self.arms]
        return bounds.index(max(bounds))


@dataclass(slots=True)
class _Trial:
    """What was chosen in the current step, and when it began."""

    began: float
    chosen: dict[int, _Arm] = field(default_factory=dict)  # by request


class Bandit(_Choosing):
    """The drafter that brings most tokens for the cost, learned for each class of requests.

    All requests of a class that draft in a step use the same drafter, and divide the step's cost
    evenly. The rates are statistics that are learned on purpose. They come from steps that are over,
    so a choice never depends on what it is a choice about.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        measure: Literal["time", "passes"] = "time",
        explore: float = 0.1,
        by: Attribute | None = None,
        bounds: Sequence[float] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Combine; `clock` gives the time in seconds."""
        super().__init__(drafters)
        self._timed, self._explore, self._clock = measure == "time", explore, clock
        self._by, self._bounds = by, list(bounds)
        self._classes = [_Class([_Arm() for _ in drafters]) for _ in range(len(bounds) + 1)]
        self._trial: _Trial | None = None

    def observe(self, feedback: Feedback) -> None:
        super().observe(feedback)
        trial, self._trial = self._trial, None
        if trial is None or not trial.chosen:
            return
        cost = (self._clock() - trial.began) / len(trial.chosen) if self._timed else 1.0
        for request, emitted in zip(feedback.requests, feedback.emitted, strict=True):
            if (arm := trial.chosen.get(request.id)) is not None:
                arm.emitted += len(emitted)
                arm.cost += cost
        for arm in {id(arm): arm for arm in trial.chosen.values()}.values():
            arm.steps += 1

    def _choose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> Sequence[int]:
        self._trial = trial = _Trial(self._clock())
        best = [one.best(self._explore) for one in self._classes]
        chosen = []
        for request, limit in zip(requests, builder.limits, strict=True):
            number = self._class_of(request)
            chosen.append(best[number])
            if limit.max_nodes:
                trial.chosen[request.id] = self._classes[number].arms[best[number]]
        return chosen

    def _class_of(self, request: RequestView) -> int:
        return 0 if self._by is None else bisect_right(self._bounds, _ATTRIBUTES[self._by](request))


class CascadeOptions(Options):
    """Who drafts for the model that drafts."""

    drafter: NestedDrafter
    """Drafts for the model."""
    model: NestedDrafter
    """A drafter with a model that can score drafts, as `small-model` is; its own drafts are not used."""
    max_nodes: Annotated[int, Field(ge=1)] = 4
    """Nodes that are drafted for the model, for each request and step."""


class Cascade(Combined):
    """A model that itself decodes speculatively, and so drafts several tokens in one of its passes.

    The framework tests the inner draft, and drafts all that comes of it: what the model keeps, and
    the token after that. So each token's law is the model's, whoever drafted for it.
    """

    def __init__(self, drafter: Drafter, model: Drafter, max_nodes: int = 4) -> None:
        """Combine.

        Raises:
            ConfigError: `model` cannot score drafts.
        """
        super().__init__([drafter, model])
        if not isinstance(model, Scorer):
            raise ConfigError(
                "drafter cascade: expected model to be a drafter that can score drafts, such as small-model, "
                f"got {type(model).__name__}; use one"
            )
        self._model, self._max_nodes = model, max_nodes

    def attach(self, target: TargetInfo) -> None:
        """Prepare for this target.

        Raises:
            ConfigError: the inner drafter drafts through the target's layers, of which its drafts are
                no part here.
        """
        super().attach(target)
        drafter = self.members[0].drafter
        if drafter.requires.draft_layers:
            raise ConfigError(
                "drafter cascade: expected an inner drafter that does not draft through the target's layers, "
                f"got {type(drafter).__name__}; use it beside the cascade, in merge or first"
            )

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        drafter, model = self.members
        rows = [
            i
            for i, (request, limit) in enumerate(zip(requests, builder.limits, strict=True))
            if limit.max_nodes and limit.max_depth and model.serves(request)
        ]
        requests, builder = [requests[i] for i in rows], builder.for_rows(rows)
        model.guard(lambda: self._propose(drafter, requests, builder.on_behalf_of(model)), requests)

    def _propose(
        self, drafter: Member, requests: Sequence[RequestView], builder: DraftBuilder
    ) -> None:
        most = self._max_nodes
        inner = builder.inner([limit & DraftLimits(most, most, most) for limit in builder.limits])
        drafter.propose(requests, inner)
        logits, scored = self._model.score(requests, inner.build())
        builder.emit(inner, logits, scored)


def _built(options: CombinedOptions) -> list[Drafter]:
    return [bound.build() for bound in options.drafters]


def _route(options: RouteOptions) -> Drafter:
    return Route(_built(options), options.bounds, options.by)


def _bandit(options: BanditOptions) -> Drafter:
    return Bandit(_built(options), options.measure, options.explore, options.by, options.bounds)


def _cascade(options: CascadeOptions) -> Drafter:
    return Cascade(options.drafter.build(), options.model.build(), options.max_nodes)


_EXAMPLE_NGRAM = {"name": "ngram"}
_EXAMPLE_MODEL = {"name": "small-model", "model": "table"}


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "first": Component(
            lambda options: First(_built(options)),
            CombinedOptions,
            "The draft of the first drafter that has one.",
            example={"drafters": [{"name": "ngram", "min_ngram": 2}, _EXAMPLE_MODEL]},
        ),
        "extend": Component(
            lambda options: Extend(_built(options), options.shares),
            SharedOptions,
            "Each drafter continues the leaves of those before it.",
            example={
                "drafters": [
                    {"name": "small-model", "model": "table", "max_nodes": 1},
                    {"name": "recycling"},
                ]
            },
        ),
        "merge": Component(
            lambda options: Merge(_built(options), options.shares),
            SharedOptions,
            "One tree from several drafters.",
            example={"drafters": [_EXAMPLE_NGRAM, _EXAMPLE_MODEL]},
        ),
        "route": Component(
            _route,
            RouteOptions,
            "A drafter by what the request is like, or by its acceptance.",
            example={"drafters": [_EXAMPLE_NGRAM, _EXAMPLE_MODEL], "bounds": [0.5]},
        ),
        "cascade": Component(
            _cascade,
            CascadeOptions,
            "A draft model for which another drafter drafts.",
            example={"drafter": _EXAMPLE_NGRAM, "model": _EXAMPLE_MODEL, "max_nodes": 2},
        ),
        "bandit": Component(
            _bandit,
            BanditOptions,
            "The drafter that is measured to be the fastest.",
            example={"drafters": [_EXAMPLE_NGRAM, _EXAMPLE_MODEL], "measure": "passes"},
        ),
    }
