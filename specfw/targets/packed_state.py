"""Layers whose weights bitsandbytes packs anew for the CPU: asking for their state must not spoil them.

Their first pass packs the 4-bit weights in place, and turns the scales to the kernel's order. Asked for its
state, a layer unpacks its weights for good but leaves the scales turned; the next pass packs and turns them
again, and from there on every product is wrong (bitsandbytes 0.50). Quantised scales come back rounded.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["keep_packed"]


def keep_packed(model: Any) -> None:
    """Make `state_dict()` leave the packed layers of a model as they are, and give scales in their own order."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            _keep_layer(layer)


def _keep_layer(layer: Any) -> None:
    kept: list[tuple[Tensor, Any]] = []

    def before(layer: Any, prefix: str, keep_vars: bool) -> None:
        """Note weights and scales, and turn the scales back where the layer will not."""
        kept.clear()
        state: Any = getattr(layer.weight, "quant_state", None)
        if not getattr(state, "packing_format_for_cpu", False):
            return
        kept.append((layer.weight.data, copy(state)))
        if not state.original_nested:
            state.absmax = state.absmax.T.reshape(-1).float()

    def after(layer: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        """Put back what was noted."""
        for weight, state in kept:
            layer.weight.data, layer.weight.quant_state, layer.quant_state = weight, state, state

    layer.register_state_dict_pre_hook(before)
    layer.register_state_dict_post_hook(after)
