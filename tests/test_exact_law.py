"""The whole engine keeps the target's law: computed over every outcome, for every kind of draft."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, DraftLimits, Outcome, RequestView, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import KeyedSource, Purpose, RandomSource, Site
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.fixed import FixedScheduler
from specfw.engine.model_runner import ModelRunner
from specfw.errors import ContractError
from specfw.testing import (
    Case,
    EnumSource,
    MixtureDrafter,
    ScriptedDrafter,
    TableDrafter,
    TableLM,
    certify,
    enumerate_runs,
)
from specfw.testing import strategies as kit
from specfw.testing.cases import MEMORY_CASES, SETTINGS, build_engine, make_cases
from specfw.testing.certification import enumerate_case
from specfw.testing.conformance import (
    DrafterConformance,
    SchedulerConformance,
    VerifierConformance,
)
from specfw.testing.drafting import Text, draft
from specfw.testing.laws import Emission, target_law, total_variation
from specfw.types import Guarantee, SamplingParams

VERIFIERS = [CoupledVerifier, RejectionVerifier]
PLAIN = SamplingParams(temperature=1.0, ignore_eos=True)


class TestCoupled(VerifierConformance):
    def make(self) -> Verifier:
        return CoupledVerifier()


class TestRejection(VerifierConformance):
    def make(self) -> Verifier:
        return RejectionVerifier()


class TestNoDrafter(DrafterConformance):
    drafts = False

    def make(self) -> Drafter:
        return NoDrafter()


class TestTableDrafter(DrafterConformance):
    def make(self) -> Drafter:
        return TableDrafter("unrelated", depth=2, width=2)


class TestFixed(SchedulerConformance):
    def make(self) -> FixedScheduler:
        return FixedScheduler(2, 2, 1)


@pytest.mark.parametrize("verifier", VERIFIERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_draft_any_settings(verifier: Callable[[], Verifier], data: st.DataObject) -> None:
    """Whatever tree is drafted under whatever settings, memory and limits, the law is the target's."""
    case = data.draw(kit.cases())
    drafter = data.draw(kit.drafters(case.vocab_size))
    limits: DraftLimits = data.draw(kit.limits())
    schedulers = [lambda: FixedScheduler(limits.max_nodes, limits.max_depth, limits.max_width)]
    certificate = certify(lambda: drafter, verifier, schedulers, cases=[case])
    assert certificate.ok, str(certificate)
    assert not certificate.faults


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_more_siblings_than_tokens(verifier: Callable[[], Verifier]) -> None:
    """A width beyond the vocabulary must not make two draws share their noise."""
    case = Case(PLAIN, vocab_size=2, horizon=4, seed=3)
    certificate = certify(
        lambda: TableDrafter("near", depth=3, width=3),
        verifier,
        [lambda: FixedScheduler(7, 3, 3)],
        cases=[case],
    )
    assert certificate.ok, str(certificate)


