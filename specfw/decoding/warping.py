"""Temperature and filters: from scores to laws, row by row, each rule one function.

Formulas follow transformers' warpers, and so does the order: temperature, top-h, top-k, top-p, min-p,
typical, epsilon, eta.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.types import SamplingParams

__all__ = ["Warping", "column", "index_of"]

Rule = Callable[[Tensor, Tensor], Tensor]
"""Rows [M, V] and a number for each, [M, 1], to rows [M, V]."""


class Warping:
    """The temperatures and filters of the B requests of a step."""

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        def values(number: Callable[[SamplingParams], float | None], off: float) -> Numbers:
            given = [number(one) for one in params]
            return np.array([np.nan if one is None or one == off else one for one in given], float)

        self.greedy = np.array([one.temperature == 0.0 for one in params], np.bool_)
        """bool [B]: whether the most likely token is sure."""
        self._temperature = np.array([one.temperature or 1.0 for one in params])
        self._on_scores: tuple[tuple[Numbers, Rule], ...] = (
            (values(lambda one: one.top_h, -1.0), _keep_top_h),
            (values(lambda one: one.top_k, -1.0), _keep_top_k),
        )
        self._on_laws: tuple[tuple[Numbers, Rule], ...] = (
            (values(lambda one: one.top_p, 1.0), _keep_top_p),
            (values(lambda one: one.min_p, 0.0), _keep_min_p),
            (values(lambda one: one.typical_p, 1.0), _keep_typical),
            (values(lambda one: one.epsilon_cutoff, 0.0), _cut_epsilon),
            (values(lambda one: one.eta_cutoff, 0.0), _cut_eta),
        )

    def laws(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        """Probabilities of score rows [M, V], of the requests numbered `request` [M].

        Temperature 0 gives the one-hot law of the highest score (the lowest id on ties).
        """
        greedy = self.greedy[request]
        if greedy.all():
            return _one_hot(scores)
        if not greedy.any():
            return self._warp(scores, request)
        law = torch.empty_like(scores)
        sure, drawn = index_of(np.flatnonzero(greedy), scores), np.flatnonzero(~greedy)
        law[sure] = _one_hot(scores[sure])
        law[index_of(drawn, scores)] = self._warp(scores[index_of(drawn, scores)], request[drawn])
        return law

    def _warp(self, scores: Tensor, request: NDArray[np.int64]) -> Tensor:
        temperature = column(self._temperature[request], scores)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature
        for numbers, rule in self._on_scores:
            scores = _apply(rule, numbers[request], scores)
        law = scores.softmax(-1)
        for numbers, rule in self._on_laws:
            law = _apply(rule, numbers[request], law)
        return law


Numbers = NDArray[np.float64]


def _apply(rule: Rule, numbers: Numbers, rows: Tensor) -> Tensor:
    """Apply a rule to the rows whose number is given."""
    chosen = np.flatnonzero(~np.isnan(numbers))
    if not len(chosen):
        return rows
    if len(chosen) == len(numbers):
        return rule(rows, column(numbers, rows))
    index = index_of(chosen, rows)
    return rows.index_copy(0, index, rule(rows[index], column(numbers[chosen], rows)))


def column(values: Sequence[float] | NDArray[np.float64], like: Tensor) -> Tensor:
    """Numbers as a column [M, 1] in the dtype and on the device of `like`."""
    return torch.tensor(np.asarray(values), dtype=like.dtype, device=like.device)[:, None]


def index_of(rows: NDArray[np.int64], like: Tensor) -> Tensor:
    """Row numbers as int64 [M] on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(rows, np.int64)).to(like.device)


def _one_hot(scores: Tensor) -> Tensor:
    return torch.zeros_like(scores).scatter_(1, scores.argmax(-1, keepdim=True), 1.0)


def _normalised(law: Tensor) -> Tensor:
    return law / law.sum(-1, keepdim=True)


