"""How likely a draft token is kept, by depth and by rank among its siblings, from tested tokens only.

A token below a refused one was never tested, nor was a sibling after a kept one, so counting these as
refused would make drafters look worse the more they draft. Old evidence fades; a depth without evidence
is taken to be like the one above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from specfw.contracts import DraftLimits, Feedback, RequestView
from specfw.shapes import Shape, best_shapes

__all__ = ["Acceptance", "AcceptanceByRequest", "BurstyAcceptance"]

_LATER_SIBLING = 0.5
"""A sibling's chance to be kept, as a share of the earlier one's, before there is evidence."""
_BURST = 8.0
"""The memory of the estimate for bursts, which are short, in drafted steps."""
_BURST_DOUBT = 2.0
"""That estimate's doubt: drafting on in vain costs less than missing a burst."""
_FRESH = 8
"""Shapes are worked out anew as often in a memory."""


class _Place:
    """Evidence for one depth and rank."""

    __slots__ = ("kept", "tested")

    def __init__(self) -> None:
        self.tested = self.kept = 0.0


class Acceptance:
    """Running estimates of P(kept | tested) at depths 1, 2, ... and ranks 0, 1, ...; each drafted step counts once."""

    def __init__(self, prior: float = 0.8, memory: float = 32.0, doubt: float = 1.0) -> None:
        """Start without evidence.

        Args:
            prior: the estimate before any evidence, of the first sibling.
            memory: drafted steps after which evidence counts 1/e.
            doubt: tests that the estimate of the depth above weighs.
        """
        self._prior, self._doubt = prior, doubt
        self._keeps = 1 - 1 / memory
        self._fresh = max(1, int(memory / _FRESH))
        self._places: list[list[_Place]] = []
        """By depth, as many as there were ever siblings."""
        self.steps = 0
        """Steps in which something was tested."""
        self._shapes: dict[tuple[int, int, int], tuple[int, list[Shape]]] = {}

    def add(
        self, tested: int, kept: int, ranks: Sequence[int] = (), siblings: Sequence[int] = ()
    ) -> None:
        """A step in which depths 1 .. `tested` were tested, and 1 .. `kept` kept; `tested` 0 is no evidence.

        Args:
            tested, kept: numbers of depths.
            ranks: ranks of the kept nodes; 0 each unless given.
            siblings: nodes at each tested depth that could be kept; 1 each unless given.
        """
        if not tested:
            return
        self.steps += 1
        for place in (place for depth in self._places for place in depth):
            place.tested *= self._keeps
            place.kept *= self._keeps
        for depth in range(tested):
            last = ranks[depth] if ranks and depth < kept else 0
            count = siblings[depth] if siblings else 1
            row = self._row(depth, count)
            for rank in range(last + 1 if depth < kept else count):
                row[rank].tested += 1
            row[last].kept += depth < kept

    def _row(self, depth: int, siblings: int) -> list[_Place]:
        while len(self._places) <= depth:
            self._places.append([])
        row = self._places[depth]
        row += [_Place() for _ in range(siblings - len(row))]
        return row

    def rates(self) -> Iterator[float]:
        """The estimates for first siblings at depths 1, 2, ... without end."""
        return (rates[0] for rates in self._all_rates(1))

    def reaches(self) -> Iterator[float]:
        """The chance that a chain is kept down to depths 1, 2, ...: the product of the rates."""
        reach = 1.0
        for rate in self.rates():
            reach *= rate
            yield reach

    def shares(self, depth: int, width: int) -> list[list[float]]:
        """The chance that of the siblings at a depth the one of each rank is kept, [depth, width].

        It is 0 for ranks that a tested depth never had: the drafter does not draft so wide there.
        """
        table = []
        for _, rates in zip(range(depth), self._all_rates(width), strict=False):
            left, row = 1.0, []
            for rate in rates:
                row.append(left * rate)
                left *= 1 - rate
            table.append(row)
        return table

    def shapes(self, limits: DraftLimits) -> list[Shape]:
        """The best trees within limits, by number of nodes; worked out anew after some evidence only."""
        key = limits.max_nodes, limits.max_depth, limits.max_width
        known = self._shapes.get(key)
        if known is None or self.steps - known[0] >= min(self._fresh, max(1, known[0])):
            table = self.shares(limits.max_depth, limits.max_width)
            known = self._shapes[key] = self.steps, best_shapes(np.array(table), limits.max_nodes)
        return known[1]

    def _all_rates(self, width: int) -> Iterator[list[float]]:
        """The estimates at depths 1, 2, ... without end, by rank."""
        expected = [self._prior * _LATER_SIBLING**rank for rank in range(width)]
        for row in self._places:
            expected = [
                (row[rank].kept + self._doubt * rate) / (row[rank].tested + self._doubt)
                if rank < len(row)
                else 0.0
                for rank, rate in enumerate(expected)
            ]
            yield expected
        while True:
            yield expected


