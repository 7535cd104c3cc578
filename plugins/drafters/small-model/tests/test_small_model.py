"""The drafter `small-model`: its KV is right after any outcome, and whatever it does, the text stays."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import specfw_plugin_small_model.drafter as plugin
import torch
from numpy.typing import NDArray
from specfw_plugin_compose import Cascade
from specfw_plugin_small_model import SmallModelDrafter
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from specfw.builtins import NoDrafter
from specfw.components import Component, Options
from specfw.contracts import (
    Drafter,
    Feedback,
    LoadedTarget,
    Outcome,
    RequestView,
    TargetInfo,
    TargetLoader,
    Verifier,
)
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.errors import ConfigError, UnsupportedModelError
from specfw.hookspecs import hookimpl
from specfw.plugins import PluginManager
from specfw.runner import KVMemory, ModelRunner, Rows
from specfw.testing.drafters import ScriptedDrafter
from specfw.types import SamplingParams, SpeculationParams

VOCAB = 64
FAMILIES = ["llama", "gpt2", "gemma3-window"]
SIZES = (3, 9, 20, 1, 14)


def config_of(kind: str, vocab: int, positions: int) -> Any:
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=positions, **special
        )
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": positions,
        **special,
    }
    window = 8 if kind.endswith("window") else None
    if kind.startswith("mistral"):
        return MistralConfig(**common, sliding_window=window)
    if kind.startswith("gemma3"):
        layers = ["sliding_attention" if window else "full_attention", "full_attention"]
        return Gemma3TextConfig(
            **common, sliding_window=8, query_pre_attn_scalar=8, layer_types=layers
        )
    return LlamaConfig(**common)


def tiny(kind: str, seed: int = 0, vocab: int = VOCAB, positions: int = 256) -> Any:
    """A random model of two layers in float32, with a sliding window of 8 if `kind` says so."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(kind, vocab, positions)).eval()


def resembling(model: Any, noise: float = 0.05) -> Any:
    """A copy with noise on its weights, which drafts tokens that are often, not always, accepted."""
    generator = torch.Generator().manual_seed(7)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return twin


def info_of(runner: ModelRunner, tokenizer: Any = None) -> TargetInfo:
    return TargetInfo(
        "big",
        runner.model.config.vocab_size,
        runner.max_length,
        (2,),
        tokenizer,
        runner.model,
        runner.device,
        runner.dtype,
    )


def engine_of(
    runner: ModelRunner,
    drafter: Drafter,
    verifier: Verifier | None = None,
    *,
    blocks: int = 80,
    tokenizer: Any = None,
) -> Engine:
    return Engine(
        runner,
        KVMemory(blocks, 4),
        info_of(runner, tokenizer),
        drafter,
        verifier or CoupledVerifier(),
        [FixedScheduler(max_nodes=12, max_depth=12)],
        KeyedSource(),
        max_batch=3,
        prefill_chunk=5,
    )


