"""The scheduler `goodput`: more drafts in an idle machine, none in a full one, and no other law."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from specfw_plugin_block import BlockVerifier
from specfw_plugin_goodput import GoodputOptions, GoodputScheduler

from specfw.contracts import DraftLimits, RequestView, Scheduler, SchedulerView, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.fixed import FixedScheduler
from specfw.testing.cases import SETTINGS, Case
from specfw.testing.certification import certify
from specfw.testing.conformance import SchedulerConformance
from specfw.testing.drafters import TableDrafter
from specfw.testing.simulation import SimulatedRequest, World

QUICK = GoodputOptions(max_nodes=4, max_depth=3, max_width=2, warmup=1, memory=2)


def full_at_sixteen(rows: int) -> float:
    """Seconds of a pass: as good as flat until 16 rows, then in proportion to them."""
    return 1.0 + 0.01 * rows + max(0, rows - 16) / 16


CASES = [
    Case(SETTINGS["temperature"], vocab_size=2, horizon=4),
    Case(SETTINGS["end of text"], vocab_size=3, horizon=3, seed=2),
    Case(SETTINGS["top-p"], "sparse", vocab_size=3, horizon=3, batch=3, seed=3),
]


class TestConformance(SchedulerConformance):
    def make(self) -> GoodputScheduler:
        return GoodputScheduler(QUICK)


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier, BlockVerifier])
@pytest.mark.parametrize("relation", ["identical", "near", "disjoint"])
def test_keeps_the_law(verifier: Callable[[], Verifier], relation: str) -> None:
    """A share that depended on this step's drafts would change the law."""
    certificate = certify(
        lambda: TableDrafter(relation, 3, 2),
        verifier,
        [lambda: GoodputScheduler(QUICK)],
        cases=CASES,
    )
    assert certificate.ok, str(certificate)
    assert certificate.drafted


def nodes_by_load(acceptance: float) -> list[float]:
    """Draft nodes for each request in the end, with 1, 4, 8, 16 and 32 requests."""
    means = []
    for count in (1, 4, 8, 16, 32):
        world = World(lambda depth: acceptance, full_at_sixteen, lambda nodes: 0.02 * nodes)
        scheduler = GoodputScheduler()
        requests = [SimulatedRequest(i) for i in range(count)]
        for _ in range(80):
            world.step(scheduler, requests)
        last = [sum(depths) / count for depths in world.depths[-20:]]
        means.append(sum(last) / len(last))
    return means


def test_drafts_shrink_as_the_batch_grows() -> None:
    """Drafts that fill an already full machine slow everybody down."""
    means = nodes_by_load(0.8)
    assert means == sorted(means, reverse=True)
    assert means[0] >= 6
    assert means[-1] < 0.2


def test_comes_back_when_the_batch_empties() -> None:
    """What was switched off for lack of room must not stay off in an empty machine."""
    world = World(lambda depth: 0.8, full_at_sixteen, lambda nodes: 0.02 * nodes)
    scheduler = GoodputScheduler()
    requests = [SimulatedRequest(i) for i in range(32)]
    for _ in range(60):
        world.step(scheduler, requests)
    assert sum(world.depths[-1]) == 0
    for _ in range(10):
        world.step(scheduler, requests[:1])
    assert world.depths[-1][0] >= 4


def test_nodes_go_where_they_are_kept() -> None:
    """An even share would waste rows on the request whose drafts are refused."""

    class Half(World):
        def _walk(self, draft: Sequence[int]) -> list[int]:
            self.turn = 1 - getattr(self, "turn", 1)
            return [0] * len(draft) if self.turn == 0 else []

    scheduler, requests = GoodputScheduler(), [SimulatedRequest(0), SimulatedRequest(1)]
    world = Half(lambda depth: 1.0, lambda rows: 1.0 + 0.05 * rows, lambda nodes: 0.05)
    for _ in range(60):
        world.step(scheduler, requests)
    assert world.depths[-1] == [8, 0]


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_no_worse_than_plain_or_fixed(count: int, acceptance: float) -> None:
    """Below 0.97 of the better of plain and K=4, somebody would do better without this scheduler."""

    def seconds(scheduler: Scheduler) -> float:
        world = World(lambda depth: acceptance, full_at_sixteen, lambda nodes: 0.05 * nodes)
        requests = [SimulatedRequest(i) for i in range(count)]
        world.run(scheduler, requests, 64 * count)
        return world.run(scheduler, requests, 1000 * count)

    best = min(seconds(FixedScheduler(0, 0, 1)), seconds(FixedScheduler(4, 4, 1)))
    assert best / seconds(GoodputScheduler()) > 0.97


def test_drafts_that_slow_the_batch_down_end() -> None:
    """Costs that medians do not tell: here every third pass with drafts takes four times as long as others."""

    class Dear(World):
        def step(self, scheduler: Scheduler, requests: Sequence[RequestView]) -> None:
            usual, dear = self.target, len(self.depths) % 3 == 0
            self.target = lambda rows: usual(rows) + 3.0 * (dear and rows > len(requests))
            super().step(scheduler, requests)
            self.target = usual

    requests = [SimulatedRequest(i) for i in range(8)]
    world = Dear(lambda depth: 0.5, lambda rows: 1.0 + 0.01 * rows, lambda nodes: 0.02 * nodes)
    scheduler = GoodputScheduler()
    for _ in range(300):
        world.step(scheduler, requests)
    drafted = sum(any(depths) for depths in world.depths[100:])
    assert 0 < drafted < 20


def test_caps_win() -> None:
    """A request near its end must not get nodes that others could use."""
    scheduler = GoodputScheduler()
    caps = [DraftLimits(), DraftLimits(2, 1, 1), DraftLimits(3, 9, 1)]
    requests = [SimulatedRequest(i) for i in range(3)]
    limits = scheduler.plan(SchedulerView(requests, caps, 3))
    assert [limit.max_nodes for limit in limits] == [0, 1, 3]
