"""Writing a head in speculators' layout, which keeps EAGLE-3's tensor names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specfw.contracts import TargetInfo
from specfw.fingerprint import KEY, fingerprint
from specfw.training import whole_file
from specfw_plugin_eagle.checkpoints import Checkpoint

__all__ = ["write_checkpoint"]

_CHAIN = 5


def write_checkpoint(
    checkpoint: Checkpoint, target: TargetInfo, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write `model.safetensors` and `config.json`, each complete whenever it exists.

    Args:
        checkpoint: an EAGLE-3 head; without an embedding of its own it takes the target's.
        target: what it was trained for.
        folder: where to.
        dtype: of the weights.
    """
    tensors = {
        name: (value.to(dtype) if value.is_floating_point() else value).contiguous()
        for name, value in checkpoint.tensors.items()
    }
    with whole_file(folder / "model.safetensors") as aside:
        save_file(tensors, aside, {"format": "pt", KEY: fingerprint(target)})
    with whole_file(folder / "config.json") as aside:
        settings = _config(checkpoint, target, str(dtype).removeprefix("torch."))
        aside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _config(checkpoint: Checkpoint, target: TargetInfo, dtype: str) -> dict[str, Any]:
    config = checkpoint.config
    inner = checkpoint.tensors["layers.0.mlp.gate_proj.weight"].shape[0]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "dtype": dtype,
        "draft_vocab_size": len(checkpoint.tensors["lm_head.weight"]),
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers or ()),
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": inner,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": config.activation,
            "rms_norm_eps": config.eps,
            "max_position_embeddings": config.max_positions,
            "rope_theta": config.rope["rope_theta"],
            "rope_parameters": dict(config.rope),
            "vocab_size": config.vocab_size,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _CHAIN}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(getattr(target.model.config, "architectures", None) or []),
            },
        },
    }
