"""The verifier `block`: block verification on chains, traversal verification on trees.

The same recursion as the core's rejection verifier, but the weight with which a path survives is carried
down and rounded as late as possible, so more of a draft is kept. Sun et al., "Block verification
accelerates speculative decoding", arXiv 2403.10444; Weng et al., "Traversal verification for speculative
tree decoding", arXiv 2505.12398.
"""

from __future__ import annotations

from collections.abc import Mapping
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

        rows = torch.arange(draft.batch, device=draft.start.device)
        root_law = laws.rows(torch.zeros_like(draft.start))
        weight = root_law.new_ones(draft.batch, draft.max_depth + 1)
        law = root_law.new_zeros(draft.batch, draft.max_depth + 1, root_law.shape[-1])
        law[:, 0] = root_law
        node = torch.zeros_like(draft.start)
        last = root_law
        live = torch.ones_like(draft.start, dtype=torch.bool)
        for turn, (entered, left) in enumerate(_post_order(draft)):
            for moves, enters in ((entered, True), (left, False)):
                if not (moves >= 0).any():
                    continue
                at = torch.from_numpy(moves).to(node.device)
                moving, at = at >= 0, at.clamp_min(0)
                depth, _ = draft.history(at, with_path=False)
                above = (depth - 1).clamp_min(0)
                w, p = weight[rows, above], law[rows, above]
                token = draft.token[rows, at]
                q = draft.laws_of(at, token, like=p)
                if enters:
                    survives = (w * p[rows, token] / q[rows, token]).clamp_max(1)
                    weight[rows, depth] = torch.where(moving, survives, weight[rows, depth])
                    law[rows, depth] = torch.where(moving[:, None], laws.rows(at), law[rows, depth])
                else:
                    site = Site(Purpose.WALK, draft.seed, draft.start, turn)
                    ends = live & moving & random.bernoulli(weight[rows, depth], site, active=live & moving)
                    node = torch.where(ends, at, node)
                    last = torch.where(ends[:, None], law[rows, depth], last)
                    live = live & ~ends
                    rest, mass = _refused(w, p, q)
                    weight[rows, above] = torch.where(moving, mass, w)
                    law[rows, above] = torch.where(moving[:, None], rest, p)
        last = torch.where(live[:, None], law[:, 0], last)
        return Outcome(node, random.categorical(last, Site(Purpose.RESIDUAL, draft.seed, draft.start)))


def _refused(w: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The law and the weight that are left of p [B, V] with weight w [B] after a draft from q was refused."""
    import torch

    rest = (w[:, None] * p - q).clamp_min(0)
    mass = rest.sum(-1)
    total = mass + 1 - w
    return (
        torch.where(mass[:, None] > 0, rest / mass[:, None], p),
        torch.where(total > 0, mass / total, torch.ones_like(mass)),
    )


def _post_order(draft: Draft) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Turn by turn, the node that each request enters and the node that it leaves, [B] each, -1 for none."""
    walks = [_walk(draft.parent[b], int(draft.sizes[b])) for b in range(draft.batch)]
    turns = max((len(walk) for walk in walks), default=0)
    table = np.full((turns, 2, draft.batch), -1, np.int64)
    for b, walk in enumerate(walks):
        for turn, (way, node) in enumerate(walk):
            table[turn, way, b] = node
    return [(entered, left) for entered, left in table]


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
            lambda _: BlockVerifier(), summary="The target's law; keeps more of a draft than `rejection`."
        )
    }
