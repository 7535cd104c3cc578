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
    """What drafts cost and how they fare.

    Requests draft as deep as the scheduler lets them: a chain of first siblings, each with as many
    siblings beside it as there are chances for.
    """

    acceptance: Callable[[int], float]
    """The chance that a draft token at a depth from 1 is kept, if it is tested."""
    target: Callable[[int], float] = lambda rows: 1.0
    """Seconds of a target pass by rows."""
    drafting: Callable[[int], float] = lambda nodes: 0.0
    """Seconds of drafting by the most nodes of one request, from 1."""
    siblings: Sequence[float] = ()
    """The chance that each later sibling is kept, if it is tested; nothing is drafted below these."""
    cap: DraftLimits = field(default_factory=lambda: DraftLimits(64, 64, 8))
    seed: int = 0
    seconds: float = 0.0
    """Time so far."""
    emitted: int = 0
    """Tokens so far."""
    depths: list[list[int]] = field(default_factory=list)
    """How deep every request drafted, step by step."""
    nodes: list[list[int]] = field(default_factory=list)
    """How many nodes."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def step(self, scheduler: Scheduler, requests: Sequence[RequestView]) -> None:
        """One round for all requests."""
        caps = [self.cap] * len(requests)
        limits = scheduler.plan(SchedulerView(requests, caps, len(requests)))
        drafts = [self._draft(limit) for limit in limits]
        walks = [self._walk(draft) for draft in drafts]
        depths, nodes = [len(draft) for draft in drafts], [sum(draft) for draft in drafts]
        kept = [len(ranks) for ranks in walks]
        # After a later sibling there is nothing left to test.
        tested = [
            count if any(ranks) else min(count + 1, depth)
            for ranks, count, depth in zip(walks, kept, depths, strict=True)
        ]
        rows, most = len(requests) + sum(nodes), max(nodes, default=0)
        draft = self.drafting(most) if most else 0.0
        target = self.target(rows)
        self.depths.append(depths)
        self.nodes.append(nodes)
        self.seconds += draft + target
        self.emitted += sum(kept) + len(requests)
        scheduler.observe(
            Feedback(
                requests,
                emitted=[[0] * (count + 1) for count in kept],
                kept=[list(range(count)) for count in kept],
                drafted=nodes,
                tested=tested,
                ranks=walks,
                siblings=[d[:count] for d, count in zip(drafts, tested, strict=True)],
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

    def _draft(self, limit: DraftLimits) -> list[int]:
        """Siblings at each depth."""
        wide = min(1 + len(self.siblings), limit.max_width)
        left = limit.max_nodes
        drafted: list[int] = []
        while left and wide and len(drafted) < limit.max_depth:
            drafted.append(min(wide, left))
            left -= drafted[-1]
        return drafted

    def _walk(self, draft: Sequence[int]) -> list[int]:
        """Ranks of the kept nodes; nothing was drafted below a later sibling."""
        ranks = []
        for place, siblings in enumerate(draft):
            chances = [self.acceptance(place + 1), *self.siblings][:siblings]
            rank = next((r for r, c in enumerate(chances) if self._random.random() < c), None)
            if rank is None:
                break
            ranks.append(rank)
            if rank:
                break
        return ranks
