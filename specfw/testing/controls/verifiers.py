"""Verifiers that break the law they promise, and the exact one that some of them are made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specfw.contracts import Drafter, Outcome, Verifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import Purpose, RandomSource, Site
from specfw.decoding.rejection import RejectionVerifier
from specfw.testing.controls.control import Control
from specfw.testing.controls.statements import Siblings
from specfw.testing.drafters import TableDrafter
from specfw.types import Guarantee

__all__ = ["VERIFIERS", "Aliased", "Block", "chain", "tree"]


class ResidualNotUpdated(RejectionVerifier):
    """Tests every sibling against the whole of what the first was tested against."""

    @staticmethod
    def _test_children(draft: Draft, node: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(node))
        share = left.new_zeros(len(node), draft.max_width + 1)
        undecided, refused = left.new_ones(len(node)), left
        for rank in range(draft.max_width):
            child = draft.children[rows, node, rank]
            token = draft.token[rows, child.clamp_min(0)]
            q = draft.laws_of(child.clamp_min(0), token, like=left)
            accept = (left[rows, token] / q[rows, token]).clamp_max(1)  # of p, not of what is left
            accept = torch.where(child >= 0, accept, 0)
            share[:, rank] = undecided * accept
            undecided = undecided * (1 - accept)
            rest = (left - q).clamp_min(0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left)
            refused = torch.where((child >= 0)[:, None], rest, refused)
        share[:, draft.max_width] = undecided
        return share, refused


class ResampledFromTarget(RejectionVerifier):
    """Draws from the target's law after a refusal, not from what is left of it."""

    @staticmethod
    def _test_children(draft: Draft, node: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        return RejectionVerifier._test_children(draft, node, left)[0], left


class MaskedOnly(RejectionVerifier):
    """Takes a refused token out of the target's law, as if it had been guessed and not drawn."""

    @staticmethod
    def _test_children(draft: Draft, node: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        share, _ = RejectionVerifier._test_children(draft, node, left)
        for rank in range(draft.max_width):
            child = draft.children[torch.arange(len(node)), node, rank]
            token = draft.token[torch.arange(len(node)), child.clamp_min(0)]
            masked = left.scatter(1, token[:, None], 0.0)
            left = torch.where(
                (child >= 0)[:, None] & (masked.sum(-1, keepdim=True) > 0), masked, left
            )
        return share, left


class LongestAccepted(Verifier):
    """A coin for each token of a chain, and the longest prefix that ends in heads."""

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"
    supports_trees = False

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        for depth in range(1, draft.max_depth + 1):
            above, here = torch.full_like(node, depth - 1), torch.full_like(node, depth)
            ratio = _ratio(draft, laws.rows(above), here)
            site = Site(Purpose.WALK, draft.seed, draft.start, depth)
            node = torch.where(random.bernoulli(ratio.clamp_max(1), site), here, node)
        left = laws.rows(node)
        if draft.max_depth and int(node[0]) < draft.max_depth:
            rest = _left(draft, left, node + 1)
            left = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left)
        return Outcome(
            node, random.categorical(left, Site(Purpose.RESIDUAL, draft.seed, draft.start))
        )


class Block(Verifier):
    """Block verification of chains (Sun et al., arXiv 2403.10444), for one request; exact."""

    splits: ClassVar[bool] = True
    """Whether a weight is kept for what lies below a token."""

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"
    supports_trees = False

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        weights, last = [torch.ones(len(node), dtype=torch.float64)], draft.max_depth
        for depth in range(1, last + 1):
            p = laws.rows(torch.full_like(node, depth - 1))
            weights.append(
                (weights[-1] * _ratio(draft, p, torch.full_like(node, depth))).clamp_max(1)
            )
        for depth in range(1, last + 1):
            here = torch.full_like(node, depth)
            keep = weights[depth]
            if depth < last and self.splits:
                rest = _left(draft, weights[depth][:, None] * laws.rows(here), here + 1).sum(-1)
                keep = torch.where(keep < 1, rest / (rest + 1 - keep), 1.0)
            site = Site(Purpose.WALK, draft.seed, draft.start, depth)
            node = torch.where(random.bernoulli(keep, site), here, node)
        left = laws.rows(node)
        if len(node) and int(node[0]) < last:
            rest = _left(draft, weights[int(node[0])][:, None] * left, node + 1)
            left = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left)
        return Outcome(
            node, random.categorical(left, Site(Purpose.RESIDUAL, draft.seed, draft.start))
        )


class WeightNotSplit(Block):
    """Keeps a token with all the weight that it has, although those below may be kept with it too."""

    splits = False


class ChosenAfterLooking(Verifier):
    """One of two exact verifiers, chosen by the second draft token."""

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"
    supports_trees = False

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        looked = draft.max_depth > 1 and int(draft.token[0, 2]) == 0
        chosen: Verifier = Block() if looked else RejectionVerifier()
        return chosen.verify(draft, laws, random)


def _ratio(draft: Draft, p: Tensor, node: Tensor) -> Tensor:
    rows = torch.arange(len(node))
    token = draft.token[rows, node]
    return p[rows, token] / draft.laws_of(node, token, like=p)[rows, token]


def _left(draft: Draft, p: Tensor, node: Tensor) -> Tensor:
    token = draft.token[torch.arange(len(node)), node]
    return (p - draft.laws_of(node, token, like=p)).clamp_min(0)


class Aliased(RandomSource):
    """Answers some draws from another draw's site."""

    def __init__(self, source: RandomSource, alias: Callable[[Site], Site]) -> None:
        self._source, self._alias = source, alias

    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        return self._source.race(probs, self._alias(site), k, active)

    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        return self._source.bernoulli(p, self._alias(site), active)


class SharesTargetNoise(RejectionVerifier):
    """Has drafts drawn with the target's noise and draws its own last token with it again."""

    noise: ClassVar[Literal["target", "draft"]] = "target"

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        def alias(site: Site) -> Site:
            if site.purpose is not Purpose.RESIDUAL:
                return site
            return Site(Purpose.TARGET, site.seed, site.position + 1)

        return super().verify(draft, laws, Aliased(random, alias))


class SharesDraftSite(RejectionVerifier):
    """Tosses its first coin with the noise that drew the first draft token."""

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        def alias(site: Site) -> Site:
            if site.purpose is not Purpose.WALK:
                return site
            return Site(Purpose.DRAFT, site.seed, site.position, 1)

        return super().verify(draft, laws, Aliased(random, alias))


class SaysSameText(RejectionVerifier):
    """Promises plain decoding's text, which depends on the draft."""

    guarantee: ClassVar[Guarantee] = "same-text"


def chain() -> Drafter:
    """A chain of draws from laws that have little to do with the target's."""
    return TableDrafter("unrelated", depth=2)


def tree() -> Drafter:
    """Two siblings below every node."""
    return TableDrafter("near", depth=2, width=2)


VERIFIERS: tuple[Control, ...] = (
    Control("residual not updated between siblings", Siblings, ResidualNotUpdated),
    Control("resampled from the target", chain, ResampledFromTarget),
    Control("refused token masked only", chain, MaskedOnly),
    Control("longest accepted position", chain, LongestAccepted),
    Control("block weight not split", chain, WeightNotSplit),
    Control("verifier chosen after looking", chain, ChosenAfterLooking),
    Control("residual drawn with the target's noise", chain, SharesTargetNoise),
    Control("coin drawn with the draft's noise", chain, SharesDraftSite),
    Control("text that depends on the draft", chain, SaysSameText),
)
