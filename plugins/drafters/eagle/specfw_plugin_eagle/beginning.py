"""What training begins with: an EAGLE-3 head that is made of parts of the target, where they fit."""

from __future__ import annotations

import torch
from torch import Tensor

from specfw.contracts import TargetInfo
from specfw_plugin_eagle.checkpoints import Checkpoint, HeadConfig

__all__ = ["make_beginning"]

_SPREAD = 0.02


def make_beginning(
    target: TargetInfo, layers: tuple[int, ...], vocab: Tensor, inner: int | None, seed: int
) -> Checkpoint:
    """A head that looks at the last of `layers` through a copy of the target's last decoder layer.

    Where the target's modules have other names or shapes, weights are random instead.

    Args:
        target: what it drafts for.
        layers: indices into `hidden_states`, from 0.
        vocab: the target's id of each draft id, rising, int64 [Vd].
        inner: width of the MLP; the target's if None.
        seed: of the random weights.
    """
    sizes = target.model.config.get_text_config(decoder=True)
    width, heads = int(sizes.hidden_size), int(sizes.num_attention_heads)
    kv_heads = int(getattr(sizes, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(sizes, "head_dim", None) or width // heads)
    inner = inner or int(getattr(sizes, "intermediate_size", 0) or 4 * width)
    config = HeadConfig(
        family="eagle3",
        hidden_size=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=1,
        vocab_size=target.vocab_size,
        eps=float(getattr(sizes, "rms_norm_eps", 1e-6)),
        rope={"rope_type": "default", "rope_theta": _rope_theta(sizes)},
        max_positions=target.max_length,
        feature_layers=layers,
    )
    generator = torch.Generator().manual_seed(seed)
    source = {
        name: value.detach().to("cpu", torch.float32)
        for name, value in target.model.state_dict().items()
    }
    last = f"layers.{int(sizes.num_hidden_layers) - 1}."

    def theirs(suffix: str, *shape: int) -> Tensor | None:
        found = next((value for name, value in source.items() if name.endswith(suffix)), None)
        return None if found is None or tuple(found.shape) != shape else found.clone()

    def linear(part: str, rows: int, columns: int, beside: int = 0) -> Tensor:
        """Their weight for the feature, small random ones for the `beside` columns of the embedding."""
        weight = torch.randn(rows, beside + columns, generator=generator) * _SPREAD
        if (found := theirs(f"{last}{part}.weight", rows, columns)) is not None:
            weight[:, beside:] = found
        return weight

    def norm(suffix: str) -> Tensor:
        found = theirs(suffix, width)
        return torch.ones(width) if found is None else found

    queries, keys = heads * head_dim, kv_heads * head_dim
    fuse = torch.randn(width, len(layers) * width, generator=generator) * _SPREAD
    fuse[:, -width:] += torch.eye(width)
    tensors = {
        "fc.weight": fuse,
        "layers.0.self_attn.q_proj.weight": linear("self_attn.q_proj", queries, width, width),
        "layers.0.self_attn.k_proj.weight": linear("self_attn.k_proj", keys, width, width),
        "layers.0.self_attn.v_proj.weight": linear("self_attn.v_proj", keys, width, width),
        "layers.0.self_attn.o_proj.weight": linear("self_attn.o_proj", width, queries),
        "layers.0.mlp.gate_proj.weight": linear("mlp.gate_proj", inner, width),
        "layers.0.mlp.up_proj.weight": linear("mlp.up_proj", inner, width),
        "layers.0.mlp.down_proj.weight": linear("mlp.down_proj", width, inner),
        "layers.0.input_layernorm.weight": torch.ones(width),
        "layers.0.hidden_norm.weight": norm(f"{last}input_layernorm.weight"),
        "layers.0.post_attention_layernorm.weight": norm(f"{last}post_attention_layernorm.weight"),
        "norm.weight": norm("model.norm.weight"),
        "lm_head.weight": target.model.get_output_embeddings().weight[vocab].detach().float().cpu(),
    }
    if len(vocab) < target.vocab_size:
        tensors["d2t"] = vocab - torch.arange(len(vocab))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(
            0, vocab, True
        )
    return Checkpoint("the head in training", config, tensors)


def _rope_theta(sizes: object) -> float:
    rope = getattr(sizes, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    return float(theta or getattr(sizes, "rope_theta", None) or 10000.0)