def run(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.has_work:
            break
        engine.step()
        engine.memory.check()
        if isinstance(drafter := engine.drafters.default, SmallModelDrafter):
            drafter._memory.check()
    assert not engine.has_work


def play(
    engine: Engine, params: SamplingParams, sizes: Sequence[int] = SIZES
) -> tuple[list[list[int]], Any]:
    """The texts of ragged requests, of which three run at a time, and their counts together."""
    rng = np.random.default_rng(1)
    requests = [
        engine.add(rng.integers(3, 60, size).tolist(), params.model_copy(update={"seed": size}))
        for size in sizes
    ]
    run(engine)
    stats = [request.stats for request in requests]
    total = SimpleNamespace(
        drafted=sum(one.drafted for one in stats),
        accepted=sum(one.accepted for one in stats),
        emitted=sum(one.emitted for one in stats),
        rounds=sum(one.drafted_rounds for one in stats),
    )
    return [request.tokens for request in requests], total


def small(model: Any, words: Any = None, **options: Any) -> SmallModelDrafter:
    return SmallModelDrafter(LoadedTarget("small", model, words), **options)


class Checked(SmallModelDrafter):
    """Compares every row of logits with the draft model's own forward over the node's whole text."""

    rows = 0

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        checking = _CheckingBuilder(requests, builder)
        super().propose(requests, checking)  # type: ignore[arg-type]
        while checking.rows:
            expected = self._runner.stock_logits(max(checking.rows, key=len))
            for text in [max(checking.rows, key=len)[:size] for size in range(len(expected) + 1)]:
                if (
                    text in checking.rows
                ):  # a forward is causal, so it shows the text's beginnings too
                    apart = (checking.rows.pop(text) - expected[len(text) - 1]).abs().max()
                    assert apart < 1e-3 * expected.std()
                    self.rows += 1


class _CheckingBuilder:
    """Notes the logits that a drafter hands over, by the text that they follow."""

    def __init__(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self._requests, self._builder = requests, builder
        self.rows: dict[tuple[int, ...], Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def sample(
        self, parents: NDArray[np.int64], logits: Tensor, width: int, vocab: Tensor | None
    ) -> Any:
        assert vocab is None
        for parent, row in zip(parents, logits, strict=True):
            self.rows[self._text(int(parent))] = row
        return self._builder.sample(parents, logits, width)

    def _text(self, node: int) -> tuple[int, ...]:
        path: list[int] = []
        request = self._requests[int(self._builder.request_of(np.array([node]))[0])]
        while self._builder.depth_of(np.array([node]))[0]:
            path.insert(0, int(self._builder.tokens_of(np.array([node]))[0]))
            node = int(self._builder.parent_of(np.array([node]))[0])
        return (*request.tokens, *path)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", FAMILIES)
def test_B10_the_text_is_that_of_plain_decoding(family: str, temperature: float) -> None:
    """Fault: a chain or a tree changes the text; or the draft model's KV is wrong after a rejection,
    a compaction, a preemption, or where requests join and leave."""
    runner = ModelRunner(tiny(family))
    params = SamplingParams(
        max_new_tokens=20, temperature=temperature, repetition_penalty=1.1, ignore_eos=True
    )
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    for model, width, blocks in (
        (resembling(runner.model), 1 if temperature else 3, 80),
        (resembling(runner.model), 2, 16),
    ):
        drafter = Checked(LoadedTarget("small", model), max_nodes=6, width=width)
        engine = engine_of(runner, drafter, blocks=blocks)
        preempted: list[int] = []
        engine.observers.append(lambda report, seen=preempted: seen.append(report.preempted))
        drafted, stats = play(engine, params)
        assert drafted == plain
        assert not engine.faults
        assert drafter.rows > 50
        assert stats.drafted > stats.accepted > 0
        assert (sum(preempted) > 0) == (blocks == 16)
        assert drafter._memory.used == 0
        assert drafter._sequences == {}


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_twin_is_always_accepted(
    temperature: float, verifier: type[Verifier], width: int
) -> None:
    """Fault: the draft model sees other tokens, positions or settings than the target, so that even
    the target's own weights are rejected."""
    model = tiny("llama")
    drafter = small(model, max_nodes=4 if width == 1 else 6, max_depth=4, width=width)
    params = SamplingParams(
        max_new_tokens=41,
        temperature=temperature,
        top_k=30,
        frequency_penalty=0.3,
        min_new_tokens=30,
        ignore_eos=True,
    )
    _, stats = play(engine_of(ModelRunner(model), drafter, verifier()), params)
    if width == 1:
        assert stats.accepted >= 0.98 * stats.drafted
        assert stats.emitted / stats.rounds > 4.7  # of at most 5
    else:  # a draft's last level is below the first node only, so a sibling may end it
        assert stats.emitted / stats.rounds > 2.9


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize(
    ("target", "draft"), [("-window", ""), ("", "-window"), ("-window", "-window")]
)
def test_B07_windows_of_eight(family: str, target: str, draft: str) -> None:
    """Fault: with a sliding window on either side, text or drafts go wrong once the sequence reaches
    the window (huggingface/transformers#48280). Drafts are accepted now and then, as the draft
    model has the target's weights with some noise."""
    runner = ModelRunner(tiny(family + target))
    model = resembling(tiny(family + draft), noise=0.03)
    drafter = Checked(LoadedTarget("small", model), max_nodes=5)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    texts, stats = play(engine_of(runner, drafter), params, sizes=(3, 7, 8, 9, 20))
    assert 0 < stats.accepted < stats.drafted
    for text, size in zip(texts, (3, 7, 8, 9, 20), strict=True):
        assert len(text) == size + 60
        # Causal, so one forward over the text shows every greedy choice made on the way.
        choices = runner.stock_logits(text).argmax(-1).tolist()
        assert text[size:] == choices[size - 1 : -1]


def tokenizer_of(tokens: Sequence[str], eos: str = "</s>") -> Any:
    vocabulary = {token: id for id, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<s>",
        eos_token=eos,
    )


WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))]


