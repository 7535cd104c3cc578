"""Costs, acceptance and probes: what schedulers decide by."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from copy import deepcopy
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfw.acceptance import Acceptance
from specfw.contracts import DraftLimits, Feedback, Scheduler, SchedulerView
from specfw.costs import (
    CostCurve,
    Gain,
    Pace,
    StepCosts,
    best_depth,
    expected_tokens,
    read_profile,
    speedup,
)
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.errors import ConfigError
from specfw.probing import Probe
from specfw.testing.cases import SETTINGS, Case, build_engine
from specfw.testing.drafters import TableDrafter
from specfw.testing.simulation import SimulatedRequest


def test_expected_tokens_of_four() -> None:
    """(1 - 0.8^5) / 0.2 = (1 - 0.32768) / 0.2 = 3.3616; leaving the bonus token out gives 2.3616."""
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616, abs=1e-12)
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1


@pytest.mark.parametrize(
    ("cost", "acceptance", "depth", "gain"),
    [
        (0.02, 0.5, 4, 1.79),
        (0.05, 0.8, 8, 3.09),
        (0.10, 0.9, 10, 3.43),
        (0.20, 0.6, 2, 1.40),
        (0.50, 0.5, 0, 1.00),
    ],
)
def test_best_depth(cost: float, acceptance: float, depth: int, gain: float) -> None:
    """Depths found by trying all with the formula by hand: at a=.8, c=.05 the sum 4.3289 over 1.4 is 3.092."""
    assert best_depth(acceptance, cost) == depth
    assert speedup(acceptance, depth, cost) == pytest.approx(gain, abs=0.005)


def test_best_depth_knows_the_price_of_rows() -> None:
    """A pass that gets dearer with each row makes shorter drafts best."""
    assert best_depth(0.8, 0.05, lambda rows: 0.7 + 0.3 * rows) < best_depth(0.8, 0.05)


def test_curve_between_and_beyond_points() -> None:
    """Linear between points, constant below them, and rising on beyond them."""
    curve = CostCurve({2: 1.0, 4: 2.0, 8: 3.0})
    assert curve(1) == 1.0
    assert curve(3) == pytest.approx(1.5)
    assert curve(6) == pytest.approx(2.5)
    assert curve(11) == pytest.approx(4.0)  # (3 - 1) / (8 - 2) a row
    assert CostCurve()(5) == 0.0


def test_curve_is_robust() -> None:
    """One pass during which the machine was busy must not move the curve."""
    curve = CostCurve()
    for seconds in (1.0, 1.1, 50.0, 0.9, 1.0):
        curve.add(1, seconds)
    assert curve(1) == 1.0
    assert curve.measurements(1) == 5


def test_curve_forgets() -> None:
    """A machine that became slower must show after some passes."""
    curve = CostCurve({1: 1.0})
    for seconds in [1.0] * 30 + [2.0] * 100:
        curve.add(1, seconds)
    assert curve(1) == 2.0


def test_a_profile_is_scaled_by_what_is_measured() -> None:
    """Passes over more requests than were profiled are dearer at all rows, not only at those measured so far."""
    curve = CostCurve({1: 1.0, 4: 1.5, 8: 2.0, 16: 4.0})
    curve.add(4, 30.0)
    assert curve(4) == 1.5  # one measurement is none
    for _ in range(3):
        curve.add(8, 3.0)
    assert curve(8) == 3.0
    assert curve.measured(8)
    assert not curve.measured(4)
    assert curve(16) == pytest.approx(6.0)
    assert curve(1) == pytest.approx(1.5)
    for _ in range(3):
        curve.add(16, 5.0)
    assert curve(16) == 5.0
    assert curve(1) == pytest.approx(1.5)


@given(st.lists(st.tuples(st.integers(1, 2000), st.floats(1e-4, 10.0)), min_size=1, max_size=40))
def test_curve_never_falls(measurements: list[tuple[int, float]]) -> None:
    """With a curve that falls, more rows could look cheaper than fewer by chance alone."""
    curve = CostCurve()
    for rows, seconds in measurements:
        curve.add(rows, seconds)
    values = [curve(rows) for rows in range(1, 2100, 7)]
    assert all(b >= a - 1e-9 for a, b in pairwise(values))
    assert all(0 < value < math.inf for value in curve.points().values())


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60))
def test_curve_stays_within_what_was_measured(counts: list[int]) -> None:
    """On a machine that keeps its speed, following it must change nothing."""
    curve = CostCurve()
    for rows in counts:
        curve.add(rows, 1.0 + 0.1 * rows)
    assert curve.points() == pytest.approx({rows: 1.0 + 0.1 * rows for rows in set(counts)})
    low, high = 1.0 + 0.1 * min(counts), 1.0 + 0.1 * max(counts)
    assert all(low - 1e-9 <= curve(rows) <= high + 1e-9 for rows in counts)


def test_a_machine_that_slows_down_makes_no_count_look_dear() -> None:
    """Counts that were last measured while the machine was fast would seem cheap beside those measured now."""
    curve = CostCurve()
    for _ in range(20):
        curve.add(1, 1.0)
        curve.add(9, 1.5)
    for _ in range(40):
        curve.add(9, 3.0)
    assert curve(9) == pytest.approx(3.0)
    assert curve(1) == pytest.approx(2.0)


def test_pace_is_the_price_of_time() -> None:
    """Priced at what a good step brings, time would seem too dear to draft much in that step."""
    costs, pace = StepCosts({1: 1.0, 5: 2.0}), Pace(memory=8.0)
    request = SimulatedRequest()
    assert pace.now == 1.0
    plain = Feedback([request], [[7]], [[]], [0], rows=1)
    drafted = Feedback([request], [[7, 7, 7, 7]], [[0, 1, 2]], [4], rows=5)
    for _ in range(100):
        pace.observe(plain, costs)
        pace.observe(drafted, costs)
    assert pace.now == pytest.approx(5 / 3, rel=0.1)  # 5 tokens in the time of 3 plain steps
    wasted = Feedback([request], [[7]], [[]], [4], rows=5)
    for _ in range(100):
        pace.observe(wasted, costs)
    assert pace.now == 1.0


def test_step_costs_part_the_phases() -> None:
    """Drafting that counted as target time would make every row look dear."""
    costs = StepCosts()
    assert costs(1, 0, 0) == costs(5, 4, 4) == 1.0  # nothing is known
    seconds = {"plan": 0.1, "draft": 4.0, "forward": 0.8, "commit": 0.1}
    requests = [SimulatedRequest(0), SimulatedRequest(1)]
    costs.observe(Feedback(requests, [], [], [2, 4], rows=8, seconds=seconds))
    assert costs(2, 6, 0) == pytest.approx(1.0)
    assert costs.drafting(4) == pytest.approx(4.0)
    assert costs.drafting(2) == pytest.approx(2.0)
    costs.observe(Feedback([], [], [], [3]))  # no times, nothing learned
    assert costs.drafting(4) == pytest.approx(4.0)
    costs.observe(Feedback(requests, [], [], [0, 0], rows=40, seconds={"forward": 9.0}))  # a prompt
    assert costs(40, 0, 0) == 1.0
    assert costs(2, 38, 0) == pytest.approx(1.0)


def test_what_a_step_takes_is_known_from_its_neighbours() -> None:
    """Requests that end one after the other would each time have plain steps timed anew."""
    costs = StepCosts()
    requests = [SimulatedRequest(i) for i in range(12)]
    for _ in range(3):
        assert not costs.measured(12)
        costs.observe(Feedback(requests, [], [], [0] * 12, rows=12, seconds={"forward": 1.0}))
    assert costs.measured(12)
    assert costs.measured(10)
    assert not costs.measured(8)
    assert not costs.measured(1)


def test_drafts_alone_do_not_tell_what_plain_steps_take() -> None:
    """A scheduler that drafts in each step would never learn that steps without drafts became quicker."""
    costs, request = StepCosts(), [SimulatedRequest()]
    plain = Feedback(request, [], [], [0], rows=1, seconds={"forward": 1.0})
    drafted = Feedback(request, [], [], [2], rows=3, seconds={"forward": 1.5})
    for _ in range(3):
        costs.observe(plain)
    for _ in range(100):
        costs.observe(drafted)
        assert costs.measured(1)
    for _ in range(30):
        costs.observe(drafted)
    assert not costs.measured(1)
    costs.observe(plain)
    assert costs.measured(1)


def test_gain_is_what_turned_out() -> None:
    """Whatever acceptance and costs are estimated to be, drafts that made the batch slower must show."""
    costs, gain = StepCosts(), Gain()
    requests = [SimulatedRequest(i) for i in range(4)]

    def step(nodes: int, emitted: int, seconds: float) -> None:
        told = Feedback(
            requests,
            [[7] * emitted] * 4,
            [],
            [nodes] * 4,
            rows=4 + 4 * nodes,
            seconds={"forward": seconds},
        )
        costs.observe(told)
        gain.observe(told, costs)

    assert gain.now is None
    step(0, 1, 1.0)
    for _ in range(3):
        assert gain.now is None
        assert not gain.wants_plain
        step(3, 3, 2.0)
    assert gain.wants_plain
    for _ in range(20):
        step(3, 3, 2.0)
    assert gain.now == pytest.approx(1.5)
    for _ in range(200):
        step(3, 1, 2.0)
    assert gain.now == pytest.approx(0.5, rel=0.05)
    step(0, 1, 1.0)
    assert not gain.wants_plain


def test_passes_with_drafts_have_prices_of_their_own() -> None:
    """Fifteen requests and a draft cost more than sixteen requests, at the same rows."""
    costs = StepCosts({1: 1.0, 16: 2.0})
    for _ in range(9):
        for count, nodes, seconds in ((16, 0, 2.0), (15, 0, 1.9), (15, 1, 3.0)):
            requests = [SimulatedRequest(i) for i in range(count)]
            drafted = [nodes] + [0] * (count - 1)
            told = Feedback(
                requests, [], [], drafted, rows=count + nodes, seconds={"forward": seconds}
            )
            costs.observe(told)
    assert costs(16, 0, 0) == pytest.approx(2.0, rel=0.01)
    assert costs(15, 1, 1) == pytest.approx(3.0, rel=0.01)


class Watcher(Scheduler):
    """Allows some drafts and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Feedback] = []
        self.before: list[int] = []

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        self.before.append(view.rows)
        return [DraftLimits(3, 2, 2) & cap for cap in view.caps]

    def observe(self, feedback: Feedback) -> None:
        self.told.append(feedback)


