"""What keeps a model that the packed forward cannot run exactly from running at all.

Three nets, each for what the one before lets through: what the config says, how the layers call the
attention function (`attend` counts), and numbers: the model's own forward against the packed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.engine.attention import ATTENTION, register
from specfw.engine.batching import Segment
from specfw.engine.memory import KVMemory
from specfw.errors import UnsupportedModelError
from specfw.weights import quantized_linears

if TYPE_CHECKING:
    from specfw.engine.model_runner import ModelRunner

__all__ = [
    "TREE",
    "attention_configs",
    "check_config",
    "logit_distance",
    "longest_sequence",
    "probe",
    "probe_length",
    "tolerance",
]

Ints = NDArray[np.int64]

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_LIST_HINT = "use a model that `specfw models` lists as supported"
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.1}
"""By dtype, in standard deviations of the logits; a real fault is seldom below 1e-2.

In bfloat16 the first tokens of a text, which later ones attend to most, round worst: by half a standard
deviation between a model and its float32 copy. So there only gross faults show; the same code is held to
1e-4 in float32.
"""


_AMPLIFIED = 4.0
"""A quantised model may differ by this many times what rounding its embeddings does to its own logits.

Its kernels may compute in fewer bits than the dtype says. And where they round activations, a change in the
last digit tips one of them over now and then, and the layers behind it amplify that.
"""


def attention_configs(model: Any) -> list[Any]:
    """The distinct configs that modules of the model read their attention function from."""
    configs = {id(config): config for config in _with_parts(model.config)}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())


def _with_parts(config: Any) -> Iterator[Any]:
    """A config and those nested in it, such as the text and the vision part."""
    yield config
    for key in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, key, None)) is not None:
            yield from _with_parts(part)


def check_config(model: Any) -> None:
    """Refuse by kind, before any forward.

    Raises:
        UnsupportedModelError: the model has an encoder, or layers whose state cannot be rolled back,
            or it does not take an attention function.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name}: expected a decoder-only model, got an encoder-decoder; use a causal language model"
        )
    _check_layers(model, name)
    if not _takes_attention_functions(model):
        raise UnsupportedModelError(
            f"{name}: expected a model that takes transformers' attention functions, got one that computes "
            f"attention itself; {_LIST_HINT}"
        )


def _check_layers(model: Any, name: str) -> None:
    config = model.config.get_text_config(decoder=True)
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if not foreign and getattr(
        model, "_is_stateful", False
    ):  # says that its cache cannot be cropped
        foreign = [f"the recurrent layers of {config.model_type}"]
    if not foreign:
        return
    fault = "whose state cannot be rolled back after a rejected draft"
    if all(kind.endswith("_attention") and kind != "linear_attention" for kind in foreign):
        fault = "which choose their keys in a way that the packed mask does not follow"
    raise UnsupportedModelError(
        f"{name}: expected layers of full or sliding attention only, got {', '.join(foreign)}, {fault}; {_LIST_HINT}"
    )


def _takes_attention_functions(model: Any) -> bool:
    """Whether the model lets its attention function be set; leaves the one it has."""
    register()
    configs = attention_configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        model.set_attn_implementation(ATTENTION)  # only warns if it cannot
        return bool(model.config._attn_implementation == ATTENTION)
    except (ValueError, AttributeError, ImportError):
        return False
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def longest_sequence(model: Any) -> int:
    """The longest sequence whose positions do not depend on batch-mates, in tokens.

    Dynamic and longrope frequencies change for all tokens of a pass once one of them lies beyond the
    original length, so such models end there.
    """
    config = model.config.get_text_config(decoder=True)
    longest = int(
        getattr(config, "max_position_embeddings", None)
        or getattr(config, "n_positions", None)
        or 1 << 20
    )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


TREE = np.array([-1, 0, 0, 1])
"""A root, two children, and one grandchild below the first child."""
_TREE_PATHS = ([0], [0, 1], [0, 2], [0, 1, 3])


