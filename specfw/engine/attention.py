"""The attention function that the target calls: write K and V to the pool, attend over the pool.

It is registered with transformers under the name "specfw"; no mask function is registered, so a model
builds no mask of its own. Everything about the step comes in as one keyword argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specfw.engine.batching import PackedBatch
from specfw.engine.memory import KVSequence
from specfw.errors import ContractError, UnsupportedModelError

__all__ = ["ATTENTION", "KVStore", "StepContext", "attend", "register"]

ATTENTION = "specfw"


class KVStore:
    """K and V of all layers: [slots, heads, head_dim] each, allocated when a layer first writes.

    Shapes, dtype and device come from the tensors that the layer hands over.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The store of one layer, for `key` and `value` of shape [T, heads, head_dim]."""
        if index not in self.layers:
            self.layers[index] = (self._allocate(key), self._allocate(value))
        return self.layers[index]

    def _allocate(self, like: Tensor) -> Tensor:
        store = like.new_empty(self.num_slots, *like.shape[1:])
        store[0] = 0  # what padding reads; every other slot is written before it is read
        return store

    @torch.inference_mode()
    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` [N] to slots `target` [N] in every layer; the two may overlap."""
        for layer in self.layers.values():
            for store in layer:
                store.index_copy_(
                    0, target.to(store.device), store.index_select(0, source.to(store.device))
                )

    def compact(self, kept: Iterable[tuple[KVSequence, int, Sequence[int]]]) -> None:
        """Move the rows of kept nodes to the slots of their positions.

        Args:
            kept: for each sequence, the position of its first kept node, and how far behind that
                position each kept node was written, in order.
        """
        moves = [
            (
                sequence.slots(first + place, first + place + 1),
                sequence.slots(first + i, first + i + 1),
            )
            for sequence, first, places in kept
            for i, place in enumerate(places)
            if i != place
        ]
        if moves:
            source, target = (np.concatenate(slots) for slots in zip(*moves, strict=True))
            self.move(torch.from_numpy(source), torch.from_numpy(target))

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one position over all layers seen so far."""
        return sum(s[0].numel() * s.element_size() for layer in self.layers.values() for s in layer)


class StepContext:
    """One pass: its layout, the store, and which layers have attended."""

    def __init__(self, batch: PackedBatch, store: KVStore) -> None:
        self.batch, self.store = batch, store
        self.calls: Counter[int] = Counter()


_current: ContextVar[StepContext | None] = ContextVar("specfw_step", default=None)
"""The running pass, for the few models that drop unknown keyword arguments on the way."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    specfw_step: StepContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the packed tokens: query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, Dv]."""
    step = specfw_step or _current.get()
    if step is None:
        raise ContractError(
            f"{type(module).__name__}: expected to attend within a specfw pass, got a call from outside; call the model "
            "through specfw, or set another attention implementation"
        )
    index = int(module.layer_idx)  # type: ignore[arg-type]
    step.calls[index] += 1
    if step.calls[index] > 1:
        raise UnsupportedModelError(
            f"{type(module).__name__}: expected one attention call a layer and pass, got a second one in layer {index}, "
            "for which the KV memory has no room; use a model that `specfw models` lists as supported"
        )
    if attention_mask is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: expected attention without a mask or position bias of the model's own, got one, "
            "which does not know draft trees; use a model that `specfw models` lists as supported"
        )
    key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, Hkv, D]
    keys, values = step.store.layer(index, key, value)
    batch = step.batch
    keys.index_copy_(0, batch.slots, key)
    values.index_copy_(0, batch.slots, value)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query = query[0].transpose(0, 1)  # [T, H, D]
    outputs = []
    for group in batch.groups:
        b, q, s = group.shape
        padded = query if batch.unpad is None else query.index_select(0, group.query)
        out = _attend_padded(
            padded.view(b, q, *query.shape[1:]).transpose(1, 2),
            keys.index_select(0, group.slots).view(b, s, *keys.shape[1:]).transpose(1, 2),
            values.index_select(0, group.slots).view(b, s, *values.shape[1:]).transpose(1, 2),
            group.windowed(sliding_window),
            scaling,
            softcap,
            s_aux,
        )
        outputs.append(out.transpose(1, 2).reshape(b * q, *out.shape[1:2], out.shape[-1]))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if batch.unpad is not None:
        packed = packed.index_select(0, batch.unpad)
    return packed[None], None


def _attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [B, H, Q, D], key and value [B, Hkv, S, D], mask bool [B, 1, Q, S] -> [B, H, Q, Dv]."""
    share = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        if (
            share > 1 and query.device.type != "cpu"
        ):  # elsewhere masked grouped heads have no fused kernel
            return _fold_groups(query, key, value, mask, scaling, share)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=share > 1
        )
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return torch.matmul(scores.softmax(-1).to(value.dtype), value)
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)


def _fold_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, share: int
) -> Tensor:
    """Query heads that share a KV head become more queries of that head."""
    b, heads, q, d = query.shape
    folded = query.reshape(b, heads // share, share * q, d)
    mask = None if mask is None else mask.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(b, heads, q, out.shape[-1])


def register() -> None:
    """Make the attention function known to transformers (repeating it does nothing)."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
