"""The combinators: who drafts what, within which limits, and that nothing of it changes the law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specfw_plugin_compose import Bandit, Cascade, Extend, First, Merge, Route
from specfw_plugin_recycling import RecyclingDrafter, RecyclingOptions
from specfw_plugin_suffix import SuffixDrafter, SuffixOptions

from specfw.builtins import NoDrafter
from specfw.combining import Combined
from specfw.contracts import (
    Drafter,
    DraftLimits,
    Feedback,
    RankedRows,
    RequestView,
    Requirements,
    Scorer,
    Verifier,
)
from specfw.decoding import builder as builder_module
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.fixed import FixedScheduler
from specfw.errors import ConfigError, ContractError
from specfw.plugins import PluginManager
from specfw.references import Reference, parse_reference
from specfw.testing import (
    MixtureDrafter,
    ScriptedDrafter,
    TableDrafter,
    target_law,
    total_variation,
)
from specfw.testing.cases import SETTINGS, Case, build_engine, table_runner
from specfw.testing.certification import enumerate_case
from specfw.testing.conformance import DrafterConformance
from specfw.testing.drafters import log_laws
from specfw.testing.drafting import ROOMY, Text, builder_for
from specfw.types import SamplingParams

VOCAB = 64
CPU = torch.device("cpu")


class Script(Drafter):
    """Guesses fixed chains after each last token, and notes what it is told."""

    reads_ahead = True

    def __init__(
        self, chains: dict[int, list[list[int]]], needs: Requirements | None = None
    ) -> None:
        self.chains, self.requires = chains, needs or Requirements()  # type: ignore[misc]
        self.told: list[tuple[Any, ...]] = []
        self.seen: list[list[int]] = []

    def attach(self, target: Any) -> None:
        self.told.append(("attach", target))

    def begin(self, request: RequestView) -> None:
        self.told.append(("begin", request.id))

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root in zip(requests, builder.roots.tolist(), strict=True):
            self.seen.append(list(request.tokens))
            for chain in self.chains.get(request.tokens[-1], []):
                builder.guess(root, chain)

    def observe(self, feedback: Feedback) -> None:
        self.told.append(("observe", [rows.top.tolist() for rows in feedback.ranked]))

    def end(self, request: RequestView) -> None:
        self.told.append(("end", request.id))

    def close(self) -> None:
        self.told.append(("close",))


class Drawing(Drafter):
    """Draws one token below each root."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        builder.sample(builder.roots, torch.zeros(len(requests), VOCAB))


def drafted(
    drafter: Drafter, requests: Sequence[Text], limits: DraftLimits = ROOMY
) -> list[list[tuple[int, ...]]]:
    """The paths to all nodes that `drafter` drafts for each request, in draw order."""
    builder = builder_for(requests, [limits] * len(requests))
    drafter.propose(requests, builder)
    draft = builder.build()
    draft.check()
    return [
        [
            tuple(int(draft.token[b, i]) for i in draft.path(b, node))
            for node in range(1, int(draft.sizes[b]))
        ]
        for b in range(len(requests))
    ]


def drafted_by(
    drafter: Drafter, request: Text, limits: DraftLimits = ROOMY
) -> list[tuple[int, int]]:
    """Each node's token and the number of the drafter that added it."""
    builder = builder_for([request], [limits])
    drafter.propose([request], builder)
    draft = builder.build()
    return [
        (int(draft.token[0, i]), int(draft.drafter[0, i])) for i in range(1, int(draft.sizes[0]))
    ]


A = {1: [[10, 11, 12, 13]], 2: [[20]]}
B = {1: [[10, 30, 31]], 3: [[40]]}


# builder.limited