def test_the_engine_tells_what_a_step_took() -> None:
    """Rows without drafts, or tested depths that are not those of the walk, would mislead schedulers."""
    watcher = Watcher()
    case = Case(SETTINGS["temperature"], horizon=8, batch=3)
    engine, requests = build_engine(
        case,
        lambda: TableDrafter("near", width=2),
        RejectionVerifier,
        [lambda: watcher],
        KeyedSource(),
    )
    rows = []
    while engine.has_work:
        rows.append(engine.step().rows)
    assert [feedback.rows for feedback in watcher.told] == rows
    for before, feedback in zip(watcher.before, watcher.told, strict=True):
        assert feedback.rows == before + sum(feedback.drafted)
        assert set(feedback.seconds) == {"plan", "draft", "forward", "verify", "commit"}
        assert all(seconds > 0 for seconds in feedback.seconds.values())
        for drafted, tested, kept in zip(
            feedback.drafted, feedback.tested, feedback.kept, strict=True
        ):
            assert len(kept) <= tested <= min(len(kept) + 1, drafted)
    for request in requests:
        tested = sum(
            t
            for feedback in watcher.told
            for one, t in zip(feedback.requests, feedback.tested, strict=True)
            if one is request
        )
        assert tested == sum(request.stats.tested_by_depth)


