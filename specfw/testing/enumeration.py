"""Every outcome of a randomised run, with its probability: chance is enumerated, not sampled.

A run draws through an `EnumSource` only. `enumerate_runs` repeats it, by replay and depth first, until
every combination of outcomes was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.decoding.random import KeyedSource, RandomSource, Site
from specfw.errors import ContractError

__all__ = ["EnumSource", "enumerate_runs"]

T = TypeVar("T")

_SLIVER = 1e-12
"""Parts of an interval below this share are rounding: two laws that are equal cut at equal points."""


@dataclass(slots=True)
class _Choice:
    """One place in a run where several outcomes are possible."""

    outcomes: list[int]
    weights: list[float]
    taken: int = 0

    @property
    def exhausted(self) -> bool:
        return self.taken == len(self.outcomes) - 1


class EnumSource(RandomSource):
    """Follows a script of outcomes, and extends it by the first possible one at each new choice.

    Every site owns a number u, uniform in [0, 1), of which only an interval is known. A draw from a
    law splits the interval where the law's cumulative sums (in token order) fall into it. So asking
    a site twice gives answers that hang together, as keyed noise does: drafter and verifier that
    share noise rightly stay exact, and those that share it wrongly are caught.
    """

    weight: float
    """Probability of the outcomes so far."""

    def __init__(self, script: list[_Choice] | None = None, watch: int | None = None) -> None:
        """Start a run.

        Args:
            script: the choices to replay; extended in place.
            watch: enumerate the draws of the request with this seed only, and answer all others
                by keyed noise; None enumerates all.
        """
        self.weight = 1.0
        self._script = [] if script is None else script
        self._place = 0
        self._watch = watch
        self._others = KeyedSource()
        self._known: dict[tuple[int, ...], tuple[float, float]] = {}

    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        """The first of the k is a draw from the site's number; the others are the most likely rest.

        Any law of the others would do: it is the tokens alone that matter to who gets them.
        """
        watched = list(self._watched(site, active))
        if len(watched) == len(probs):
            winners = site.seed.new_zeros(len(probs), k)
        else:
            winners = self._others.race(probs, site, k, active)
        for row, key in watched:
            law = _normalised(probs[row])
            first = self._split(key, law)
            law[first] = np.inf
            winners[row] = torch.from_numpy(np.argsort(-law, kind="stable")[:k].copy())
        return winners

    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        """True on the lower part of the site's number."""
        coins = self._others.bernoulli(p, site, active)
        for row, key in self._watched(site, active):
            heads = min(max(float(p[row]), 0.0), 1.0)
            coins[row] = self._split(key, np.array([heads, 1 - heads])) == 0
        return coins

    def _watched(self, site: Site, active: Tensor | None) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Rows to enumerate, with the keys of their sites."""
        node = site.node if isinstance(site.node, Tensor) else torch.full_like(site.seed, site.node)
        keys = torch.stack([site.seed, site.position, node.to(site.seed)], 1).tolist()
        wanted = [True] * len(keys) if active is None else active.tolist()
        for row, (key, want) in enumerate(zip(keys, wanted, strict=True)):
            if want and self._watch in (None, key[0]):
                yield row, (int(site.purpose), *key)

    def _split(self, key: tuple[int, ...], law: NDArray[np.float64]) -> int:
        """Which outcome of `law` the site's number falls on; narrows what is known of it."""
        low, high = self._known.get(key, (0.0, 1.0))
        ends = np.cumsum(law)
        ends[np.flatnonzero(law)[-1] :] = 1.0
        starts = np.concatenate([[0.0], ends[:-1]])
        lows, highs = np.maximum(starts, low), np.minimum(ends, high)
        share = (highs - lows) / (high - low)
        outcomes = np.flatnonzero(share > _SLIVER)
        weights = share[outcomes] / share[outcomes].sum()
        outcome = self._choose(outcomes.tolist(), weights.tolist())
        self._known[key] = (float(lows[outcome]), float(highs[outcome]))
        return outcome

    def _choose(self, outcomes: list[int], weights: list[float]) -> int:
        if len(outcomes) == 1:
            return outcomes[0]
        if self._place == len(self._script):
            self._script.append(_Choice(outcomes, weights))
        choice = self._script[self._place]
        if choice.outcomes != outcomes:
            raise ContractError(
                f"enumeration: choice {self._place} of a run had the outcomes {choice.outcomes} before, now "
                f"{outcomes}; draw through the source only, and build components with state anew for each run"
            )
        self._place += 1
        self.weight *= choice.weights[choice.taken]
        return choice.outcomes[choice.taken]

    def _next_script(self) -> list[_Choice] | None:
        """The script of the run after this one; None after the last."""
        script = self._script[: self._place]
        while script and script[-1].exhausted:
            script.pop()
        if not script:
            return None
        script[-1].taken += 1
        return script


def enumerate_runs(
    run: Callable[[EnumSource], T], watch: int | None = None
) -> Iterator[tuple[float, T]]:
    """Call `run` once for every combination of outcomes: its probability and what it returned.

    Args:
        run: a function of the source alone; whatever has state is built within.
        watch: see `EnumSource`.

    Raises:
        ContractError: a run did not repeat itself under the same outcomes.
    """
    script: list[_Choice] | None = []
    while script is not None:
        source = EnumSource(script, watch)
        result = run(source)
        yield source.weight, result
        script = source._next_script()


def _normalised(probs: Tensor) -> NDArray[np.float64]:
    law: NDArray[np.float64] = probs.detach().cpu().numpy().astype(np.float64)
    total = float(law.sum())
    if not np.isfinite(total) or total <= 0 or law.min() < 0:
        raise ContractError(f"enumeration: expected a law to draw from, got {law.tolist()}")
    law /= total
    return law