def test_a_limited_builder_keeps_to_its_limits_and_those_above() -> None:
    """Fault: combinators that nest add more than the request may have in all."""
    builder = builder_for([Text([1]), Text([2])], [DraftLimits(5, 9, 9), DraftLimits(2, 9, 9)])
    outer = builder.limited([DraftLimits(4, 3, 9)] * 2)
    inner = outer.limited([DraftLimits(3, 9, 1)] * 2)
    assert inner.limits == [DraftLimits(3, 3, 1), DraftLimits(2, 3, 1)]
    first, second = inner.roots.tolist()
    assert len(inner.guess(first, [1, 2, 3, 4])) == 3
    assert len(inner.guess(second, [1, 2, 3, 4])) == 2
    assert [b.added.tolist() for b in (inner, outer, builder)] == [[3, 2]] * 3
    assert inner.guess(first, [9]) == []
    assert len(outer.guess(first, [9, 9])) == 1  # the fourth of four
    assert len(builder.guess(first, [9, 8])) == 2  # one there already, and the fifth of five
    assert builder.guess(second, [9]) == []


def test_draws_share_what_all_limits_leave() -> None:
    """Fault: several draws in one call overrun a limit above, as each sees it untouched."""
    builder = builder_for([Text([1]), Text([2])], [DraftLimits(5, 9, 9), DraftLimits(1, 9, 9)])
    view = builder.limited([DraftLimits(3, 9, 2)] * 2)
    handles = view.sample(view.roots, torch.zeros(2, VOCAB), width=4)
    assert (handles >= 0).sum(1).tolist() == [2, 1]
    more = view.sample(handles[0, :2], torch.zeros(2, VOCAB), width=2)
    assert (more >= 0).sum(1).tolist() == [1, 0]


def test_a_builder_below_a_leaf_counts_from_there() -> None:
    builder = builder_for([Text([1]), Text([2])], [DraftLimits(9, 4, 9)] * 2)
    path = builder.guess(int(builder.roots[1]), [5, 6])
    view = builder.limited([DraftLimits(9, 9, 9)], np.array(path[1:]))
    assert view.limits == [DraftLimits(7, 2, 9)]
    (root,) = view.roots.tolist()
    below = view.guess(root, [7, 8, 9])
    assert len(below) == 2  # depth four in all
    nodes = np.array([root, *below])
    assert view.depth_of(nodes).tolist() == [0, 1, 2]
    assert view.request_of(nodes).tolist() == [0, 0, 0]
    assert view.parent_of(nodes).tolist() == [-1, root, below[0]]
    assert view.guessed_path(below[-1]) == [7, 8]
    assert builder.guessed_path(below[-1]) == [5, 6, 7, 8]
    assert builder.depth_of(nodes).tolist() == [2, 3, 4]
    assert view.leaves().tolist() == below[-1:]
    assert builder.leaves().tolist() == [int(builder.roots[0]), below[-1]]
    with pytest.raises(ContractError, match="not below a root"):
        view.guess(int(builder.roots[0]), [1])


def test_the_host_does_not_know_what_was_drawn() -> None:
    """Fault: a drawn token is read before the device has it, or taken for token -1."""
    builder = builder_for([Text([1])], [ROOMY])
    drawn = builder.sample(builder.roots, torch.zeros(1, VOCAB))
    (below,) = builder.guess(int(drawn[0, 0]), [5])
    assert builder.guessed_path(int(drawn[0, 0])) is None
    assert builder.guessed_path(below) is None


# what each combinator drafts


def test_first_takes_the_first_draft_of_each_request() -> None:
    """Fault: one request's draft keeps the next drafter from serving the others."""
    drafter = First([Script(A), Script(B)])
    found = drafted(drafter, [Text([1], 0), Text([2], 1), Text([3], 2), Text([4], 3)])
    assert [paths[-1:] for paths in found] == [[(10, 11, 12, 13)], [(20,)], [(40,)], []]


def test_first_does_not_ask_in_vain() -> None:
    second = Script(B)
    drafted(First([Script(A), second]), [Text([1])])
    assert second.seen == []


def test_merge_goes_through_what_is_there() -> None:
    """Fault: a guess of two drafters is scored twice."""
    (found,) = drafted(Merge([Script(A), Script(B)]), [Text([1])])
    assert found == [
        (10,),
        (10, 11),
        (10, 11, 12),
        (10, 11, 12, 13),
        (10, 30),
        (10, 30, 31),
    ]


