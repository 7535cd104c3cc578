"""The scheduler `confidence`: it stops unsure drafts, keeps to its target, and changes no law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specfw_plugin_block import BlockVerifier
from specfw_plugin_confidence import ConfidenceOptions, ConfidenceScheduler

from specfw.contracts import Feedback, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.testing.cases import SETTINGS, Case, build_engine
from specfw.testing.certification import certify
from specfw.testing.conformance import SchedulerConformance
from specfw.testing.drafters import TableDrafter
from specfw.testing.simulation import SimulatedRequest
from specfw.types import SamplingParams

QUICK = ConfidenceOptions(measure="top", threshold=0.5, rate=0.2)

CASES = [
    Case(SETTINGS["temperature"], vocab_size=2, horizon=4),
    Case(SETTINGS["end of text"], vocab_size=3, horizon=3, seed=2),
    Case(SETTINGS["top-p"], "sparse", vocab_size=3, horizon=3, batch=3, seed=3),
]


class TestConformance(SchedulerConformance):
    def make(self) -> ConfidenceScheduler:
        return ConfidenceScheduler(QUICK)


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier, BlockVerifier])
@pytest.mark.parametrize(
    "options",
    [
        QUICK,
        ConfidenceOptions(threshold=0.6, rate=0.1),
        ConfidenceOptions(measure="last", threshold=0.5, rate=0.2),
        ConfidenceOptions(measure="path", threshold=0.5, rate=0.2),
    ],
    ids=lambda options: options.measure,
)
def test_keeps_the_law(verifier: Callable[[], Verifier], options: ConfidenceOptions) -> None:
    """A stop that looked at the drawn token and then dropped it would change the law."""
    certificate = certify(
        lambda: TableDrafter("near", 3, 2),
        verifier,
        [lambda: ConfidenceScheduler(options)],
        cases=CASES,
    )
    assert certificate.ok, str(certificate)
    assert certificate.drafted


def test_measures() -> None:
    """Each measure is 1 for a sure law and falls with doubt: 1 - sqrt(0.2 ln 4) = 0.473."""
    laws = torch.tensor([[1.0, 0, 0, 0], [0.7, 0.1, 0.1, 0.1], [0.25] * 4])
    top = ConfidenceScheduler(ConfidenceOptions(measure="top")).confidence(laws)
    torch.testing.assert_close(top, torch.tensor([1.0, 0.7, 0.25]))
    entropy = ConfidenceScheduler().confidence(laws)
    assert entropy[0] == 1
    assert entropy[0] > entropy[1] > entropy[2]
    assert float(entropy[2]) == pytest.approx(1 - (0.2 * 1.3862944) ** 0.5, abs=1e-6)


def test_after_kept_tokens() -> None:
    """`last` looks at the token just kept, `path` at all of them: .9 * .8 * .7 = .504."""
    chances = torch.tensor([[1.0, 1.0, 1.0], [0.9, 0.8, 0.7], [0.9, 0.6, 0.9]])
    for measure, expected in (("last", [True, True, True]), ("path", [True, True, False])):
        scheduler = ConfidenceScheduler(ConfidenceOptions(measure=measure, threshold=0.5))
        assert scheduler.before_draw(torch.full((3, 4), 0.25)) is None
        assert scheduler.after_kept(chances).tolist() == expected
    assert ConfidenceScheduler().after_kept(chances) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("measure", ["last", "path"])
def test_what_was_drawn_decides(temperature: float, measure: str) -> None:
    """Chances that are another node's, or of another law, would stop the wrong draws; greedy ones have a softmax."""
    asked: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Watching(ConfidenceScheduler):
        def after_kept(self, chances: torch.Tensor) -> torch.Tensor | None:
            answer = super().after_kept(chances)
            asked.append((chances, answer))
            return answer

    scheduler = Watching(ConfidenceOptions(measure=measure, threshold=0.45, rate=0.0))
    drafter = TableDrafter("near", 3, 2)
    case = Case(SamplingParams(temperature=temperature, ignore_eos=True), horizon=6)
    engine, [request] = build_engine(
        case, lambda: drafter, RejectionVerifier, [lambda: scheduler], KeyedSource()
    )
    tokens = list(request.tokens)
    draft, *_ = _drafted(engine)
    laws = {(): drafter._model.law(tokens)}
    for node in range(1, int(draft.sizes[0])):
        path = tuple(draft.token[0, draft.path(0, node)].tolist())
        laws[path] = drafter._model.law([*tokens, *path])
        product = 1.0
        for place in range(len(path)):
            product *= laws[path[:place]][path[place]]
        last = laws[path[:-1]][path[-1]]
        goes_on = (product if measure == "path" else last) >= 0.45 and len(path) < 3
        assert bool((draft.parent[0] == node).any()) == goes_on
    assert asked[0][0].tolist() == [[1.0]]
    assert any(not bool(answer.all()) for _, answer in asked)


