"""What every component must pass: subclass a base in a test file, and say in `make` how it is built.

class TestMyDrafter(DrafterConformance):
    def make(self):
        return MyDrafter()
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch

from specfw.builtins import NoDrafter
from specfw.contracts import (
    Drafter,
    DraftLimits,
    Feedback,
    LoadedTarget,
    Outcome,
    RequestView,
    Requirements,
    Scheduler,
    SchedulerView,
    TargetInfo,
    TargetLoader,
    Verifier,
)
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft, ExtraRows
from specfw.decoding.probabilities import NodeLaws, SamplingBatch
from specfw.decoding.random import KeyedSource, RandomSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.engine.model_runner import ModelRunner
from specfw.testing.cases import SETTINGS, Case, build_engine, deep_enough, target_info
from specfw.testing.certification import Certificate, certify
from specfw.testing.drafters import MixtureDrafter, ScriptedDrafter, TableDrafter
from specfw.testing.near_ties import greedy_differences
from specfw.types import SamplingParams
from specfw.weights import quantized_linears, weight_bytes

__all__ = [
    "DrafterConformance",
    "SchedulerConformance",
    "TargetConformance",
    "VerifierConformance",
]

_LONG = Case(SETTINGS["temperature"], vocab_size=4, horizon=10, batch=3)
"""Enough steps for state to go wrong; run with keyed noise, not enumerated."""

Node = tuple[int, int, int]
"""Parent, token and kind of a draft node; the kind of an extra row is -1."""


class _Recorder(Drafter):
    """Passes everything on to a drafter, and keeps its drafts by request and committed tokens."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.drafts: dict[tuple[int, tuple[int, ...]], list[Node]] = {}
        self.last: Draft | None = None
        self.extras: list[ExtraRows] = []

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """The drafter's, which it may know only once it is attached."""
        return self.inner.requires

    @property
    def faults(self) -> Mapping[str, int]:
        """Those of drafters that the drafter is made of."""
        return self.inner.faults

    def attach(self, target: TargetInfo) -> None:
        self.inner.attach(target)

    def begin(self, request: RequestView) -> None:
        self.inner.begin(request)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self.inner.propose(requests, builder)
        self.last, self.extras = builder.build(), builder.extras
        for b, request in enumerate(requests):
            if builder.limits[b].max_nodes:
                self.drafts[request.params.seed or 0, tuple(request.tokens)] = _nodes(
                    self.last, builder.extras[b], b
                )

    def take(self) -> Draft | None:
        """The draft made since the last call."""
        draft, self.last = self.last, None
        return draft

    def observe(self, feedback: Feedback) -> None:
        self.inner.observe(feedback)

    def end(self, request: RequestView) -> None:
        self.inner.end(request)

    def close(self) -> None:
        self.inner.close()


def _nodes(draft: Draft, extra: ExtraRows, b: int) -> list[Node]:
    nodes = [
        (int(draft.parent[b, i]), int(draft.token[b, i]), int(draft.kind[b, i]))
        for i in range(1, int(draft.sizes[b]))
    ]
    return nodes + [
        (row, token, -1) for row, token in zip(extra.parents, extra.tokens, strict=True)
    ]


class _Pausing(Scheduler):
    """Lets no request draft while its number of tokens is in a range."""

    def __init__(self, pause: range) -> None:
        self._pause = pause

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        return [
            DraftLimits() if len(request.tokens) in self._pause else cap
            for request, cap in zip(view.requests, view.caps, strict=True)
        ]


def _run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.memory.check()


def _assert_certified(certificate: Certificate, drafts: bool = True) -> None:
    assert certificate.ok, str(certificate)
    assert not certificate.faults, f"drafts were lost: {dict(certificate.faults)}"
    assert certificate.drafted or not drafts, "nothing was drafted, so nothing was checked"


