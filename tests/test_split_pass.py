"""A pass in two parts equals a whole one: layer views, rows run in advance, and an engine that drafts with them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from specfw.contracts import Drafter, DraftLimits, RequestView, Requirements
from specfw.decoding.builder import DraftBuilder
from specfw.engine import layer_views, split_pass, survey
from specfw.engine.batching import Segment
from specfw.engine.engine import Engine
from specfw.engine.layer_views import LayerView, find_layers
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.engine.split_pass import SplitModel, SplitPass
from specfw.errors import ConfigError, ContractError, UnsupportedModelError
from specfw.testing.drafting import Text, draft
from specfw.testing.table_model import TableDecoder, TableLM
from specfw.types import SamplingParams
from tests.engine_kit import OracleDrafter, make_engine, outputs, prompt_of, run
from tests.test_packed_forward import TOLERANCE, Drive
from tests.tiny_models import ARCHITECTURES, build

LAYERS = 3
SPLITS = [(0,), (0, 1), (0, 2)]
"""What drafts go through: with one shared layer, with two, and with a gap behind the first."""


@pytest.fixture(scope="module")
def runners() -> dict[str, ModelRunner]:
    return {name: ModelRunner(build(name, num_hidden_layers=LAYERS)) for name in ARCHITECTURES}


@pytest.fixture(params=ARCHITECTURES)
def runner(request: pytest.FixtureRequest, runners: dict[str, ModelRunner]) -> ModelRunner:
    return runners[request.param]


def chain(tokens: Sequence[int], memory: KVMemory) -> Segment:
    nodes = np.arange(len(tokens))
    return Segment(memory.open(list(tokens)), np.array(tokens), nodes - 1, nodes)


@contextmanager
def reserved(segment: Segment, memory: KVMemory) -> Iterator[None]:
    with memory.transaction() as transaction:
        transaction.reserve(segment.sequence, len(segment.tokens))
        yield


def decoder_layers(model: Any) -> nn.ModuleList:
    path, name = find_layers(model)
    layers: nn.ModuleList = getattr(model.get_submodule(path), name)
    return layers


class ResumedDrive(Drive):
    """Random ragged batches, of which random parts are run in advance, in two rounds."""

    draft_layers: tuple[int, ...] = (0,)

    def score(self, segments: Sequence[Segment]) -> torch.Tensor:
        self.split = getattr(self, "split", None) or SplitModel(self.runner, self.draft_layers)
        target_pass = SplitPass(self.split, self.store)
        before = [0] * len(segments)
        for _ in range(2):
            stops = [
                self.rng.randint(first, len(s.tokens))
                for first, s in zip(before, segments, strict=True)
            ]
            begun = [
                Segment(s.sequence, s.tokens[:stop], s.parents[:stop], s.scored[:0])
                for s, stop in zip(segments, stops, strict=True)
                if stop
            ]
            if begun:
                target_pass.advance(begun)
            before = stops
        return target_pass.finish(segments).logits


@pytest.mark.parametrize("layers", SPLITS)
@settings(
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=3,
)
@given(seed=st.integers(0, 2**32 - 1))
def test_resumed_rows_equal_the_stock_forward(
    runner: ModelRunner, layers: tuple[int, ...], seed: int
) -> None:
    """A state taken from another row, a row run twice or never, or KV that draft layers left behind a gap."""
    drive = ResumedDrive(runner, random.Random(seed))
    drive.draft_layers = layers
    for _ in range(3):
        drive.step()
    assert drive.worst <= TOLERANCE


def test_a_view_of_the_first_layers_is_a_truncated_model(runner: ModelRunner) -> None:
    """Wrong kinds of layers, embeddings or norms in the view, against a model that has no more layers."""
    memory, name = KVMemory(16, 4), runner.model.config.model_type
    architecture = {"gemma3_text": "gemma3"}.get(name, name)
    for count in (1, 2):
        short = build(architecture, num_hidden_layers=count)
        weights = runner.model.state_dict()
        short.load_state_dict({key: weights[key] for key in short.state_dict()})
        segment = chain(prompt_of(17), memory)
        with reserved(segment, memory):
            batch = runner.pack([segment], None)
            view = LayerView(runner, range(count))
            logits, states = view.run(runner.new_store(memory.num_slots), batch, {count})
        expected = ModelRunner(short, check=False).stock_logits(segment.tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=4 * TOLERANCE)
        torch.testing.assert_close(view.logits(states[count]), logits, rtol=0, atol=1e-6)


def test_hidden_states_are_those_of_a_whole_pass(runner: ModelRunner) -> None:
    """Other drafters in the same pipeline reading the states of other layers than they asked for."""
    memory, wanted = KVMemory(16, 4), (0, 1, 2, 3, -1, -2)
    segment = chain(prompt_of(11), memory)
    with reserved(segment, memory):
        whole = runner.run(runner.new_store(memory.num_slots), [segment], None, wanted)
        for layers in SPLITS:
            split = SplitModel(runner, layers)
            store = runner.new_store(memory.num_slots)
            parts = SplitPass(split, store, wanted).finish([segment])
            assert parts.hidden.keys() == whole.hidden.keys()
            for layer, states in whole.hidden.items():
                torch.testing.assert_close(parts.hidden[layer], states, rtol=0, atol=TOLERANCE)


def test_views_copy_no_weight_and_leave_the_model_alone(runner: ModelRunner) -> None:
    """A second copy of the weights, or a model that its owner finds cut off."""
    model = runner.model
    weights = {tensor.data_ptr() for tensor in model.parameters()}
    modules = list(model.modules())
    config = model.config.to_dict()
    split = SplitModel(runner, (0, 2))
    for view in (split.draft, split.rest):
        assert {tensor.data_ptr() for tensor in view._model.parameters()} <= weights
    assert list(model.modules()) == modules
    assert model.config.to_dict() == config
    assert not any("forward" in module.__dict__ for module in modules)


@pytest.mark.parametrize("layers", [(), (1,), (0, 0), (0, 2, 1), (0, 1, 2), (0, 3), (-1,)])
def test_layers_that_cannot_be_drafted_with(
    layers: tuple[int, ...], runners: dict[str, ModelRunner]
) -> None:
    """Layers out of range, out of order, or all of them."""
    with pytest.raises(ConfigError, match=r"target's 3, got \["):
        SplitModel(runners["llama"], layers)


def test_a_model_whose_layers_are_not_listed() -> None:
    """A model that hides its layers in some other form is refused, not run to its end."""
    model = build("llama")
    model.model.layers = nn.Sequential(*model.model.layers)
    runner = ModelRunner(model, check=False)
    with pytest.raises(UnsupportedModelError, match="one list of 2 decoder layers"):
        SplitModel(runner, (0,))


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_models_whose_layers_take_more_than_hidden_states_are_refused(model_type: str) -> None:
    """Several streams, or inputs for each layer by its place, which a view would get wrong."""
    runner = ModelRunner(survey._tiny_model(model_type))
    with pytest.raises(UnsupportedModelError, match="use a drafter without draft layers"):
        SplitModel(runner, (0,))


class CarryingDecoder(TableDecoder):
    """Adds what the first layer says to what the last one does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + output.hidden_states[1]
        return output


