"""Packing: every request's tokens of a step become one row of T tokens, with where to read and write KV.

The linear layers see the packed [1, T] tokens; attention sees padded groups [B, Q] x [B, S]. Requests of
like size share a group, so that a long prefill chunk does not pad everybody's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.engine.memory import KVSequence

__all__ = ["AttentionGroup", "PackedBatch", "Segment", "pack"]

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Segment:
    """One sequence's part of a pass: some nodes behind its committed KV.

    Node i sits in slot n_kv + i and has position n_kv + its depth. Nodes below `first` were run
    earlier in the same step (a draft model grows its tree level by level).
    """

    sequence: KVSequence
    tokens: Ints
    """Tokens of the nodes first .. first + q - 1; those that only the device knows are -1."""
    parents: Ints
    """Parents of the nodes 0 .. first + q - 1; -1 is the last token with committed KV."""
    scored: Ints
    """Nodes whose logits are wanted."""
    first: int = 0

    @property
    def depths(self) -> Ints:
        return _depths(self.parents)


def _is_chain(parents: Ints) -> bool:
    return bool((parents == np.arange(-1, len(parents) - 1)).all())


def _depths(parents: Ints) -> Ints:
    if _is_chain(parents):
        return np.arange(len(parents))
    depths = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1 if parent >= 0 else 0
    return depths


def _ancestry(parents: Ints) -> NDArray[np.bool_]:
    """Whether column's node is on the way to the row's node, itself included: [n, n]."""
    if _is_chain(parents):
        return np.tri(len(parents), dtype=np.bool_)
    table = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            table[node] |= table[parent]
    return table


@dataclass(slots=True)
class AttentionGroup:
    """Padded queries and keys of B segments."""

    shape: tuple[int, int, int]  # B, Q, S
    query: Tensor  # int64 [B * Q], packed row of each padded query
    slots: Tensor  # int64 [B * S], KV slot of each padded key; 0 is never a real one
    mask: Tensor | None  # bool [B, 1, Q, S]; None where every key is seen by every query
    query_position: Tensor  # int64 [B, Q]
    key_position: Tensor  # int64 [B, S]
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def windowed(self, window: int | None) -> Tensor | None:
        """The mask with keys `window` or more positions behind the query removed, by position."""
        if window is None:
            return self.mask
        if window not in self._windows:
            near = (
                self.key_position[:, None, None, :] > self.query_position[:, None, :, None] - window
            )
            self._windows[window] = near if self.mask is None else near & self.mask
        return self._windows[window]


@dataclass(slots=True)
class PackedBatch:
    """The inputs of one pass, on the device."""

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T]
    slots: Tensor  # int64 [T], where each token's K and V are written
    scored: Tensor  # int64 [R], packed rows whose logits are wanted
    groups: list[AttentionGroup]
    unpad: (
        Tensor | None
    )  # int64 [T], row of each token among all groups' padded queries; None: they are the same
    first_token: Ints = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # [B], packed row of each segment's first token (host)


def pack(
    segments: Sequence[Segment],
    device: torch.device,
    device_tokens: tuple[Ints, Tensor] | None = None,
    min_tokens: int = 1,
) -> PackedBatch:
    """Lay out the segments of one pass.

    Args:
        segments: at least one.
        device: where the model is.
        device_tokens: packed rows, [D], and the tokens, int64 [D], that only the device knows.
        min_tokens: pad the pass to this many tokens, by repeating the last one.
    """
    lengths = np.array([len(segment.tokens) for segment in segments])
    first_token = np.concatenate([[0], lengths.cumsum()[:-1]])
    positions = [s.sequence.n_kv + s.depths for s in segments]
    ids = np.concatenate([s.tokens for s in segments])
    slots = np.concatenate(
        [
            s.sequence.slots(s.sequence.n_kv + s.first, s.sequence.n_kv + len(s.parents))
            for s in segments
        ]
    )
    query_positions = np.concatenate(
        [p[s.first :] for p, s in zip(positions, segments, strict=True)]
    )
    scored = np.concatenate(
        [f + s.scored - s.first for f, s in zip(first_token, segments, strict=True)]
    )
    padding = max(0, min_tokens - len(ids))
    if padding:  # the repeated token writes what it wrote before, so the padding leaves no trace
        ids, slots, query_positions = (
            np.pad(a, (0, padding), mode="edge") for a in (ids, slots, query_positions)
        )

    def on_device(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    groups, unpad = [], np.zeros(len(ids), np.int64)
    padded_rows = 0
    for members in _alike(lengths):
        group = _group(
            [segments[m] for m in members],
            [positions[m] for m in members],
            first_token[members],
            on_device,
        )
        for place, member in enumerate(members):
            rows = np.arange(lengths[member])
            unpad[first_token[member] + rows] = padded_rows + place * group.shape[1] + rows
        padded_rows += group.shape[0] * group.shape[1]
        groups.append(group)
    if padding:
        unpad[-padding:] = unpad[-padding - 1]
    input_ids = on_device(ids.clip(0))
    if device_tokens is not None and len(device_tokens[0]):
        input_ids[on_device(device_tokens[0])] = device_tokens[1]
        if padding:
            input_ids[-padding:] = input_ids[-padding - 1]
    return PackedBatch(
        input_ids=input_ids[None],
        position_ids=on_device(query_positions)[None],
        slots=on_device(slots),
        scored=on_device(scored),
        groups=groups,
        unpad=None if padded_rows == len(ids) and len(segments) == 1 else on_device(unpad),
        first_token=first_token,
    )


def _alike(lengths: Ints) -> list[Ints]:
    """Segments grouped by the size class (power of four) of their query count."""
    size_class = np.ceil(np.log(np.maximum(lengths, 1)) / np.log(4)).astype(np.int64)
    size_class = np.maximum(size_class, 2)
    return [np.flatnonzero(size_class == c) for c in np.unique(size_class)]


def _group(
    segments: Sequence[Segment],
    positions: Sequence[Ints],
    first_token: Ints,
    on_device: Callable[[NDArray[Any]], Tensor],
) -> AttentionGroup:
    batch = len(segments)
    queries = max(len(s.tokens) for s in segments)
    keys = max(s.sequence.n_kv + len(s.parents) for s in segments)
    query = np.zeros((batch, queries), np.int64)
    slots = np.zeros((batch, keys), np.int64)
    mask = np.zeros((batch, 1, queries, keys), np.bool_)
    query_position = np.zeros((batch, queries), np.int64)
    key_position = np.zeros((batch, keys), np.int64)
    for b, (s, position) in enumerate(zip(segments, positions, strict=True)):
        n_kv, q, total = s.sequence.n_kv, len(s.tokens), s.sequence.n_kv + len(s.parents)
        query[b] = first_token[b]
        query[b, :q] += np.arange(q)
        slots[b, :total] = s.sequence.slots(0, total)
        mask[b, 0, :q, :n_kv] = True
        mask[b, 0, :q, n_kv:total] = _ancestry(s.parents)[s.first :]
        mask[b, 0, q:, 0] = True  # a row without a key would be NaN
        query_position[b, :q] = position[s.first :]
        key_position[b, :n_kv] = np.arange(n_kv)
        key_position[b, n_kv:total] = position
    return AttentionGroup(
        shape=(batch, queries, keys),
        query=on_device(query.reshape(-1)),
        slots=on_device(slots.reshape(-1)),
        mask=None if mask.all() else on_device(mask),
        query_position=on_device(query_position),
        key_position=on_device(key_position),
    )
