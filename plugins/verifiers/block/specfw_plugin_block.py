"""The verifier `block`: block verification on chains, traversal verification on trees.

The same recursion as the core's rejection verifier, but the weight with which a path survives is carried
down and rounded as late as possible, so more of a draft is kept. Sun et al., "Block verification
accelerates speculative decoding", arXiv 2403.10444; Weng et al., "Traversal verification for speculative
tree decoding", arXiv 2505.12398.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from specfw.components import Component
from specfw.contracts import API_VERSION, Outcome, Verifier
from specfw.hookspecs import hookimpl
from specfw.types import Guarantee

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from specfw.decoding.draft import Draft
    from specfw.decoding.probabilities import NodeLaws
    from specfw.decoding.random import RandomSource

__all__ = ["BlockVerifier", "specfw_api", "specfw_verifiers"]

specfw_api = API_VERSION


class BlockVerifier(Verifier):
    """Walks every tree in post-order; a node that is left ends the walk with the weight it has then.

    At node v with weight w and law p: child c enters with weight min(1, w p(x_c) / q_c(x_c)) and its own
    law; when c is refused with all below it, w and p become S / (S + 1 - w) and (w p - q_c)+ / S, where
    S is the mass of (w p - q_c)+.
    """

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        import torch

        from specfw.decoding.random import Purpose, Site

        node = torch.zeros_like(draft.start)
        last = laws.rows(node)
        live = torch.ones_like(draft.start, dtype=torch.bool)
        for left in _departures(draft, laws):
            site = Site(Purpose.WALK, draft.seed, draft.start, left.node)
            asked = live & left.leaving
            ends = asked & random.bernoulli(left.weight, site, active=asked)
            node = torch.where(ends, left.node, node)
            last = torch.where(ends[:, None], left.law, last)
            live = live & ~ends
        return Outcome(
            node, random.categorical(last, Site(Purpose.RESIDUAL, draft.seed, draft.start))
        )

    def plan(self, draft: Draft, laws: NodeLaws) -> torch.Tensor:
        import torch

        rows = torch.arange(draft.batch, device=draft.start.device)
        stop = laws.rows(torch.zeros_like(draft.start)).new_zeros(draft.token.shape)
        undecided = torch.ones_like(stop[:, 0])
        for left in _departures(draft, laws):
            ends = torch.where(left.leaving, undecided * left.weight, 0)
            stop[rows, left.node] += ends
            undecided = undecided - ends
        return stop


@dataclass(frozen=True, slots=True)
class _Departure:
    """A node that each request leaves, after all below it was refused."""

    leaving: torch.Tensor  # bool [B], which requests leave one in this turn
    node: torch.Tensor  # int64 [B]
    weight: torch.Tensor  # float [B], the chance that the walk ends here if it has not ended before
    law: torch.Tensor  # float [B, V], the law of the next token if it does


def _departures(draft: Draft, laws: NodeLaws) -> Iterator[_Departure]:
    """Every node in post-order, turn by turn; the roots come last, with weight one."""
    import torch

    rows = torch.arange(draft.batch, device=draft.start.device)
    root = torch.zeros_like(draft.start)
    root_law = laws.rows(root)
    weight = root_law.new_ones(draft.batch, draft.max_depth + 1)
    law = root_law.new_zeros(draft.batch, draft.max_depth + 1, root_law.shape[-1])
    law[:, 0] = root_law
    for moves, enters in _post_order(draft):
        at = torch.from_numpy(moves).to(root.device)
        moving, at = at >= 0, at.clamp_min(0)
        depth, _ = draft.history(at, with_path=False)
        above = (depth - 1).clamp_min(0)
        w, p = weight[rows, above], law[rows, above]
        token = draft.token[rows, at]
        q = draft.laws_of(at, token, like=p)
        if enters:
            survives = (w * p[rows, token] / q[rows, token]).clamp_max(1)
            weight[rows, depth] = torch.where(moving, survives, weight[rows, depth])
            law[rows, depth] = torch.where(moving[:, None], laws.rows(at, moving), law[rows, depth])
        else:
            yield _Departure(moving, at, weight[rows, depth], law[rows, depth])
            rest, mass = _refused(w, p, q)
            weight[rows, above] = torch.where(moving, mass, w)
            law[rows, above] = torch.where(moving[:, None], rest, p)
    yield _Departure(torch.ones_like(root, dtype=torch.bool), root, weight[:, 0], law[:, 0])


def _refused(
    w: torch.Tensor, p: torch.Tensor, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The law and the weight that are left of p [B, V] with weight w [B] after a draft from q was refused."""
    import torch

    rest = (w[:, None] * p - q).clamp_min(0)
    mass = rest.sum(-1)
    total = mass + (1 - w)  # in this order a weight of one stays exactly one
    return (
        torch.where(mass[:, None] > 0, rest / mass[:, None], p),
        torch.where(total > 0, mass / total, torch.ones_like(mass)),
    )


def _post_order(draft: Draft) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """Turn by turn, the nodes that requests enter (True) and leave (False): [B] each, -1 for none."""
    walks = [_walk(draft.parent[b], int(draft.sizes[b])) for b in range(draft.batch)]
    turns = max((len(walk) for walk in walks), default=0)
    table = np.full((turns, 2, draft.batch), -1, np.int64)
    for b, walk in enumerate(walks):
        for turn, (way, node) in enumerate(walk):
            table[turn, way, b] = node
    for moves in table:
        for nodes, enters in zip(moves, (True, False), strict=True):
            if (nodes >= 0).any():
                yield nodes, enters


def _walk(parent: NDArray[np.int32], nodes: int) -> list[tuple[int, int]]:
    """One request's moves below the root: (0, node) enters and (1, node) leaves; siblings in draw order."""
    children: list[list[int]] = [[] for _ in range(nodes)]
    for node in range(1, nodes):
        children[parent[node]].append(node)
    moves: list[tuple[int, int]] = []
    stack = [(0, child) for child in reversed(children[0])]
    while stack:
        way, node = stack.pop()
        moves.append((way, node))
        if way == 0:
            stack.append((1, node))
            stack += [(0, child) for child in reversed(children[node])]
    return moves


@hookimpl
def specfw_verifiers() -> Mapping[str, Component[Verifier]]:
    return {
        "block": Component(
            lambda _: BlockVerifier(),
            summary="The target's law; keeps more of a draft than `rejection`.",
        )
    }
