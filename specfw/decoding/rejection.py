"""The rejection verifier: multi-round speculative sampling on trees, with a general q for each child.

Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318, for chains; the rounds over
siblings follow Miao et al., arXiv 2305.09781. One categorical a depth, over the children and "none",
replaces a coin for each child.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from specfw.contracts import Outcome, Verifier
from specfw.decoding.draft import Draft, nothing
from specfw.decoding.plan_form import plan_from_shares
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import Purpose, RandomSource, Site
from specfw.types import Guarantee

__all__ = ["RejectionVerifier"]


class RejectionVerifier(Verifier):
    """Tests siblings in draw order, child c with probability min(1, r(x_c) / q_c(x_c)), where r is what
    the earlier siblings left of the target's law; the last token is drawn from what is left.
    """

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        live = torch.ones_like(draft.start, dtype=torch.bool)
        rows = torch.arange(len(node), device=node.device)
        left = laws.rows(node)  # [B, V], the law of the token after `node`
        for depth in range(draft.max_depth):
            share, refused = self._test_children(draft, node, left)
            site = Site(Purpose.WALK, draft.seed, draft.start, depth)
            # "None" goes first, so that the noise of an outcome does not depend on others' widths.
            choice = random.categorical(share.roll(1, -1), site, active=live) - 1  # [B], -1 is none
            kept = live & (choice >= 0)
            child = draft.children[rows, node, choice.clamp_min(0)]
            left = torch.where((live & ~kept)[:, None], refused, left)
            node = torch.where(kept, child, node)
            live = kept
            if nothing(live):
                break
            left = torch.where(live[:, None], laws.rows(node, live), left)
        token = random.categorical(left, Site(Purpose.RESIDUAL, draft.seed, draft.start))
        return Outcome(node, token)

    def plan(self, draft: Draft, laws: NodeLaws) -> Tensor:
        return plan_from_shares(draft, laws, self._test_children)

    @staticmethod
    def _test_children(draft: Draft, node: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """The law over (child 0 .. W-1, none), [B, W + 1], and the residual if none is kept, [B, V]."""
        rows = torch.arange(len(node), device=node.device)
        undecided = left.new_ones(len(node))
        share = left.new_zeros(len(node), draft.max_width + 1)
        for rank in range(draft.max_width):
            child = draft.children[rows, node, rank]
            exists = child >= 0
            child = child.clamp_min(0)
            token = draft.token[rows, child]
            q = draft.laws_of(child, token, like=left)
            accept = (left[rows, token] / q[rows, token]).clamp_max(1)
            accept = torch.where(exists, accept, 0)
            share[:, rank] = undecided * accept
            undecided = undecided * (1 - accept)
            left = torch.where(exists[:, None], _residual(left, q), left)
        share[:, draft.max_width] = undecided
        return share, left


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ normalised, row by row [B, V]; p itself where nothing is left, which has probability zero."""
    rest = (p - q).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)
