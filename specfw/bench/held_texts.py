"""Decoding that is held to given texts, so that what is compared works on the same ones.

Rounding differs with the rows of a pass, and a greedy text that turns elsewhere for it is easier or
harder to draft, which would be taken for speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from torch import Tensor

from specfw.contracts import Outcome
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import RandomSource, Site
from specfw.pipeline import Pipeline
from specfw.types import SamplingParams

__all__ = ["HeldTexts", "HeldVerifier"]


class HeldTexts:
    """Texts that requests are held to, each under a seed of its own."""

    def __init__(self, pipeline: Pipeline, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Write them: what the pipeline makes of each prompt greedily, in at most `tokens` tokens."""
        params = SamplingParams(max_new_tokens=tokens)
        outputs = pipeline.generate([list(prompt) for prompt in prompts], params, progress=False)
        self._texts = {
            tuple(prompt): [*prompt, *output.token_ids]
            for prompt, output in zip(prompts, outputs, strict=True)
        }
        self._seeds: Iterator[int] = count()
        self.by_seed: dict[int, list[int]] = {}

    def params(self, prompt: Sequence[int], tokens: int) -> SamplingParams:
        """Settings for a request that is to write the text of this prompt, `tokens` of it at most."""
        seed = next(self._seeds)
        self.by_seed[seed] = self._texts[tuple(prompt)]
        return SamplingParams(max_new_tokens=tokens, seed=seed)


class HeldVerifier(CoupledVerifier):
    """Does all that the coupled verifier does, and then takes the text's token; behind its end, the drawn one."""

    def __init__(self, texts: HeldTexts) -> None:
        self._texts = texts

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        return super().verify(draft, laws, _Held(random, self._texts.by_seed))


class _Held(RandomSource):
    """Draws, and answers with the texts' tokens."""

    def __init__(self, random: RandomSource, texts: Mapping[int, Sequence[int]]) -> None:
        self._random, self._texts = random, texts

    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        drawn = self._random.race(probs, site, k, active)
        places = zip(site.seed.tolist(), site.position.tolist(), strict=True)
        for row, (seed, position) in enumerate(places):
            text = self._texts[seed]
            if position < len(text):
                drawn[row, 0] = text[position]
        return drawn

    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        return self._random.bernoulli(p, site, active)