def test_B24_equal_tokenizers_start_whatever_the_padding(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: widths of logits are taken for the vocabulary; or an id of the target's padding, which
    the draft model cannot embed, ends drafting for everybody."""
    for wide, narrow in ((72, VOCAB), (VOCAB, 72)):
        runner = ModelRunner(tiny("llama", vocab=wide))
        params = SamplingParams(max_new_tokens=25, temperature=1.0, ignore_eos=True)
        plain, _ = play(engine_of(runner, NoDrafter()), params)
        drafter = small(tiny("llama", vocab=narrow), tokenizer_of(WORDS))
        engine = engine_of(runner, drafter, tokenizer=tokenizer_of(WORDS))
        drafted, stats = play(engine, params)
        assert drafted == plain
        assert not engine.faults
        assert stats.drafted > 0
        if wide > VOCAB:
            assert any(token >= VOCAB for text in plain for token in text)
    assert not caplog.records


def test_B24_other_tokenizers_are_refused() -> None:
    """Fault: a draft model with another vocabulary starts, and every id means another string
    (sgl-project/sglang#24051)."""
    swapped = [*WORDS[:10], WORDS[11], WORDS[10], *WORDS[12:]]
    runner = ModelRunner(tiny("llama"))
    for tokens, id, ours in (
        (swapped, 10, "'w11'"),
        ([*WORDS[:3], *(f"x{i}" for i in range(3, VOCAB))], 3, "'x3'"),
        (WORDS[:-1], 63, "no token"),
    ):
        with pytest.raises(ConfigError) as caught:
            engine_of(
                runner,
                small(runner.model, tokenizer_of(tokens), tokenizer="same"),
                tokenizer=tokenizer_of(WORDS),
            )
        for part in ("'small'", "'big'", f"token id {id} ", f"'w{id}'", ours):
            assert part in str(caught.value)


def test_B24_another_end_of_text_is_warned_of_and_never_stops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fault: the draft model's end-of-sequence id ends a text, or nobody hears of the difference."""
    runner = ModelRunner(tiny("llama"))
    ours, theirs = tokenizer_of(WORDS, eos="w9"), tokenizer_of(WORDS)
    engine = engine_of(runner, small(resembling(runner.model), ours), tokenizer=theirs)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "eos_token_id is 2 for the target and 9 for the draft model" in record.getMessage()
    params = SamplingParams(max_new_tokens=60, temperature=1.2)
    drafted, _ = play(engine, params)
    plain, _ = play(engine_of(runner, NoDrafter(), tokenizer=theirs), params)
    assert drafted == plain
    assert any(9 in text[size:-1] for text, size in zip(plain, SIZES, strict=True))


def test_without_tokenizers_the_sizes_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"must have the 64 token ids .* but it has 72"):
        engine_of(ModelRunner(tiny("llama")), small(tiny("llama", vocab=72)))


def test_B08_a_recurrent_draft_model_is_refused() -> None:
    """Its state would hold the rejected tokens, and acceptance decay without a word."""
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="cannot be rolled back"):
        small(model).attach(info_of(ModelRunner(tiny("llama"))))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_drafting_ends_where_the_draft_models_positions_do(family: str) -> None:
    """Fault: a text longer than the draft model's context crashes, or is drafted from positions that
    it never learnt."""
    runner = ModelRunner(tiny("llama"))
    drafter = Checked(LoadedTarget("small", tiny(family, positions=24)), max_nodes=6, width=2)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    engine = engine_of(runner, drafter)
    longest = 0

    def note(report: Any) -> None:
        nonlocal longest
        if report.drafted:
            longest = max(longest, *(s.n_kv for s in drafter._sequences.values()))

    engine.observers.append(note)
    drafted, stats = play(engine, params, sizes=SIZES)
    assert drafted == plain
    assert not engine.faults
    assert 20 < longest <= 24
    assert stats.drafted > 0
    play(engine, params, sizes=(30,))
    assert not engine.faults


