"""What keeps a model that the packed forward cannot run exactly from running at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specfw.engine.attention import ATTENTION, register
from specfw.engine.batching import Segment
from specfw.engine.memory import KVMemory
from specfw.errors import UnsupportedModelError

if TYPE_CHECKING:
    from specfw.engine.model_runner import ModelRunner

__all__ = ["attention_configs", "check_config", "longest_sequence", "probe"]

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


def attention_configs(model: Any) -> list[Any]:
    """The distinct configs that modules of the model read their attention function from."""
    configs = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())


def check_config(model: Any) -> None:
    """Refuse by kind, before any forward.

    Raises:
        UnsupportedModelError: the model has layers whose state cannot be rolled back, or it does not
            take an attention function.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: expected a decoder-only model, got an encoder-decoder; use a causal LM")
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if foreign:
        raise UnsupportedModelError(
            f"{name}: expected attention layers only, got {', '.join(foreign)}, whose state cannot be rolled back "
            "after a rejected draft; use a model with full or sliding attention (`specfw models` lists them)"
        )
    register()
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(ATTENTION)
        taken = model.config._attn_implementation == ATTENTION
    except (ValueError, AttributeError):
        taken = False
    finally:
        model.set_attn_implementation(before)
    if not taken:
        raise UnsupportedModelError(
            f"{name}: expected a model that takes transformers' attention functions, got one with its own; "
            "`specfw models` lists models that work"
        )


def longest_sequence(model: Any) -> int:
    """The longest sequence whose positions do not depend on batch-mates, in tokens."""
    config = model.config.get_text_config(decoder=True)
    longest = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


def probe(runner: ModelRunner) -> float:
    """Compare a two-chunk prefill and a small tree with the stock forward on the model itself.

    Returns:
        The worst row's root mean square difference, in standard deviations of the logits.

    Raises:
        UnsupportedModelError: it exceeds what rounding explains for the dtype.
    """
    config = runner.model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None) or 0
    length = window + 6 if 0 < window <= 64 else 24
    length = max(8, min(length, runner.max_length - 4))
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, length + 4)
    parents = np.array([-1, 0, 0, 1])  # a root, two children, one grandchild below the first
    memory = KVMemory(num_blocks=length // 4 + 3, block_size=4, prefix_cache=False)
    store = runner.new_store(memory.num_slots)
    sequence = memory.open(prompt[:length].tolist())
    rows = []
    for start, stop in ((0, length // 2), (length // 2, length)):
        nodes = np.arange(stop - start)
        with memory.transaction() as transaction:
            transaction.reserve(sequence, len(nodes))
            rows.append(runner.run(store, [Segment(sequence, prompt[start:stop], nodes - 1, nodes)]).logits)
            transaction.commit(sequence, prompt[:stop].tolist(), stop)
    with memory.transaction() as transaction:
        transaction.reserve(sequence, 4)
        rows.append(runner.run(store, [Segment(sequence, prompt[length:], parents, np.arange(4))]).logits)
    paths = [prompt[:length], *(prompt[:length].tolist() + [prompt[length + i] for i in path] for path in ([0], [0, 1], [0, 2], [0, 1, 3]))]
    expected = torch.cat(
        [runner.stock_logits(paths[0])] + [runner.stock_logits(path)[-1:] for path in paths[1:]]
    )
    packed = torch.cat(rows)
    apart = (packed.double() - expected.double()).square().mean(-1).sqrt().max()
    error = float(apart / expected.double().std().clamp_min(1e-9))
    if not error <= _TOLERANCE.get(runner.dtype, 0.2):
        raise UnsupportedModelError(
            f"{type(runner.model).__name__}: expected the packed forward to equal the stock forward, got logits that "
            f"differ by {error:.2g} standard deviations; use a model that `specfw models` lists as supported"
        )
    return error
