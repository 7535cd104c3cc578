"""A random head that fits any target: it drafts nonsense at the cost of a real one."""

from __future__ import annotations

import torch

from specfw.contracts import TargetInfo
from specfw_plugin_eagle.checkpoints import Checkpoint, HeadConfig

__all__ = ["make_untrained"]

_HEAD_DIM = 64
_SEED = 0


def make_untrained(target: TargetInfo) -> Checkpoint:
    """An EAGLE-1 head with random weights and the target's embedding and vocabulary projection."""
    sizes = target.model.config.get_text_config(decoder=True)
    width = int(sizes.hidden_size)
    heads = max(1, width // _HEAD_DIM)
    config = HeadConfig(
        family="eagle",
        hidden_size=width,
        heads=heads,
        kv_heads=heads,
        head_dim=_HEAD_DIM,
        layers=1,
        vocab_size=int(sizes.vocab_size),
    )
    inner, attention = 2 * width, heads * _HEAD_DIM
    shapes = {
        "fc.weight": (width, 2 * width),
        "layers.0.self_attn.q_proj.weight": (attention, width),
        "layers.0.self_attn.k_proj.weight": (attention, width),
        "layers.0.self_attn.v_proj.weight": (attention, width),
        "layers.0.self_attn.o_proj.weight": (width, attention),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
    }
    generator = torch.Generator().manual_seed(_SEED)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(width)
    return Checkpoint("an untrained head", config, tensors)