def test_merge_divides_the_nodes() -> None:
    """Fault: `shares` has no effect, or what one drafter leaves over is lost."""
    limits = DraftLimits(4, 9, 9)

    def sizes(token: int, shares: list[float] | None) -> list[int]:
        authors = [
            who
            for _, who in drafted_by(Merge([Script(A), Script(B)], shares), Text([token]), limits)
        ]
        return [authors.count(0), authors.count(1)]

    assert sizes(1, None) == [4, 0]
    assert sizes(1, [1, 1]) == [2, 2]
    assert sizes(1, [3, 1]) == [3, 1]
    assert sizes(3, [3, 1]) == [0, 1]
    assert sizes(2, [1, 3]) == [1, 0]


def test_extend_continues_the_leaves() -> None:
    """Fault: the second drafter sees the text without the path, or starts at the root."""
    first = Script({1: [[10, 11], [12]]})
    second = Script({11: [[50]], 12: [[60, 61]], 4: [[43]]})
    found = drafted(Extend([first, second]), [Text([0, 1], 0), Text([4], 1), Text([5], 2)])
    assert found == [[(10,), (10, 11), (12,), (10, 11, 50), (12, 60), (12, 60, 61)], [(43,)], []]
    assert second.seen == [[0, 1, 10, 11], [0, 1, 12], [4], [5]]


def test_extend_divides_the_nodes_among_the_leaves() -> None:
    first = Script({1: [[10], [11]]})
    second = Script({10: [[50, 51, 52, 53]], 11: [[60, 61, 62, 63]]})
    (found,) = drafted(Extend([first, second]), [Text([1])], DraftLimits(7, 9, 9))
    assert [path[0] for path in found].count(10) == 4
    assert [path[0] for path in found].count(11) == 3
    long = Script({1: [[10, 11, 12, 13]]})
    (found,) = drafted(
        Extend([long, Script({11: [[50, 51]]})], [1, 1]), [Text([1])], DraftLimits(4, 9, 9)
    )
    assert found[-1] == (10, 11, 50, 51)


def test_extend_leaves_drawn_leaves_alone() -> None:
    """Fault: a token that only the device knows is guessed upon."""
    second = Script({token: [[5]] for token in range(-1, VOCAB)})
    (found,) = drafted(Extend([Drawing(), second]), [Text([1])])
    assert len(found) == 1
    assert second.seen == []


def test_extend_refuses_drafters_that_would_take_guesses_for_text() -> None:
    with pytest.raises(ConfigError, match="read ahead"):
        Extend([Script(A), TableDrafter()])
    with pytest.raises(ConfigError, match="read ahead"):
        Extend([Script(A), Merge([Script(B), TableDrafter()])])
    Extend([TableDrafter(), Merge([Script(B), First([Script(A), Script(B)])])])


def test_extend_with_real_drafters() -> None:
    """Fault: the state of the second drafter keeps a path that was only guessed."""
    tokens = [1, 2, 3, 7, 5, 6, 3, 8, 1, 2]
    suffix = SuffixDrafter(SuffixOptions(factor=0, offset=1))
    drafter, request = Extend([suffix, SuffixDrafter()]), Text(tokens)
    drafter.begin(request)
    before = drafted(drafter, [request])
    assert (3, 7, 5) in before[0]
    assert drafted(drafter, [request]) == before


def test_provenance_is_the_outermost_combinators() -> None:
    """Fault: statistics by drafter count a nested drafter's number as the outer one's."""
    nested = Merge([NoDrafter(), First([NoDrafter(), Script(A)])])
    assert drafted_by(nested, Text([2])) == [(20, 1)]
    assert drafted_by(Merge([Script(A), Script(B)]), Text([1]), DraftLimits(5, 9, 9)) == [
        (10, 0),
        (11, 0),
        (12, 0),
        (13, 0),
        (30, 1),
    ]


# route and bandit


def route(by: Any, bounds: list[float], **request: Any) -> int:
    tokens = {1: [[10]]}, {1: [[11]]}, {1: [[12]]}
    drafter = Route([Script(chains) for chains in tokens], bounds, by)
    ((path,),) = drafted(drafter, [Text([1], **request)])
    return path[0] - 10


def test_route_by_what_the_request_is_like() -> None:
    """Fault: `by` or `bounds` has no effect, or a bound belongs to the wrong side."""
    assert [route("prompt_length", [5, 9], prompt_length=n) for n in (4, 5, 9)] == [0, 1, 2]
    cold, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    assert [route("temperature", [0.1, 2.0], params=params) for params in (cold, warm)] == [0, 1]


