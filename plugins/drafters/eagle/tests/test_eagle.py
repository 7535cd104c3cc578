"""The drafter `eagle`: every layout loads as published, every row is the head's, and the text stays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from specfw_plugin_eagle import EagleOptions
from specfw_plugin_eagle.checkpoints import Checkpoint, Choices, read_checkpoint
from specfw_plugin_eagle.drafter import EagleDrafter
from specfw_plugin_eagle.head import Head
from specfw_plugin_eagle.state import HeadState
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, RequestView, TargetInfo, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.runner import KVMemory, ModelRunner
from specfw.testing.conformance import DrafterConformance
from specfw.types import SamplingParams

VOCAB, WIDTH = 64, 32
SIZES = (3, 9, 20, 1, 14)
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.9, ignore_eos=True)

Family = Literal["eagle", "eagle3"]
Tensors = dict[str, Tensor]


@cache
def runner() -> ModelRunner:
    """A tiny random Llama of four layers in float32; never changed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    return ModelRunner(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def info_of(runner: ModelRunner) -> TargetInfo:
    size = runner.model.config.vocab_size
    return TargetInfo(
        "big", size, runner.max_length, (2,), None, runner.model, runner.device, runner.dtype
    )


def tensors_of(
    family: Family,
    *,
    width: int = WIDTH,
    states: int = WIDTH,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    draft_vocab: int | None = None,
    layers: int = 1,
    seed: int = 1,
) -> Tensors:
    """A random head by the names that EAGLE checkpoints have; norms too are random."""
    generator = torch.Generator().manual_seed(seed)
    three = family == "eagle3"
    first = "midlayer" if three else "layers.0"
    tensors: Tensors = {}

    def add(name: str, *shape: int) -> None:
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1 + 0.2 * noise if len(shape) == 1 else 0.2 * noise

    add("fc", width, 3 * states if three else 2 * width)
    for index in range(layers):
        name = f"layers.{index}" if index else first
        inputs = 2 * width if three and not index else width
        for part, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            add(f"{name}.self_attn.{part}_proj", rows * head_dim, inputs)
        add(f"{name}.self_attn.o_proj", width, heads * head_dim)
        add(f"{name}.mlp.gate_proj", 40, width)
        add(f"{name}.mlp.up_proj", 40, width)
        add(f"{name}.mlp.down_proj", width, 40)
        add(f"{name}.post_attention_layernorm", width)
        if three or index:
            add(f"{name}.input_layernorm", width)
        if three and not index:
            add(f"{name}.hidden_norm", width)
    if three:
        add("norm", width)
        rows = draft_vocab or VOCAB
        add("lm_head", rows, width)
        if draft_vocab:
            ids = torch.arange(draft_vocab) * (VOCAB // draft_vocab) + 1
            tensors["d2t"] = ids - torch.arange(draft_vocab)
            tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def save(folder: Path, config: Mapping[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def eagle1(folder: Path, **kind: Any) -> Path:
    """As EAGLE-1 and -2 heads are published: pickled, with an embedding and a bias of `fc`."""
    tensors = tensors_of("eagle", **kind)
    tensors["embed_tokens.weight"] = 0.3 * torch.randn(VOCAB, WIDTH)
    tensors["fc.bias"] = 0.3 * torch.randn(WIDTH)
    return save(folder, LLAMA, tensors, pickled=True)


def eagle3(folder: Path, extra: Mapping[str, Any] | None = None, **kind: Any) -> Path:
    """As EAGLE-3 heads are published: a reduced vocabulary, no embedding, the target's number of layers."""
    kind = {"draft_vocab": 16, **kind}
    config = {**LLAMA, "num_hidden_layers": 40, "draft_vocab_size": kind["draft_vocab"] or VOCAB}
    return save(folder, {**config, **(extra or {})}, tensors_of("eagle3", **kind))


def speculators(folder: Path, extra: Mapping[str, Any] | None = None, **kind: Any) -> Path:
    """As the speculators library saves EAGLE-3 heads."""
    kind = {"draft_vocab": 16, **kind}
    named = {
        name.replace("midlayer", "layers.0"): t for name, t in tensors_of("eagle3", **kind).items()
    }
    named["embed_tokens.weight"] = 0.3 * torch.randn(VOCAB, WIDTH)
    named["verifier_norm.weight"] = torch.ones(WIDTH)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 16,
        "norm_before_residual": True,
        "target_hidden_size": WIDTH,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "transformer_layer_config": {**LLAMA, "rope_theta": 500000.0},
        "speculators_config": {"algorithm": "eagle3"},
    }
    return save(folder, {**config, **(extra or {})}, named)


def speculators1(folder: Path, extra: Mapping[str, Tensor] | None = None) -> Path:
    """As the speculators library saves EAGLE-1 heads: `fusion_fc`, and the layer as `transformer`."""
    named = {
        name.replace("layers.0.", "transformer.").replace("fc.", "fusion_fc."): tensor
        for name, tensor in tensors_of("eagle").items()
    }
    named["embed_tokens.weight"] = 0.3 * torch.randn(VOCAB, WIDTH)
    named["fusion_fc.bias"] = 0.3 * torch.randn(WIDTH)
    config = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": LLAMA,
        "speculators_config": {"algorithm": "eagle"},
    }
    return save(folder, config, {**named, **(extra or {})})


class Reference:
    """A head without cache, batch or tree: it runs one text from its first feature, as the papers have it."""

    def __init__(self, checkpoint: Checkpoint, runner: ModelRunner) -> None:
        self.c, self.t = checkpoint.config, checkpoint.tensors
        self._model = runner.model
        layers = self.c.feature_layers or ((4,) if self.c.family == "eagle" else (2, 2, 1))
        self._layers = layers

    @torch.inference_mode()
    def logits(self, text: Sequence[int], path: Sequence[int], first: int = 0) -> Tensor:
        """Draft logits after committed `text` and drafted `path`, with features from position `first` on."""
        states = self._model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        features = torch.cat(
            [states[layer][0, first : len(text) - 1] for layer in self._layers], -1
        )
        if self.c.family == "eagle3":
            features = features @ self.t["fc.weight"].T + self.t.get("fc.bias", 0)
        tokens = list(text[first + 1 :])
        output = self._outputs(tokens, features, first)[-1:]
        for token in path:
            tokens.append(token)
            features = torch.cat([features, output])
            output = self._outputs(tokens, features, first)[-1:]
        if self.c.family == "eagle":
            return output[0] @ self._model.lm_head.weight.T
        if not self.c.norm_output:
            output = self._norm(output, "norm.weight")
        return output[0] @ self.t["lm_head.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        if name not in self.t:
            return x
        return self.t[name] * x / (x.pow(2).mean(-1, keepdim=True) + self.c.eps).sqrt()

    def _outputs(self, tokens: Sequence[int], features: Tensor, first: int) -> Tensor:
        table = self.t.get("embed_tokens.weight", self._model.get_input_embeddings().weight)
        embedded = table[torch.tensor(tokens)]
        x = features
        if self.c.family == "eagle":
            both = torch.cat([embedded, features], -1)
            x = both @ self.t["fc.weight"].T + self.t.get("fc.bias", 0)
        for index in range(self.c.layers):
            x = self._layer(f"layers.{index}.", embedded, x, first)
        return self._norm(x, "norm.weight") if self.c.norm_output else x

    def _layer(self, name: str, embedded: Tensor, x: Tensor, first: int) -> Tensor:
        inputs = self._norm(x, f"{name}input_layernorm.weight")
        if f"{name}hidden_norm.weight" in self.t:
            normed = self._norm(x, f"{name}hidden_norm.weight")
            inputs = torch.cat([self._norm(embedded, f"{name}input_layernorm.weight"), normed], -1)
            x = normed if self.c.norm_before_residual else x
        query, key, value = (
            (inputs @ self.t[f"{name}self_attn.{part}_proj.weight"].T).view(
                len(x), -1, self.c.head_dim
            )
            for part in "qkv"
        )
        query, key = self._turned(query, first), self._turned(key, first)
        rows = []
        for i in range(len(x)):
            heads = []
            for head in range(self.c.heads):
                shared = head // (self.c.heads // self.c.kv_heads)
                scores = key[: i + 1, shared] @ query[i, head] / self.c.head_dim**0.5
                heads.append(scores.softmax(0) @ value[: i + 1, shared])
            rows.append(torch.cat(heads))
        x = x + torch.stack(rows) @ self.t[f"{name}self_attn.o_proj.weight"].T
        normed = self._norm(x, f"{name}post_attention_layernorm.weight")
        gate, up, down = (
            self.t[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up", "down")
        )
        return x + (torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down

    def _turned(self, x: Tensor, first: int) -> Tensor:
        """Pairs (i, i + D / 2) as complex numbers, turned by their positions' angles."""
        half = self.c.head_dim // 2
        speeds = self.c.rope["rope_theta"] ** (-torch.arange(half) / half)
        angles = (first + torch.arange(len(x)))[:, None] * speeds
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.ones_like(angles), angles
        ).unsqueeze(1)
        return torch.cat([pairs.real, pairs.imag], -1)


class Checked(EagleDrafter):
    """Compares rows of logits with the reference, and notes where its features began."""

    def __init__(self, checkpoint: Checkpoint, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self.reference = Reference(checkpoint, runner())
        self.rows = 0
        self.starts: set[int] = set()

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        checking = _CheckingBuilder(self, requests, builder)
        super().propose(requests, checking)  # type: ignore[arg-type]
        for state in self._states.values():
            assert state.read + sum(map(len, state.unread)) <= len(state.request.tokens) - 1


class _CheckingBuilder:
    """Checks every third row of logits that a drafter hands over."""

    def __init__(
        self, drafter: Checked, requests: Sequence[RequestView], builder: DraftBuilder
    ) -> None:
        self._drafter, self._requests, self._builder = drafter, requests, builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def sample(
        self, parents: NDArray[np.int64], logits: Tensor, width: int, vocab: Tensor | None
    ) -> Any:
        for parent, row in zip(parents, logits, strict=True):
            self._drafter.rows += 1
            if self._drafter.rows % 3 == 0:
                self._check(int(parent), row)
        return self._builder.sample(parents, logits, width, vocab)

    def _check(self, node: int, row: Tensor) -> None:
        request = self._requests[int(self._builder.request_of(np.array([node]))[0])]
        path: list[int] = []
        while self._builder.depth_of(np.array([node]))[0]:
            path.insert(0, int(self._builder.tokens_of(np.array([node]))[0]))
            node = int(self._builder.parent_of(np.array([node]))[0])
        start = self._drafter._states[request.id].start
        self._drafter.starts.add(start)
        expected = self._drafter.reference.logits(request.tokens, path, start)
        assert (row - expected).abs().max() < 1e-3 * expected.std()


def engine_of(
    drafter: Drafter,
    verifier: type[Verifier] = CoupledVerifier,
    *,
    blocks: int = 80,
    max_batch: int = 3,
) -> Engine:
    return Engine(
        runner(),
        KVMemory(blocks, 4),
        info_of(runner()),
        drafter,
        verifier(),
        [FixedScheduler(max_nodes=12, max_depth=12, max_width=4)],
        KeyedSource(),
        max_batch=max_batch,
        prefill_chunk=5,
    )


def run(engine: Engine) -> None:
    for _ in range(3000):
        if not engine.has_work:
            break
        engine.step()
        engine.memory.check()
    assert not engine.has_work
    assert not engine.faults, dict(engine.faults)


def play(engine: Engine, params: SamplingParams) -> tuple[list[list[int]], int, int]:
    """The texts of ragged requests, of which three run at a time; tokens drafted and accepted."""
    rng = np.random.default_rng(1)
    requests = [
        engine.add(rng.integers(3, 60, size).tolist(), params.model_copy(update={"seed": size}))
        for size in SIZES
    ]
    run(engine)
    stats = [request.stats for request in requests]
    return (
        [request.tokens for request in requests],
        sum(one.drafted for one in stats),
        sum(one.accepted for one in stats),
    )


@cache
def _plain(temperature: float) -> list[list[int]]:
    params = GREEDY if temperature == 0 else SAMPLED
    return play(engine_of(NoDrafter()), params)[0]


def plain(params: SamplingParams) -> list[list[int]]:
    """What plain decoding makes of the same requests."""
    return _plain(params.temperature)


LAYOUTS = {
    "eagle": eagle1,
    "eagle of two layers": lambda folder: eagle1(folder, layers=2),
    "eagle3": lambda folder: eagle3(folder),
    "eagle3 of two layers": lambda folder: eagle3(folder, layers=2),
    "wide heads": lambda folder: eagle3(folder, head_dim=12),
    "full vocabulary": lambda folder: eagle3(folder, draft_vocab=None),
    "speculators": speculators,
    "speculators of EAGLE-1": speculators1,
    "normed output": lambda folder: speculators(folder, {"norm_output": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_B10_every_row_is_the_heads(layout: str, tmp_path: Path) -> None:
    """Fault: features and tokens are off by one, draft rows outlive a rollback, or a batch's padding
    is looked at (a wrong position, mask, norm or residual costs acceptance only, so no text shows it)."""
    checkpoint = read_checkpoint(
        LAYOUTS[layout](tmp_path),
        Choices(
            layers=None
            if layout.startswith("speculators")
            or layout in ("eagle", "eagle of two layers", "normed output")
            else (2, 2, 1)
        ),
    )
    for params, width in ((GREEDY, 2), (SAMPLED, 1)):
        drafter = Checked(checkpoint, max_nodes=9 if width > 1 else 4, max_depth=4, width=width)
        texts, drafted, _ = play(engine_of(drafter), params)
        assert texts == plain(params)
        assert drafted > 100
        assert drafter.rows > 100
        assert drafter.starts == {0}
        assert drafter._states == {}


def test_preempted_requests_begin_again(tmp_path: Path) -> None:
    """Fault: after a preemption old rows are taken for the new request's."""
    drafter = Checked(read_checkpoint(speculators(tmp_path)), max_nodes=4, width=2)
    engine = engine_of(drafter, blocks=14)
    preempted: list[int] = []
    engine.observers.append(lambda report: preempted.append(report.preempted))
    texts, drafted, _ = play(engine, SAMPLED)
    assert sum(preempted) > 0
    assert texts == plain(SAMPLED)
    assert drafted > 50
    assert drafter._states == {}


def test_cached_positions_have_no_features(tmp_path: Path) -> None:
    """Fault: after a prefix-cache hit features are paired with other tokens, or the request never drafts
    again (vllm-project/vllm#47926)."""
    drafter = Checked(read_checkpoint(speculators(tmp_path)), max_nodes=4)
    engine = engine_of(drafter)
    prompt = np.random.default_rng(3).integers(3, 60, 18).tolist()
    first = engine.add(prompt, GREEDY)
    run(engine)
    assert drafter.starts == {0}
    again = engine.add(prompt, GREEDY)
    run(engine)
    assert again.tokens == first.tokens
    assert max(drafter.starts) == 16  # whole blocks of 4 before the last prompt token
    assert again.stats.drafted_rounds == first.stats.drafted_rounds > 10


def test_every_chunk_of_a_long_prompt_is_read(tmp_path: Path) -> None:
    """Fault: only the last chunk of a prompt has features, so that the head forgets long prompts."""
    drafter = Checked(read_checkpoint(speculators(tmp_path)), max_nodes=2)
    engine = engine_of(drafter)
    engine.add(list(range(3, 40)), GREEDY)  # 37 tokens in chunks of 5
    run(engine)
    assert drafter.starts == {0}
    assert drafter.rows > 10


def test_long_backlogs_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: chunks of the head's own reading lose their order, or look at rows to come."""
    monkeypatch.setattr("specfw_plugin_eagle.state._CHUNK", 4)
    drafter = Checked(read_checkpoint(speculators(tmp_path)), max_nodes=2)
    assert play(engine_of(drafter), GREEDY)[0] == plain(GREEDY)
    assert drafter.rows > 100


@pytest.mark.parametrize("mode", ["sampled", "point"])
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_a_head_never_changes_the_text(layout: str, mode: Any, tmp_path: Path) -> None:
    """Fault: a tree of another vocabulary changes the text; rejection at temperature 0 must agree too."""
    checkpoint = read_checkpoint(LAYOUTS[layout](tmp_path))
    for params, verifier in ((GREEDY, RejectionVerifier), (SAMPLED, CoupledVerifier)):
        drafter = EagleDrafter(checkpoint, max_nodes=8, width=3, mode=mode)
        texts, drafted, accepted = play(engine_of(drafter, verifier), params)
        assert texts == plain(params)
        assert drafted > accepted


class Confident(EagleDrafter):
    """Compares each guessed tree with the one that a plain search over the reference finds."""

    trees = 0

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        super().propose(requests, builder)
        draft = builder.build()
        for b, request in enumerate(requests):
            state = self._states[request.id]
            if int(draft.sizes[b]) > 1 and self.trees < 12:
                self.trees += 1
                got = {
                    tuple(int(draft.token[b, i]) for i in draft.path(b, node))
                    for node in range(1, int(draft.sizes[b]))
                }
                assert got == self._best(request.tokens, state, builder.limits[b].max_nodes)

    def _best(self, text: Sequence[int], state: HeadState, most: int) -> set[tuple[int, ...]]:
        assert self._checkpoint is not None
        reference = Reference(self._checkpoint, runner())
        vocab, own = self._head.vocab, self._own
        assert vocab is not None
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        pool: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(own.max_depth):
            found = []
            for score, path in frontier:
                law = reference.logits(text, path, state.start).double().log_softmax(-1)
                best = law.topk(own.max_width)
                found += [
                    (score + float(value), (*path, int(vocab[index])))
                    for value, index in zip(best.values, best.indices, strict=True)
                ]
            pool += found
            frontier = sorted(found, reverse=True)[: own.max_width]
        return {path for _, path in sorted(pool, reverse=True)[: min(most, own.max_nodes)]}


def test_the_most_confident_tree_is_guessed(tmp_path: Path) -> None:
    """Fault: nodes are ranked by their own probability, or a child hangs below the wrong parent."""
    drafter = Confident(
        read_checkpoint(speculators(tmp_path)), max_nodes=7, max_depth=3, width=3, mode="point"
    )
    assert play(engine_of(drafter), SAMPLED)[0] == plain(SAMPLED)
    assert drafter.trees == 12


def successor_model() -> Any:
    """A target in float64 whose law depends on the last token alone: attention and MLP add nothing."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        # Of root mean square 1, so that the final norm changes nothing.
        model.model.embed_tokens.weight.copy_(4.0 * torch.eye(8, 16))
        noise = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
        model.lm_head.weight.copy_(noise)
    return model


def right_eagle1() -> Tensors:
    """A head that passes the token's embedding through as the next feature."""
    tensors = {name: torch.zeros_like(t) for name, t in small_tensors("eagle").items()}
    tensors["fc.weight"][:, :16] = torch.eye(16)
    return tensors


def right_eagle3(model: Any) -> Tensors:
    """A head whose attention finds the token itself and drowns the feature; one id is left out.

    Embeddings use the first half of each head's dimension only, so no rotation makes two tokens
    alike: the score of another token is 0, that of the token itself 40 at least.
    """
    tensors = {name: torch.zeros_like(t) for name, t in small_tensors("eagle3").items()}
    one = torch.eye(16)
    for part, scale in (("q", 10.0), ("k", 1.0), ("v", 1.0)):
        tensors[f"midlayer.self_attn.{part}_proj.weight"][:, :16] = scale * one
    tensors["midlayer.self_attn.o_proj.weight"] += 1000 * one
    tensors["fc.weight"][:, :16] = one
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        tensors[f"{norm}.weight"] += 1
    rows = model.lm_head.weight.detach().float()
    never = set(range(8)) - set((rows[:, :8].argmax(0)).tolist())
    ids = torch.tensor([id for id in range(8) if id != min(never)])
    tensors["lm_head.weight"] = rows[ids].clone()
    tensors["d2t"] = ids - torch.arange(7)
    return tensors


def small_tensors(family: Family) -> Tensors:
    return tensors_of(family, width=16, states=16, heads=1, kv_heads=1, head_dim=16)


@pytest.mark.parametrize("mode", ["sampled", "point"])
@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_a_head_that_must_be_right_is_always_accepted(
    family: Family, verifier: type[Verifier], mode: Any, tmp_path: Path
) -> None:
    """Fault: the head gets the token or the feature of another position, draft ids are not the target's,
    or the last token of a fully accepted round has no row in the head."""
    model = successor_model()
    config = {**LLAMA, "hidden_size": 16, "num_attention_heads": 1, "vocab_size": 8}
    tensors = right_eagle1() if family == "eagle" else right_eagle3(model)
    folder = save(tmp_path, config, tensors)
    checkpoint = read_checkpoint(
        folder, Choices(layers=(0, 1, 1) if family == "eagle3" else None, norm_before_residual=True)
    )
    drafter = EagleDrafter(checkpoint, max_nodes=4, mode=mode)
    target = ModelRunner(model)
    engine = Engine(
        target,
        KVMemory(80, 4),
        info_of(target),
        drafter,
        verifier(),
        [FixedScheduler(max_nodes=4, max_depth=4)],
        KeyedSource(),
    )
    requests = [
        # The first pass has no feature to draft from; each of the others emits five tokens.
        engine.add(prompt, SamplingParams(max_new_tokens=41, ignore_eos=True))
        for prompt in ([3], [1, 2, 7], [5] * 9)
    ]
    run(engine)
    for request in requests:
        assert request.stats.drafted == request.stats.accepted == 32
        assert request.stats.target_passes == 9


def test_a_right_law_is_accepted_under_the_targets_noise(tmp_path: Path) -> None:
    """Fault: a draft is drawn with another position's noise, so that equal laws give other tokens."""
    config = {**LLAMA, "hidden_size": 16, "num_attention_heads": 1, "vocab_size": 8}
    drafter = EagleDrafter(read_checkpoint(save(tmp_path, config, right_eagle1())), max_nodes=4)
    target = ModelRunner(successor_model())
    engine = Engine(
        target, KVMemory(80, 4), info_of(target), drafter, CoupledVerifier(),
        [FixedScheduler(max_nodes=4, max_depth=4)], KeyedSource(),
    )  # fmt: skip
    request = engine.add(
        [3, 4], SamplingParams(max_new_tokens=41, temperature=1.0, ignore_eos=True)
    )
    run(engine)
    assert request.stats.accepted == request.stats.drafted == 32


def test_a_thousand_requests_leave_nothing() -> None:
    """Fault: rows of requests that are gone are kept for ever."""
    drafter = EagleDrafter(None, max_nodes=1)
    engine = engine_of(drafter, max_batch=16)
    for place in range(1000):
        engine.add([3 + place % 50], SamplingParams(max_new_tokens=3, ignore_eos=True))
    run(engine)
    assert drafter._states == {}


def config_with(tmp_path: Path, extra: Mapping[str, Any], **choices: Any) -> Any:
    return read_checkpoint(eagle3(tmp_path, extra), Choices(**choices)).config


@pytest.mark.parametrize(
    ("make", "choice", "expected"),
    [
        ("eagle3", "auto", (2, 3, 4)),
        ("eagle3", "before", (1, 2, 3)),
        ("speculators", "auto", (1, 2, 4)),
        ("speculators", "after", (2, 3, 5)),
    ],
)
def test_layer_ids_count_states_or_layers(
    make: str, choice: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """Fault: engines read the same ids one layer apart, and no error tells."""
    if make == "eagle3":
        nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
        config = config_with(tmp_path, nested, layer_ids=choice)
    else:
        config = read_checkpoint(speculators(tmp_path), Choices(layer_ids=choice)).config
    assert config.feature_layers == expected
    assert config_with(tmp_path / "own", {}, layers=(0, 1, 2)).feature_layers == (0, 1, 2)


def test_default_layers_are_those_of_the_reference(tmp_path: Path) -> None:
    """Fault: a head without stated layers reads others than it was trained on."""
    torch.manual_seed(0)
    deep = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=12,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    target = info_of(ModelRunner(AutoModelForCausalLM.from_config(deep).eval()))
    assert Head(read_checkpoint(eagle3(tmp_path / "3")), target).feature_layers == (2, 6, 9)
    assert Head(read_checkpoint(eagle1(tmp_path / "1")), target).feature_layers == (12,)


def test_the_rotary_base_is_stated_chosen_or_10000(tmp_path: Path) -> None:
    """Fault: a missing base becomes the target's 500000, with which the head was not trained."""
    assert config_with(tmp_path, {}).rope["rope_theta"] == 10000
    assert config_with(tmp_path, {"rope_theta": 5e5}).rope["rope_theta"] == 5e5
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}
    assert config_with(tmp_path, nested).rope["rope_theta"] == 7e4
    assert config_with(tmp_path, {"rope_theta": 5e5}, rope_theta=3e4).rope["rope_theta"] == 3e4


def test_scaled_rotary_positions_are_those_of_transformers(tmp_path: Path) -> None:
    """Fault: rope_scaling in its old spelling is ignored."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    extra = {"rope_scaling": scaling, "rope_theta": 5e5, "max_position_embeddings": 256}
    target, choices = info_of(runner()), Choices(layers=(1, 2, 3))
    plain_head = Head(read_checkpoint(eagle3(tmp_path / "a", {"rope_theta": 5e5}), choices), target)
    scaled = Head(read_checkpoint(eagle3(tmp_path / "b", extra), choices), target)
    ratio = plain_head._frequencies / scaled._frequencies
    assert ratio[0] == pytest.approx(1.0)  # fast pairs stay, slow ones are 8 times slower
    assert ratio[-1] == pytest.approx(8.0)


@pytest.mark.parametrize("stated", [None, True, False])
@pytest.mark.parametrize("chosen", [None, True, False])
def test_norm_before_residual_is_chosen_stated_or_no(
    stated: bool | None, chosen: bool | None, tmp_path: Path
) -> None:
    """Fault: loaders disagree on what a missing entry means, and the user cannot say."""
    extra = {} if stated is None else {"norm_before_residual": stated}
    config = config_with(tmp_path, extra, norm_before_residual=chosen)
    assert config.norm_before_residual is next(
        value for value in (chosen, stated, False) if value is not None
    )


def test_draft_ids_come_from_offsets_or_from_the_mask(tmp_path: Path) -> None:
    """Fault: `d2t` is taken for ids, which shifts every draft token but the first."""
    target, choices = info_of(runner()), Choices(layers=(1, 2, 3))
    tensors = tensors_of("eagle3", draft_vocab=16)
    config = {**LLAMA, "draft_vocab_size": 16}
    for left_out in ("t2d", "d2t"):
        kept = {name: tensor for name, tensor in tensors.items() if name != left_out}
        head = Head(read_checkpoint(save(tmp_path / left_out, config, kept), choices), target)
        assert head.vocab is not None
        assert head.vocab.tolist() == list(range(1, 64, 4))
    whole = read_checkpoint(eagle3(tmp_path / "whole", draft_vocab=None), choices)
    assert Head(whole, target).vocab is None


def test_a_missing_embedding_is_the_targets(tmp_path: Path) -> None:
    """Fault: a head published without an embedding cannot be loaded."""
    choices = Choices(layers=(1, 2, 3))
    head = Head(read_checkpoint(eagle3(tmp_path), choices), info_of(runner()))
    assert head._embed is runner().model.get_input_embeddings()


class Evil:
    """Runs code when it is unpickled carelessly."""

    def __reduce__(self) -> Any:
        return print, ("this must never run",)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


T3, C3 = tensors_of("eagle3", draft_vocab=16), {**LLAMA, "draft_vocab_size": 16}
WRONG: Mapping[str, tuple[Mapping[str, Any], Tensors, str]] = {
    "another target's width": (
        {**C3, "hidden_size": 16},
        {
            **tensors_of("eagle3", width=16, states=16, draft_vocab=16),
            "embed_tokens.weight": torch.zeros(VOCAB, 16),
        },
        r"tensor fc.weight .* to be \[16, 96\].*but it is \[16, 48\]; use a head that was trained",
    ),
    "an EAGLE-1 head of another width": (
        {**LLAMA, "hidden_size": 16},
        tensors_of("eagle", width=16),
        "takes the embedding from the target 'big' and so expects a width of 16, got 32",
    ),
    "a missing tensor": (C3, without(T3, "norm.weight"), "hold the tensor norm.weight, but it does"),
    "no attention": (LLAMA, {"fc.weight": torch.zeros(2, 2)}, "hold the tensor layers.0.self_attn.q_p"),
    "no map of a reduced vocabulary": (
        C3,
        without(without(T3, "d2t"), "t2d"),
        "hold the tensor d2t, but it does not",
    ),
    "an unknown tensor": (C3, {**T3, "router.weight": torch.zeros(2)}, "no known head has: router.weight"),
    "ids beyond the vocabulary": (
        C3,
        {**T3, "d2t": T3["d2t"] + 40},
        "each of 16 draft ids a token id of its own below 64, but they do not",
    ),
    "too few heads": ({**C3, "num_attention_heads": 5}, T3, "fit its config of 5 heads"),
    "no width": ({**C3, "hidden_size": None}, T3, "state hidden_size as an integer, got None"),
    "another type": ({**C3, "speculators_model_type": "peagle"}, T3, "eagle or eagle3 .* got 'peagle'"),
    "another activation": ({**C3, "hidden_act": "xielu"}, T3, "got 'xielu'; use a head with one"),
    "dynamic positions": (
        {**C3, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        T3,
        "default, linear, llama3 or yarn, got 'dynamic'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_checkpoints_are_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    """Fault: a head that cannot fit runs anyway, or dies in a matrix product."""
    config, tensors, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as caught:
        Head(
            read_checkpoint(
                save(tmp_path, config, tensors),
                Choices(layers=(1, 2, 3)) if "hidden_norm" in " ".join(tensors) else Choices(),
            ),
            info_of(runner()),
        )
    assert "\n" not in str(caught.value)


def test_norms_that_eagle1_does_not_have_are_refused(tmp_path: Path) -> None:
    """Fault: the variant with `layernorms` is run without them."""
    norm = {"embedding_layernorm.weight": torch.ones(WIDTH)}
    with pytest.raises(ConfigError, match=r"no known head has: embedding_layernorm\.weight"):
        Head(read_checkpoint(speculators1(tmp_path, norm)), info_of(runner()))


def test_layers_that_the_target_lacks_are_refused(tmp_path: Path) -> None:
    """Fault: L - 3 of a shallow target is a layer from the wrong end."""
    for choice, shown in (((1, 2, 5), r"\[1, 2, 5\]"), ((1, 2), r"\[32, 64\]")):
        checkpoint = read_checkpoint(eagle3(tmp_path), Choices(layers=choice))
        with pytest.raises(ConfigError, match=shown):
            Head(checkpoint, info_of(runner()))


def test_code_in_a_checkpoint_is_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: loading a published head runs whatever its author pickled."""
    evil: Any = {"fc.weight": Evil()}
    save(tmp_path, LLAMA, evil, pickled=True)
    with pytest.raises(ConfigError, match="holds code or other objects, which are never run"):
        read_checkpoint(tmp_path)
    assert not capsys.readouterr().out


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    """Fault: a wrong path ends in a traceback."""
    with pytest.raises(ConfigError, match=r"readable config\.json .* FileNotFoundError"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="to be an object, got list"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.safetensors or pytorch_model\.bin"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_it_is_built_from_options(tmp_path: Path) -> None:
    """Fault: an option has no effect, or the depth of confident trees has no bound."""
    path = str(eagle3(tmp_path))
    options = {"path": path, "layers": [1, 2, 3], "max_nodes": 60, "width": 10, "mode": "point"}
    built = PluginManager().bind("drafter", {"name": "eagle", **options}).build()
    assert isinstance(built, EagleDrafter)
    assert (built._own.max_nodes, built._own.max_depth, built._own.max_width) == (60, 6, 10)
    assert built._checkpoint is not None
    assert built._checkpoint.config.feature_layers == (1, 2, 3)
    assert EagleOptions(path="untrained").max_nodes == 4
    assert EagleDrafter(None, max_nodes=9)._own.max_depth == 9
    with pytest.raises(ConfigError, match="an untrained head has no use for rope_theta, layers"):
        PluginManager().bind("drafter", "eagle(path='untrained', layers=[1], rope_theta=5.0)")


class TestChains(DrafterConformance):
    def make(self) -> Drafter:
        return EagleDrafter(None)


class TestConfidentTrees(DrafterConformance):
    def make(self) -> Drafter:
        return EagleDrafter(None, width=2, mode="point")


class TestEagle3Trees(DrafterConformance):
    """On table models, whose two hidden states are 24 times their vocabulary wide."""

    def make(self) -> Drafter:
        return _ForTables()


class _ForTables(EagleDrafter):
    """An EAGLE-3 head as wide as the table model that it is attached to."""

    def __init__(self) -> None:
        super().__init__(None, width=2)

    def attach(self, target: TargetInfo) -> None:
        width, size = target.model.config.hidden_size, target.vocab_size
        tensors = tensors_of("eagle3", width=width, states=width, heads=1, kv_heads=1)
        named = {name.replace("midlayer", "layers.0"): t for name, t in tensors.items()}
        named["lm_head.weight"] = named["lm_head.weight"][: size - 1]
        named["d2t"] = torch.ones(size - 1, dtype=torch.long)  # all but the first id
        config = read_config(width, size)
        self._checkpoint = Checkpoint("a head", config, named)
        super().attach(target)


def read_config(width: int, size: int) -> Any:
    from specfw_plugin_eagle.checkpoints import HeadConfig

    return HeadConfig("eagle3", width, 1, 1, 8, layers=1, vocab_size=size, feature_layers=(0, 1, 1))
