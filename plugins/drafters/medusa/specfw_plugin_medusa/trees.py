"""Static draft trees: which ranks of which heads are drafted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count

from specfw.contracts import DraftLimits

__all__ = ["MedusaTree", "NodePath"]

NodePath = tuple[int, ...]
"""A node of a tree: the rank of the token at each depth, from the first head's down; 0 is the best."""


@dataclass(frozen=True)
class MedusaTree:
    """The nodes of a draft tree, each parent before its children, the most useful first."""

    paths: tuple[NodePath, ...]

    @classmethod
    def best_first(cls, weights: Sequence[Sequence[float]], nodes: int) -> MedusaTree:
        """The `nodes` likeliest nodes, if the token of rank r at depth d is right `weights[d - 1][r]` of
        the time, whatever came before; those that never are stay out."""
        waiting: list[tuple[float, int, NodePath]] = []
        order = count()

        def push_children(of: NodePath, share: float) -> None:
            ranks = weights[len(of)] if len(of) < len(weights) else ()
            for rank, weight in enumerate(ranks):
                if weight > 0:
                    heappush(waiting, (-share * weight, next(order), (*of, rank)))

        paths: list[NodePath] = []
        push_children((), 1.0)
        while waiting and len(paths) < nodes:
            share, _, path = heappop(waiting)
            paths.append(path)
            push_children(path, -share)
        return cls(tuple(paths))

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """One more than the highest rank."""
        return max((1 + max(path) for path in self.paths), default=0)

    @cached_property
    def levels(self) -> list[dict[NodePath, list[NodePath]]]:
        """For each depth the nodes above it that have children, and these."""
        levels: list[dict[NodePath, list[NodePath]]] = [{} for _ in range(self.depth)]
        for path in self.paths:
            levels[len(path) - 1].setdefault(path[:-1], []).append(path)
        for level in levels:
            for children in level.values():
                children.sort()
        return levels

    def cut(self, depth: int, width: int) -> MedusaTree:
        """The nodes of which no path is longer than `depth`, and no rank is `width` or more."""
        return MedusaTree(
            tuple(path for path in self.paths if len(path) <= depth and max(path) < width)
        )

    def within(self, limits: DraftLimits) -> MedusaTree:
        """The first nodes that respect the limits, in the same order."""
        kept: dict[NodePath, None] = {}
        children: Counter[NodePath] = Counter()
        for path in self.paths:
            parent = path[:-1]
            fits = len(path) <= limits.max_depth and children[parent] < limits.max_width
            if len(kept) < limits.max_nodes and fits and (not parent or parent in kept):
                kept[path] = None
                children[parent] += 1
        return MedusaTree(tuple(kept))
