"""The drafter `medusa`: what it loads and refuses, that right heads are always accepted, and that the text stays."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import save_file, save_model
from specfw_plugin_medusa import MedusaDrafter, MedusaOptions, MedusaTree
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, DraftLimits, Feedback, RequestView, TargetInfo, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.errors import ConfigError, PluginError
from specfw.plugins import PluginManager
from specfw.testing import certify
from specfw.testing.cases import SETTINGS, Case
from specfw.testing.conformance import DrafterConformance
from specfw.testing.table_model import TableTokenizer
from specfw.types import SamplingParams

VOCAB = 13
HIDDEN = 16
STEP = 5  # in the world of `cyclic`, each token is followed by the one this many further
HEADS = 3
SIZES = (3, 9, 20, 1, 14)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)

Tensors = dict[str, Tensor]


# Targets


def llama(seed: int = 0, vocab: int = VOCAB) -> Any:
    """A random model in float64 whose final norm is uneven, so that states before it are no good."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval().double()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0)
    return model


def cyclic(vocab: int = VOCAB, noise: float = 0.0) -> Any:
    """A model in which token x is followed by x + STEP; with noise, often but not always."""
    model = llama(vocab=vocab)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, HIDDEN))
        model.lm_head.weight.copy_(shift(STEP, vocab, HIDDEN))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(noise)
            layer.mlp.down_proj.weight.mul_(noise)
    return model


def shift(by: int, rows: int, columns: int) -> Tensor:
    """The matrix that maps token x to x + `by`, on one-hot vectors: float64 [rows, columns]."""
    matrix = torch.zeros(rows, columns, dtype=torch.float64)
    for token in range(min(rows, columns)):
        matrix[(token + by) % rows, token] = 1.0
    return matrix


@pytest.fixture(scope="module")
def cyclic_runner() -> ModelRunner:
    return ModelRunner(cyclic())


@pytest.fixture(scope="module")
def noisy_runner() -> ModelRunner:
    return ModelRunner(cyclic(noise=0.35))


# Heads that are right in the world of `cyclic`


def projections(heads: int = HEADS, vocab: int = VOCAB) -> list[Tensor]:
    """Head i's projection from the last hidden state to the token that comes i + 2 places later."""
    return [shift(STEP * (i + 2), vocab, HIDDEN) for i in range(heads)]


def square(by: int) -> Tensor:
    """A block's weight that moves most of a one-hot vector on by `by` tokens."""
    weight = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
    weight[:VOCAB, :VOCAB] = 3.0 * shift(by, VOCAB, VOCAB)
    return weight


def idle_block() -> Tensors:
    return {"linear.weight": torch.zeros(HIDDEN, HIDDEN), "linear.bias": torch.zeros(HIDDEN)}


def own(heads: int = HEADS, vocab: int = VOCAB, prefix: str = "") -> Tensors:
    """One idle block and a projection for each head."""
    tensors: Tensors = {}
    for i, projection in enumerate(projections(heads, vocab)):
        tensors |= {f"{prefix}{i}.0.{name}": tensor for name, tensor in idle_block().items()}
        tensors[f"{prefix}{i}.1.weight"] = projection
    return tensors


def tied(heads: int = HEADS) -> Tensors:
    """One block for each head, which moves on by what the target's own projection does not."""
    return {
        f"{i}.0.linear.{kind}": square(STEP * (i + 1))
        if kind == "weight"
        else torch.zeros(HIDDEN, dtype=torch.float64)
        for i in range(heads)
        for kind in ("weight", "bias")
    }


def twice(weight_only_once: bool = False) -> Tensors:
    """Two blocks for each head, both the same one, which moves on by half the way."""
    half = (VOCAB + 1) // 2  # twice this is 1, modulo VOCAB
    tensors: Tensors = {}
    for i in range(HEADS):
        for block in range(1 if weight_only_once else 2):
            tensors[f"{i}.{block}.linear.weight"] = square(STEP * (i + 1) * half)
            tensors[f"{i}.{block}.linear.bias"] = torch.zeros(HIDDEN, dtype=torch.float64)
        tensors[f"{i}.2.weight"] = shift(STEP, VOCAB, HIDDEN)
    return tensors


