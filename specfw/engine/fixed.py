"""The scheduler `fixed`: the same draft limits in every step."""

from __future__ import annotations

from collections.abc import Sequence

from specfw.contracts import DraftLimits, Scheduler, SchedulerView

__all__ = ["FixedScheduler"]


class FixedScheduler(Scheduler):
    """Allows every request the same draft, whatever happened before."""

    def __init__(self, max_nodes: int = 7, max_depth: int = 7, max_width: int = 4) -> None:
        self._limits = DraftLimits(max_nodes, max_depth, max_width)

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        return [self._limits & cap for cap in view.caps]