def feedback(request: Text, kept: int, emitted: int | None = None) -> Feedback:
    return Feedback([request], [[0] * (emitted or kept + 1)], [list(range(kept))], [5])


def test_route_by_acceptance() -> None:
    """Fault: acceptance of one request decides for another; or it is kept when the request is gone."""
    low, high = Script({1: [[10]]}), Script({1: [[11]]})
    drafter = Route([low, high], [1.0])
    good, bad = Text([1], 0), Text([1], 1)
    drafter.begin(good)
    drafter.begin(bad)
    assert drafted(drafter, [good, bad]) == [[(11,)], [(11,)]]
    drafter.observe(feedback(good, 3))
    drafter.observe(feedback(bad, 0))
    assert drafted(drafter, [good, bad]) == [[(11,)], [(10,)]]
    for _ in range(6):
        drafter.observe(feedback(good, 0))
        drafter.observe(feedback(bad, 3))
    assert drafted(drafter, [good, bad]) == [[(10,)], [(11,)]]
    drafter.end(good)
    drafter.end(bad)
    assert drafter._accepted == {}


def play(
    drafter: Bandit, brings: Callable[[int, Text], int], steps: int, *requests: Text
) -> list[int]:
    """Which drafter serves the first request in each step; `brings` says how many tokens it emits."""
    chosen = []
    for _ in range(steps):
        now = [paths[0][0] - 10 for paths in drafted(drafter, requests)]
        chosen.append(now[0])
        emitted = [[0] * brings(choice, one) for choice, one in zip(now, requests, strict=True)]
        drafter.observe(Feedback(requests, emitted, [[]] * len(requests), [1] * len(requests)))
    return chosen


def arms() -> list[Drafter]:
    return [Script({1: [[10]]}), Script({1: [[11]]}), Script({1: [[12]]})]


def test_bandit_finds_the_drafter_that_brings_most() -> None:
    """Fault: it stays with the first, or with none."""
    drafter = Bandit(arms(), measure="passes")
    chosen = play(drafter, lambda choice, _: (2, 4, 1)[choice], 200, Text([1]))
    assert sorted(chosen[:3]) == [0, 1, 2]
    assert chosen.count(1) > 150
    assert chosen[-20:].count(1) >= 18


def test_bandit_counts_time() -> None:
    """Fault: `measure` has no effect, so that a slow drafter with long drafts wins."""
    now = [0.0]
    slow = {0: 1.0, 1: 9.0, 2: 1.0}

    def brings(choice: int, _: Text) -> int:
        now[0] += slow[choice]
        return (2, 4, 1)[choice]

    drafter = Bandit(arms(), clock=lambda: now[0])
    assert play(drafter, brings, 200, Text([1])).count(0) > 150


def test_bandit_explores_as_much_as_it_is_told() -> None:
    counts = [
        play(
            Bandit(arms(), measure="passes", explore=explore),
            lambda choice, _: (2, 3, 2)[choice],
            100,
            Text([1]),
        ).count(1)
        for explore in (0.0, 0.3, 5.0)
    ]
    assert counts[0] == 98
    assert counts[0] > counts[1] > counts[2]


def test_bandit_learns_for_each_class() -> None:
    """Fault: what is best for one kind of requests is taken for all."""
    short, long = Text([1], 0, prompt_length=5), Text([1], 1, prompt_length=500)

    def brings(choice: int, request: Text) -> int:
        best = 1 if request is short else 2
        return 5 if choice == best else 1

    drafter = Bandit(arms(), measure="passes", by="prompt_length", bounds=[100])
    assert play(drafter, brings, 50, short, long)[-10:].count(1) >= 9
    assert play(drafter, brings, 50, long, short)[-10:].count(2) >= 9


def test_bandit_ignores_steps_in_which_nothing_could_be_drafted() -> None:
    """Fault: a request that may not draft is counted against the drafter."""
    drafter, request = Bandit(arms(), measure="passes"), Text([1])
    builder = builder_for([request], [DraftLimits()])
    drafter.propose([request], builder)
    drafter.observe(feedback(request, 0))
    assert all(arm.steps == 0 for arm in drafter._classes[0].arms)