def converted(one_projection: bool = False, bias: bool = False) -> Tensors:
    """The layout that vLLM reads."""
    if one_projection:
        tensors = {
            f"blocks.{i}.layers.0.weight": tied()[f"{i}.0.linear.weight"] for i in range(HEADS)
        }
        tensors["lm_head.weight"] = shift(STEP, VOCAB, HIDDEN)
    else:
        tensors = {f"lm_heads.{i}.weight": head for i, head in enumerate(projections())}
        tensors |= {
            f"blocks.{i}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(HEADS)
        }
    if bias:
        tensors |= {f"blocks.{i}.layers.0.bias": torch.zeros(HIDDEN) for i in range(HEADS)}
    return tensors


def reduced(projected: bool = True) -> Tensors:
    """The converted layout with a vocabulary of its own, whose rows are projected, or to be chosen."""
    order = torch.arange(VOCAB).flip(0)
    tensors: Tensors = {
        f"blocks.{i}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for i in range(HEADS)
    }
    tensors["token_map"] = order
    for i, head in enumerate(projections()):
        padded = torch.cat([head, torch.ones_like(head[:1])])  # the last row is no token's
        tensors[f"lm_heads.{i}.weight"] = head[order] if projected else padded
    return tensors


def base() -> Tensors:
    """Tensors of the target that a file may hold too."""
    return {
        "model.layers.0.mlp.up_proj.weight": torch.zeros(4, 2),
        "model.embed_tokens.weight": torch.zeros(3, 2),
        "lm_head.weight": torch.zeros(3, 2),
    }


def save_pt(tensors: Tensors, folder: Path, name: str = "medusa_lm_head.pt") -> None:
    torch.save(tensors, folder / name)


def save_safe(tensors: Tensors, folder: Path, name: str = "medusa_lm_head.safetensors") -> None:
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / name)


