"""The plan form of verifiers that walk down: one pass over the nodes, parents first, no chance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws

__all__ = ["plan_from_shares"]


def plan_from_shares(
    draft: Draft,
    laws: NodeLaws,
    decide: Callable[[Draft, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """The probability that the walk ends at each node: float [B, N].

    Args:
        draft: the trees.
        laws: the target's laws at their nodes.
        decide: what a verifier does at `node` [B] with the law there, [B, V]: the law over
            (child 0 .. W-1, none), [B, W + 1], and what is left of the target's.
    """
    rows = torch.arange(draft.batch, device=draft.start.device)
    valid = torch.from_numpy(draft.valid).to(draft.start.device)
    stop = laws.rows(torch.zeros_like(draft.start)).new_zeros(draft.token.shape)
    reach = stop.clone()
    reach[:, 0] = 1
    for place in range(draft.token.shape[1]):
        node = torch.where(valid[:, place], place, 0)
        share, _ = decide(draft, node, laws.rows(node))
        arrives = reach[:, place]
        stop[:, place] = arrives * share[:, -1]
        for rank in range(draft.max_width):
            child = draft.children[rows, node, rank]
            goes_on = valid[:, place] & (child >= 0)
            child = child.clamp_min(0)
            reach[rows, child] = torch.where(goes_on, arrives * share[:, rank], reach[rows, child])
    return stop