def test_acceptance_counts_tested_tokens_only() -> None:
    """With a = 0.5 at each depth, kept over drafted would be 0.25 at depth 2, whose true rate is 0.5."""
    acceptance = Acceptance(memory=1e6, doubt=1e-6)
    for tested, kept in [(1, 0), (1, 0), (2, 1), (2, 2)] * 50:
        acceptance.add(tested, kept)
    assert list(islice(acceptance.rates(), 2)) == pytest.approx([0.5, 0.5], abs=1e-3)
    assert list(islice(acceptance.reaches(), 2)) == pytest.approx([0.5, 0.25], abs=1e-3)


def test_acceptance_is_extended_and_forgets() -> None:
    """Untested depths are like the last tested one; old evidence fades; copies go their own way."""
    acceptance = Acceptance(prior=0.8, memory=8)
    assert list(islice(acceptance.rates(), 3)) == [0.8, 0.8, 0.8]
    for _ in range(100):
        acceptance.add(1, 0)
    bad = list(islice(acceptance.rates(), 3))
    assert bad[0] == bad[1] == bad[2] < 0.15
    other = deepcopy(acceptance)
    for _ in range(100):
        acceptance.add(2, 2)
    assert next(acceptance.rates()) > 0.95
    assert next(other.rates()) == bad[0]
    acceptance.add(0, 0)
    assert acceptance.steps == 200


def test_probes_cost_a_bounded_share() -> None:
    """Probes that never pay, each of the time of 1.5 plain steps, must take 1 % at most."""
    probe = Probe(share=0.01, least=4)
    probes = 0
    for _ in range(10_000):
        if probe.due():
            probes += 1
            probe.learn(extra=1.5, gain=0.25, drafted=True)
    assert 50 <= probes <= 67  # one in 150


def test_a_probe_that_pays_is_repeated() -> None:
    """A drafter that became good must not wait for the next probe."""
    probe = Probe(share=0.01, least=4)
    assert [probe.due() for _ in range(5)] == [False, False, False, False, True]
    probe.learn(extra=0.01, gain=1.0, drafted=True)
    assert probe.due()
    probe.learn(extra=0.01, gain=0.0, drafted=True)
    assert not probe.due()


def test_a_probe_in_which_nothing_was_drafted_is_soon_repeated() -> None:
    """A drafter that has something to say now and then must not be asked only when it has nothing."""
    probe = Probe(share=0.01, least=4)
    assert [probe.due() for _ in range(5)][-1]
    probe.learn(extra=0.0, gain=0.0, drafted=False)
    assert probe.due()
    probe.learn(extra=0.03, gain=0.0, drafted=False)  # looking took time
    assert [probe.due() for _ in range(4)] == [False, False, False, True]


def test_a_profile_is_read(tmp_path: Path) -> None:
    """A file that is no profile must be refused with a sentence, not with a traceback."""
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"curve": [{"rows": 1, "seconds": 0.5}]}))
    assert read_profile(path) == {1: 0.5}
    for text in ("{}", "[]", "no json", '{"curve": [{"rows": 1}]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="specfw profile"):
            read_profile(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_profile(tmp_path / "missing.json")