def test_the_probe_refuses_what_flows_past_the_layers() -> None:
    """A state that goes around the upper layers, and is another one where only these are run."""
    model = TableLM(3, seed=5, layers=2)
    model.decoder = CarryingDecoder(model.config, model.embed)
    runner = ModelRunner(model, prepack=False)
    with pytest.raises(UnsupportedModelError, match="in two parts to equal a whole one"):
        SplitModel(runner, (0,))


class Exit(Drafter):
    """Draws below every live node from what the draft layers say, `width` at a time."""

    reads_ahead = True

    def __init__(self, layers: tuple[int, ...] = (0,), depth: int = 3, width: int = 1) -> None:
        self.requires = Requirements(draft_layers=layers)  # type: ignore[misc]
        self._depth, self._width = depth, width

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        live = builder.roots
        for _ in range(self._depth):
            live = live[builder.wants_more(live)]
            if not len(live):
                return
            logits = builder.draft_logits(builder.draft_states(live))
            children = builder.sample(live, logits, self._width)
            live = children[children >= 0]


class WithOthers(Exit):
    """In some steps and for some requests only, next to guesses and extra rows of others'."""

    def __init__(self, texts: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(**options)
        self._oracle = OracleDrafter(texts, right=0.7, depth=3, branches=2)
        self._steps = 0

    def begin(self, request: RequestView) -> None:
        self._oracle.begin(request)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self._steps += 1
        builder.extra(int(builder.roots[0]), [5, 6, 7], [-1, 0, 0])
        guesses = builder.limited([DraftLimits(4, 3, 2)] * len(requests))
        self._oracle.propose(requests, guesses)
        chosen = [i for i in range(len(requests)) if (i + self._steps) % 3]
        roots = builder.roots[chosen]
        own = builder.limited([DraftLimits(3, 3, 2)] * len(chosen), roots)
        super().propose([requests[i] for i in chosen], own)

    def end(self, request: RequestView) -> None:
        self._oracle.end(request)


def play(engine: Engine) -> list[list[int]]:
    """The texts of ragged requests with different settings."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((3, 21, 9, 1, 14))]
    params = [
        SamplingParams(
            max_new_tokens=14, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True, top_p=0.9
        )
        for i in range(len(prompts))
    ]
    return [output.token_ids for output in outputs(engine, prompts, params)]


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [(name, SPLITS[i % len(SPLITS)]) for i, name in enumerate(ARCHITECTURES)],
)
def test_texts_are_those_of_plain_decoding(
    architecture: str, layers: tuple[int, ...], runners: dict[str, ModelRunner]
) -> None:
    """Joins and leaves, preemption, chunked prompts and shared prefixes, with and without rows run in advance."""
    runner = runners[architecture]
    sizes = {"blocks": 24, "max_batch": 3, "prefill_chunk": 5}
    plain = play(make_engine(runner, OracleDrafter([]), **sizes))
    texts = [[*prompt_of(9, 2), *plain[2]], [*prompt_of(3, 0), *plain[0]]]
    for drafter in (Exit(layers, width=2), WithOthers(texts, layers=layers, width=2)):
        engine = make_engine(runner, drafter, **sizes)
        assert play(engine) == plain
        assert not engine.faults


def test_passes_that_are_padded_to_more_rows(
    runners: dict[str, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of padding rows taken for those of tokens, as where linear layers want two rows at least."""
    plain = play(make_engine(runners["gpt2"], OracleDrafter([])))
    monkeypatch.setattr(runners["gpt2"]._linears, "min_rows", 7)
    for layers in SPLITS:
        assert play(make_engine(runners["gpt2"], Exit(layers, width=2))) == plain


@pytest.mark.parametrize("layers", SPLITS)
def test_no_row_goes_through_a_shared_layer_twice(
    runners: dict[str, ModelRunner], layers: tuple[int, ...]
) -> None:
    """The lower layers computed again by the verification, which would make an early exit worth nothing."""
    runner, rows = runners["llama"], Counter[int]()

    def count(layer: int, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        rows[layer] += args[0].shape[1]

    engine = make_engine(runner, WithOthers([], layers=layers, width=2), prefill_chunk=5)
    hooks = [
        layer.register_forward_pre_hook(partial(count, i))
        for i, layer in enumerate(decoder_layers(runner.model))
    ]
    for seed, length in enumerate((3, 12, 7)):
        engine.add(prompt_of(length, seed), SamplingParams(max_new_tokens=9, temperature=0.0))
    reports = run(engine)
    for hook in hooks:
        hook.remove()
    total = sum(report.rows for report in reports)
    assert sum(report.drafted for report in reports) > 0
    shared = 2 if layers == (0, 1) else 1
    assert [rows[layer] for layer in range(shared)] == [total] * shared
    assert [rows[layer] for layer in range(shared, LAYERS) if layer not in layers] == [total] * (
        LAYERS - shared - sum(layer >= shared for layer in layers)
    )
    if layers == (0, 2):  # behind the gap only what is drafted from goes twice
        assert total < rows[2] < 1.7 * total


def without_upper_layers(architecture: str) -> ModelRunner:
    """A float64 model of three layers, of which the upper two change nothing."""
    model = build(architecture, num_hidden_layers=LAYERS).double()
    with torch.no_grad():
        for layer in decoder_layers(model)[1:]:
            for name, module in layer.named_modules():
                if name.rpartition(".")[2] in (
                    "o_proj",
                    "down_proj",
                    "c_proj",
                    "dense",
                    "dense_4h_to_h",
                ):
                    for parameter in module.parameters():
                        parameter.zero_()
    return ModelRunner(model)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", [(0,), (0, 2)])
def test_a_twin_is_always_right(architecture: str, layers: tuple[int, ...]) -> None:
    """Where no layer above the exit changes anything, every draft token is right in every round, those
    after a fully accepted draft included."""
    engine = make_engine(without_upper_layers(architecture), Exit(layers, depth=4), draft=(4, 4, 1))
    for seed, length in enumerate((3, 12, 7)):
        params = SamplingParams(max_new_tokens=21, temperature=0.0, ignore_eos=True)
        engine.add(prompt_of(length, seed), params)
    reports = run(engine)
    assert sum(report.drafted for report in reports) > 30
    for report in reports:
        assert report.accepted == report.drafted


def test_B10_rolled_back_rows_leave_every_layer_right(runners: dict[str, ModelRunner]) -> None:
    """A rollback that reaches only some of the layers, here those that drafts ran in advance."""
    runner = runners["gemma3"]
    engine = make_engine(runner, Exit((0, 2), depth=4, width=2))
    request = engine.add(prompt_of(9), SamplingParams(max_new_tokens=20, temperature=0.9, seed=3))
    rejected = 0
    while engine.has_work:
        report = engine.step()
        rejected += report.drafted - report.accepted
        if request.sequence is None:
            break
        tokens = list(request.tokens[: request.sequence.n_kv])
        memory = KVMemory(24, 4)
        segment, fresh = chain(tokens, memory), runner.new_store(memory.num_slots)
        with reserved(segment, memory):
            runner.run(fresh, [segment])
            theirs = segment.sequence.slots(0, len(tokens))
        ours = request.sequence.slots(0, len(tokens))
        for layer, stores in engine.store.layers.items():
            for got, expected in zip(stores, fresh.layers[layer], strict=True):
                torch.testing.assert_close(got[ours], expected[theirs], rtol=0, atol=TOLERANCE)
    assert rejected > 20


def test_accelerates_hooks_do_not_run_the_whole_model(runners: dict[str, ModelRunner]) -> None:
    """A forward that accelerate has bound to the copied module would run all layers, whatever the view says."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("llama", num_hidden_layers=LAYERS)
    expected = play(make_engine(runners["llama"], OracleDrafter([])))
    for module in (model, model.model, *model.model.layers, model.model.layers[1].mlp):
        hooks.add_hook_to_module(module, hooks.ModelHook())
    engine = make_engine(ModelRunner(model), Exit((0,), width=2))
    assert play(engine) == expected
    calls = Counter[int]()
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, i=i: calls.update([i]))
    engine.add(prompt_of(5), SamplingParams(max_new_tokens=6))
    run(engine)
    assert calls[0] > calls[1] == calls[2] > 0


def test_only_who_requires_draft_layers_may_ask_for_them() -> None:
    """A pass that nobody prepared for."""

    class Asking(Drafter):
        def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
            builder.draft_states(builder.roots)

    with pytest.raises(ContractError, match="requires draft layers"):
        draft(Asking(), Text([1, 2, 3]))


def test_a_failing_draft_pass_costs_the_draft_only(
    runners: dict[str, ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that fails half-way counted as done, so that verification resumes from rows that are not there."""
    plain = play(make_engine(runners["qwen3"], OracleDrafter([])))
    engine = make_engine(runners["qwen3"], Exit((0, 1)))
    assert engine._split is not None
    inner, calls = engine._split.draft.run, iter(range(10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        result = inner(*arguments, **options)
        if next(calls) == 2:  # the first two ran the roots, and read what came of them
            raise ArithmeticError("on purpose")
        return result

    monkeypatch.setattr(engine._split.draft, "run", failing)
    assert play(engine) == plain
    assert engine.faults


# Mutants: each is one plausible mistake, which the checks above must see.


def resumes_behind_the_gap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(split_pass, "_count_shared", lambda layers, count: len(layers))


def rows_in_the_order_they_were_run(patch: pytest.MonkeyPatch) -> None:
    inner = SplitPass._pick
    patch.setattr(SplitPass, "_pick", lambda self, name, rows: inner(self, name, np.sort(rows)))


def kinds_of_layers_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer_views, "_config_of", lambda config, layers: config)


@pytest.mark.parametrize(
    ("mutant", "architecture", "layers"),
    [
        (resumes_behind_the_gap, "llama", (0, 2)),
        (rows_in_the_order_they_were_run, "llama", (0,)),
        (kinds_of_layers_not_moved, "gemma3", (0,)),
    ],
)
def test_the_check_sees(
    mutant: Callable[[pytest.MonkeyPatch], None],
    architecture: str,
    layers: tuple[int, ...],
    runners: dict[str, ModelRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check that passes whatever the split pass does."""
    runner = runners[architecture]
    monkeypatch.setattr(runner, "checked", False)  # else the probe refuses some mutants
    mutant(monkeypatch)
    worst = 0.0
    for seed in range(3):
        drive = ResumedDrive(runner, random.Random(seed))
        drive.draft_layers = layers
        for _ in range(4):
            drive.step()
        worst = max(worst, drive.worst)
    assert worst > 100 * TOLERANCE
