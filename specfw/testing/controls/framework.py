"""Faults of the framework itself, each made for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import specfw.engine.batching as batching
import specfw.engine.engine as engine
import specfw.engine.model_runner as model_runner
import specfw.testing.cases as kit_cases
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws, SamplingBatch
from specfw.decoding.random import Site
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.attention import KVStore
from specfw.engine.batching import Segment
from specfw.engine.memory import KVSequence, _PrefixIndex
from specfw.engine.requests import Request
from specfw.testing.cases import SETTINGS, Case, DrafterFactory
from specfw.testing.controls.control import PLAIN, Control, small_cases
from specfw.testing.controls.verifiers import Aliased, Block, chain, tree

__all__ = ["FRAMEWORK", "draft_noise_by_position"]


@contextmanager
def draft_noise_by_position() -> Iterator[None]:
    """Two steps share the noise of one position, which a verifier that reads ahead leaks."""
    draw = DraftBuilder._draw_fresh

    def keyed_by_position(self: DraftBuilder, parents: Any, q: Tensor, room: Any) -> Any:
        def alias(site: Site) -> Site:
            depth = torch.from_numpy(self.depth_of(parents))
            return Site(site.purpose, site.seed, site.position + depth, 0)

        source = self._random
        self._random = Aliased(source, alias)
        try:
            return draw(self, parents, q, room)
        finally:
            self._random = source

    with patch.object(DraftBuilder, "_draw_fresh", keyed_by_position):
        yield


@contextmanager
def _rounded_laws() -> Iterator[None]:
    """Laws kept in bfloat16 are not those that were drawn from; the difference is small."""
    build = DraftBuilder.build

    def rounded(self: DraftBuilder) -> Draft:
        draft = build(self)
        if draft.qstore is None:
            return draft
        return replace(draft, qstore=draft.qstore.bfloat16().double())

    with patch.object(DraftBuilder, "build", rounded):
        yield


@contextmanager
def _penalties_of_the_prefix() -> Iterator[None]:
    """Every node penalised by the step's prefix."""
    penalise = SamplingBatch._penalise

    def without_path(self: SamplingBatch, scores: Tensor, request: Any, path: Tensor) -> Tensor:
        return penalise(self, scores, request, path[:, :0])

    with patch.object(SamplingBatch, "_penalise", without_path):
        yield


@contextmanager
def _penalties_counted_twice() -> Iterator[None]:
    """Processor state that is advanced by the draft and again by what was kept."""
    emit = Request.emit

    def twice(self: Request, tokens: Sequence[int], kept: int) -> Any:
        taken, reason = emit(self, tokens, kept)
        self.sampling.advance(self.tokens[len(self.tokens) - taken :])
        return taken, reason

    with patch.object(Request, "emit", twice):
        yield


@contextmanager
def _minimum_in_steps() -> Iterator[None]:
    """The end of text forbidden at every node of a step that begins too early."""
    forbid = SamplingBatch._forbid_early_stop

    def at_the_root(self: SamplingBatch, scores: Tensor, request: Any, depth: Tensor) -> Any:
        return forbid(self, scores, request, torch.zeros_like(depth))

    with patch.object(SamplingBatch, "_forbid_early_stop", at_the_root):
        yield


class _BonusOnly(NodeLaws):
    """Draft tokens tested against the unfiltered law."""

    def rows(self, node: Tensor, live: Tensor | None = None) -> Tensor:
        filtered = super().rows(node)
        bare = self._logits.index_select(0, self._first_row + node).softmax(-1)
        if not self._draft.max_width:
            return filtered
        tested = (self._draft.children[torch.arange(len(node)), node] >= 0).any(-1)
        return torch.where(tested[:, None], bare, filtered)


class _RowBefore(NodeLaws):
    """The law after the last kept token taken from the row before."""

    def rows(self, node: Tensor, live: Tensor | None = None) -> Tensor:
        deepest = node == self._draft.parent.shape[1] - 1
        return super().rows(torch.where(deepest, (node - 1).clamp_min(0), node), live)