class TwoLevels(Drafter):
    """Asks for two children below the root, then for two below each of these at once."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        logits = torch.arange(8.0)
        first = builder.sample(builder.roots, logits.expand(len(requests), -1), 2)
        builder.sample(first.reshape(-1), logits.expand(first.size, -1), 2)


@pytest.mark.parametrize("limits", [DraftLimits(9, 3, 3), DraftLimits(5, 2, 9)])
def test_the_first_of_several_parents_leaves_room(limits: DraftLimits) -> None:
    """A parent that is given room for more children than are drawn takes it from those after it."""
    made = draft(TwoLevels(), Text([1, 2]), limits)
    assert made.parent[0].tolist() == [-1, 0, 0, 1, 1, 2, 2][: 1 + limits.max_nodes]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_draft_law_that_the_settings_ban(verifier: Callable[[], Verifier]) -> None:
    """A drafter sure of an end of text that is still forbidden leaves no law, and must not give NaN."""
    params = SETTINGS["min tokens"]
    case = [Case(params, vocab_size=2, horizon=3, seed=seed) for seed in range(3)]
    certificate = certify(lambda: TableDrafter("one_hot"), verifier, cases=case)
    assert certificate.ok, str(certificate)
    assert not certificate.faults


def test_a_target_law_that_the_settings_ban() -> None:
    """No token can be drawn where all are forbidden: an error for the request, not NaN."""
    case = Case(SamplingParams(temperature=1.0, logit_bias={0: -np.inf, 1: -np.inf}), "dense", 2, 2)
    engine, (request,) = build_engine(case, NoDrafter, RejectionVerifier, [], KeyedSource())
    engine.step()
    assert request.output is not None
    assert request.output.finish_reason == "error"


class Typical(Verifier):
    """Keeps every drafted token that is likely enough: lossy by design."""

    guarantee: ClassVar[Guarantee] = "lossy"
    noise: ClassVar[Literal["target", "draft"]] = "draft"
    supports_trees = False

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        for depth in range(1, draft.max_depth + 1):
            here = torch.full_like(node, depth)
            p = laws.rows(here - 1).gather(1, draft.token[:, depth : depth + 1])[:, 0]
            node = torch.where((node == depth - 1) & (p > 0.1), here, node)
        site = Site(Purpose.RESIDUAL, draft.seed, draft.start)
        return Outcome(node, random.categorical(laws.rows(node), site))


def test_a_lossy_verifier_reports_how_far_it_is() -> None:
    """Its distance from the target's law is stated, and no guarantee is claimed to be broken."""
    certificate = certify(
        lambda: TableDrafter("unrelated"), Typical, cases=[Case(PLAIN, vocab_size=2)]
    )
    assert certificate.guarantee == "lossy"
    assert certificate.ok
    assert certificate.max_tv > 0.01
    assert certificate.counterexample is not None