def _drafted(engine: Engine) -> tuple[Any, Any, Any]:
    """The draft of the engine's first step."""
    seen: list[tuple[Any, Any, Any]] = []
    make = engine._draft
    engine._draft = lambda *given: seen.append(make(*given)) or seen[-1]  # type: ignore[method-assign]
    engine.step()
    return seen[0]


def test_nobody_is_asked_without_need() -> None:
    """A law for every draw, and a wait for its answer, would cost all who use no such scheduler."""
    assert ConfidenceScheduler().stops_drafts
    assert not FixedScheduler().stops_drafts


def test_stops_what_is_below_the_threshold() -> None:
    """The threshold itself is good enough."""
    scheduler = ConfidenceScheduler(ConfidenceOptions(measure="top", threshold=0.5))
    laws = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.4, 0.6]])
    assert scheduler.before_draw(laws).tolist() == [True, True, True]
    assert scheduler.before_draw(torch.tensor([[0.4, 0.3, 0.3]])).tolist() == [False]


@pytest.mark.parametrize("target", [0.6, 0.8, 0.9])
def test_threshold_settles_at_the_target(target: float) -> None:
    """With confidence c uniform on [.5, 1] and P(accept) = 2c - 1, tokens of c >= t are accepted with
    chance t in the mean, so the threshold must settle at the target."""
    options = ConfidenceOptions(measure="top", target=target, threshold=0.5, rate=0.01, highest=1.0)
    scheduler = ConfidenceScheduler(options)
    random = torch.Generator().manual_seed(3)
    request, seen = SimulatedRequest(), []
    for _ in range(4000):
        chance, luck = torch.rand(2, generator=random, dtype=torch.float64)
        sure = (1 + chance) / 2
        drawn = bool(scheduler.before_draw(torch.stack([sure, 1 - sure])[None])[0])
        kept = drawn and bool(luck < chance)
        scheduler.observe(
            Feedback([request], [[0]], [[1]] if kept else [[]], [int(drawn)], tested=[int(drawn)])
        )
        seen.append(scheduler.threshold)
    settled = sum(seen[-1000:]) / 1000
    assert settled == pytest.approx(target, abs=0.05)


def test_recovers_when_everything_is_stopped() -> None:
    """A threshold above every law would never see an outcome again."""
    scheduler = ConfidenceScheduler(ConfidenceOptions(measure="top", threshold=0.95, rate=0.1))
    law, request, steps = torch.tensor([[0.6, 0.4]]), SimulatedRequest(), 0
    while not scheduler.before_draw(law)[0]:
        scheduler.observe(Feedback([request], [[0]], [[]], [0], tested=[0]))
        steps += 1
        assert steps < 50
    assert scheduler.threshold <= 0.6


def test_steps_without_drafts_teach_nothing() -> None:
    """Plain steps must not move the threshold."""
    scheduler = ConfidenceScheduler(QUICK)
    scheduler.observe(Feedback([SimulatedRequest()], [[0]], [[]], [0], tested=[0]))
    assert scheduler.threshold == 0.5


def test_stays_within_bounds() -> None:
    """A threshold beyond 1 would need long to come back."""
    scheduler = ConfidenceScheduler(QUICK)
    request = SimulatedRequest()
    for _ in range(100):
        scheduler.observe(Feedback([request], [[0]], [[]], [1], tested=[1]))
    assert scheduler.threshold == 0.95
    for _ in range(200):
        scheduler.observe(Feedback([request], [[0, 0]], [[1]], [1], tested=[1]))
    assert scheduler.threshold == 0.0