def probe(runner: ModelRunner) -> float:
    """Compare two prefill chunks, a small tree and a batch-mate with the model's own forward.

    Returns:
        The worst row's root mean square difference, in standard deviations of the logits.

    Raises:
        UnsupportedModelError: it exceeds what rounding explains for the dtype, or a pass fails.
    """
    name = type(runner.model).__name__
    random = np.random.default_rng(0)
    vocab_size = runner.model.config.get_text_config(decoder=True).vocab_size
    prompt = random.integers(0, vocab_size, probe_length(runner))
    tree = random.integers(0, vocab_size, len(TREE))
    mate = random.integers(0, vocab_size, 5)
    expected = _stock_rows(runner, prompt, tree, mate).double()
    try:
        packed = _packed_rows(runner, prompt, tree, mate).double()
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as cause:
        raise UnsupportedModelError(
            f"{name}: expected a forward that takes packed tokens and position_ids, got {type(cause).__name__}: "
            f"{cause}; {_LIST_HINT}"
        ) from cause
    error = logit_distance(packed, expected)
    allowed = tolerance(runner.dtype)
    if error > allowed and quantized_linears(runner.model):
        with _nudged(runner):
            nudged = _stock_rows(runner, prompt, tree, mate).double()
        allowed = _AMPLIFIED * logit_distance(nudged, expected)
    if not error <= allowed:
        raise UnsupportedModelError(
            f"{name}: expected the packed forward to equal the model's own, got logits that differ by {error:.2g} "
            f"standard deviations; {_LIST_HINT}"
        )
    return error


def tolerance(dtype: torch.dtype) -> float:
    """The largest `logit_distance` that rounding explains."""
    return _TOLERANCE.get(dtype, 0.5)


_BANNED = 100.0
"""Logits this far below their row's best stand for impossible tokens; how far below does not count."""


def logit_distance(packed: Tensor, expected: Tensor) -> float:
    """The worst row's root mean square difference, in standard deviations of the possible tokens' logits."""
    if bool(packed.isnan().any() | expected.isnan().any()):
        return float("nan")
    floor = expected.amax(-1, keepdim=True) - _BANNED
    scale = expected[expected > floor].std()
    apart = packed.maximum(floor) - expected.maximum(floor)
    return float(apart.square().mean(-1).sqrt().max() / scale.clamp_min(1e-9))


def probe_length(runner: ModelRunner) -> int:
    """Long enough to leave a small window, short enough for the context and for a quick start."""
    window = getattr(runner.model.config.get_text_config(decoder=True), "sliding_window", None) or 0
    length = window + 6 if 0 < window <= 64 else 24
    return max(8, min(length, runner.max_length - len(TREE)))


def _packed_rows(runner: ModelRunner, prompt: Ints, tree: Ints, mate: Ints) -> Tensor:
    """Logits of the prompt, run in two chunks, of the tree behind it and of the batch-mate: [R, V]."""
    memory = KVMemory(num_blocks=len(prompt) // 4 + 5, block_size=4, prefix_cache=False)
    store = runner.new_store(memory.num_slots)
    sequence, other = memory.open(prompt.tolist()), memory.open(mate.tolist())
    half, rows = len(prompt) // 2, []
    for chunk in (prompt[:half], prompt[half:]):
        with memory.transaction() as transaction:
            transaction.reserve(sequence, len(chunk))
            rows.append(runner.run(store, [_chain(sequence, chunk)]).logits)
            if not store.layers:
                raise UnsupportedModelError(
                    f"{type(runner.model).__name__}: expected layers that call transformers' attention functions, "
                    f"got none that did; {_LIST_HINT}"
                )
            transaction.commit(sequence, prompt.tolist(), sequence.n_kv + len(chunk))
    with memory.transaction() as transaction:
        transaction.reserve(sequence, len(tree))
        transaction.reserve(other, len(mate))
        segments = [Segment(sequence, tree, TREE, np.arange(len(tree))), _chain(other, mate)]
        rows.append(runner.run(store, segments).logits)
    return torch.cat(rows)


def _chain(sequence: Any, tokens: Ints) -> Segment:
    nodes = np.arange(len(tokens))
    return Segment(sequence, tokens, nodes - 1, nodes)


def _stock_rows(runner: ModelRunner, prompt: Ints, tree: Ints, mate: Ints) -> Tensor:
    """The same rows by the model's own forward, each tree path a sequence of its own: [R, V]."""
    paths = [np.concatenate([prompt, tree[path]]) for path in _TREE_PATHS]
    rows = [runner.stock_logits(prompt), *(runner.stock_logits(path)[-1:] for path in paths)]
    return torch.cat([*rows, runner.stock_logits(mate)])


@contextmanager
def _nudged(runner: ModelRunner) -> Iterator[None]:
    """Within, embeddings differ by about what bfloat16 rounds away, in which some kernels compute anyway."""
    size = torch.finfo(torch.bfloat16).eps

    def nudge(module: Any, inputs: Any, output: Tensor) -> Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        return output * (1 + size * noise.to(output))

    handle = runner.model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        handle.remove()