class TestEnumeration:
    """The kit's own chance."""

    def test_weights_sum_to_one(self) -> None:
        """A lost or doubled branch would falsify every law."""

        def run(source: EnumSource) -> tuple[int, bool, int]:
            one = int(source.categorical(torch.tensor([[0.2, 0.5, 0.3]]), site(1))[0])
            coin = bool(source.bernoulli(torch.tensor([0.1 * one]), site(2))[0])
            return one, coin, int(source.categorical(torch.tensor([[1.0, coin, 0.0]]), site(3))[0])

        runs = list(enumerate_runs(run))
        assert sum(weight for weight, _ in runs) == pytest.approx(1, abs=1e-12)
        assert len({result for _, result in runs}) == len(runs)
        law = {result: weight for weight, result in runs}
        assert law[2, True, 1] == pytest.approx(0.3 * 0.2 * 0.5, abs=1e-7)

    def test_a_site_asked_twice_gives_answers_that_hang_together(self) -> None:
        """Independent answers would hide noise that is shared wrongly."""
        law = torch.tensor([[0.25, 0.75]])
        twice = list(enumerate_runs(lambda s: [int(s.categorical(law, site(1))[0]) for _ in "ab"]))
        assert twice == [(0.25, [0, 0]), (0.75, [1, 1])]
        other = torch.tensor([[0.5, 0.5]])
        pairs = enumerate_runs(
            lambda s: (int(s.categorical(law, site(1))[0]), int(s.categorical(other, site(1))[0]))
        )
        assert {result: weight for weight, result in pairs} == pytest.approx(
            {(0, 0): 0.25, (1, 0): 0.25, (1, 1): 0.5}
        )

    def test_other_sites_are_independent(self) -> None:
        """Every part of the key counts: purpose, seed, position and node."""
        law = torch.tensor([[0.5, 0.5]])
        sites = [site(1), site(2), site(1, position=1), site(1, seed=1)]
        sites.append(Site(Purpose.WALK, sites[0].seed, sites[0].position, 1))
        runs = list(enumerate_runs(lambda s: [int(s.categorical(law, at)[0]) for at in sites]))
        assert len(runs) == 2 ** len(sites)
        assert {weight for weight, _ in runs} == {2.0 ** -len(sites)}

    def test_a_race_of_several_has_the_first_by_law_and_no_token_twice(self) -> None:
        """The others are only there to be matched."""
        law = torch.tensor([[0.1, 0.6, 0.3]])
        runs = list(enumerate_runs(lambda s: s.race(law, site(1), 3)[0].tolist()))
        assert [result for _, result in runs] == [[0, 1, 2], [1, 2, 0], [2, 1, 0]]
        assert [weight for weight, _ in runs] == pytest.approx([0.1, 0.6, 0.3])

    def test_inactive_rows_do_not_branch(self) -> None:
        """Rows that nobody reads would multiply the runs."""
        law, idle = torch.tensor([[0.5, 0.5]]), torch.tensor([False])
        assert len(list(enumerate_runs(lambda s: s.categorical(law, site(1), active=idle)))) == 1

    def test_a_watched_request_alone_is_enumerated(self) -> None:
        """Its batch-mates are answered as in production."""
        law = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
        at = Site(Purpose.WALK, torch.tensor([7, 8]), torch.tensor([0, 0]))
        runs = [r for _, r in enumerate_runs(lambda s: s.categorical(law, at).tolist(), watch=7)]
        keyed = int(KeyedSource().categorical(law, at)[1])
        assert runs == [[0, keyed], [1, keyed]]

    def test_a_run_that_does_not_repeat_itself_is_refused(self) -> None:
        """State that survives a run would make the weights meaningless."""
        calls = iter([[[0.5, 0.5, 0.0]], [[0.0, 0.5, 0.5]]])
        with pytest.raises(ContractError, match="anew for each run"):
            list(enumerate_runs(lambda s: s.categorical(torch.tensor(next(calls)), site(1))))

    def test_a_row_without_a_law_is_refused(self) -> None:
        """NaN must not pass for certainty."""
        with pytest.raises(ContractError, match="expected a law"):
            EnumSource().categorical(torch.tensor([[float("nan"), 1.0]]), site(1))


def site(node: int, seed: int = 0, position: int = 0) -> Site:
    return Site(Purpose.DRAFT, torch.tensor([seed]), torch.tensor([position]), node)


class TestTableModel:
    """The kit's own target."""

    @pytest.mark.parametrize("layers", [1, 3])
    def test_the_packed_forward_gives_the_law_of_the_tokens(self, layers: int) -> None:
        """Chunks and trees through the pool, against the tokens themselves."""
        model = TableLM(3, seed=5, layers=layers)
        assert ModelRunner(model, prepack=False).probe_error < 1e-12

    @pytest.mark.parametrize("layers", [1, 2, 3])
    @pytest.mark.parametrize("kind", ["dense", "sparse", "one_hot"])
    def test_the_stock_forward_gives_the_law_of_the_tokens(self, kind: str, layers: int) -> None:
        """`law` uses no attention, `forward` nothing but."""
        model = TableLM(3, seed=5, kind=kind, layers=layers)
        tokens = [0, 2, 1, 1, 0, 2, 2]
        logits = model(torch.tensor([tokens])).logits[0]
        laws = np.array([model.law(tokens[: n + 1]) for n in range(len(tokens))])
        np.testing.assert_allclose(logits.exp().numpy(), laws, atol=1e-12)
        assert (laws == 0).any() == (kind != "dense")

    @pytest.mark.parametrize("layers", [1, 2])
    def test_every_context_has_its_own_law(self, layers: int) -> None:
        """Two contexts with one law would hide a mistaken one for the other."""
        model = TableLM(2, seed=1, layers=layers)
        contexts = [tuple(map(int, f"{n:b}")) for n in range(1, 512)]
        assert len({tuple(model.law(context)) for context in contexts}) == len(contexts)

    def test_positions_count(self) -> None:
        """The same tokens one place later are another context."""
        model = TableLM(3, seed=1)
        here = model(torch.tensor([[1, 2]])).logits
        later = model(torch.tensor([[1, 2]]), position_ids=torch.tensor([[1, 2]])).logits
        assert not torch.allclose(here, later)

    def test_relations_of_draft_models(self) -> None:
        """Disjoint laws share no token; a mixture lies between."""
        target = TableLM(3, seed=1, kind="sparse")
        apart, near = TableLM(3, seed=2, avoid=target), TableLM(3, seed=2, mix=(target, 0.9))
        context, disjoint = [0, 1], 0
        for token in (0, 1, 2):
            p, q = target.law([*context, token]), apart.law([*context, token])
            disjoint += bool((p == 0).any()) and float(np.minimum(p, q).sum()) == 0
            assert np.abs(near.law([*context, token]) - p).sum() < 0.2 + 1e-12
        assert disjoint


