"""Hypothesis strategies: laws, drafts, settings and batches, small enough to be enumerated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch
from hypothesis import strategies as st

from specfw.contracts import Drafter, DraftLimits, RequestView
from specfw.decoding.builder import DraftBuilder
from specfw.testing.cases import CHOICES, EOS, MEMORY_CASES, Case, forbids
from specfw.testing.drafters import MixtureDrafter, ScriptedDrafter, TableDrafter
from specfw.testing.table_model import LawKind
from specfw.types import SamplingParams

__all__ = [
    "Guess",
    "PlannedDrafter",
    "Sample",
    "batches",
    "cases",
    "drafters",
    "law_pairs",
    "laws",
    "limits",
    "plans",
    "sampling_params",
]

T = TypeVar("T")
Law = tuple[float, ...]


@st.composite
def laws(draw: st.DrawFn, vocab_size: int) -> Law:
    """A law over the vocabulary: often with zeros, sometimes sure."""
    parts = draw(st.lists(st.integers(0, 6), min_size=vocab_size, max_size=vocab_size).filter(any))
    return tuple(part / sum(parts) for part in parts)


@st.composite
def law_pairs(draw: st.DrawFn, vocab_size: int) -> tuple[Law, Law]:
    """Two laws: identical, without a common token, or any."""
    one = draw(laws(vocab_size))
    other = draw(st.one_of(st.just(one), laws(vocab_size)))
    free = [0.0 if p else 1.0 for p in one]
    if any(free) and draw(st.booleans()):
        other = tuple(f / sum(free) for f in free)
    return one, other


@dataclass(frozen=True, slots=True)
class Guess:
    """Guess `tokens` below the node added as number `below` (0 is the root), modulo their count."""

    below: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Draw `width` children from `law` below node number `below`."""

    below: int
    law: Law
    width: int


@st.composite
def plans(draw: st.DrawFn, vocab_size: int, max_moves: int = 3) -> tuple[Guess | Sample, ...]:
    """How to grow a tree: guesses and draws in any order and place, several at one node too."""
    below = st.integers(0, 3)
    tokens = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=2).map(tuple)
    move = st.one_of(
        st.builds(Guess, below, tokens),
        st.builds(Sample, below, laws(vocab_size), st.integers(1, vocab_size)),
    )
    return tuple(draw(st.lists(move, max_size=max_moves)))


@dataclass(frozen=True)
class PlannedDrafter(Drafter):
    """Grows the same planned tree for every request in every step."""

    plan: tuple[Guess | Sample, ...]

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root in builder.roots.tolist():
            nodes = [root]
            for move in self.plan:
                parent = nodes[move.below % len(nodes)]
                if isinstance(move, Guess):
                    nodes += builder.guess(parent, move.tokens)
                else:
                    logits = torch.tensor([move.law], dtype=torch.float64).log()
                    handles = builder.sample(np.array([parent]), logits, move.width)
                    nodes += handles[handles >= 0].tolist()


def drafters(vocab_size: int) -> st.SearchStrategy[Drafter]:
    """Drafters without state: tables of every relation to the target, scripts, mixtures, plans."""
    relation = st.sampled_from(["identical", "near", "unrelated", "sparse", "one_hot", "disjoint"])
    seed = st.integers(0, 99)
    return st.one_of(
        st.builds(TableDrafter, relation, st.integers(1, 2), st.integers(1, 2), seed),
        st.builds(MixtureDrafter, relation, st.just(1), st.just(1), seed),
        st.builds(ScriptedDrafter, seed),
        st.builds(PlannedDrafter, plans(vocab_size)),
    )


def limits() -> st.SearchStrategy[DraftLimits]:
    """Draft limits that keep enumeration small."""
    return st.builds(DraftLimits, st.integers(0, 4), st.integers(0, 2), st.integers(1, 3))


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int, horizon: int) -> SamplingParams:
    """Settings of every kind, each often left alone."""

    def often(default: T, strategy: st.SearchStrategy[T]) -> T:
        return draw(strategy) if draw(st.booleans()) else default

    penalty = st.sampled_from([-0.5, 0.3, 0.9])
    installed = find_spec("llguidance") is not None
    choices = often(None, st.just(CHOICES)) if installed and draw(st.booleans()) else None
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.3])),
        top_k=often(None, st.integers(1, vocab_size)),
        top_p=often(None, st.sampled_from([0.35, 0.6, 0.85])),
        min_p=often(None, st.sampled_from([0.15, 0.45])),
        repetition_penalty=often(1.0, st.sampled_from([0.8, 1.4])),
        presence_penalty=often(0.0, penalty),
        frequency_penalty=often(0.0, penalty),
        logit_bias=often({}, st.just({vocab_size - 1: 0.7})),
        choices=choices,
        max_new_tokens=horizon,
        # What a grammar has completed must be free to end.
        min_new_tokens=often(0, st.integers(1, min(horizon, 3) if choices else horizon)),
        stop=often((), st.sampled_from([("ab",), ("ba", "b")])),
        stop_token_ids=often((), st.just((vocab_size - 1,))) if vocab_size > 2 else (),
        ignore_eos=draw(st.booleans()) and choices is None,
        include_stop=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Worlds for `certify`."""
    vocab_size, horizon = draw(st.sampled_from([(2, 3), (3, 2)]))
    params = draw(sampling_params(vocab_size, horizon))
    # Zeros could leave no law where tokens are forbidden.
    kinds: list[LawKind] = ["dense"] if forbids(params) else ["dense", "sparse", "one_hot"]
    kind = draw(st.sampled_from(kinds))
    memory = draw(st.sampled_from(MEMORY_CASES))
    batch = 3 if memory == "preemption" else draw(st.sampled_from([1, 3]))
    return Case(params, kind, vocab_size, horizon, batch, memory, draw(st.integers(0, 99)))


@st.composite
def batches(
    draw: st.DrawFn, vocab_size: int, horizon: int = 8, max_requests: int = 4
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts and settings of requests that share an engine, each with a seed of its own."""
    token = st.integers(EOS, vocab_size - 1)
    count = draw(st.integers(1, max_requests))
    return [
        (
            draw(st.lists(token, min_size=1, max_size=6)),
            draw(sampling_params(vocab_size, horizon)).model_copy(update={"seed": seed}),
        )
        for seed in range(count)
    ]
