"""The coupled verifier: the token at each position is a function of the seed, the position and the target's law.

Daliri, Musco, Suresh: "Coupling without communication and drafter-invariant speculative decoding",
arXiv 2408.07978. The race over a tree (the k best keys as children) extends it to several siblings.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from specfw.contracts import Outcome, Verifier
from specfw.decoding.draft import Draft, nothing
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
            drawn = random.coupled(
                laws.rows(node), draft.seed, draft.start + depth + 1, active=live
            )[:, 0]
            token = torch.where(live, drawn, token)
            child = draft.child_with(node, drawn)
            live = live & (child >= 0)
            node = torch.where(live, child, node)
            if nothing(live):
                break
        return Outcome(node, token)