class TestReference:
    """The reference law, on examples small enough for a pen."""

    class Fixed:
        def law(self, prefix):
            return np.array([0.5, 0.3, 0.2])

    def law(self, horizon: int = 1, text_of=None, **params) -> dict[Emission, float]:
        settings = SamplingParams(**{"temperature": 1.0, **params})
        return target_law(self.Fixed(), [2], horizon, settings, (0,), text_of)

    @pytest.mark.parametrize(
        ("params", "expected"),
        [
            ({}, [0.5, 0.3, 0.2]),
            ({"temperature": 0.0}, [1, 0, 0]),
            ({"temperature": 0.5}, [25 / 38, 9 / 38, 4 / 38]),
            ({"top_k": 2}, [0.625, 0.375, 0]),
            ({"top_p": 0.5}, [1, 0, 0]),
            ({"top_p": 0.51}, [0.625, 0.375, 0]),
            ({"min_p": 0.5}, [0.625, 0.375, 0]),
            ({"repetition_penalty": 2.0}, [0.5 / 0.84, 0.3 / 0.84, 0.04 / 0.84]),
            ({"min_new_tokens": 1}, [0, 0.6, 0.4]),
            ({"logit_bias": {1: float(np.log(5 / 3))}}, [0.5 / 1.2, 0.5 / 1.2, 0.2 / 1.2]),
        ],
    )
    def test_settings(self, params: dict[str, float], expected: list[float]) -> None:
        """Each setting alone, by hand."""
        law = self.law(**params)
        got = [sum(w for e, w in law.items() if e.tokens == (token,)) for token in range(3)]
        assert got == pytest.approx(expected)

    def test_ends(self) -> None:
        """The end of text ends a request at once, a stop string at its last letter."""
        law = self.law(2, lambda tokens: "".join("abc"[t] for t in tokens), stop=("bc",))
        assert law[Emission((0,), "stop")] == pytest.approx(0.5)
        assert law[Emission((1, 2), "stop")] == pytest.approx(0.06)
        assert law[Emission((2, 1), "length")] == pytest.approx(0.06)
        assert sum(law.values()) == pytest.approx(1)

    def test_penalties_count_what_was_emitted(self) -> None:
        """Frequency counts times, presence counts once, and neither counts the prompt."""
        law = self.law(2, frequency_penalty=1.0, presence_penalty=0.5, ignore_eos=True)
        second = 0.3 * np.exp(-1.5)
        assert law[Emission((1, 1), "length")] == pytest.approx(0.3 * second / (0.7 + second))

    def test_total_variation(self) -> None:
        """Half the absolute differences, over the outcomes of both."""
        one, other = Emission((0,), "length"), Emission((1,), "length")
        assert total_variation({one: 1.0}, {other: 1.0}) == 1
        assert total_variation({one: 0.5, other: 0.5}, {one: 1.0}) == 0.5


