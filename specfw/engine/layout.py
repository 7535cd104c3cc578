"""From a step's plan, drafts and extra rows to the segments of a pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.decoding.draft import Draft, ExtraRows
from specfw.engine.batching import Segment
from specfw.engine.planning import Work

__all__ = ["DeviceTokens", "lay_out", "remainder"]

Ints = NDArray[np.int64]

DeviceTokens = tuple[Ints, Tensor]
"""Packed rows, [D], and the tokens, int64 [D], that only the device knows."""


def lay_out(
    work: Sequence[Work], draft: Draft, extras: Sequence[ExtraRows] | None = None
) -> tuple[list[Segment], DeviceTokens]:
    """The context, the draft and the extra rows of every request.

    Row b of the draft, and of `extras`, belongs to the b-th work that decodes.
    """
    segments: list[Segment] = []
    rows: list[Ints] = [np.zeros(0, np.int64)]  # packed rows of draft tokens,
    places: list[Ints] = [np.zeros(0, np.int64)]  # and where these are in the draft
    first_row = b = 0
    for item in work:
        if item.decodes:
            nodes = int(draft.sizes[b])
            extra = ExtraRows() if extras is None else extras[b]
            segments.append(_segment(item, draft.parent[b, 1:nodes], extra))
            rows.append(first_row + item.context + np.arange(nodes - 1))
            places.append(b * draft.parent.shape[1] + np.arange(1, nodes))
            b += 1
        else:
            segments.append(_chunk(item))
        first_row += len(segments[-1].tokens)
    index = torch.from_numpy(np.concatenate(places)).to(draft.token.device)
    return segments, (np.concatenate(rows), draft.token.reshape(-1)[index])


def _chunk(work: Work) -> Segment:
    """The context of a request as a chain, of which nothing is scored."""
    sequence = work.sequence
    tokens = np.array(work.request.tokens[sequence.n_kv : sequence.n_kv + work.context], np.int64)
    return Segment(sequence, tokens, np.arange(-1, work.context - 1), np.zeros(0, np.int64))


def _segment(work: Work, draft_parents: NDArray[np.int32], extra: ExtraRows) -> Segment:
    """A chunk with the draft below its last token, and the extra rows, all scored."""
    chunk, root = _chunk(work), work.context - 1
    first_extra = work.context + len(draft_parents)
    above = np.array(extra.parents, np.int64)
    chunk.tokens = np.concatenate(
        [chunk.tokens, np.full(len(draft_parents), -1), np.array(extra.tokens, np.int64)]
    )
    chunk.parents = np.concatenate(
        [
            chunk.parents,
            root + draft_parents,
            np.where(above < 0, root + ~above, first_extra + above),
        ]
    )
    chunk.scored = np.arange(root, len(chunk.parents))
    return chunk


def remainder(
    segments: Sequence[Segment], device_tokens: DeviceTokens | None, done: Sequence[int]
) -> tuple[list[Segment], DeviceTokens | None]:
    """What is left of whole segments, unscored, once the first `done[i]` rows of segment i were run."""
    lengths = np.array([len(segment.tokens) for segment in segments])
    starts = lengths.cumsum() - lengths
    left = [
        Segment(s.sequence, s.tokens[first:], s.parents, s.scored[:0], first)
        for s, first in zip(segments, done, strict=True)
        if first < len(s.tokens)
    ]
    if device_tokens is None:
        return left, None
    rows, tokens = device_tokens
    new = np.full(int(lengths.sum()), -1)
    kept = np.concatenate(
        [start + np.arange(a, n) for start, a, n in zip(starts, done, lengths, strict=True)]
    )
    new[kept] = np.arange(len(kept))
    there = np.flatnonzero(new[rows] >= 0)
    return left, (new[rows[there]], tokens[torch.from_numpy(there).to(tokens.device)])
