"""How likely a draft token is kept, by depth, from tested tokens only.

A token below a refused one was never tested, so counting it as refused would make drafters look worse
the more they draft. Old evidence fades; a depth without evidence is taken to be like the one above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

__all__ = ["AcceptanceByDepth"]


class AcceptanceByDepth:
    """Running estimates of P(kept | tested) at depths 1, 2, ...; each drafted step counts once."""

    def __init__(self, prior: float = 0.8, memory: float = 32.0, doubt: float = 1.0) -> None:
        """Start without evidence.

        Args:
            prior: the estimate before any evidence.
            memory: drafted steps after which evidence counts 1/e.
            doubt: tests that the estimate of the depth above weighs.
        """
        self._prior, self._doubt = prior, doubt
        self._keeps = 1 - 1 / memory
        self._tested: list[float] = []
        self._kept: list[float] = []
        self.steps = 0
        """Steps in which something was tested."""

    def add(self, tested: int, kept: int) -> None:
        """A step in which depths 1 .. `tested` were tested, and 1 .. `kept` kept; `tested` 0 is no evidence."""
        if not tested:
            return
        self.steps += 1
        missing = tested - len(self._tested)
        self._tested += [0.0] * missing
        self._kept += [0.0] * missing
        for depth in range(len(self._tested)):
            self._tested[depth] = self._keeps * self._tested[depth] + (depth < tested)
            self._kept[depth] = self._keeps * self._kept[depth] + (depth < kept)

    def copy(self) -> AcceptanceByDepth:
        """The same evidence, to go its own way from here."""
        other = copy(self)
        other._tested, other._kept = [*self._tested], [*self._kept]
        return other

    def rates(self) -> Iterator[float]:
        """The estimates at depths 1, 2, ... without end."""
        rate = self._prior
        for tested, kept in zip(self._tested, self._kept, strict=True):
            rate = (kept + self._doubt * rate) / (tested + self._doubt)
            yield rate
        while True:
            yield rate

    def reaches(self) -> Iterator[float]:
        """The chance that a draft token at depths 1, 2, ... is kept: the product of the rates down to it."""
        reach = 1.0
        for rate in self.rates():
            reach *= rate
            yield reach
