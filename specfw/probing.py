"""When to draft although it does not seem to pay: seldom enough that it costs a bounded share of the time."""

from __future__ import annotations

__all__ = ["Probe"]


class Probe:
    """Waits between probes in proportion to what one costs; after one that paid it does not wait."""

    def __init__(self, share: float = 0.01, least: int = 16) -> None:
        """Set the bound.

        Args:
            share: the largest part of the time that probes may take which do not pay.
            least: steps to wait at least after one.
        """
        self._share, self._least = share, least
        self._waited = 0
        self._extra = 0.0
        self._again = False

    def due(self, extra: float) -> bool:
        """Whether to probe in this step, in which a probe takes the time of `extra` plain steps."""
        self._waited += 1
        if not self._again and self._waited < max(self._least, extra / self._share):
            return False
        self._waited, self._again, self._extra = 0, False, extra
        return True

    def learn(self, gain: float) -> None:
        """The probe brought as many tokens more as `gain` plain steps do."""
        self._again = gain > self._extra