class _Shifted(NodeLaws):
    """Rows that belong to another request of the batch."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first_row = self._first_row.roll(1)


def _laws(kind: type[NodeLaws]) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(engine, "NodeLaws", kind)


def _never_moved() -> AbstractContextManager[Any]:
    """Without compaction a refused sibling's keys and values stay in the context."""
    return patch.object(KVStore, "move", lambda self, source, target: None)


@contextmanager
def _written_once() -> Iterator[None]:
    """Slots written once keep what they hold; the next step's writes go nowhere."""
    pack = batching.pack
    written: dict[KVSequence, set[int]] = {}

    def write_once(segments: Sequence[Segment], *arguments: Any, **options: Any) -> Any:
        batch = pack(segments, *arguments, **options)
        for first, segment in zip(batch.first_token, segments, strict=True):
            known = written.setdefault(segment.sequence, set())
            for row in range(len(segment.tokens)):
                slot = int(batch.slots[first + row])
                if slot in known:
                    batch.slots[first + row] = 0
                known.add(slot)
        return batch

    with patch.object(model_runner, "pack", write_once):
        yield


@contextmanager
def _foreign_prefix() -> Iterator[None]:
    """Blocks of the prefix cache that hold other tokens."""
    chain_of, fill = _PrefixIndex.chain, kit_cases._fill_cache

    def careless(self: _PrefixIndex, tokens: Sequence[int], block_size: int) -> list[int]:
        return list(chain_of(self, [*tokens[:-1], 1 - tokens[-1]], block_size))

    with ExitStack() as stack:
        stack.enter_context(patch.object(_PrefixIndex, "chain", careless))
        stack.enter_context(patch.object(Case, "prompts", [[0, 1, 0, 0, 1]]))
        stack.enter_context(
            patch.object(kit_cases, "_fill_cache", lambda to, _: fill(to, [0, 1, 0, 1, 1]))
        )
        yield


def _positions_by_index() -> AbstractContextManager[Any]:
    """Siblings have one position, whatever their order in the draft."""
    return patch.object(batching, "_depths", lambda parents: np.arange(len(parents)))


def _visible_sibling() -> AbstractContextManager[Any]:
    """A causal mask over a tree shows a node its siblings."""
    return patch.object(batching, "_ancestry", lambda parents: np.tri(len(parents), dtype=np.bool_))


_PENALTIES = small_cases(SETTINGS["penalties"])
_MINIMUM = small_cases(SETTINGS["min tokens"].model_copy(update={"min_new_tokens": 1}))
_TOP_P = small_cases(SETTINGS["top-p"])
_PREFIX_HIT = (Case(PLAIN, vocab_size=2, horizon=2, memory="prefix hit"),)

_OF_MEMORY: tuple[tuple[str, DrafterFactory, Callable[[], AbstractContextManager[Any]]], ...] = (
    ("kept nodes left in draft slots", tree, _never_moved),
    ("refused token not overwritten", chain, _written_once),
    ("foreign prefix", chain, _foreign_prefix),
    ("positions by index", tree, _positions_by_index),
    ("visible sibling", tree, _visible_sibling),
)

FRAMEWORK: tuple[Control, ...] = (
    Control("draft noise keyed by position", chain, Block, broken=draft_noise_by_position),
    Control("rounded draft laws", chain, broken=_rounded_laws),
    Control(
        "penalties of the step's prefix", chain, cases=_PENALTIES, broken=_penalties_of_the_prefix
    ),
    Control("penalties counted twice", chain, cases=_PENALTIES, broken=_penalties_counted_twice),
    Control("minimum length in steps", chain, cases=_MINIMUM, broken=_minimum_in_steps),
    Control("top-p on the bonus only", chain, cases=_TOP_P, broken=_laws(_BonusOnly)),
    Control("bonus from the wrong row", chain, broken=_laws(_RowBefore)),
    Control("neighbour's row", chain, cases=small_cases(batch=3), broken=_laws(_Shifted)),
    *(
        Control(
            f"{name}, {'rejection' if verifier is RejectionVerifier else 'coupled'}",
            drafter,
            verifier,
            _PREFIX_HIT if broken is _foreign_prefix else small_cases(),
            broken,
        )
        for name, drafter, broken in _OF_MEMORY
        for verifier in (RejectionVerifier, CoupledVerifier)
    ),
)
