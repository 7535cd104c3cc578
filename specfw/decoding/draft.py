"""The draft of one step: a padded batch of ragged trees.

The shape of a tree (parents, ranks, depths) is known on the host, because it never depends on drawn
values; the tokens may live on the device only. So a step needs no synchronisation to be packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.errors import ContractError

__all__ = ["Draft", "ExtraRows", "Kind", "everything", "nothing"]


class Kind(IntEnum):
    """How a node's token came to be: a guess, or a draw from a stored law."""

    POINT = 0
    DENSE = 1


@dataclass(slots=True)
class ExtraRows:
    """What is scored for one request beside its draft; verifiers never see it, and nothing of it is kept."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """The extra row that each one follows, an earlier one, or ~n for the draft's node n; ~0 is the root."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Draft:
    """All proposed nodes of a step, one row a request.

    Node 0 is the root (the last committed token). Index order is draw order: parents come before
    children, and `rank` counts siblings in draw order, which is the order they are tested in.
    A POINT node is a guess (its q is a point mass); a DENSE node was drawn from `qstore[qrow]`,
    its law given everything drawn before it. A point mass is always a valid q.
    """

    token: Tensor  # int64 [B, N]
    parent: NDArray[np.int32]  # [B, N], -1 at the root and at padding
    rank: NDArray[np.int16]  # [B, N]
    depth: NDArray[np.int16]  # [B, N]
    valid: NDArray[np.bool_]  # [B, N]
    kind: NDArray[np.uint8]  # [B, N]
    qrow: NDArray[np.int32]  # [B, N], -1 for POINT
    qstore: Tensor | None  # float [R, V], the very rows drawn from, each summing to one
    drafter: NDArray[np.int16]  # [B, N], who proposed it (for statistics)
    start: Tensor  # int64 [B], the root's absolute position
    seed: Tensor  # int64 [B], the request's seed
    chance: Tensor | None = None
    """float64 [B, N], how likely each node's token was in the law that it was drawn from, NaN at guesses; None
    if no scheduler is asked before draws. At temperature 0 the law is the softmax of the logits."""

    @classmethod
    def empty(cls, root: Tensor, start: Tensor, seed: Tensor) -> Draft:
        """Roots only: ordinary decoding. `root`, `start` and `seed` are int64 [B]."""
        shape = (len(root), 1)
        return cls(
            token=root[:, None],
            parent=np.full(shape, -1, np.int32),
            rank=np.zeros(shape, np.int16),
            depth=np.zeros(shape, np.int16),
            valid=np.ones(shape, np.bool_),
            kind=np.zeros(shape, np.uint8),
            qrow=np.full(shape, -1, np.int32),
            qstore=None,
            drafter=np.full(shape, -1, np.int16),
            start=start,
            seed=seed,
        )

    @property
    def batch(self) -> int:
        return int(self.parent.shape[0])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Nodes per request, the root included: [B]."""
        sizes: NDArray[np.int64] = self.valid.sum(1, dtype=np.int64)
        return sizes

    @cached_property
    def max_depth(self) -> int:
        return int(self.depth.max(initial=0))

    @cached_property
    def max_width(self) -> int:
        return int(self.rank.max(initial=0)) + 1 if self.parent.shape[1] > 1 else 0

    @cached_property
    def children(self) -> Tensor:
        """Child table int64 [B, N, W] on the tokens' device, -1 where there is none."""
        table = np.full((*self.parent.shape, self.max_width), -1, np.int64)
        b, i = np.nonzero(self.parent >= 0)
        table[b, self.parent[b, i], self.rank[b, i]] = i
        return torch.from_numpy(table).to(self.token.device)

    @cached_property
    def paths(self) -> NDArray[np.int64]:
        """Nodes on the way from the root (left out) to each node: [B, N, max_depth], -1 padded."""
        table = np.full((*self.parent.shape, self.max_depth), -1, np.int64)
        for i in range(1, self.parent.shape[1]):
            rows = np.flatnonzero(self.valid[:, i])
            table[rows, i] = table[rows, self.parent[rows, i]]
            table[rows, i, self.depth[rows, i] - 1] = i
        return table

    def history(self, node: Tensor, with_path: bool = True) -> tuple[Tensor, Tensor]:
        """Depths int64 [B] of `node` [B], and the draft tokens that lead there, int64 [B, D], -1 padded.

        Without `with_path` the second is empty: [B, 0].
        """
        rows = torch.arange(len(node), device=node.device)
        depth = self._device_depth[rows, node]
        if not with_path:
            return depth, node.new_empty(len(node), 0)
        nodes = self._device_paths[rows, node]
        return depth, torch.where(nodes >= 0, self.token.gather(1, nodes.clamp_min(0)), -1)

    @cached_property
    def _device_depth(self) -> Tensor:
        return torch.from_numpy(self.depth.astype(np.int64)).to(self.token.device)

    @cached_property
    def _device_paths(self) -> Tensor:
        return torch.from_numpy(self.paths).to(self.token.device)

    def path(self, request: int, node: int) -> list[int]:
        """Nodes from the root (left out) to `node` of one request."""
        return [int(i) for i in self.paths[request, node] if i >= 0]

    def children_of(self, request: int, nodes: Sequence[int]) -> list[list[int]]:
        """The children of each of one request's `nodes`, by rank."""
        parent = self.parent[request]
        return [np.flatnonzero(parent == node).tolist() for node in nodes]

    def mean_depth(self, stop: Tensor) -> Tensor:
        """Expected draft tokens kept, float [B], if the walk ends at each node with chance `stop` [B, N]."""
        return (stop * self._device_depth).sum(-1)

    def child_with(self, node: Tensor, token: Tensor) -> Tensor:
        """The first child of `node` [B] that carries `token` [B]: int64 [B], -1 where there is none."""
        if self.max_width == 0:
            return torch.full_like(node, -1)
        rows = torch.arange(len(node), device=node.device)
        children = self.children[rows, node]  # [B, W]
        match = (children >= 0) & (self.token.gather(1, children.clamp_min(0)) == token[:, None])
        first = match.long().argmax(1, keepdim=True)
        return torch.where(match.any(1), children.gather(1, first)[:, 0], -1)

    def laws_of(self, node: Tensor, token: Tensor, like: Tensor) -> Tensor:
        """q of `node` [B], which carries `token` [B]: rows [B, V] in the shape and dtype of `like`."""
        q = torch.zeros_like(like).scatter_(1, token[:, None], 1.0)
        if self.qstore is None:
            return q
        row = self._device_qrow[torch.arange(len(node), device=node.device), node]
        return torch.where((row >= 0)[:, None], self.qstore[row.clamp_min(0)].to(like.dtype), q)

    @cached_property
    def _device_qrow(self) -> Tensor:
        return torch.from_numpy(self.qrow.astype(np.int64)).to(self.token.device)

    def as_point_masses(self) -> Draft:
        """The same tree with every token taken as a guess; always valid, whatever was drawn."""
        return replace(
            self, kind=np.zeros_like(self.kind), qrow=np.full_like(self.qrow, -1), qstore=None
        )

    def check(self) -> None:
        """Verify the tree's own rules.

        Raises:
            ContractError: parents, ranks, depths or laws contradict each other.
        """
        for b in range(self.batch):
            seen: dict[int, int] = {}
            for i in range(1, self.parent.shape[1]):
                if not self.valid[b, i]:
                    continue
                parent = int(self.parent[b, i])
                if not 0 <= parent < i or not self.valid[b, parent]:
                    raise ContractError(
                        f"draft: node {i} of request {b} has parent {parent}, not an earlier node"
                    )
                if self.rank[b, i] != seen.get(parent, 0):
                    raise ContractError(
                        f"draft: node {i} of request {b} is out of draw order among its siblings"
                    )
                if self.depth[b, i] != self.depth[b, parent] + 1:
                    raise ContractError(
                        f"draft: node {i} of request {b} is not one below its parent"
                    )
                seen[parent] = seen.get(parent, 0) + 1
                if self.kind[b, i] == Kind.DENSE:
                    row = self.qstore[self.qrow[b, i]] if self.qstore is not None else None
                    if (
                        row is None
                        or row[self.token[b, i]] <= 0
                        or abs(float(row.sum()) - 1) > 1e-4
                    ):
                        raise ContractError(
                            f"draft: node {i} of request {b} was not drawn from its stated law"
                        )


def nothing(mask: Tensor) -> bool:
    """Whether no entry of `mask` is set; on an accelerator, where asking would wait, always False."""
    return mask.device.type == "cpu" and not bool(mask.any())


def everything(mask: Tensor) -> bool:
    """Whether every entry of `mask` is set; on an accelerator, where asking would wait, always True."""
    return mask.device.type != "cpu" or bool(mask.all())
