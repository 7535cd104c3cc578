"""Growing drafts: from the head's laws, or as the tree that it is most confident of (EAGLE-2, 2406.16858)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.contracts import DraftLimits
from specfw.decoding.builder import DraftBuilder
from specfw_plugin_eagle.head import Head
from specfw_plugin_eagle.state import HeadState, pad_past

__all__ = ["guess_confident", "sample_tree"]

Ints = NDArray[np.int64]


class _Rows:
    """The head's rows below the roots of B requests; they are gone with this object."""

    def __init__(self, head: Head, states: Sequence[HeadState]) -> None:
        self._head = head
        self._past, self._seen = pad_past(head, states)
        device = self._seen.device
        self._last_read = torch.tensor([[state.end - 1] for state in states], device=device)
        self._ancestry = torch.zeros(len(states), 0, 0, dtype=torch.bool, device=device)
        self._depth = 0

    def read(self, tokens: Tensor, features: Tensor, parents: Tensor) -> Tensor:
        """Run one more level.

        Args:
            tokens: int64 [B, m].
            features: what the head returned for their parents, [B, m, d].
            parents: their parents' places among all rows read here, int64 [B, m]; -1 is the root.

        Returns:
            The head's output, [B, m, d]; the rows' places follow on those read before.
        """
        self._depth += 1
        batch, new = tokens.shape
        inherited = self._inherit(parents)
        own = torch.eye(new, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        visible = torch.cat([inherited, own], -1)
        mask = torch.cat([self._seen[:, None].expand(-1, new, -1), visible], -1)
        positions = (self._last_read + self._depth).expand(-1, new)
        outputs, self._past = self._head.run(tokens, features, positions, self._past, mask)
        older = torch.nn.functional.pad(self._ancestry, (0, new))
        self._ancestry = torch.cat([older, visible], 1)
        return outputs

    def _inherit(self, parents: Tensor) -> Tensor:
        """Which rows each new row's parent may look at: bool [B, m, N]."""
        if not self._ancestry.shape[1]:
            return self._ancestry.new_zeros(*parents.shape, 0)
        index = parents.clamp(min=0)[..., None].expand(-1, -1, self._ancestry.shape[2])
        return self._ancestry.gather(1, index) & (parents >= 0)[..., None]


@dataclass(slots=True)
class _Node:
    """A node whose children are to be drawn."""

    row: int
    """Its request's place in the batch."""
    handle: int
    place: int = -1
    """Its place among the rows read; -1 at the root."""
    column: int = 0
    """Its place in its level's padded rows."""
    children: int = 0


def sample_tree(
    head: Head,
    states: Sequence[HeadState],
    roots: Sequence[int],
    limits: Sequence[DraftLimits],
    builder: DraftBuilder,
) -> None:
    """Draw from the head's laws, level by level, one pass of the head a level."""
    rows = _Rows(head, states)
    features = _last_outputs(states)[:, None]
    left = [limit.max_nodes for limit in limits]
    live = [_Node(row, int(root)) for row, root in enumerate(roots)]
    read = depth = 0
    while live := _to_expand(live, limits, left, depth, builder):
        if depth:
            features = _read_level(rows, live, features, read, builder)
            read += features.shape[1]
        index = _pair(live, features.device)
        live = _draw(live, head.logits(features[index]), head.vocab, builder)
        depth += 1


def _to_expand(
    nodes: Sequence[_Node],
    limits: Sequence[DraftLimits],
    left: list[int],
    depth: int,
    builder: DraftBuilder,
) -> list[_Node]:
    """The nodes that get children, with how many; these are taken from what is `left`."""
    chosen = []
    wanted = builder.wants_more(np.array([node.handle for node in nodes], np.int64))
    for node, more in zip(nodes, wanted, strict=True):
        limit = limits[node.row]
        node.children = min(limit.max_width, left[node.row]) if more else 0
        if node.children > 0 and depth < limit.max_depth:
            left[node.row] -= node.children
            chosen.append(node)
    return chosen


def _read_level(
    rows: _Rows, live: Sequence[_Node], features: Tensor, read: int, builder: DraftBuilder
) -> Tensor:
    """Run the drawn nodes of one level: their outputs [B, m, d], padded."""
    device, batch = features.device, features.shape[0]
    above = _pair(live, device)  # each node's parent in the last level's rows
    parents = torch.tensor([node.place for node in live], device=device)
    counts = [0] * batch
    for node in live:
        node.column = counts[node.row]
        node.place = read + node.column
        counts[node.row] += 1
    here, shape = _pair(live, device), (batch, max(counts))
    tokens = builder.tokens_of(np.array([node.handle for node in live])).to(device)
    return rows.read(
        tokens.new_zeros(shape).index_put(here, tokens),
        features.new_zeros(*shape, features.shape[-1]).index_put(here, features[above]),
        parents.new_full(shape, -1).index_put(here, parents),
    )


def _pair(nodes: Sequence[_Node], device: torch.device) -> tuple[Tensor, Tensor]:
    """Where nodes are in their level's padded rows."""
    places = [[node.row for node in nodes], [node.column for node in nodes]]
    rows, columns = torch.tensor(places, device=device)
    return rows, columns


def _draw(
    nodes: Sequence[_Node], logits: Tensor, vocab: Tensor | None, builder: DraftBuilder
) -> list[_Node]:
    """Draw the children of nodes, whose logits are [M, Vd]: the children, which keep their parent's place."""
    drawn = []
    # More than one width only where a limit cuts a tree.
    for width in sorted({node.children for node in nodes}, reverse=True):
        same = [i for i, node in enumerate(nodes) if node.children == width]
        parents = np.array([nodes[i].handle for i in same], np.int64)
        handles = builder.sample(parents, logits[same], width, vocab)
        drawn += [
            _Node(nodes[i].row, handle, nodes[i].place, nodes[i].column)
            for i, children in zip(same, handles.tolist(), strict=True)
            for handle in children
            if handle >= 0
        ]
    return drawn


def guess_confident(
    head: Head,
    states: Sequence[HeadState],
    roots: Sequence[int],
    limits: Sequence[DraftLimits],
    width: int,
    builder: DraftBuilder,
) -> None:
    """Guess the nodes with the largest products of the head's probabilities along their paths.

    Each level expands the `width` best nodes of the last one by `width` tokens each; of all
    candidates the best are added, as point masses.
    """
    candidates = _Candidates(head, states, limits, width)
    tokens, scores, parents = candidates.grow()
    for b, (root, limit) in enumerate(zip(roots, limits, strict=True)):
        _add_best(int(root), limit.max_nodes, tokens[b], scores[b], parents[b], builder)


class _Candidates:
    """The candidate nodes of B requests, level by level and all on the head's device."""

    def __init__(
        self, head: Head, states: Sequence[HeadState], limits: Sequence[DraftLimits], width: int
    ) -> None:
        self._head, self._limits, self._width = head, limits, width
        self._rows = _Rows(head, states)
        self._features = _last_outputs(states)[:, None]

    def grow(self) -> tuple[Ints, NDArray[np.float64], Ints]:
        """Tokens, cumulative log-probabilities and parents' places (-1 at the root): [B, N] each.

        Parents come before their children; what a request's limits forbid scores -inf.
        """
        device, batch = self._features.device, len(self._limits)
        frontier = torch.zeros(batch, 1, device=device, dtype=torch.float64)  # scores
        places = torch.full((batch, 1), -1, device=device)  # among candidates
        slots = places  # among the head's rows
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        count = read = 0
        for depth in range(1, max(limit.max_depth for limit in self._limits) + 1):
            tokens, scores = self._children(frontier, depth)
            each = tokens.shape[2]
            parents = places.repeat_interleave(each, 1)
            levels.append((tokens.flatten(1), scores.flatten(1), parents))
            best = scores.flatten(1).topk(min(self._width, parents.shape[1]), -1)
            frontier, above = best.values, best.indices // each
            places = count + best.indices
            count += parents.shape[1]
            if depth == max(limit.max_depth for limit in self._limits):
                break
            self._features = self._rows.read(
                levels[-1][0].gather(1, best.indices),
                _gather(self._features, above),
                slots.gather(1, above),
            )
            slots = read + torch.arange(above.shape[1], device=device).expand(batch, -1)
            read += above.shape[1]
        tokens, scores, parents = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        return tokens.cpu().numpy(), scores.cpu().numpy(), parents.cpu().numpy()

    def _children(self, frontier: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The best tokens below each frontier node, and their scores: [B, m, width] each."""
        laws = self._head.logits(self._features).double().log_softmax(-1)
        best = laws.topk(min(self._width, laws.shape[-1]), -1)
        vocab = self._head.vocab
        tokens = best.indices if vocab is None else vocab[best.indices]
        allowed = torch.tensor(
            [
                [depth <= limit.max_depth and rank < limit.max_width for rank in range(self._width)]
                for limit in self._limits
            ],
            device=tokens.device,
        )[:, None, : tokens.shape[2]]
        scores = frontier[..., None] + best.values
        return tokens, torch.where(allowed & scores.isfinite(), scores, -torch.inf)


def _add_best(
    root: int,
    most: int,
    tokens: Ints,
    scores: NDArray[np.float64],
    parents: Ints,
    builder: DraftBuilder,
) -> None:
    """Add the `most` best candidates [N] of one request, parents first."""
    order = np.argsort(-scores, kind="stable")[:most]  # a child scores no more than its parent
    handles: dict[int, int] = {-1: root}
    for place in order[np.isfinite(scores[order])].tolist():
        parent = handles.get(int(parents[place]))
        added = [] if parent is None else builder.guess(parent, [int(tokens[place])])
        if added:
            handles[place] = added[0]


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """Rows [B, m, d] at index [B, n]."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


def _last_outputs(states: Sequence[HeadState]) -> Tensor:
    """The head's output that stands for each root, [B, d]."""
    return torch.stack([state.last for state in states if state.last is not None])