# what all combinators do


COMBINATORS: dict[str, Callable[[Sequence[Drafter]], Combined]] = {
    "first": First,
    "merge": Merge,
    "merge with shares": lambda drafters: Merge(drafters, [1.0] * len(drafters)),
    "extend": lambda drafters: Extend(drafters, [1.0] * len(drafters)),
    "route": lambda drafters: Route(drafters, range(len(drafters) - 1)),
    "bandit": lambda drafters: Bandit(drafters, measure="passes"),
}


@pytest.mark.parametrize("combine", COMBINATORS.values(), ids=COMBINATORS)
def test_everything_is_passed_on(combine: Callable[[Sequence[Drafter]], Combined]) -> None:
    """Fault: an inner drafter misses a request, or is told of ranks that it did not ask for."""
    ones = [
        Script({}, Requirements((3, 1), 2)),
        Script({}, Requirements((1, 5))),
        Script({}, Requirements((), 1)),
    ]
    drafter = combine(ones)
    assert drafter.requires == Requirements((3, 1, 5), 2)
    request = Text([1])
    target: Any = object()
    drafter.attach(target)
    drafter.begin(request)
    rows = RankedRows(np.array([1]), np.array([-1]), np.array([[7, 8]]))
    drafter.observe(Feedback([request], [[7]], [[]], [0], ranked=[rows]))
    drafter.end(request)
    drafter.close()
    for one, ranked in zip(ones, ([[[7, 8]]], [], [[[7]]]), strict=True):
        assert one.told == [
            ("attach", target),
            ("begin", 0),
            ("observe", ranked),
            ("end", 0),
            ("close",),
        ]


@pytest.mark.parametrize("combine", COMBINATORS.values(), ids=COMBINATORS)
@given(limits=st.builds(DraftLimits, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)))
def test_every_limit_holds(
    combine: Callable[[Sequence[Drafter]], Combined], limits: DraftLimits
) -> None:
    """Fault: drafters that each keep to the limit exceed it together."""
    chains = {1: [[1, 1, 1], [2, 1], [3]], 2: [[4, 1], [1]], 3: [[1, 1, 1, 1, 1]]}
    other = {1: [[5, 1, 2, 3]], 4: [[1], [2]], 3: [[6], [7]]}
    drafter = combine([Script(chains), Script(other), Script(chains)])
    requests = [Text([token], id=token) for token in (1, 2, 3, 4)]
    builder = builder_for(requests, [limits] * 4)
    drafter.propose(requests, builder)
    draft = builder.build()
    draft.check()
    assert draft.sizes.max() - 1 <= limits.max_nodes
    assert draft.max_depth <= limits.max_depth
    assert draft.max_width <= limits.max_width


class Failing(Script):
    def end(self, request: RequestView) -> None:
        raise ArithmeticError("on purpose")


def test_one_that_fails_to_let_go_keeps_no_other() -> None:
    """Fault: a request that ended stays in the state of all drafters after the one that failed."""
    first = Script({})
    drafter = Merge([first, Failing({})])
    drafter.end(Text([1]))
    assert first.told == [("end", 0)]
    assert drafter.faults == {"raised ArithmeticError: on purpose": 1}


def test_a_thousand_requests_leave_nothing() -> None:
    """Fault: state is kept for requests that are gone."""
    for combine in COMBINATORS.values():
        inner = [SuffixDrafter(), RecyclingDrafter()]
        drafter = combine(inner)
        for number in range(1000):
            request = Text([1, 2, 1], number)
            drafter.begin(request)
            drafted(drafter, [request]) if number % 100 == 0 else None
            drafter.observe(Feedback([], [], [], []))
            drafter.end(request)
        assert (inner[0]._texts, inner[1]._own) == ({}, {})
        assert getattr(drafter, "_accepted", {}) == {}


def eager() -> list[Drafter]:
    return [
        SuffixDrafter(SuffixOptions(min_probability=0.0)),
        RecyclingDrafter(RecyclingOptions(k=2)),
    ]


class TestFirst(DrafterConformance):
    learns = True

    def make(self) -> Drafter:
        return First([*eager(), TableDrafter("near")])