def _only(law: Tensor, kept: Tensor) -> Tensor:
    """`law` without the tokens that are not `kept` [M, V]; the most likely one always stays."""
    kept = kept | (law >= law.amax(-1, keepdim=True))
    return _normalised(torch.where(kept, law, 0))


def _entropy(law: Tensor) -> Tensor:
    terms: Tensor = torch.special.xlogy(law, law)
    return -terms.sum(-1, keepdim=True)


_TOP_H_TOKENS = 100
"""Tokens that top-h looks at, as in transformers: it drops all others."""


def _keep_top_h(scores: Tensor, share: Tensor) -> Tensor:
    """The most likely tokens, for as long as together they have at most `share` of the entropy."""
    ordered, order = scores.topk(min(_TOP_H_TOKENS, scores.shape[-1]), -1)
    law = ordered.softmax(-1)
    kept = -torch.special.xlogy(law, law).cumsum(-1) <= _entropy(law) * share
    kept[:, 0] = True
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, kept)
    return scores.masked_fill(~mask, -torch.inf)


def _keep_top_k(scores: Tensor, count: Tensor) -> Tensor:
    """The `count` highest scores, and those that tie with the last of them."""
    count = count.long().clamp_max(scores.shape[-1])
    best = scores.topk(int(count.max()), -1).values
    return scores.masked_fill(scores < best.gather(1, count - 1), -torch.inf)


_MOST_LIKELY = 1024
"""Tokens that are tried first for top-p on CPUs, where sorting a whole vocabulary takes long."""


def _keep_top_p(law: Tensor, mass: Tensor) -> Tensor:
    """The smallest set of most likely tokens of at least this mass."""
    if law.device.type == "cpu" and law.shape[-1] > _MOST_LIKELY:
        ordered, order = law.topk(_MOST_LIKELY, -1)
        enough = ordered.sum(-1, keepdim=True) >= mass
        kept = _keep_mass(law, ordered, order, mass)
        if bool(enough.all()):
            return kept
        # Row by row, for the two ways may break ties differently.
        return torch.where(enough, kept, _keep_mass(law, *_sorted(law), mass))
    return _keep_mass(law, *_sorted(law), mass)


def _sorted(law: Tensor) -> tuple[Tensor, Tensor]:
    values, order = law.sort(dim=-1, descending=True, stable=True)
    return values, order


def _keep_mass(law: Tensor, ordered: Tensor, order: Tensor, mass: Tensor) -> Tensor:
    above = ordered.cumsum(-1) - ordered
    kept = torch.where(above < mass, ordered, 0)
    return _normalised(torch.zeros_like(law).scatter_(1, order, kept))


def _keep_min_p(law: Tensor, share: Tensor) -> Tensor:
    """Tokens of at least this share of the most likely one's probability."""
    return _only(law, law >= share * law.amax(-1, keepdim=True))


def _keep_typical(law: Tensor, mass: Tensor) -> Tensor:
    """Tokens whose surprise is nearest the entropy, up to this mass (Meister et al., arXiv 2202.00666)."""
    strangeness = (-law.log() - _entropy(law)).abs()
    ordered, order = strangeness.sort(dim=-1, stable=True)
    below = (law.gather(1, order).cumsum(-1) < mass).sum(-1, keepdim=True)
    last = ordered.gather(1, below.clamp_max(law.shape[-1] - 1))
    return _normalised(torch.where(strangeness <= last, law, 0))


def _cut_epsilon(law: Tensor, least: Tensor) -> Tensor:
    """Tokens of at least this probability (Hewitt et al., arXiv 2210.15191)."""
    return _only(law, law >= least)


def _cut_eta(law: Tensor, epsilon: Tensor) -> Tensor:
    """The same, with a bound that falls with the entropy."""
    return _only(law, law >= torch.minimum(epsilon, epsilon.sqrt() * (-_entropy(law)).exp()))
