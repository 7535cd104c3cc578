"""The first layers of a target as a model of its own, which a draft model begins as."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.training import final_norm

__all__ = ["truncated"]

_TOLERANCE = 0.01


def truncated(target: TargetInfo, layers: int, who: str) -> Any:
    """A copy of the target's first layers, embeddings, norm and head, in its dtype and on its device.

    Args:
        target: what is copied.
        layers: how many layers stay.
        who: begins the messages.

    Raises:
        ConfigError: its weights are quantised, its layers do not stand on their own, or it has no norm behind them.
    """
    norm = final_norm(target, who)
    copied = _first_layers(target, layers, who)
    kept = _weights_of(target.model, copied)
    own = copied.state_dict()
    if any(name not in kept or kept[name].shape != own[name].shape for name in own):
        raise _refusal(target, who, "its weights are quantised or packed")
    copied.load_state_dict(kept)
    copied.to(target.device).eval()
    if not _says_what_the_layers_say(target, copied, layers, norm):
        raise _refusal(target, who, "its first layers give something else without the others")
    return copied


def _first_layers(target: TargetInfo, layers: int, who: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    if getattr(config, "quantization_config", None):
        raise _refusal(target, who, "its weights are quantised or packed")
    try:
        with torch.random.fork_rng(devices=[]):
            return AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    except Exception as error:  # a model's code raises what it likes
        raise _refusal(target, who, f"{type(error).__name__}: {error}") from error


def _weights_of(model: Any, copied: Any) -> dict[str, Tensor]:
    """The weights of `model` that `copied` has, where they are numbers."""
    names = copied.state_dict().keys()
    return {
        name: value
        for name, value in model.state_dict().items()
        if name in names and value.is_floating_point()
    }


@torch.no_grad()
def _says_what_the_layers_say(
    target: TargetInfo, copied: Any, layers: int, norm: torch.nn.Module
) -> bool:
    """Whether the copy's last hidden states are the target's after so many layers, behind its norm."""
    ids = torch.arange(1, min(9, target.vocab_size), device=target.device)[None]
    states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    expected = norm(states[layers]).float()
    found = copied.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.float()
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _refusal(target: TargetInfo, who: str, why: str) -> ConfigError:
    return ConfigError(
        f"{who}: expected a target whose first layers are a model of their own, but {target.name!r} cannot be "
        f"truncated ({why}); train eagle or recycling for it, or name its unquantised model as the target"
    )