class TestMergeOfGuessesAndDraws(DrafterConformance):
    learns = True

    def make(self) -> Drafter:
        return Merge([*eager(), TableDrafter("near", width=2), ScriptedDrafter()], [1, 1, 2, 1])


class TestMergeWithoutStatistics(DrafterConformance):
    def make(self) -> Drafter:
        return Merge([eager()[0], MixtureDrafter("near"), TableDrafter("unrelated", depth=1)])


class TestExtend(DrafterConformance):
    learns = True

    def make(self) -> Drafter:
        return Extend([ScriptedDrafter(moves=1, guesses=0.7), *eager()], [1, 2, 2])


class TestRoute(DrafterConformance):
    learns = True

    def make(self) -> Drafter:
        return Route([MixtureDrafter("near"), First(eager())], [0.5])


class TestBandit(DrafterConformance):
    learns = True
    remembers = True

    def make(self) -> Drafter:
        inner = [TableDrafter("near", width=2), Merge(eager()), NoDrafter()]
        return Bandit(inner, "passes", by="temperature", bounds=[0.1])


# cascade


class TableScorer(TableDrafter, Scorer):
    """A table model that scores drafts."""

    def score(
        self, requests: Sequence[RequestView], draft: Draft
    ) -> tuple[torch.Tensor, Sequence[bool]]:
        prefixes = [
            [*request.tokens, *(int(draft.token[b, i]) for i in draft.path(b, node))]
            for b, request in enumerate(requests)
            for node in range(int(draft.sizes[b]))
        ]
        return log_laws(self._model, prefixes), [True] * len(requests)


class TestCascade(DrafterConformance):
    def make(self) -> Drafter:
        inner = ScriptedDrafter(moves=1, guesses=0.6)  # more would be much to enumerate
        return Cascade(inner, TableScorer("near"), max_nodes=1)


def cascade_error() -> float:
    """Total variation between the law of a cascade's text and the target's."""
    case = Case(SETTINGS["temperature"], vocab_size=2, horizon=3)
    seen = enumerate_case(
        case,
        lambda: Cascade(TableDrafter("unrelated", depth=1), TableScorer("near")),
        RejectionVerifier,
        [lambda: FixedScheduler(2, 2, 1)],
    )
    assert not seen.faults
    assert seen.accepted
    [(prompt, params)] = case.requests
    law = target_law(table_runner(case).model, prompt, case.horizon, params)
    return total_variation(law, seen.law)


def test_a_cascade_that_drops_the_models_own_token_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: only what the inner verifier accepted is drafted, whose law is not the model's."""
    assert cascade_error() < 1e-9
    monkeypatch.setattr(builder_module, "_emitted", len)
    assert cascade_error() > 0.01


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_a_cascade_drafts_as_deep_as_its_model_decodes(verifier: type[Verifier]) -> None:
    """Fault: a pass of the model brings one token, as if nobody drafted for it."""
    case = Case(SETTINGS["temperature"], vocab_size=4, horizon=16)
    engine, [request] = build_engine(
        case,
        lambda: Cascade(TableDrafter("identical", depth=3), TableScorer("identical"), 3),
        verifier,
        [lambda: FixedScheduler(5, 5, 1)],
        KeyedSource(),
    )
    while engine.has_work:
        engine.step()
    assert not engine.faults
    assert request.stats.accepted == request.stats.drafted
    assert request.stats.target_passes == 4  # three kept, the model's own and the target's, of 16
    assert request.stats.drafted == 12


def test_what_goes_wrong_in_a_cascade_is_named() -> None:
    """Fault: numbers that are not finite are the inner drafter's, or its failure the model's."""

    class Overflowing(TableScorer):
        def score(self, requests: Any, draft: Any) -> Any:
            logits, scored = super().score(requests, draft)
            return logits * torch.nan, scored

    class Raising(TableDrafter):
        def propose(self, requests: Any, builder: Any) -> None:
            raise ArithmeticError("on purpose")

    for drafter, model, why, drafts in (
        (TableDrafter("near"), Overflowing("near"), "handed over NaN or infinite logits", 1),
        (Raising("near"), TableScorer("near"), "raised ArithmeticError: on purpose", 9),
    ):
        case = Case(SETTINGS["temperature"], vocab_size=4, horizon=10)
        schedulers = [lambda: FixedScheduler(3, 3, 1)]
        both = (drafter, model)
        engine, [request] = build_engine(
            case, lambda both=both: Cascade(*both), CoupledVerifier, schedulers, KeyedSource()
        )
        while engine.has_work:
            engine.step()
        assert engine.faults == {why: 1}
        assert 0 < request.stats.drafted_rounds <= drafts
        assert (request.stats.drafted_rounds > 1) == (drafts > 1)


