"""Which tree to draft: for each number of nodes, the one that keeps most, by dynamic programming.

A node that is kept has children that are tested in order; share[d, r] is the chance that of those at
depth d it is the one of rank r that is kept. After Chen et al., "Sequoia: Scalable, robust, and
hardware-aware speculative decoding", arXiv 2402.12374, with shares that differ by depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specfw.contracts import DraftLimits

__all__ = ["Shape", "best_shapes"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What the best tree of some size looks like from afar, and the tokens that a step with it emits."""

    nodes: int
    depth: int
    width: int
    tokens: float
    """In the mean: one more than are kept."""

    @property
    def limits(self) -> DraftLimits:
        """Limits that just let this tree be drafted."""
        return DraftLimits(self.nodes, self.depth, max(self.width, 1))


@dataclass(slots=True)
class _Best:
    """By number of nodes from 0: what is kept at best, and how deep and wide that is."""

    kept: NDArray[np.float64]
    depth: NDArray[np.int64]
    width: NDArray[np.int64]

    @classmethod
    def nothing(cls, nodes: int) -> _Best:
        none = np.zeros(nodes + 1, np.int64)
        return cls(np.zeros(nodes + 1), none, none)


def best_shapes(shares: NDArray[np.float64] | Sequence[Sequence[float]], nodes: int) -> list[Shape]:
    """The best tree of 0, 1, ..., `nodes` nodes; fewer where the depth and width hold no more.

    Args:
        shares: float [D, W], by depth from 1 and rank from 0; each row's sum at most 1.
        nodes: most nodes below the root.
    """
    table = np.asarray(shares, np.float64)
    if not table.any() or not nodes:
        return [Shape(0, 0, 0, 1.0)]
    table = table[:, : np.flatnonzero(table.any(0))[-1] + 1]  # later siblings are never kept
    below = _Best.nothing(nodes)
    for row in table[::-1]:
        siblings = _Best.nothing(nodes)
        for rank in range(len(row))[::-1]:
            siblings = _with_one_more(float(row[rank]), rank, below, siblings)
        below = siblings
    depth, width = table.shape
    room = _room(depth, width, nodes)
    return [
        Shape(count, int(below.depth[count]), int(below.width[count]), 1 + float(below.kept[count]))
        for count in range(min(nodes, room) + 1)
    ]


def _room(depth: int, width: int, nodes: int) -> int:
    """Nodes of the full tree, or more than `nodes`."""
    level = total = 0
    for place in range(depth):
        level = width if place == 0 else level * width
        total += level
        if total > nodes:
            break
    return total


def _with_one_more(share: float, rank: int, below: _Best, others: _Best) -> _Best:
    """The best division of nodes between a child of this rank, with all below it, and later siblings."""
    sizes = len(below.kept)
    given = np.arange(1, sizes)  # nodes for the child, itself included
    left = np.arange(sizes)[:, None] - given  # [sizes, sizes - 1]
    kept = share * (1 + below.kept[given - 1]) + others.kept[left]
    kept[left < 0] = -1.0
    choice = kept.argmax(1)
    most = kept[np.arange(sizes), choice]
    take = most > 0
    rest = np.arange(sizes) - given[choice]
    return _Best(
        np.where(take, most, 0.0),
        np.where(take, np.maximum(1 + below.depth[choice], others.depth[rest]), 0),
        np.where(
            take, np.maximum(np.maximum(rank + 1, below.width[choice]), others.width[rest]), 0
        ),
    )
