"""The plan form says without chance what enumeration of the walk finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specfw_plugin_block import BlockVerifier
from specfw_plugin_typical import TypicalOptions, TypicalVerifier
from torch import Tensor

from specfw.contracts import Drafter, Outcome, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import KeyedSource, RandomSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.fixed import FixedScheduler
from specfw.testing.cases import SETTINGS, Case, build_engine
from specfw.testing.drafters import MixtureDrafter, ScriptedDrafter, TableDrafter
from specfw.testing.enumeration import EnumSource, enumerate_runs
from specfw.testing.strategies import cases, drafters


@dataclass
class Recorder(Verifier):
    """Passes on to a verifier, and keeps every draft with its laws."""

    inner: Verifier
    seen: list[tuple[Draft, NodeLaws]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guarantee, self.noise = self.inner.guarantee, self.inner.noise  # type: ignore[misc]

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        self.seen.append((draft, laws))
        return self.inner.verify(draft, laws, random)


def drafts_of(
    drafter: Callable[[], Drafter], verifier: Verifier, case: Case
) -> list[tuple[Draft, NodeLaws]]:
    """The drafts of a run."""
    recorder = Recorder(verifier)
    limit = [lambda: FixedScheduler(4, 3, 3)]
    engine, _ = build_engine(case, drafter, lambda: recorder, limit, KeyedSource())
    while engine.has_work:
        engine.step()
    return [(draft, laws) for draft, laws in recorder.seen if draft.batch]


def enumerated(verifier: Verifier, draft: Draft, laws: NodeLaws, request: int) -> Tensor:
    """The chance that one request's walk ends at each node, [N], over every outcome of its draws."""
    stop = torch.zeros(draft.token.shape[1], dtype=torch.float64)

    def walk(source: EnumSource) -> int:
        return int(verifier.verify(draft, laws, source).node[request])

    for weight, node in enumerate_runs(walk, watch=int(draft.seed[request])):
        stop[node] += weight
    return stop


def check_plan(verifier: Verifier, drafter: Callable[[], Drafter], case: Case) -> float:
    """Compare the plan with enumeration for every draft of a run; tokens kept on average."""
    kept = 0.0
    for draft, laws in drafts_of(drafter, verifier, case):
        stop = verifier.plan(draft, laws)
        assert stop is not None
        walked = torch.stack([enumerated(verifier, draft, laws, b) for b in range(draft.batch)])
        torch.testing.assert_close(stop, walked, rtol=0, atol=1e-12)
        kept += float(draft.mean_depth(stop).sum())
    return kept


DRAFTERS = {
    "chain": lambda: TableDrafter("near", depth=3),
    "tree": lambda: TableDrafter("near", depth=2, width=2),
    "disjoint": lambda: TableDrafter("disjoint", depth=2, width=2),
    "identical": lambda: TableDrafter("identical", depth=3),
    "mixture": MixtureDrafter,
    "scripted": lambda: ScriptedDrafter(3, moves=4),
}
CASES = [
    Case(SETTINGS["temperature"], horizon=4),
    Case(SETTINGS["top-p"], vocab_size=4, horizon=4, batch=3, seed=2),
    Case(SETTINGS["penalties"], kind="sparse", horizon=4, batch=3),
]


def typical() -> Verifier:
    """A lossy verifier, whose walk has no chance in it."""
    return TypicalVerifier(TypicalOptions(allow_lossy=True, epsilon=0.3))


@pytest.mark.parametrize("verifier", [RejectionVerifier, BlockVerifier, typical])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("case", CASES, ids=["alone", "batch", "sparse"])
def test_plan_equals_enumeration(verifier: Callable[[], Verifier], name: str, case: Case) -> None:
    """A plan that has its own idea of shares, residuals or order would promise what is not kept."""
    check_plan(verifier(), DRAFTERS[name], case)


@pytest.mark.parametrize("case", CASES, ids=["alone", "batch", "sparse"])
def test_plan_of_coupled_for_guesses(case: Case) -> None:
    """A repeated sibling, which is never followed, must not be counted."""
    kept = [
        check_plan(CoupledVerifier(), lambda s=s: ScriptedDrafter(s, 4, guesses=1.0), case)
        for s in range(4)
    ]
    assert sum(kept) > 0


@given(st.data())
def test_plan_of_any_tree(data: st.DataObject) -> None:
    """A shape of tree that nobody thought of must not break the plan."""
    case = data.draw(cases())
    drafter = data.draw(drafters(case.vocab_size))
    verifier = data.draw(st.sampled_from([RejectionVerifier(), BlockVerifier()]))
    check_plan(verifier, lambda: drafter, case)


class Peek(Recorder):
    """Keeps nothing of any draft, so that the draft's own draws are all that is enumerated."""

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        self.seen.append((draft, laws))
        return Outcome(torch.zeros_like(draft.start), torch.zeros_like(draft.start))


def mean_kept(verifier: Verifier, drafter: Callable[[], Drafter], seed: int) -> float:
    """Draft tokens kept in a step, over every draft that could be drawn."""
    case = Case(SETTINGS["temperature"], horizon=4, seed=seed)

    def kept(source: EnumSource) -> float:
        recorder = Peek(verifier)
        limit = [lambda: FixedScheduler(5, 3, 2)]
        engine, _ = build_engine(case, drafter, lambda: recorder, limit, source)
        engine.step()
        [(draft, laws)] = recorder.seen
        stop = verifier.plan(draft, laws)
        assert stop is not None
        return float(draft.mean_depth(stop))

    return sum(weight * mean for weight, mean in enumerate_runs(kept))


def test_block_keeps_at_least_as_much_as_rejection() -> None:
    """Carrying the weight down must pay: on chains with every model, on trees in the mean."""
    made: dict[str, Callable[[], Drafter]] = {
        "chain": lambda: TableDrafter("near", depth=3),
        "tree": MixtureDrafter,
    }
    gains = {
        name: [
            mean_kept(BlockVerifier(), drafter, seed)
            - mean_kept(RejectionVerifier(), drafter, seed)
            for seed in range(5)
        ]
        for name, drafter in made.items()
    }
    assert min(gains["chain"]) > -1e-12
    assert max(gains["chain"]) > 1e-3
    assert sum(gains["tree"]) > 1e-3


def test_a_verifier_without_a_plan_has_none() -> None:
    """Callers can ask any verifier."""

    class Plain(Verifier):
        def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
            raise NotImplementedError

    draft, laws = drafts_of(DRAFTERS["chain"], RejectionVerifier(), CASES[0])[0]
    assert Plain().plan(draft, laws) is None