class TestCases:
    """The walk of a certification goes where it says."""

    @pytest.mark.parametrize("verifier", VERIFIERS)
    @pytest.mark.parametrize("memory", MEMORY_CASES)
    def test_memory_cases_happen(self, memory: str, verifier: Callable[[], Verifier]) -> None:
        """A case that does not occur checks nothing."""
        case = Case(PLAIN, vocab_size=2, batch=3, memory=memory)
        chunks: list[int] = []
        begun: list[int] = []

        class Watching(TableDrafter):
            def begin(self, request):
                begun.append(request.params.seed)

        seen = enumerate_case(case, Watching, verifier, [lambda: FixedScheduler(3, 2, 2)])
        engine, requests = build_engine(case, NoDrafter, verifier, [], KeyedSource())
        while requests[case.watched].output is None:
            chunks.append(requests[case.watched].uncomputed)
            engine.step()
        if memory == "preemption":
            assert seen.preemptions > 0
            assert begun.count(requests[case.watched].seed) > seen.leaves
        assert (seen.hit_tokens >= 4 * seen.leaves) == (memory in ("prefix hit", "preemption"))
        if memory == "chunked prefill":
            assert chunks[:3] == [5, 3, 1]
        assert seen.accepted > 0
        assert seen.drafted > seen.accepted

    def test_every_setting_meets_every_memory_case(self) -> None:
        """The default walk covers all pairs, both batch sizes and all kinds of laws."""
        walk = list(make_cases())
        assert len({(str(case.params), case.memory) for case in walk}) == len(SETTINGS) * 4
        assert {case.batch for case in walk} == {1, 3}
        assert {case.kind for case in walk} == {"dense", "sparse", "one_hot"}
        assert {(case.vocab_size, case.horizon) for case in walk} == {(3, 2), (2, 3), (3, 3)}

    def test_progress_and_paste(self) -> None:
        """Every case is announced, and can be pasted back."""
        told: list[Case] = []
        walk = [Case(PLAIN, vocab_size=2, horizon=1), Case(PLAIN, vocab_size=2, horizon=2)]
        certificate = certify(
            NoDrafter, CoupledVerifier, cases=walk, progress=lambda n, of, case: told.append(case)
        )
        assert told == walk
        assert certificate.combinations == 2
        assert certificate.leaves == 2 + 4
        names = {"Case": Case, "SamplingParams": SamplingParams}
        assert eval(walk[1].paste(), names) == walk[1]


def test_a_raising_drafter_shows_in_the_certificate(caplog: pytest.LogCaptureFixture) -> None:
    """A drafter that always fails keeps the law, but nothing of it was checked."""

    class Failing(Drafter):
        def propose(self, requests, builder) -> None:
            raise ArithmeticError("no")

    with caplog.at_level(logging.ERROR):
        certificate = certify(Failing, CoupledVerifier, cases=[Case(PLAIN, vocab_size=2)])
    assert certificate.ok
    assert certificate.drafted == 0
    assert certificate.faults


@pytest.mark.parametrize("drafter", [ScriptedDrafter, MixtureDrafter])
def test_scripts_and_mixtures_mix_guesses_and_draws(drafter: Callable[[], Drafter]) -> None:
    """They are there to test trees of both kinds."""
    kinds: set[int] = set()
    widths: set[int] = set()

    class Watching(RejectionVerifier):
        def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
            draft.check()
            kinds.update(draft.kind[:, 1:][draft.valid[:, 1:]].tolist())
            widths.add(draft.max_width)
            return super().verify(draft, laws, random)

    case = Case(PLAIN, vocab_size=4, horizon=8, batch=3)
    engine, _ = build_engine(
        case, drafter, Watching, [lambda: FixedScheduler(5, 3, 3)], KeyedSource()
    )
    while engine.has_work:
        engine.step()
    assert kinds == {0, 1}
    assert max(widths) > 1
