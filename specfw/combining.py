"""Several drafters as one: what they require, what each is told, and that a fault costs only its own drafts.

The engine combines the drafters of its requests this way, and so do combinators in plugins.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeVar

from specfw.contracts import (
    Drafter,
    Feedback,
    RankedRows,
    RequestView,
    Requirements,
    TargetInfo,
)

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["Combined", "Member"]

log = logging.getLogger("specfw")

T = TypeVar("T")


class Member:
    """One of the drafters that draft together; what goes wrong in it costs only its own drafts."""

    def __init__(self, drafter: Drafter, label: str) -> None:
        """`label` names the drafter in warnings."""
        self.drafter, self.label = drafter, label
        self.faults: Counter[str] = Counter()
        """Drafts lost, by cause; each cause is logged once."""
        self._stopped: set[int] = set()

    def begin(self, request: RequestView) -> None:
        self.guard(self.drafter.begin, [request], request)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        """Let the drafter draft for those of `requests` with which nothing went wrong."""
        rows = [i for i, request in enumerate(requests) if self.serves(request)]
        if len(rows) < len(requests):
            requests, builder = [requests[i] for i in rows], builder.for_rows(rows)
        # What was drawn before a failure stays: dropping it could depend on what was drawn.
        self.guard(self.drafter.propose, requests, requests, builder.on_behalf_of(self))

    def observe(self, feedback: Feedback) -> None:
        self.guard(self.drafter.observe, feedback.requests, feedback)

    def end(self, request: RequestView) -> None:
        self.guard(self.drafter.end, [request], request)
        self._stopped.discard(request.id)

    def serves(self, request: RequestView) -> bool:
        """Whether nothing went wrong for this request yet."""
        return request.id not in self._stopped

    def stop(self, request: RequestView, why: str) -> None:
        """Have nothing more drafted for a request; the first time, say why."""
        if not self.faults[why]:
            log.warning(
                "drafter %s %s; requests hit by this go on without its drafts", self.label, why
            )
        self.faults[why] += 1
        self._leave_out(request)

    def _leave_out(self, request: RequestView) -> None:
        self._stopped.add(request.id)

    def guard(
        self, call: Callable[..., None], requests: Sequence[RequestView], *arguments: Any
    ) -> None:
        """Call the drafter; if it raises, `requests` go on without its drafts."""
        try:
            call(*arguments)
        except Exception as error:
            log.debug("drafter failed", exc_info=True)
            for request in {request.id: request for request in requests}.values():
                self.stop(request, f"raised {type(error).__name__}: {error}")


class Combined(Drafter):
    """A drafter made of others, its members, which all follow every request unless a subclass chooses.

    A subclass says in `propose` which members draft what, through `Member.propose`.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        whole = type(self).__name__
        self.members = [
            Member(drafter, f"{type(drafter).__name__} (number {number} of {whole})")
            for number, drafter in enumerate(drafters, 1)
        ]

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """All that any of the drafters requires."""
        return reduce(or_, (member.drafter.requires for member in self.members), Requirements())

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        """Whether all of the drafters take tokens beyond the observed ones as given for one call only."""
        return all(member.drafter.reads_ahead for member in self.members)

    @property
    def faults(self) -> Mapping[str, int]:
        total: Counter[str] = Counter()
        for member in self.members:
            total += member.faults
            total += Counter(member.drafter.faults)
        return total

    def followers(self, request: RequestView) -> Sequence[Member]:
        """The members that are told of a request: all."""
        return self.members

    def attach(self, target: TargetInfo) -> None:
        for member in self.members:
            member.drafter.attach(target)

    def begin(self, request: RequestView) -> None:
        for member in self.followers(request):
            member.begin(request)

    def observe(self, feedback: Feedback) -> None:
        for member in self.members:
            rows = [i for i, r in enumerate(feedback.requests) if member in self.followers(r)]
            chunks = [c for c in feedback.chunks if member in self.followers(c.request)]
            part = replace(_rows_of(feedback, rows), chunks=chunks)
            member.observe(_narrowed(part, member.drafter.requires))

    def end(self, request: RequestView) -> None:
        for member in reversed(self.followers(request)):
            member.end(request)

    def close(self) -> None:
        with ExitStack() as stack:  # one that fails keeps no other from closing
            for member in reversed(self.members):
                stack.callback(member.drafter.close)


def _rows_of(feedback: Feedback, rows: Sequence[int]) -> Feedback:
    """The feedback of some of its requests."""
    if len(rows) == len(feedback.requests):
        return feedback
    return replace(
        feedback,
        requests=_pick(feedback.requests, rows),
        emitted=_pick(feedback.emitted, rows),
        kept=_pick(feedback.kept, rows),
        drafted=_pick(feedback.drafted, rows),
        hidden={layer: _pick(states, rows) for layer, states in feedback.hidden.items()},
        ranked=_pick(feedback.ranked, rows),
        extra=_pick(feedback.extra, rows),
        tested=_pick(feedback.tested, rows),
        ranks=_pick(feedback.ranks, rows),
        siblings=_pick(feedback.siblings, rows),
        chances=_pick(feedback.chances, rows),
    )


def _pick(values: Sequence[T], rows: Sequence[int]) -> Sequence[T]:
    return [values[i] for i in rows] if values else values


def _narrowed(feedback: Feedback, requires: Requirements) -> Feedback:
    """The feedback with what one drafter requires, and no more."""
    layers, top_k = requires.hidden_layers, requires.top_k

    def first(count: int, ranked: Sequence[RankedRows]) -> list[RankedRows]:
        return [RankedRows(rows.tokens, rows.parents, rows.top[:, :count]) for rows in ranked]

    return replace(
        feedback,
        hidden={layer: feedback.hidden[layer] for layer in layers if layer in feedback.hidden},
        chunks=feedback.chunks if layers else (),
        ranked=first(top_k, feedback.ranked) if top_k else (),
        extra=first(max(top_k, 1), feedback.extra),
    )