class DrafterConformance(ABC):
    """The contract of drafters."""

    learns: ClassVar[bool] = False
    """Whether it keeps statistics on purpose, so that the past may change what it drafts."""
    remembers: ClassVar[bool] = False
    """Whether what one request teaches serves later ones too."""
    drafts: ClassVar[bool] = True
    """Whether it drafts anything for a table model's random text."""

    @abstractmethod
    def make(self) -> Drafter:
        """A new drafter, not yet attached."""

    def engine(
        self, drafter: Drafter, case: Case = _LONG, schedulers: Sequence[Scheduler] = ()
    ) -> Engine:
        """An engine with this drafter and the case's requests, on a table model."""
        case = deep_enough(case, self.make)
        factories = [lambda: FixedScheduler(4, 4, 2), *((lambda s=s: s) for s in schedulers)]
        return build_engine(case, lambda: drafter, CoupledVerifier, factories, KeyedSource())[0]

    @pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
    def test_keeps_the_law(self, verifier: Callable[[], Verifier]) -> None:
        """A drafter may change the speed, never the law."""
        _assert_certified(certify(self.make, verifier), self.drafts)

    @pytest.mark.parametrize("limits", [(0, 0, 1), (1, 1, 1), (2, 1, 2), (3, 3, 1), (5, 2, 3)])
    def test_drafts_within_limits(self, limits: tuple[int, int, int]) -> None:
        """More nodes, extra rows, depth or width than allowed would not fit into the pass."""
        recorder = _Recorder(self.make())
        engine = build_engine(
            deep_enough(_LONG, self.make),
            lambda: recorder,
            CoupledVerifier,
            [lambda: FixedScheduler(*limits)],
            KeyedSource(),
        )[0]
        while engine.has_work:
            engine.step()
            if (draft := recorder.take()) is not None:
                draft.check()
                extra = [len(rows) for rows in recorder.extras]
                assert int((draft.sizes + extra).max(initial=1)) - 1 <= limits[0]
                assert draft.max_depth <= limits[1]
                assert draft.max_width <= limits[2]
        assert not engine.faults

    def test_state_follows_the_committed_tokens(self) -> None:
        """State left over from refused drafts would show in later drafts."""
        if self.learns:
            pytest.skip("what it drafts depends on the past on purpose")
        always = _Recorder(self.make())
        _run(self.engine(always))
        for start in range(4, 9):
            late = _Recorder(self.make())
            _run(self.engine(late, schedulers=[_Pausing(range(start))]))
            for key in always.drafts.keys() & late.drafts.keys():
                assert always.drafts[key] == late.drafts[key], (
                    f"after {key[1]} the draft depends on earlier drafts, not on the tokens alone"
                )

    @pytest.mark.parametrize("pause", [range(4, 6), range(5, 9)], ids=str)
    def test_B33_back_from_a_pause_it_drafts_as_before(self, pause: range) -> None:
        """Fault B33: a scheduler that goes to 0 and back finds a drafter that missed what was emitted
        in between, and whose drafts are refused from then on."""
        always, paused = _Recorder(self.make()), _Recorder(self.make())
        texts = []
        for recorder, schedulers in ((always, []), (paused, [_Pausing(pause)])):
            engine = self.engine(recorder, schedulers=schedulers)
            requests = list(engine.planner.waiting)
            _run(engine)
            assert not engine.faults, dict(engine.faults)
            texts.append([request.emitted for request in requests])
        assert texts[0] == texts[1]
        assert not [key for key in paused.drafts if len(key[1]) in pause]
        back = {key for key in paused.drafts if len(key[1]) >= pause.stop}
        assert back, "nobody was asked for a draft after the pause"
        if not self.learns:
            for key in back & always.drafts.keys():
                assert paused.drafts[key] == always.drafts[key], (
                    f"after {key[1]} the draft depends on whether there were drafts before"
                )

    def test_batch_mates_do_not_matter(self) -> None:
        """State of one request that leaks into another would show in a batch."""
        if self.learns:
            pytest.skip("what it drafts depends on the past on purpose")
        together = _Recorder(self.make())
        _run(self.engine(together))
        prompt, params = _LONG.requests[_LONG.watched]
        alone = _Recorder(self.make())
        engine = self.engine(alone, Case(params, vocab_size=4, horizon=10))
        assert Case(params, vocab_size=4, horizon=10).requests[0] == (prompt, params)
        _run(engine)
        for key in alone.drafts:
            assert together.drafts.get(key, alone.drafts[key]) == alone.drafts[key]
        assert alone.drafts.keys() & together.drafts.keys() or not alone.drafts

    def test_a_request_that_ends_is_forgotten(self) -> None:
        """State that outlives its request is a leak."""
        drafter = self.make()
        engine = self.engine(drafter)
        requests = [weakref.ref(request) for request in engine.planner.waiting]
        _run(engine)
        del engine
        gc.collect()
        assert not [request for request in requests if request() is not None], (
            "end(request) must drop whatever refers to the request"
        )
        drafter.close()

    def test_the_same_request_again(self) -> None:
        """What begin and end leave behind would show when a request comes again."""
        if self.learns:
            pytest.skip("what it drafts depends on the past on purpose")
        recorder = _Recorder(self.make())
        engine = self.engine(recorder)
        engine.memory.prefix_cache = False  # so that the second time is like the first
        _run(engine)
        first, recorder.drafts = recorder.drafts, {}
        for prompt, params in _LONG.requests:
            engine.add(prompt, params)
        _run(engine)
        assert recorder.drafts == first

    def test_B11_an_earlier_request_leaves_nothing(self) -> None:
        """A table kept from an earlier, longer request would show in what a later one drafts."""
        if self.remembers:
            pytest.skip("what one request teaches serves others on purpose")
        params = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True)
        seen = []
        for prompts in (([1, 2, 3] * 4, [3, 3, 1, 2]), ([3, 3, 1, 2],)):
            recorder = _Recorder(self.make())
            engine = self.engine(recorder, Case(params, vocab_size=4, horizon=1))
            engine.memory.prefix_cache = False  # so that it is not found there either
            _run(engine)
            for prompt in prompts:  # one after the other
                request = engine.add(prompt, params.model_copy(update={"seed": len(prompt)}))
                _run(engine)
            drafts = {key: nodes for key, nodes in recorder.drafts.items() if key[0] == 4}
            seen.append((request.tokens, request.stats, drafts))
        assert seen[0] == seen[1]

    def test_requests_join_leave_and_are_preempted(self) -> None:
        """Requests that come and go between steps must neither confuse nor break it."""
        case = Case(SETTINGS["temperature"], vocab_size=4, horizon=5, batch=3, memory="preemption")
        drafter = self.make()
        engine = self.engine(drafter, case)
        engine.step()
        joined = engine.add([1, 2], SamplingParams(max_new_tokens=4, temperature=1.0, seed=5))
        gone = engine.add([3], SamplingParams(max_new_tokens=4, temperature=0.0, seed=6))
        engine.step()
        engine.cancel(gone)
        _run(engine)
        assert joined.output is not None
        assert joined.output.finish_reason in ("stop", "length")
        assert not engine.faults

    def test_a_thousand_requests_leave_nothing_behind(self) -> None:
        """Whatever is kept by request, of those preempted, cancelled or found in the prefix cache too, piles up."""
        drafter = self.make()
        engine = self.engine(drafter, Case(vocab_size=4, horizon=1))
        _run(engine)
        engine._next_id = first = 1 << 40  # numbers that nothing else holds
        random = np.random.default_rng(5)
        prompts = [random.integers(0, 4, length).tolist() for length in (1, 2, 5, 6, 9)]
        preempted = cancelled = asked = 0
        while asked < 1000 or engine.has_work:
            for prompt in random.choice(len(prompts), min(1000 - asked, 12)):
                temperature = float(random.choice([0.0, 1.0]))
                params = SamplingParams(max_new_tokens=8, temperature=temperature, seed=asked)
                engine.add(prompts[prompt], params)
                asked += 1
            waiting = list(engine.planner.waiting)
            report = engine.step()
            preempted += report.preempted
            admitted = [request for request in waiting if request in engine.planner.running]
            if admitted and asked % 5 == 0:
                engine.cancel(admitted[0])
                cancelled += 1
        engine.memory.check()
        assert min(preempted, cancelled) > 1
        assert engine.memory.cached  # so that prompts, which come again and again, were found there
        assert not engine.faults, dict(engine.faults)
        held = {number for number in _numbers_in(drafter) if number >= first}
        assert not held, f"{len(held)} requests that are gone are still known, such as {min(held)}"

    def test_an_empty_batch(self) -> None:
        """A step may have nobody to draft for."""
        drafter = self.make()
        engine = self.engine(drafter)
        drafter.propose([], _empty_builder(engine))
        drafter.observe(Feedback([], [], [], []))

    def test_nothing_added_is_removed(self) -> None:
        """Dropping or changing a node after a look at it would make its stated law false."""
        inner = self.make()
        added: dict[int, int] = {}

        class Watching(_Recorder):
            def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
                sample, guess, emit = DraftBuilder.sample, DraftBuilder.guess, DraftBuilder.emit
                added.clear()

                def note(grown: DraftBuilder, handles: Sequence[int]) -> None:
                    if grown._token is not builder._token:  # a draft within the draft
                        return
                    known = np.array([h for h in handles if h >= 0], np.int64)
                    added.update(
                        zip(known.tolist(), builder.tokens_of(known).tolist(), strict=True)
                    )

                def watched_sample(self, *arguments, **options):  # type: ignore[no-untyped-def]
                    handles = sample(self, *arguments, **options)
                    note(self, handles.reshape(-1).tolist())
                    return handles

                def watched_guess(self, *arguments, **options):  # type: ignore[no-untyped-def]
                    handles = guess(self, *arguments, **options)
                    note(self, handles)
                    return handles

                def watched_emit(self, *arguments, **options):  # type: ignore[no-untyped-def]
                    chains = emit(self, *arguments, **options)
                    note(self, [handle for chain in chains for handle in chain])
                    return chains

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(DraftBuilder, "sample", watched_sample)
                    patch.setattr(DraftBuilder, "guess", watched_guess)
                    patch.setattr(DraftBuilder, "emit", watched_emit)
                    super().propose(requests, builder)
                draft = builder.build()
                kept = {
                    builder.handles_of(b, [i])[0]: int(draft.token[b, i])
                    for b in range(draft.batch)
                    for i in range(1, int(draft.sizes[b]))
                }
                assert kept == added

        engine = self.engine(Watching(inner))
        _run(engine)
        assert not engine.faults, dict(engine.faults)

    def test_a_failure_costs_the_draft_only(self) -> None:
        """Whatever it does before it raises, the text is plain decoding's."""

        class Failing(_Recorder):
            def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
                super().propose(requests, builder)
                raise ArithmeticError("on purpose")

        texts = []
        for drafter in (NoDrafter(), Failing(self.make())):
            engine = self.engine(drafter)
            requests = list(engine.planner.waiting)
            _run(engine)
            texts.append([request.emitted for request in requests])
            assert all(request.output is not None for request in requests)
        assert texts[0] == texts[1]