def test_a_cascade_needs_a_model_that_scores() -> None:
    with pytest.raises(ConfigError, match="expected model to be a drafter that can score"):
        Cascade(Script(A), Script(B))


def test_an_inner_draft_begins_at_the_text() -> None:
    builder = builder_for([Text([1])], [ROOMY])
    (node,) = builder.guess(int(builder.roots[0]), [5])
    with pytest.raises(ContractError, match="begin at the last committed token"):
        builder.limited([ROOMY], np.array([node])).inner([ROOMY])


# how they are named


def test_drafters_need_no_options_name() -> None:
    expected = Reference(
        "merge",
        {"drafters": ["suffix", "small-model", "a:b", {"name": "c:d", "k": 8}], "shares": [1, 2]},
    )
    text = "merge(suffix, small-model, 'a:b', c:d(k=8), shares=[1, 2])"
    assert parse_reference("drafter", text) == expected
    nested = parse_reference("drafter", "first(extend(a, b.c()), d)")
    inner = {"name": "extend", "drafters": ["a", {"name": "b.c"}]}
    assert nested == Reference("first", {"drafters": [inner, "d"]})


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("drafter", "merge(suffix, 5)", "nothing but drafters"),
        ("drafter", "merge(suffix, a + b)", "nothing but drafters"),
        ("drafter", "merge(suffix, a - b)", "nothing but drafters"),
        ("drafter", "merge(suffix, 'a b')", "nothing but drafters"),
        ("drafter", "merge(*suffix)", "nothing but drafters"),
        ("drafter", "merge(suffix, [a])", "nothing but drafters"),
        ("drafter", "merge(suffix, drafters=['a'])", "'drafters' twice"),
        ("target", "transformers(a)", "by name only"),
        ("scheduler", "fixed(a)", "by name only"),
    ],
)
def test_nothing_else_goes_without_one(kind: Any, text: str, why: str) -> None:
    """An expression is data: it must not be guessed at."""
    with pytest.raises(ConfigError, match=why):
        parse_reference(kind, text)


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("first(suffix, recycling(k=8))", First),
        ("merge(suffix, first(none, recycling), shares=[1, 2])", Merge),
        ("extend(none, suffix(factor=1.5), recycling)", Extend),
        ("route(suffix, recycling, by='temperature', bounds=[0.5])", Route),
        ("bandit(suffix, recycling, explore=0.2, by='prompt_length', bounds=[9])", Bandit),
        ("cascade(drafter='suffix', model=small-model(model='table'), max_nodes=6)", Cascade),
    ],
)
def test_expressions_build_and_come_back_from_their_resolved_settings(
    text: str, built: type
) -> None:
    manager = PluginManager()
    bound = manager.bind("drafter", text)
    assert isinstance(bound.build(), built)
    assert manager.bind("drafter", bound.settings()).settings() == bound.settings()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("merge(suffix)", "at least 2"),
        ("merge(suffix, recycling, shares=[1])", "one share for each of the 2"),
        ("merge(suffix, recycling, shares=[1, 0])", "greater than 0"),
        ("merge(suffix, sufix)", "did you mean 'suffix'"),
        ("merge(suffix, recycling(kk=8))", "did you mean 'k'"),
        ("route(suffix, recycling, bounds=[1, 2])", "2 drafters need 1 bounds, got 2"),
        ("route(suffix, recycling, none, bounds=[2, 1])", "bounds must rise"),
        ("bandit(suffix, recycling, bounds=[1])", "give both or neither"),
        ("suffix(recycling)", "unknown option 'drafters'"),
    ],
)
def test_what_does_not_fit_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PluginManager().bind("drafter", text)
