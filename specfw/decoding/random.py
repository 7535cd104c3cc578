"""Where all chance comes from: draws keyed by what they decide, not by when they happen.

A draw is named by its site (purpose, request seed, position, node). `KeyedSource` turns a site into
noise by hashing it, so that a draw does not depend on the batch, the order or the device; the same
site always gives the same noise. Tests put an enumerator in its place (`specfw.testing`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from specfw.decoding.draft import everything

__all__ = ["InnerSource", "KeyedSource", "Purpose", "RandomSource", "Site"]


class Purpose(IntEnum):
    """What a draw decides.

    TARGET is keyed by the token's own absolute position; every other purpose by the position at
    which the step starts (its root), so that two steps never share noise.
    """

    TARGET = 0
    DRAFT = 1
    WALK = 2
    RESIDUAL = 3
    SCHEDULE = 4


@dataclass(frozen=True, slots=True)
class Site:
    """The keys of one draw for each of B rows."""

    purpose: Purpose
    seed: Tensor  # int64 [B]
    position: Tensor  # int64 [B]
    node: Tensor | int = 0  # int64 [B], or one for all


class RandomSource(ABC):
    """The only way to chance. Rows whose `active` is False may get any value."""

    @abstractmethod
    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        """The k winners of the exponential race of `probs` under the site's noise: int64 [B, k], best first.

        The first is a draw from `probs` (float [B, M], each row's sum positive); all k together are
        a draw without replacement. Entries beyond a row's support are arbitrary.
        """

    @abstractmethod
    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        """A coin for each row: bool [B], True with probability p, float [B]."""

    def categorical(self, probs: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        """One draw a row from `probs` (float [B, M], need not be normalised): int64 [B]."""
        return self.race(probs, site, 1, active)[:, 0]

    def coupled(
        self,
        probs: Tensor,
        seed: Tensor,
        position: Tensor,
        k: int = 1,
        active: Tensor | None = None,
    ) -> Tensor:
        """The k best race keys of `probs` under the target's own noise at `position`: int64 [B, k].

        Drafter and verifier that race different laws under this noise tend to agree, and the
        verifier's winner is the token at that position whatever was drafted (Daliri et al.,
        arXiv 2408.07978).
        """
        return self.race(probs, Site(Purpose.TARGET, seed, position), k, active)


_INNER = 1 << 32
"""What is added to the nodes of a draft within a draft, so that its draws have sites of their own."""


class InnerSource(RandomSource):
    """Chance for a draft that is tested while drafting: the target's noise as it is, all else apart."""

    def __init__(self, outer: RandomSource) -> None:
        self._outer = outer

    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        return self._outer.race(probs, _within(site), k, active)

    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        return self._outer.bernoulli(p, _within(site), active)


def _within(site: Site) -> Site:
    return site if site.purpose is Purpose.TARGET else replace(site, node=site.node + _INNER)


_GOLDEN = -7046029254386353131


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 [...] with wrap-around; the masks make the shifts logical."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


class KeyedSource(RandomSource):
    """Stateless noise: a hash of the site and the outcome's index."""

    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        key = self._key(site, probs.device)
        if active is None or everything(active):
            return self._winners(probs, key, k)
        winners = key.new_zeros(len(probs), k)
        winners[active] = self._winners(probs[active], key[active], k)
        return winners

    def _winners(self, probs: Tensor, key: Tensor, k: int) -> Tensor:
        times = self._race_times(probs, key)
        if k == 1:
            return times.argmin(-1, keepdim=True)
        return times.topk(k, dim=-1, largest=False).indices

    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        return self._uniform(self._key(site, p.device)) < p

    @staticmethod
    def _key(site: Site, device: torch.device) -> Tensor:
        key = _mix(site.seed.to(device) + _GOLDEN)
        node = site.node if isinstance(site.node, Tensor) else torch.tensor(site.node)
        for part in (site.position, torch.tensor(int(site.purpose)), node):
            key = _mix(key ^ _mix(part.to(device) + _GOLDEN))
        return key

    @staticmethod
    def _uniform(key: Tensor) -> Tensor:
        """float64 in the open interval (0, 1), 53 bits."""
        return (((_mix(key) >> 11) & 0x1FFFFFFFFFFFFF).double() + 0.5) * 2.0**-53

    def _race_times(self, probs: Tensor, key: Tensor) -> Tensor:
        """Arrival times Exp(1) / probs, [B, M]; infinite outside the support."""
        if probs.device.type == "cpu":
            support = probs.nonzero(as_tuple=True)
            if 4 * len(support[0]) < probs.numel():  # one-hot or filtered: hash the support only
                noise = self._exponential(key[support[0]], support[1])
                times = torch.full_like(probs, torch.inf)
                times[support] = noise.to(probs.dtype) / probs[support]
                return times
        index = torch.arange(probs.shape[-1], device=probs.device)
        noise = self._exponential(key[:, None], index).to(probs.dtype)
        return torch.where(probs > 0, noise / probs, torch.inf)

    def _exponential(self, key: Tensor, index: Tensor) -> Tensor:
        return -torch.log1p(-self._uniform(key + (index + 1) * _GOLDEN))