@pytest.mark.parametrize("kv_tokens", [1, 48, 96])
def test_a_small_kv_memory_costs_drafts_only(
    kv_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a full draft KV memory raises, or requests push each other out for ever."""
    runner = ModelRunner(tiny("llama"))
    params = SamplingParams(max_new_tokens=30, temperature=0.9, ignore_eos=True)
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    drafter = small(resembling(runner.model), kv_tokens=kv_tokens, width=2, max_nodes=6)
    engine = engine_of(runner, drafter)
    drafted, stats = play(engine, params)
    assert drafted == plain
    assert not engine.faults
    assert (stats.drafted > 100) == (kv_tokens > 1)
    assert [record.getMessage().count("raise kv_tokens") for record in caplog.records] == [1]


def test_those_that_fit_keep_their_place() -> None:
    """Fault: with memory for two of three requests each pushes the next one out, and all tokens are
    read again in every step."""
    runner = ModelRunner(tiny("llama"))
    drafter = small(runner.model, kv_tokens=96)
    engine = engine_of(runner, drafter)
    read = 0
    original = drafter._runner.run

    def count(store: Any, segments: Any, *rest: Any) -> Rows:
        nonlocal read
        read += sum(len(segment.tokens) for segment in segments)
        return original(store, segments, *rest)

    drafter._runner.run = count  # type: ignore[method-assign]
    prompts = np.random.default_rng(1).integers(3, 60, (3, 24)).tolist()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    first, second, third = (engine.add(prompt, params) for prompt in prompts)
    run(engine)
    for request in (first, second):
        assert request.stats.drafted_rounds == request.stats.target_passes
    assert third.stats.drafted_rounds < third.stats.target_passes
    # A text has 44 tokens in the end, and the last of a draft is never read; the third, pushed out
    # while it grew, may be read once more.
    assert read <= 3 * 44 + 44


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a long prompt makes one pass of unbounded size, or its chunks lose their order."""
    monkeypatch.setattr(plugin, "_CHUNK", 6)
    runner = ModelRunner(tiny("llama"))
    drafter = Checked(LoadedTarget("small", runner.model))
    _, stats = play(engine_of(runner, drafter), SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert stats.accepted == stats.drafted > 0


class Elsewhere(Tensor):
    """A tensor that claims to be on another device: all it allows is to be moved."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.to:
            raise AssertionError(f"{func} on a tensor that is on the draft model's device")
        return args[0].as_subclass(Tensor)


def test_B37_tensors_are_moved_between_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: drafted ids stay on the drafter's device, or the target's meet the draft model there
    (huggingface/transformers#35099)."""
    moved: list[int] = []

    class RemoteRunner(ModelRunner):
        def run(
            self, store: Any, segments: Any, device_tokens: Any = None, hidden: Any = ()
        ) -> Rows:
            self.device = torch.device("cpu")
            if device_tokens is not None:
                index, tokens = device_tokens
                assert tokens.device.type == "meta"
                moved.append(len(tokens))
                device_tokens = index, torch.full(tokens.shape, 3)
            rows = super().run(store, segments, device_tokens, hidden)
            self.device = torch.device("meta")  # all that callers see
            rows.logits = rows.logits.as_subclass(Elsewhere)
            return rows

    runner = ModelRunner(tiny("llama"))
    params = SamplingParams(
        max_new_tokens=50, temperature=0.9, repetition_penalty=1.2, min_new_tokens=5
    )
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    drafter = small(tiny("llama"), width=2)
    engine = engine_of(runner, drafter)
    drafter._runner.__class__ = RemoteRunner
    drafter._runner.device = torch.device("meta")
    drafted, stats = play(engine, params)
    assert drafted == plain
    assert not engine.faults
    assert stats.drafted > 0
    assert moved
    assert max(moved) <= 3 * 4  # ids of the new nodes only, not of the text


@pytest.mark.parametrize(("temperature", "value"), [(0.0, float("nan")), (1.0, float("inf"))])
def test_B38_logits_that_overflow_cost_drafts_only(
    temperature: float, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a draft model whose numbers overflow drafts on for nothing, and nobody notices
    (vllm-project/vllm#55250)."""
    runner = ModelRunner(tiny("llama"))
    params = SamplingParams(max_new_tokens=100, temperature=temperature, ignore_eos=True)
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    model = resembling(runner.model)
    engine = engine_of(runner, small(model, width=2))
    passes = 0

    def spoil(module: Any, inputs: Any, output: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return output if passes <= 10 else output * value

    model.lm_head.register_forward_hook(spoil)
    drafted, stats = play(engine, params)
    assert drafted == plain
    assert dict(engine.faults) == {"handed over NaN or infinite logits": len(SIZES)}
    assert len(caplog.records) == 1
    assert 0 < stats.drafted < 200


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_draft_model_may_have_another_dtype(dtype: str) -> None:
    """Fault: two dtypes meet in a product in the middle of a run."""
    runner = ModelRunner(tiny("llama"))
    built = build({"name": "small-model", "model": {"name": "tiny"}, "dtype": dtype})
    assert built._loaded.model.dtype == getattr(torch, dtype)
    engine = engine_of(runner, built)
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_new_tokens=30, temperature=temperature, ignore_eos=True)
        plain, _ = play(engine_of(runner, NoDrafter()), params)
        drafted, stats = play(engine, params)
        assert drafted == plain
        assert not engine.faults
        assert stats.accepted > 0.8 * stats.drafted  # the same weights, rounded


class TinyOptions(Options):
    family: str = "llama"


class TinyLoader(TargetLoader):
    def __init__(self, options: TinyOptions) -> None:
        self.options = options

    def load(self) -> LoadedTarget:
        return LoadedTarget("tiny", tiny(self.options.family))


class TinyPlugin:
    specfw_api = 1

    @hookimpl
    def specfw_targets(self) -> dict[str, Component[TargetLoader]]:
        return {"tiny": Component(TinyLoader, TinyOptions)}


def build(reference: Any) -> SmallModelDrafter:
    built = PluginManager([TinyPlugin()]).bind("drafter", reference).build()
    assert isinstance(built, SmallModelDrafter)
    return built


def test_the_draft_model_is_named_like_any_target() -> None:
    for model in ("tiny", "tiny(family='gpt2')", {"name": "tiny", "family": "gpt2"}):
        built = build({"name": "small-model", "model": model, "width": 2, "max_depth": 3})
        assert type(built._loaded.model).__name__.startswith("Llama" if model == "tiny" else "GPT2")


class Counted(SmallModelDrafter):
    """Notes draft sizes and kept nodes of every step."""

    def observe(self, feedback: Feedback) -> None:
        self.drafted.extend(feedback.drafted)
        self.kept.extend(map(len, feedback.kept))
        super().observe(feedback)

    drafted: list[int]
    kept: list[int]


@pytest.mark.parametrize(("nodes", "depth", "width"), [(3, 9, 9), (9, 2, 9), (9, 9, 1), (0, 9, 9)])
def test_a_requests_own_limits_hold(nodes: int, depth: int, width: int) -> None:
    """Fault: limits are counted in another unit than the target's tokens, or a request's are ignored
    (huggingface/transformers#34803)."""
    runner = ModelRunner(tiny("llama"))
    drafter = Counted(LoadedTarget("small", runner.model), max_nodes=6, max_depth=3, width=2)
    drafter.drafted, drafter.kept = [], []
    wish = SpeculationParams(max_nodes=nodes, max_depth=depth, max_width=width)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, speculation=wish)
    _, stats = play(engine_of(runner, drafter), params)
    assert stats.drafted == sum(drafter.drafted)
    assert stats.accepted == sum(drafter.kept)
    depth = min(depth, 3)
    most = min(6, nodes, depth if width == 1 else 2 + 4 + 8 if depth == 3 else 6)
    assert max(drafter.drafted) == most
    assert max(drafter.kept) <= min(depth, most)


class AfterGuesses(Checked):
    """Drafts after another drafter, some of whose nodes are accepted."""

    plain: dict[int, list[int]]

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root in zip(requests, builder.roots, strict=True):
            text, length = self.plain[request.id], len(request.tokens)
            if length % 2:
                builder.guess(int(root), text[length : length + 2])
        super().propose(requests, builder)


def test_nodes_of_other_drafters_are_read_once_they_are_committed() -> None:
    """Fault: a node that another drafter put into the tree is taken for one with KV here."""
    runner = ModelRunner(tiny("llama"))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    drafter = AfterGuesses(LoadedTarget("small", resembling(runner.model)), width=2, max_nodes=6)
    drafter.plain = dict(enumerate(plain))
    engine = engine_of(runner, drafter)
    drafted, stats = play(engine, params)
    assert drafted == plain
    assert not engine.faults
    assert drafter.rows > 100
    assert stats.accepted > 60


class Scoring(SmallModelDrafter):
    """Compares the scores of drafts with the draft model's own forward over each node's whole text."""

    rows = 0
    left_out = 0

    def score(self, requests: Sequence[RequestView], draft: Draft) -> Any:
        logits, scored = super().score(requests, draft)
        first = 0
        for b, request in enumerate(requests):
            for node in range(int(draft.sizes[b]) if scored[b] else 0):
                path = [int(draft.token[b, i]) for i in draft.path(b, node)]
                expected = self._runner.stock_logits([*request.tokens, *path])[-1]
                apart = (logits[first + node] - expected).abs().max()
                assert apart < 1e-3 * expected.std()
                self.rows += 1
            first += int(draft.sizes[b])
            self.left_out += not scored[b]
        return logits, scored


@pytest.mark.parametrize(("kv_tokens", "positions"), [(16384, 256), (48, 256), (16384, 24)])
def test_scores_what_others_drafted(kv_tokens: int, positions: int) -> None:
    """Fault: in a cascade the model's KV is of drafts that were refused, or a request that does not fit
    into its memory or its context gets another one's rows."""
    runner = ModelRunner(tiny("llama"))
    params = SamplingParams(max_new_tokens=12, temperature=0.9, ignore_eos=True)
    plain, _ = play(engine_of(runner, NoDrafter()), params)
    draft_model = LoadedTarget("small", tiny("gpt2", positions=positions))
    model = Scoring(draft_model, kv_tokens=kv_tokens)
    drafter = Cascade(ScriptedDrafter(3), model, max_nodes=3)
    drafted, stats = play(engine_of(runner, drafter), params)
    assert drafted == plain
    assert stats.drafted > 10
    assert model.rows > 50
    assert (model.left_out > 0) == (kv_tokens < 100 or positions < 100)
    assert model._memory.used == 0


class Stumbling(CoupledVerifier):
    """Raises in every fourth step, when drafts are made and nothing is settled."""

    steps = 0

    def verify(self, *arguments: Any) -> Outcome:
        self.steps += 1
        if self.steps % 4 == 0:
            raise RuntimeError("stumbled")
        return super().verify(*arguments)


def test_a_step_that_fails_leaves_no_trace() -> None:
    """Fault: after a step that raised, slots stay reserved, or the last token has no logits."""
    runner = ModelRunner(tiny("llama"))
    params = SamplingParams(max_new_tokens=30, temperature=0.9, seed=1, ignore_eos=True)
    drafter = Checked(LoadedTarget("small", resembling(runner.model)), width=2, max_nodes=6)
    engine = engine_of(runner, drafter, Stumbling())
    request = engine.add([5, 6, 7], params)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            failures += 1
    plain = engine_of(runner, NoDrafter())
    alone = plain.add([5, 6, 7], params)
    run(plain)
    assert request.tokens == alone.tokens
    assert failures > 2
    assert not engine.faults
    assert drafter._memory.used == 0


def test_a_pass_that_fails_is_forgotten() -> None:
    """Fault: nodes of a pass that raised count as read, and their stale KV is kept."""
    runner = ModelRunner(tiny("llama"))
    drafter = Checked(LoadedTarget("small", runner.model))
    engine = engine_of(runner, drafter)
    request = engine.add([5, 6, 7], SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    original, calls = drafter._runner.run, 0

    def fail_later(*arguments: Any) -> Rows:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return original(*arguments)

    drafter._runner.run = fail_later  # type: ignore[method-assign]
    engine.step()
    assert not request.drafting  # the engine's answer; here it drafts on, to see what was kept
    request.drafting = True
    run(engine)
    assert sum(engine.faults.values()) == 1
    assert len(request.tokens) == 43
