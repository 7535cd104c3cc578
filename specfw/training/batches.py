"""Batches of texts: which ones follows from the seed and the step's number alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.training.features import Features
from specfw.training.run import Tell, quiet
from specfw.training.texts import Shard, Texts

__all__ = ["Batch", "Batches", "frequent_tokens"]


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded at their ends."""

    tokens: Tensor
    """int64 [B, T]."""
    best: Tensor
    """The target's best token after each token, int64 [B, T]; -1 where it was not asked, and at padding."""
    states: dict[int, Tensor]
    """By layer, [B, T, H]."""

    def some_asked(self, most: int, chosen: torch.Generator) -> Tensor:
        """At most `most` of the places where the target was asked, drawn by `chosen`, as indices into all B * T: int64 [n]."""
        asked = (self.best >= 0).flatten().nonzero()[:, 0]
        return asked[torch.randperm(len(asked), generator=chosen)[:most]]


class Batches:
    """All texts of a folder, to draw batches from."""

    def __init__(
        self,
        texts: Texts,
        features: Features,
        seed: int,
        size: int,
        most_tokens: int,
        tell: Tell = quiet,
    ) -> None:
        """Read the texts and compute what features there is room for.

        Args:
            texts: where they are.
            features: what is read with them.
            seed: names the order.
            size: texts in a batch.
            most_tokens: of each text, so many from its beginning.
            tell: takes a line on how it goes.

        Raises:
            ConfigError: there are no texts.
        """
        self._features, self._seed, self._size = features, seed, size
        self._shards: Sequence[Shard] = list(texts)
        self._spans = [
            (number, slice(span.start, min(span.stop, span.start + most_tokens)))
            for number, shard in enumerate(self._shards)
            for span in shard.spans()
        ]
        if not self._spans:
            raise ConfigError(
                "train: expected texts, got none; write some with --tokens or --minutes"
            )
        for number, shard in enumerate(self._shards):
            if not features.keep(number, shard):
                break
            done = number + 1
            tell(f"features of {done} of {len(self._shards)} shards", done / len(self._shards))

    @property
    def shards(self) -> Sequence[Shard]:
        """The texts themselves."""
        return self._shards

    def draw(self, step: int) -> Batch:
        """The batch of a step."""
        random = np.random.default_rng((self._seed, step))
        chosen = [self._spans[i] for i in random.integers(len(self._spans), size=self._size)]
        tokens = [self._shards[number].tokens[span] for number, span in chosen]
        best = [
            torch.from_numpy(self._shards[number].top[span, 0]).long() for number, span in chosen
        ]
        states = self._features.of(chosen, tokens)
        return Batch(
            pad_sequence([torch.from_numpy(ids).long() for ids in tokens], batch_first=True),
            pad_sequence(best, batch_first=True, padding_value=-1),
            {
                layer: pad_sequence([one[layer] for one in states], batch_first=True)
                for layer in self._features.layers
            },
        )


def frequent_tokens(shards: Sequence[Shard], target: TargetInfo, most: int) -> Tensor:
    """The tokens that texts hold and the target ranks first most often, with those that end texts: rising ids."""
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for shard in shards:
        for ids in (shard.tokens, shard.top[:, 0][shard.top[:, 0] >= 0]):
            counts += torch.from_numpy(ids).long().bincount(minlength=target.vocab_size)
    counts[list(target.eos_token_ids)] = counts.max() + 1
    return counts.topk(min(most, target.vocab_size)).indices.sort().values