def _numbers_in(thing: object) -> set[int]:
    """All integers that something holds, its modules and tensors excepted."""
    found: set[int] = set()
    seen: set[int] = set()
    left = [thing]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType, torch.nn.Module)):
            continue
        seen.add(id(one))
        if isinstance(one, int):
            found.add(one)
        elif isinstance(one, np.ndarray):
            found.update(one.reshape(-1).tolist() if one.dtype.kind in "iu" else ())
        elif not isinstance(one, torch.Tensor):
            left += gc.get_referents(one)
    return found


def _empty_builder(engine: Engine) -> DraftBuilder:
    none = torch.zeros(0, dtype=torch.long, device=engine.info.device)
    return DraftBuilder(
        none, none, none, [], SamplingBatch([]), KeyedSource(), "target", engine.info.vocab_size
    )


class VerifierConformance(ABC):
    """The contract of verifiers."""

    @abstractmethod
    def make(self) -> Verifier:
        """A new verifier."""

    @property
    def _schedulers(self) -> list[Callable[[], Scheduler]]:
        width = 2 if self.make().supports_trees else 1
        return [lambda: FixedScheduler(3, 2, width)]

    @pytest.mark.parametrize(
        "drafter",
        [
            lambda: TableDrafter("near"),
            lambda: TableDrafter("near", width=2),
            lambda: TableDrafter("identical"),
            lambda: TableDrafter("disjoint"),
            lambda: TableDrafter("one_hot"),
            ScriptedDrafter,
            MixtureDrafter,
        ],
        ids=["chain", "tree", "identical", "disjoint", "one-hot", "scripted", "mixture"],
    )
    def test_keeps_the_law(self, drafter: Callable[[], Drafter]) -> None:
        """Chains and trees, guesses and draws; identical laws leave a residual without mass."""
        _assert_certified(certify(drafter, self.make, self._schedulers))

    def test_empty_drafts_are_plain_decoding(self) -> None:
        """Without a draft nothing can be kept, and the law is the target's."""
        certificate = certify(NoDrafter, self.make, settings={"plain": SETTINGS["temperature"]})
        assert certificate.max_tv < 1e-9, str(certificate)
        assert certificate.accepted == 0

    def test_outcomes_do_not_depend_on_the_batch(self) -> None:
        """The same request, alone and among others, with the same noise."""
        texts = []
        for batch in (1, 3):
            case = Case(SETTINGS["temperature"], vocab_size=4, horizon=8, batch=batch)
            engine, requests = build_engine(
                case, lambda: TableDrafter("near", 3), self.make, self._schedulers, KeyedSource()
            )
            _run(engine)
            texts.append(requests[case.watched].emitted)
        assert texts[0] == texts[1]

    def test_outcomes_are_on_the_tree(self) -> None:
        """A kept node is a node of the request's own tree, and the next token is in the vocabulary."""
        verifier = _CheckedVerifier(self.make())
        case = Case(vocab_size=4, horizon=8, batch=3)
        engine, _ = build_engine(
            case, lambda: TableDrafter("near", 3), lambda: verifier, self._schedulers, KeyedSource()
        )
        _run(engine)
        assert verifier.nodes > 0


