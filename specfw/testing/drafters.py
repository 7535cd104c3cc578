"""Drafters for tests: whatever the builder allows, on small vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specfw.contracts import Drafter, Feedback, RequestView, Requirements, TargetInfo
from specfw.decoding.builder import DraftBuilder
from specfw.testing.table_model import TableLM

__all__ = [
    "CuriousDrafter",
    "MixtureDrafter",
    "Relation",
    "ScriptedDrafter",
    "TableDrafter",
    "relative",
]

Relation = Literal["identical", "near", "unrelated", "sparse", "one_hot", "disjoint"]

_OTHER_TABLES = 1_000_003
"""Draft tables are numbered from here, so that none is a target's by accident."""


@lru_cache(maxsize=64)
def relative(target: TableLM, relation: Relation, seed: int = 1) -> TableLM:
    """A draft model whose laws stand in this relation to the target's, in every context."""
    size = target.config.vocab_size
    alike = {
        "max_positions": target.config.max_position_embeddings,
        "layers": target.config.num_hidden_layers,
    }
    if relation == "identical":
        return target
    seed += _OTHER_TABLES
    if relation == "near":
        return TableLM(size, seed, mix=(target, 0.7), **alike)
    if relation == "disjoint":
        return TableLM(size, seed, avoid=target, **alike)
    return TableLM(size, seed, "dense" if relation == "unrelated" else relation, **alike)


def log_laws(model: TableLM, prefixes: Sequence[Sequence[int]]) -> Tensor:
    """Logits of a table model after each prefix: float64 [M, V]."""
    laws = np.array([model.law(prefix) for prefix in prefixes])
    return torch.from_numpy(laws.reshape(-1, model.config.vocab_size)).log()


class TableDrafter(Drafter):
    """Samples trees from a table model: `width` children below every node, `depth` deep."""

    def __init__(
        self, relation: Relation = "near", depth: int = 2, width: int = 1, seed: int = 1
    ) -> None:
        self._relation, self._depth, self._width, self._seed = relation, depth, width, seed

    def attach(self, target: TargetInfo) -> None:
        self._model = relative(target.model, self._relation, self._seed)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        parents, prefixes = builder.roots, [list(request.tokens) for request in requests]
        for _ in range(self._depth):
            handles = builder.sample(parents, log_laws(self._model, prefixes), self._width)
            rows, ranks = np.nonzero(handles >= 0)
            if not len(rows):
                return
            parents = handles[rows, ranks]
            tokens = builder.tokens_of(parents).tolist()
            prefixes = [[*prefixes[row], token] for row, token in zip(rows, tokens, strict=True)]


class MixtureDrafter(TableDrafter):
    """One tree of two sampled chains and a guess, whose shape depends on what was drawn and kept."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        super().propose(requests, builder)
        for root, request in zip(builder.roots.tolist(), requests, strict=True):
            tokens = list(request.tokens)
            guess = sum(tokens) % self._model.config.vocab_size
            handles = builder.guess(root, [guess])
            second = builder.sample(np.array([root]), log_laws(self._model, [tokens[1:] or tokens]))
            handles += second[second >= 0].tolist()
            for handle, token in zip(
                handles, builder.tokens_of(np.array(handles, np.int64)).tolist(), strict=True
            ):
                if token != 0:
                    builder.sample(np.array([handle]), log_laws(self._model, [[*tokens, token]]))


class ScriptedDrafter(Drafter):
    """A tree of guesses and draws in any order, a function of the seed and the committed tokens."""

    def __init__(self, seed: int = 0, moves: int = 3, guesses: float = 0.5) -> None:
        """`moves` times it takes a node and, with chance `guesses`, guesses below it, else draws."""
        self._seed, self._moves, self._guesses = seed, moves, guesses

    def attach(self, target: TargetInfo) -> None:
        self._vocab_size = target.vocab_size

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, request in zip(builder.roots.tolist(), requests, strict=True):
            self._grow(root, np.random.default_rng([self._seed, *request.tokens]), builder)

    def _grow(self, root: int, random: np.random.Generator, builder: DraftBuilder) -> None:
        nodes = [root]
        for _ in range(self._moves):
            parent = nodes[int(random.integers(len(nodes)))]
            width = int(random.integers(1, 3))
            if random.random() < self._guesses:
                nodes += builder.guess(
                    parent, random.integers(self._vocab_size, size=width).tolist()
                )
            else:
                logits = torch.from_numpy(random.standard_normal((1, self._vocab_size)))
                logits[:, random.random(self._vocab_size) < 0.2] = -torch.inf
                logits[:, int(random.integers(self._vocab_size))] = 1.0
                handles = builder.sample(np.array([parent]), logits, width)
                nodes += handles[handles >= 0].tolist()


class CuriousDrafter(Drafter):
    """Has random extra rows scored before and behind what another drafter drafts.

    How many, and below which nodes, is a function of the seed and the committed tokens.
    """

    def __init__(self, inner: Drafter, seed: int = 0, most: int = 3, anywhere: bool = True) -> None:
        """Up to `most` rows before, and as many behind; `anywhere` below draft nodes, else below roots."""
        self._inner, self._seed, self._most, self._anywhere = inner, seed, most, anywhere

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        return self._inner.requires

    def attach(self, target: TargetInfo) -> None:
        self._vocab_size = target.vocab_size
        self._inner.attach(target)

    def begin(self, request: RequestView) -> None:
        self._inner.begin(request)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self._look(requests, builder, 0)
        self._inner.propose(requests, builder)
        self._look(requests, builder, 1)

    def observe(self, feedback: Feedback) -> None:
        self._inner.observe(feedback)

    def end(self, request: RequestView) -> None:
        self._inner.end(request)

    def _look(self, requests: Sequence[RequestView], builder: DraftBuilder, turn: int) -> None:
        nodes = builder.leaves() if self._anywhere else builder.roots
        owners = builder.request_of(nodes)
        for b, request in enumerate(requests):
            random = np.random.default_rng([self._seed, turn, *request.tokens])
            tokens = random.integers(
                self._vocab_size, size=random.integers(self._most + 1)
            ).tolist()
            parents = [int(random.integers(-1, place)) for place in range(len(tokens))]
            builder.extra(int(random.choice(nodes[owners == b])), tokens, parents)