def save_sharded(folder: Path) -> None:
    """A full model in two files; the first has none of the heads, and cannot be read."""
    tensors = own(prefix="medusa_head.")
    (folder / "model-1.safetensors").write_bytes(b"not to be read")
    save_safe(tensors, folder, "model-2.safetensors")
    weights = dict.fromkeys(base(), "model-1.safetensors")
    weights |= dict.fromkeys(tensors, "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


class Block(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.linear.weight.data.copy_(weight)
        self.linear.bias.data.zero_()


def as_trained() -> nn.Module:
    """Heads as they are trained: of two blocks, which are one and the same module."""
    half = (VOCAB + 1) // 2
    heads = []
    for i in range(HEADS):
        output = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.float64)
        output.weight.data.copy_(shift(STEP, VOCAB, HIDDEN))
        heads.append(nn.Sequential(*[Block(square(STEP * (i + 1) * half))] * 2, output))
    return nn.ModuleList(heads)


LAYOUTS: Mapping[str, Callable[[Path], None]] = {
    "pt": lambda folder: save_pt(own(), folder),
    "safetensors": lambda folder: save_safe(own(), folder),
    "prefix": lambda folder: save_pt(own(prefix="medusa_head."), folder),
    "inside a model": lambda folder: save_safe(
        own(prefix="medusa_head.") | base(), folder, "model.safetensors"
    ),
    "inside a pickled model": lambda folder: save_pt(
        own(prefix="medusa_head.") | base(), folder, "pytorch_model.bin"
    ),
    "shards": save_sharded,
    "no blocks": lambda folder: save_pt(
        {f"{i}.0.weight": head for i, head in enumerate(projections())}, folder
    ),
    "tied": lambda folder: save_pt(tied(), folder),
    "two blocks": lambda folder: save_pt(twice(), folder),
    "a shared block": lambda folder: torch.save(
        as_trained().state_dict(), folder / "medusa_lm_head.pt"
    ),
    "a shared block stored once": lambda folder: save_model(
        as_trained(), str(folder / "medusa_lm_head.safetensors")
    ),
    "a shared block without metadata": lambda folder: save_safe(twice(True), folder),
    "converted": lambda folder: save_safe(converted(), folder, "model.safetensors"),
    "converted with biases": lambda folder: save_safe(
        converted(bias=True), folder, "model.safetensors"
    ),
    "converted, one projection": lambda folder: save_safe(
        converted(one_projection=True), folder, "model.safetensors"
    ),
    "reduced": lambda folder: save_safe(reduced(), folder, "model.safetensors"),
    "reduced later": lambda folder: save_safe(reduced(False), folder, "model.safetensors"),
}


# Engines


def engine_of(
    runner: ModelRunner,
    drafter: Drafter,
    verifier: Verifier | None = None,
    *,
    blocks: int = 80,
    tokenizer: Any = None,
    max_batch: int = 3,
) -> Engine:
    model = runner.model
    info = TargetInfo(
        "big",
        model.config.vocab_size,
        runner.max_length,
        (2,),
        tokenizer,
        model,
        runner.device,
        runner.dtype,
    )
    return Engine(
        runner,
        KVMemory(blocks, 4),
        info,
        drafter,
        verifier or CoupledVerifier(),
        [FixedScheduler(max_nodes=64, max_depth=64, max_width=64)],
        KeyedSource(),
        max_batch=max_batch,
        prefill_chunk=5,
    )


def play(
    engine: Engine, params: SamplingParams = GREEDY, sizes: Sequence[int] = SIZES
) -> tuple[list[list[int]], int, int]:
    """The texts of ragged requests, of which three run at a time; then drafted and accepted tokens."""
    rng = np.random.default_rng(1)
    vocab = engine.info.vocab_size
    requests = [
        engine.add(rng.integers(3, vocab, size).tolist(), params.model_copy(update={"seed": size}))
        for size in sizes
    ]
    run(engine)
    drafted = sum(request.stats.drafted for request in requests)
    return (
        [request.tokens for request in requests],
        drafted,
        sum(request.stats.accepted for request in requests),
    )


def run(engine: Engine) -> None:
    for _ in range(2000):
        if not engine.has_work:
            break
        engine.step()
        engine.memory.check()
    assert not engine.has_work
    assert not engine.faults, dict(engine.faults)


def count_preempted(engine: Engine, counts: list[int]) -> None:
    engine.observers.append(lambda report: counts.append(report.preempted))


def right_heads(folder: Path, **options: Any) -> MedusaDrafter:
    save_pt(own(), folder)
    return MedusaDrafter(MedusaOptions(path=folder, **options))


CHAIN = {"tree": [[0], [0, 0], [0, 0, 0]]}


class Checked(MedusaDrafter):
    """Compares each hidden state with the one that the target itself has at its place."""

    runner: ModelRunner
    checked = 0
    missing = 0

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        model = self.runner.model
        for request in requests:
            feature = self._features.get(request.id)
            if feature is None:
                self.missing += 1
                continue
            assert feature.tokens == len(request.tokens)
            read = torch.tensor([list(request.tokens[:-1])])
            expected = model.model(input_ids=read, use_cache=False).last_hidden_state[0, -1]
            torch.testing.assert_close(feature.state, expected, rtol=1e-9, atol=1e-9)
            self.checked += 1
        super().propose(requests, builder)


# Loading


@pytest.mark.parametrize("mode", ["point", "sampled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_heads_are_always_accepted(
    layout: str, mode: str, tmp_path: Path, cyclic_runner: ModelRunner
) -> None:
    """Fault: tensors go to the wrong head, block or token; heads are counted by the config, which lies;
    blocks that were one module are lost; or a head is read one token off."""
    LAYOUTS[layout](tmp_path)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 5, "model_type": "medusa"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = MedusaDrafter(MedusaOptions(path=tmp_path, mode=mode, **CHAIN))
    texts, drafted, accepted = play(engine_of(cyclic_runner, drafter), sizes=(2, 7))
    for text, size in zip(texts, (2, 7), strict=True):
        for before, after in zip(text[size - 1 :], text[size:], strict=False):
            assert after == (before + STEP) % VOCAB
    # The first token comes without a draft; 23 are left: five full rounds of four, then two and one more.
    assert accepted == drafted == 2 * (5 * HEADS + 2)


def test_a_file_can_be_named(tmp_path: Path) -> None:
    save_pt(own(), tmp_path, "anything.pt")
    drafter = MedusaDrafter(MedusaOptions(path=tmp_path / "anything.pt"))
    assert len(drafter._checkpoint.heads) == HEADS


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


BROKEN: Mapping[str, tuple[Tensors, str]] = {
    "no bias": (without(own(), "1.0.linear.bias"), "the bias of block 0 of head 1"),
    "no block": (
        without(twice(), "0.1.linear.weight", "0.1.linear.bias", "0.0.linear.weight"),
        "the weight of block 0 of head 0",
    ),
    "no head": (
        without(own(), "1.0.linear.weight", "1.0.linear.bias", "1.1.weight"),
        "head 1 of 3",
    ),
    "no projection": (without(own(), "2.1.weight"), "projection of head 2"),
    "no first projection": (without(own(), "0.1.weight"), "projection of head 0"),
    "unknown": (own() | {"3.1.extra": torch.zeros(2)}, "'3.1.extra', which is none"),
    "unknown beside a model": (
        own(prefix="medusa_head.") | base() | {"fc.weight": torch.zeros(2)},
        "'fc.weight', which is none",
    ),
    "not square": (
        own() | {"0.0.linear.weight": torch.zeros(HIDDEN, 3)},
        "expected shape [hidden size, hidden size] in '0.0.linear.weight'",
    ),
    "odd bias": (own() | {"0.0.linear.bias": torch.zeros(3)}, "16 biases for head 0"),
    "a block too many": (
        own()
        | {
            f"0.{b}.linear.{k}": idle_block()[f"linear.{k}"]
            for b in (1,)
            for k in ("weight", "bias")
        },
        "got block 1 too",
    ),
    "other depth": (
        own() | {"0.5.weight": torch.zeros(VOCAB, HIDDEN)},
        "one vocabulary projection for head 0",
    ),
    "other vocabulary": (
        own() | {"1.1.weight": torch.zeros(VOCAB - 1, HIDDEN)},
        "13 tokens for head 1",
    ),
    "integers": (
        own() | {"0.0.linear.bias": torch.zeros(HIDDEN, dtype=torch.long)},
        "floating-point numbers in '0.0.linear.bias'",
    ),
    "token map": (
        reduced() | {"token_map": torch.zeros(VOCAB, dtype=torch.long)},
        "different token ids in 'token_map'",
    ),
    "token map beyond": (
        reduced() | {"token_map": torch.arange(VOCAB - 1) + 2},
        "token_map of ids below the 13 rows",
    ),
    "a model without heads": (base(), "a model without any"),
    "empty": ({}, "a model without any"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints_are_refused(case: str, tmp_path: Path) -> None:
    """Fault: what is missing stays at random, and what is unknown is dropped without a word."""
    tensors, message = BROKEN[case]
    save_pt(tensors, tmp_path)
    with pytest.raises(ConfigError) as caught:
        MedusaDrafter(MedusaOptions(path=tmp_path))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


class Boobytrap:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize(
    "save", [torch.save, lambda it, path: path.write_bytes(pickle.dumps(it, 2))]
)
def test_code_in_a_pickle_is_not_run(save: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    """Fault: a checkpoint from somewhere runs its code here."""
    witness = tmp_path / "ran"
    save(own() | {"trap": Boobytrap(witness)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match="code, which is never run"):
        MedusaDrafter(MedusaOptions(path=tmp_path))
    assert not witness.exists()


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Fault: a parser's exception, or a traceback, in place of a sentence."""
    for name, content, message in (
        (None, b"", "got none; name another folder"),
        ("medusa_lm_head.pt", b"garbage", "broken or holds code"),
        ("medusa_lm_head.pt", b"", "cannot be read"),
        ("medusa_lm_head.safetensors", b"garbage", "cannot be read"),
        ("model.safetensors.index.json", b"[]", "an index of weights"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"0.1.weight": "x.safetensors"}}',
            "read",
        ),
    ):
        for file in tmp_path.iterdir():
            file.unlink()
        if name is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            MedusaDrafter(MedusaOptions(path=tmp_path))
    with pytest.raises(ConfigError, match="no such file or folder"):
        MedusaDrafter(MedusaOptions(path=tmp_path / "missing"))
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(ConfigError, match="tensors by name"):
        MedusaDrafter(MedusaOptions(path=tmp_path / "list.pt"))


def test_heads_for_another_target_are_refused(tmp_path: Path, cyclic_runner: ModelRunner) -> None:
    """Fault: a product of the wrong width fails in the first step, or ids mean other tokens."""
    narrow = {"0.0.linear.weight": torch.zeros(8, 8), "0.0.linear.bias": torch.zeros(8)}
    wide = {"0.0.weight": torch.zeros(VOCAB + 1, HIDDEN)}
    few = {"0.0.weight": torch.zeros(VOCAB - 1, HIDDEN)}
    far = without(reduced(), "token_map") | {"token_map": torch.arange(VOCAB) + 1}
    for tensors, message in (
        (narrow, "hidden size 16 of the target 'big', got head 0 for 8"),
        (wide, "the 13 tokens of the target 'big', got head 0 for 14"),
        (few, "the 13 tokens of the target 'big', got head 0 for 12"),
        (far, "ids from 0 to 12, got 1 to 13"),
    ):
        save_pt(tensors, tmp_path)
        drafter = MedusaDrafter(MedusaOptions(path=tmp_path))
        with pytest.raises(ConfigError, match=message):
            engine_of(cyclic_runner, drafter)


@pytest.mark.parametrize("mode", ["point", "sampled"])
def test_only_the_target_is_padded(mode: str, tmp_path: Path, cyclic_runner: ModelRunner) -> None:
    """Fault: heads without rows for the target's padding are refused, or their ids are off."""
    save_pt({f"{i}.0.weight": head[: VOCAB - 2] for i, head in enumerate(projections())}, tmp_path)
    drafter = MedusaDrafter(MedusaOptions(path=tmp_path, mode=mode, max_nodes=4))
    tokenizer = TableTokenizer(VOCAB - 2)
    texts, _, accepted = play(engine_of(cyclic_runner, drafter, tokenizer=tokenizer))
    assert texts == play(engine_of(cyclic_runner, NoDrafter()))[0]
    assert accepted


# Trees


def test_B28_a_tree_is_cut_to_the_heads_and_the_vocabulary(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a tree for more heads, or for a wider top-k, than there are gathers out of range
    (FasterDecoding/Medusa#63)."""
    vocab = 7  # fewer than the tree is wide
    runner = ModelRunner(cyclic(vocab, noise=0.35))
    plain = play(engine_of(runner, NoDrafter()))[0]
    steps = [[0] * depth for depth in range(1, 6)]
    shapes: list[dict[str, Any]] = [
        {"tree": [*steps, *[[rank] for rank in range(1, 10)], [0, 0, 9]]},
        {"widths": [10] * 5},
        {"accuracy": [[0.5] * 10] * 5},
    ]
    for heads in (1, 2, 3, 5):
        save_pt(own(heads, vocab), tmp_path)
        for shape in shapes:
            for mode in ("point", "sampled"):
                caplog.clear()
                options = MedusaOptions(path=tmp_path, mode=mode, max_nodes=12, **shape)
                drafter = MedusaDrafter(options)
                texts, _, accepted = play(engine_of(runner, drafter), sizes=(3, 9))
                assert texts == play(engine_of(runner, NoDrafter()), sizes=(3, 9))[0]
                assert accepted
                assert drafter._tree.depth <= heads
                assert drafter._tree.width <= vocab
                deep = f"5 heads deep, but the checkpoint has {heads}"
                assert (deep in caplog.text) == (heads < 5)
                assert f"10 tokens wide, but the heads' vocabulary has {vocab}" in caplog.text
    caplog.clear()
    assert play(engine_of(runner, MedusaDrafter(MedusaOptions(path=tmp_path))))[0] == plain
    assert not caplog.text  # a tree that nobody asked for is not complained about


def test_trees_come_from_accuracy() -> None:
    """Fault: the tree is filled level by level, or an accuracy has no effect."""
    tree = MedusaTree.best_first([[0.6, 0.2], [0.5, 0.4, 0.0], [0.1]], 5)
    assert tree.paths == ((0,), (0, 0), (0, 1), (1,), (1, 0))
    sure = MedusaTree.best_first([[1.0], [1.0], [1.0]], 9)
    assert sure.paths == ((0,), (0, 0), (0, 0, 0))


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 12),
    st.builds(DraftLimits, st.integers(0, 6), st.integers(0, 3), st.integers(1, 3)),
)
def test_trees_are_whole_and_within_limits(
    weights: list[list[float]], nodes: int, limits: DraftLimits
) -> None:
    """Fault: a node without its parent, or more nodes, depth or siblings than allowed."""
    tree = MedusaTree.best_first(weights, nodes)
    assert len(tree.paths) <= nodes
    for cut in (tree, tree.within(limits), tree.cut(2, 2)):
        for place, path in enumerate(cut.paths):
            assert path not in cut.paths[:place]
            assert len(path) == 1 or path[:-1] in cut.paths[:place]
    kept = tree.within(limits)
    assert len(kept.paths) <= limits.max_nodes
    assert kept.depth <= limits.max_depth
    assert all(len(c) <= limits.max_width for level in kept.levels for c in level.values())


def test_point_mode_takes_exactly_the_ranks(tmp_path: Path, cyclic_runner: ModelRunner) -> None:
    """Fault: rank and place among the siblings are confused where a tree leaves ranks out."""
    tree = [[1], [0, 0], [0], [3], [3, 2]]
    drafter = right_heads(tmp_path, mode="point", tree=tree)
    engine = engine_of(cyclic_runner, drafter)
    drafts: list[dict[tuple[int, ...], int]] = []

    class Spy(DraftBuilder):
        def build(self) -> Any:
            draft = super().build()
            drafts.append(
                {
                    tuple(int(draft.token[0, n]) for n in draft.path(0, node)): node
                    for node in range(1, int(draft.sizes[0]))
                }
            )
            return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specfw.engine.engine.DraftBuilder", Spy)
        request = engine.add([4], GREEDY)
        engine.step()
        engine.step()
    assert drafts[0] == {}
    state = drafter._heads.stack([torch.eye(HIDDEN, dtype=torch.float64)[4] * HIDDEN**0.5])
    first, second = (drafter._heads.best(head, state, 4)[0].tolist() for head in (0, 1))
    assert first[0] == (4 + 2 * STEP) % VOCAB
    assert request.tokens[1] == (4 + STEP) % VOCAB
    assert list(drafts[1]) == [
        (first[1],),
        (first[0],),
        (first[0], second[0]),
        (first[3],),
        (first[3], second[2]),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either path or untrained"),
        ({"untrained": 2, "path": "x"}, "either path or untrained"),
        ({"untrained": 0}, "greater than or equal to 1"),
        ({"untrained": 2, "widths": [1], "accuracy": [[0.1]]}, "only one of tree, accuracy"),
        ({"untrained": 2, "tree": [[0], [1, 0]]}, r"node \[1, 0\] but not its parent \[1\]"),
        ({"untrained": 2, "tree": [[-1]]}, "greater than or equal to 0"),
        ({"untrained": 2, "tree": [[]]}, "at least 1 item"),
        ({"untrained": 2, "accuracy": [[1.5]]}, "less than or equal to 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MedusaOptions(**options)


# Running


@pytest.mark.parametrize("mode", ["point", "sampled"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_that_of_plain_decoding(
    temperature: float, mode: str, tmp_path: Path, noisy_runner: ModelRunner
) -> None:
    """Fault: a draft changes the text; or the hidden state is not the last one after the final norm,
    after a rejection, a preemption, or where requests join and leave."""
    save_pt(own(), tmp_path)
    params = SamplingParams(
        max_new_tokens=24, temperature=temperature, repetition_penalty=1.05, ignore_eos=True
    )
    plain = play(engine_of(noisy_runner, NoDrafter()), params)[0]
    for blocks in (80, 16):
        drafter = Checked(MedusaOptions(path=tmp_path, mode=mode, max_nodes=5))
        drafter.runner = noisy_runner
        engine = engine_of(noisy_runner, drafter, blocks=blocks)
        preempted: list[int] = []
        count_preempted(engine, preempted)
        texts, drafted, accepted = play(engine, params)
        assert texts == plain
        assert drafted > accepted > 0
        assert drafter.checked > 20
        assert drafter.missing == len(SIZES) + sum(preempted)
        assert (sum(preempted) > 0) == (blocks == 16)
        assert not drafter._features


def test_the_hidden_state_is_after_the_final_norm(tmp_path: Path) -> None:
    """Fault: the state before an uneven final norm is taken, on which heads were not trained."""
    runner = ModelRunner(llama(3))
    drafter = Checked(MedusaOptions(untrained=2))
    drafter.runner = runner
    play(engine_of(runner, drafter))
    assert drafter.checked > 20


def test_a_prefix_cache_hit_costs_one_draft_only(
    tmp_path: Path, cyclic_runner: ModelRunner
) -> None:
    """Fault: positions that the target did not pass have no hidden state, and drafting collapses
    (vllm-project/vllm#47926)."""
    drafter = right_heads(tmp_path, **CHAIN)
    engine = engine_of(cyclic_runner, drafter)
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    scored: list[int] = []
    engine.observers.append(lambda report: scored.append(report.rows))
    rows, rounds = [], []
    for _ in range(2):
        scored.clear()
        request = engine.add(prompt, GREEDY)
        run(engine)
        rows.append(sum(scored))
        rounds.append((request.stats.drafted, request.stats.accepted))
    assert rows[0] - rows[1] == 8  # two blocks of four were cached
    assert rounds == [(17, 17), (17, 17)]


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_right_heads_are_accepted_by_each_verifier(
    verifier: type[Verifier], tmp_path: Path, cyclic_runner: ModelRunner
) -> None:
    for mode in ("point", "sampled"):
        drafter = right_heads(tmp_path, mode=mode, **CHAIN)
        _, drafted, accepted = play(engine_of(cyclic_runner, drafter, verifier()))
        assert drafted == accepted > 0


def test_an_old_or_missing_state_means_no_draft(tmp_path: Path, cyclic_runner: ModelRunner) -> None:
    """Fault: after a pass without hidden states, heads read the state of an earlier position."""

    class Forgetful(MedusaDrafter):
        seen = 0

        def observe(self, feedback: Feedback) -> None:
            self.seen += 1
            if self.seen == 2:
                feedback.hidden = {}
            super().observe(feedback)

    save_pt(own(), tmp_path)
    drafter = Forgetful(MedusaOptions(path=tmp_path, **CHAIN))
    engine = engine_of(cyclic_runner, drafter)
    drafted: list[int] = []
    engine.observers.append(lambda report: drafted.append(report.drafted))
    engine.add([3], GREEDY)
    run(engine)
    assert drafted[:4] == [0, 3, 0, 3]


def test_requests_leave_nothing_behind(tmp_path: Path, cyclic_runner: ModelRunner) -> None:
    """Fault: hidden states of requests that ended, or were cancelled, pile up."""
    drafter = right_heads(tmp_path)
    engine = engine_of(cyclic_runner, drafter, max_batch=16)
    params = GREEDY.model_copy(update={"max_new_tokens": 3})
    for _ in range(100):
        requests = [engine.add([3 + number], params) for number in range(10)]
        engine.step()
        engine.cancel(requests[3])
        assert len(drafter._features) <= 16
    run(engine)
    assert drafter._features == {}


@pytest.mark.parametrize("mode", ["point", "sampled"])
@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_wide_trees_keep_the_law(verifier: type[Verifier], mode: str) -> None:
    """Fault: siblings that are drawn from one law, or laws of deeper heads, are not stated as drawn."""
    options = MedusaOptions(untrained=2, mode=mode, tree=[[0], [1], [0, 0], [1, 0], [0, 1]])
    cases = [
        Case(SETTINGS["temperature"], vocab_size=3, horizon=3),
        Case(SETTINGS["top-k"], kind="sparse", vocab_size=3, horizon=3),
        Case(SETTINGS["greedy"], vocab_size=2, horizon=3),
    ]
    certificate = certify(
        lambda: MedusaDrafter(options),
        verifier,
        [lambda: FixedScheduler(5, 2, 2)],
        cases=cases,
    )
    assert certificate.ok, str(certificate)
    assert certificate.drafted
    assert not certificate.faults


class TestSampled(DrafterConformance):
    def make(self) -> Drafter:
        return MedusaDrafter(MedusaOptions(untrained=2))


class TestPoint(DrafterConformance):
    def make(self) -> Drafter:
        return MedusaDrafter(MedusaOptions(untrained=3, mode="point", max_nodes=5))


# The component


def test_the_component_is_found_and_built(tmp_path: Path) -> None:
    save_pt(own(), tmp_path)
    manager = PluginManager()
    bound = manager.bind("drafter", {"name": "medusa", "path": str(tmp_path), "mode": "point"})
    assert isinstance(bound.build(), MedusaDrafter)
    example = manager.component("drafter", "medusa").example
    assert isinstance(manager.bind("drafter", {"name": "medusa", **example}).build(), Drafter)
    with pytest.raises((ConfigError, PluginError), match="either path or untrained"):
        manager.bind("drafter", "medusa")