class _CheckedVerifier(Verifier):
    """Looks at what a verifier decides."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.guarantee, self.noise = inner.guarantee, inner.noise  # type: ignore[misc]
        self.supports_trees = inner.supports_trees  # type: ignore[misc]
        self.nodes = 0

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        outcome = self.inner.verify(draft, laws, random)
        assert outcome.node.shape == outcome.next_token.shape == (draft.batch,)
        assert ((outcome.node >= 0) & (outcome.node < torch.from_numpy(draft.sizes))).all()
        assert ((outcome.next_token >= 0) & (outcome.next_token < 4)).all()
        self.nodes += int(draft.sizes.sum()) - draft.batch
        return outcome


class SchedulerConformance(ABC):
    """The contract of schedulers."""

    @abstractmethod
    def make(self) -> Scheduler:
        """A new scheduler, not yet attached."""

    @pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
    def test_keeps_the_law(self, verifier: Callable[[], Verifier]) -> None:
        """Limits and stops that look at a token that is then dropped would change the law."""
        limit = [self.make, lambda: FixedScheduler(3, 2, 2)]
        _assert_certified(
            certify(lambda: TableDrafter("near", width=2), verifier, limit), drafts=False
        )

    def test_plans_within_the_caps(self) -> None:
        """One limit for each request, none of it negative, at most the cap."""
        scheduler = self.attached()
        for caps in ([], [DraftLimits()], [DraftLimits(3, 2, 2), DraftLimits(8, 1, 4)]):
            requests = _views(len(caps))
            limits = scheduler.plan(SchedulerView(requests, caps, len(caps)))
            assert len(limits) == len(caps)
            for limit, cap in zip(limits, caps, strict=True):
                assert limit & cap == limit, f"{limit} exceeds the cap {cap}"
                assert min(limit.max_nodes, limit.max_depth, limit.max_width) >= 0

    def test_answers_before_a_draw(self) -> None:
        """One answer for each law, or None."""
        scheduler = self.attached()
        for rows in (0, 1, 3):
            laws, chances = torch.full((rows, 4), 0.25), torch.full((rows, 2), 0.25)
            for answer in (scheduler.before_draw(laws), scheduler.after_kept(chances)):
                if answer is not None:
                    assert answer.shape == (rows,)
                    assert answer.dtype == torch.bool

    def test_observes_any_feedback(self) -> None:
        """A step may have drafted nothing, or have nobody in it."""
        scheduler = self.attached()
        scheduler.observe(Feedback([], [], [], []))
        scheduler.observe(Feedback(_views(1), [[2]], [[]], [0]))
        scheduler.observe(Feedback(_views(1), [[2, 1]], [[1]], [2]))
        self.test_plans_within_the_caps()

    def attached(self) -> Scheduler:
        """A scheduler attached to a table model."""
        scheduler = self.make()
        scheduler.attach(target_info(_LONG))
        return scheduler


class TargetConformance(ABC):
    """The contract of target loaders; give it a small model, for each test loads one."""

    tolerance: ClassVar[float] = 1.0
    """Where greedy texts with and without a drafter part, the two best tokens may be this many standard
    deviations of the logits apart."""

    @abstractmethod
    def make(self) -> TargetLoader:
        """A loader of a small model."""

    def test_loads_what_can_run(self) -> None:
        """A model in training mode, or with gradients, decodes something else or wastes memory."""
        loaded = self.make().load()
        assert isinstance(loaded, LoadedTarget)
        assert loaded.name
        assert not loaded.model.training
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
        ModelRunner(loaded.model)  # which compares the packed forward with the model's own

    def test_the_same_model_again(self) -> None:
        """Loading must neither depend on chance nor change what was loaded before."""
        first = ModelRunner(self.make().load().model)
        tokens = _words(first)[:8]
        before = first.stock_logits(tokens)
        again = ModelRunner(self.make().load().model)
        assert torch.equal(first.stock_logits(tokens), before)
        assert torch.equal(again.stock_logits(tokens), before)

    def test_may_be_looked_at(self) -> None:
        """Packed layers that unpack themselves to give their state must come back as they were."""
        runner = ModelRunner(self.make().load().model)
        tokens = _words(runner)[:8]
        before = runner.stock_logits(tokens)
        for _ in range(2):
            runner.model.state_dict()
            assert torch.equal(runner.stock_logits(tokens), before)

    def test_says_what_is_quantised(self) -> None:
        """Who runs a quantised target must be able to know it."""
        loaded = self.make().load()
        layers = quantized_linears(loaded.model)
        if loaded.quantization is None:
            assert not layers, "the model holds quantised layers; state `quantization`"
            return
        assert loaded.notes, "notes must say what was quantised"
        if loaded.quantization.packed:
            assert layers, "the weights are said to be packed, but all linear layers are dense"
        for name, layer in layers:
            dense = 4 * layer.in_features * layer.out_features
            assert weight_bytes(layer) < dense, f"{name} takes more memory than in float32"

    @torch.inference_mode()
    def test_batch_invariance_is_as_stated(self) -> None:
        """A promise that a row does not depend on those beside it must hold to the last bit."""
        loaded = self.make().load()
        if loaded.quantization is None or not loaded.quantization.batch_invariant:
            pytest.skip("no layer promises it")
        generator = torch.Generator().manual_seed(0)
        for name, layer in quantized_linears(loaded.model):
            width = int(layer.in_features)
            x = torch.randn(1, 9, width, generator=generator).to(
                loaded.model.device, loaded.model.dtype
            )
            for rows in (1, 2, 5):
                assert torch.equal(layer(x[:, :rows]), layer(x)[:, :rows]), name

    @pytest.mark.parametrize("rows", [2, 8])
    def test_greedy_texts_part_at_near_ties_only(self, rows: int) -> None:
        """A draft may change a greedy text only where passes over more rows do so without any drafter."""
        runner = ModelRunner(self.make().load().model)
        words = _words(runner)
        for start in range(0, 12, 4):
            for found in greedy_differences(runner, words[start : start + 4], new=16, rows=rows):
                assert found.reproduced, f"an engine fault: {found}"
                assert found.gap <= self.tolerance, f"no near-tie: {found}"


def _words(runner: ModelRunner) -> list[int]:
    random = np.random.default_rng(3)
    return [int(token) for token in random.integers(0, runner.vocab_size, 16)]


def _views(count: int) -> list[RequestView]:
    case = Case(vocab_size=4, batch=max(count, 1))
    _, requests = build_engine(case, NoDrafter, CoupledVerifier, [], KeyedSource())
    return list(requests[:count])