class BurstyAcceptance:
    """Two estimates: for drafts after one that was kept whole, as while a text is being copied, and for any.

    Drafts are right in bursts; one estimate for both would draft too little in them.
    """

    def __init__(self, memory: float) -> None:
        """Start without evidence; `memory` in drafted steps, of which bursts take fewer."""
        self._any = Acceptance(memory=memory)
        self._after_whole = Acceptance(memory=min(memory, _BURST), doubt=_BURST_DOUBT)

    @property
    def steps(self) -> int:
        """Steps in which something was tested."""
        return self._any.steps

    def after(self, whole: bool) -> Acceptance:
        """The estimate for a draft after one that was kept `whole`, or after another; bursts only raise it."""
        if whole and next(self._after_whole.rates()) > next(self._any.rates()):
            return self._after_whole
        return self._any

    def add(
        self, whole: bool, tested: int, kept: int, ranks: Sequence[int], siblings: Sequence[int]
    ) -> None:
        """A step after a draft that was kept `whole`, or after another; the rest as for `Acceptance.add`."""
        self._any.add(tested, kept, ranks, siblings)
        if whole:
            self._after_whole.add(tested, kept, ranks, siblings)


@dataclass(slots=True)
class _Known:
    """What is known of one request."""

    acceptance: BurstyAcceptance
    whole: bool = True
    """Whether its last draft was kept whole; before the first one, the best is hoped for."""


class AcceptanceByRequest:
    """What is known of each request, and of all together; what is known of one ends with it."""

    def __init__(self, memory: float, carry_over: bool) -> None:
        """Start without evidence.

        Args:
            memory: drafted steps after which evidence counts 1/e.
            carry_over: whether a new request is taken to be like all others so far.
        """
        self._memory, self._carry_over = memory, carry_over
        self._all = BurstyAcceptance(memory)
        self._known: WeakKeyDictionary[RequestView, _Known] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def steps(self) -> int:
        """Drafts of all requests so far in which something was tested."""
        return self._all.steps

    def steps_of(self, request: RequestView) -> int:
        """The same of one request, and of what it was taken to be like."""
        return self._of(request).acceptance.steps

    def of(self, request: RequestView) -> Acceptance:
        """The estimate for a request's next draft."""
        known = self._of(request)
        return known.acceptance.after(known.whole)

    @property
    def of_all(self) -> Acceptance:
        """The estimate for any draft of any request."""
        return self._all.after(whole=False)

    def observe(self, feedback: Feedback) -> None:
        """Learn what was tested and kept."""
        for place, (request, tested) in enumerate(
            zip(feedback.requests, feedback.tested, strict=False)
        ):
            if not tested:
                continue
            known, kept = self._of(request), len(feedback.kept[place])
            ranks = feedback.ranks[place] if feedback.ranks else ()
            siblings = feedback.siblings[place] if feedback.siblings else ()
            for one in (known.acceptance, self._all):
                one.add(known.whole, tested, kept, ranks, siblings)
            known.whole = kept == tested

    def _of(self, request: RequestView) -> _Known:
        if request not in self._known:
            begun = deepcopy(self._all) if self._carry_over else BurstyAcceptance(self._memory)
            self._known[request] = _Known(begun)
        return self._known[request]
