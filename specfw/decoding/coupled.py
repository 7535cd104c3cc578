"""The coupled verifier: the token at each position is a function of the seed, the position and the target's law.

Daliri, Musco, Suresh: "Coupling without communication and drafter-invariant speculative decoding",
arXiv 2408.07978. The race over a tree (the k best keys as children) extends it to several siblings.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from specfw.contracts import Outcome, Verifier
from specfw.decoding.draft import Draft, nothing
from specfw.decoding.plan_form import plan_from_shares
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import RandomSource
from specfw.types import Guarantee

__all__ = ["CoupledVerifier"]


class CoupledVerifier(Verifier):
    """Draws the target's token at each position and follows the draft as long as it carries that token.

    The text equals plain decoding's for the same seed, whatever was drafted.
    """

    guarantee: ClassVar[Guarantee] = "same-text"
    noise: ClassVar[Literal["target", "draft"]] = "target"

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        token = torch.zeros_like(draft.start)
        live = torch.ones_like(draft.start, dtype=torch.bool)
        for depth in range(draft.max_depth + 1):
            law = laws.rows(node, live)
            drawn = random.coupled(law, draft.seed, draft.start + depth + 1, active=live)[:, 0]
            token = torch.where(live, drawn, token)
            child = draft.child_with(node, drawn)
            live = live & (child >= 0)
            node = torch.where(live, child, node)
            if nothing(live):
                break
        return Outcome(node, token)

    def plan(self, draft: Draft, laws: NodeLaws) -> Tensor:
        """Takes every token for a guess: one drawn under the target's noise is kept more often."""
        return plan_from_shares(draft, laws, self._follow_children)

    @staticmethod
    def _follow_children(draft: Draft, node: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """The law over (child 0 .. W-1, none), [B, W + 1], and `law` without the children, [B, V]."""
        rows = torch.arange(len(node), device=node.device)
        share = law.new_zeros(len(node), draft.max_width + 1)
        left = law.clone()
        for rank in range(draft.max_width):
            child = draft.children[rows, node, rank]
            token = draft.token[rows, child.clamp_min(0)]
            followed = (child >= 0) & (draft.child_with(node, token) == child)
            share[:, rank] = torch.where(followed, left[rows, token], 0)
            left[rows, token] = torch.where(followed, 0, left[rows, token])
        share[:, draft.max_width] = left.sum(-1)
        return share, left
