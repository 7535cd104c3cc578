"""When to draft although it does not seem to pay: seldom enough that it costs a bounded share of the time."""

from __future__ import annotations

__all__ = ["Probe"]


class Probe:
    """Waits after each probe in proportion to what it cost; after one that paid it does not wait."""

    def __init__(self, share: float = 0.01, least: int = 3) -> None:
        """Set the bound.

        Args:
            share: the largest part of the time that probes may take which do not pay.
            least: steps to wait at least after one in which something was drafted.
        """
        self._share, self._least = share, least
        self._wait = float(least)

    def due(self) -> bool:
        """Whether to probe in this step; what came of it must be told by `learn`."""
        self._wait -= 1
        return self._wait < 0

    def learn(self, extra: float, gain: float, drafted: bool) -> None:
        """A probe was made.

        Args:
            extra: what it took more, in the time of plain steps.
            gain: what it brought more, in tokens of plain steps.
            drafted: whether there was a draft; one that was empty taught nothing, and is soon tried again.
        """
        if gain > extra:
            self._wait = 0
        else:
            self._wait = max(self._least if drafted else 0, extra / self._share)
