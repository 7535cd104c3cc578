"""A scheduler in a world of known prices and acceptance: no model, no clock, the same every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specfw.contracts import DraftLimits, Feedback, RequestView, Scheduler, SchedulerView
from specfw.types import SamplingParams

__all__ = ["SimulatedRequest", "World"]


@dataclass(eq=False)
class SimulatedRequest(RequestView):
    """A request that only has a length."""

    id: int = 0
    tokens: list[int] = field(default_factory=lambda: [0])
    prompt_length: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class World:
    """What drafts cost and how they fare; requests draft chains as deep as the scheduler lets them."""

    acceptance: Callable[[int], float]
    """The chance that a draft token at a depth from 1 is kept, if it is tested."""
    target: Callable[[int], float] = lambda rows: 1.0
    """Seconds of a target pass by rows."""
    drafting: Callable[[int], float] = lambda nodes: 0.0
    """Seconds of drafting by the most nodes of one request, from 1."""
    cap: DraftLimits = field(default_factory=lambda: DraftLimits(64, 64, 8))
    seed: int = 0
    seconds: float = 0.0
    """Time so far."""
    emitted: int = 0
    """Tokens so far."""
    depths: list[list[int]] = field(default_factory=list)
    """What every request was allowed, step by step."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def step(self, scheduler: Scheduler, requests: Sequence[RequestView]) -> None:
        """One round for all requests."""
        caps = [self.cap] * len(requests)
        limits = scheduler.plan(SchedulerView(requests, caps, len(requests)))
        depths = [min(limit.max_nodes, limit.max_depth) for limit in limits]
        kept = [self._kept(depth) for depth in depths]
        rows, most = len(requests) + sum(depths), max(depths, default=0)
        draft = self.drafting(most) if most else 0.0
        target = self.target(rows)
        self.depths.append(depths)
        self.seconds += draft + target
        self.emitted += sum(kept) + len(requests)
        scheduler.observe(
            Feedback(
                requests,
                emitted=[[0] * (count + 1) for count in kept],
                kept=[list(range(count)) for count in kept],
                drafted=depths,
                tested=[min(count + 1, d) for count, d in zip(kept, depths, strict=True)],
                rows=rows,
                seconds={"draft": draft, "forward": target},
            )
        )

    def run(self, scheduler: Scheduler, requests: Sequence[RequestView], tokens: int) -> float:
        """Step until this many tokens more are emitted; the seconds that they took."""
        began, until = self.seconds, self.emitted + tokens
        while self.emitted < until:
            self.step(scheduler, requests)
        return self.seconds - began

    def plain_seconds(self, requests: int, tokens: int) -> float:
        """The seconds of as many tokens without drafts."""
        return self.target(requests) * tokens / requests

    def _kept(self, depth: int) -> int:
        for place in range(depth):
            if self._random.random() >= self.acceptance(place + 1):
                return place
        return depth
