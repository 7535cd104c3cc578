"""The target's pass in two parts, for drafters that run some of the target's own layers.

Drafts go through the *draft layers*, which write KV into the target's own memory. Those of them that
come first in the model without a gap are the *shared layers*: verification resumes behind them, so
that no row goes through one of them twice. What draft layers behind a gap wrote is written again by
the rest of the pass, before anything reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.decoding.draft import Draft
from specfw.engine.attention import KVStore
from specfw.engine.batching import Segment
from specfw.engine.guards import TREE, logit_distance, probe_length, tolerance
from specfw.engine.layer_views import LayerView, count_layers
from specfw.engine.layout import DeviceTokens, lay_out, remainder
from specfw.engine.memory import KVMemory, KVSequence
from specfw.engine.model_runner import ModelRunner, Rows
from specfw.engine.planning import Work
from specfw.errors import ConfigError, UnsupportedModelError

__all__ = ["DraftLayers", "SplitModel", "SplitPass"]

Ints = NDArray[np.int64]


class SplitModel:
    """A model as its draft layers, as the shared ones of them, and as the layers behind these."""

    def __init__(self, runner: ModelRunner, draft_layers: Sequence[int]) -> None:
        """Split the model, and check that the two parts make the whole.

        Raises:
            ConfigError: the layers do not rise from 0, or are not some of the model's.
            UnsupportedModelError: the model cannot be split exactly.
        """
        self.runner, self.count = runner, count_layers(runner.model)
        self.shared = _count_shared(tuple(draft_layers), self.count)
        self.draft = LayerView(runner, draft_layers)
        gap = self.shared < len(draft_layers)
        self.below = LayerView(runner, range(self.shared)) if gap else self.draft
        self.rest = LayerView(runner, range(self.shared, self.count))
        self.probe_error = _probe(self) if runner.checked else float("nan")


def _count_shared(layers: tuple[int, ...], count: int) -> int:
    """How many of the draft layers are shared."""
    shared = next((i for i, layer in enumerate(layers) if layer != i), len(layers))
    rising = list(layers) == sorted(set(layers))
    if not rising or not shared or layers[-1] >= count or len(layers) == count:
        raise ConfigError(
            f"drafter: expected draft layers that rise from 0 and are some, not all, of the target's "
            f"{count}, got {list(layers)}; require such"
        )
    return shared


class SplitPass:
    """One pass over the target, of which some rows may be run through the draft layers in advance."""

    def __init__(self, split: SplitModel, store: KVStore, hidden: Sequence[int] = ()) -> None:
        """Begin a pass.

        Args:
            split: the model.
            store: the KV of all sequences.
            hidden: layers whose hidden states are wanted, as `ModelRunner.run` takes them.
        """
        self._split, self._store = split, store
        self._hidden = {  # counted from 0
            layer: layer if layer >= 0 else split.count + 1 + layer for layer in hidden
        }
        below = {place for place in self._hidden.values() if place < split.shared}
        self._wanted = below | {split.shared, len(split.draft.layers)}
        self._states: dict[int, Tensor] = {}  # [rows run so far, H] by the draft view's names
        self._rows: dict[KVSequence, Ints] = {}  # where each node's row is among these
        self._count = 0

    def advance(
        self,
        segments: Sequence[Segment],
        device_tokens: DeviceTokens | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """Run what was not yet run of the segments through the draft layers.

        Args:
            segments: whole ones; from one call to the next they may grow at their ends.
            device_tokens: see `pack`.
            only: which of the segments; all of them unless given.
        """
        done = [
            len(self._rows_of(s)) if only is None or i in only else len(s.tokens)
            for i, s in enumerate(segments)
        ]
        self._run(self._split.draft, *remainder(segments, device_tokens, done))

    def _run(
        self, view: LayerView, left: Sequence[Segment], device_tokens: DeviceTokens | None
    ) -> None:
        """Run what is left of segments, and keep the states that are wanted."""
        if not left:
            return
        batch = self._split.runner.pack(left, device_tokens)
        wanted = {name for name in self._wanted if name <= len(view.layers)}
        _, states = view.run(self._store, batch, wanted)
        rows = sum(len(segment.tokens) for segment in left)
        for name, new in states.items():
            known = [self._states[name]] if name in self._states else []
            self._states[name] = torch.cat([*known, new[:rows]])
        for segment in left:
            added = self._count + np.arange(len(segment.tokens))
            self._rows[segment.sequence] = np.concatenate([self._rows_of(segment), added])
            self._count += len(added)

    def drafted(self, nodes: Sequence[tuple[KVSequence, int]]) -> Tensor:
        """What the draft layers returned for some nodes of sequences that were advanced: [M, H]."""
        rows = np.array([self._rows[sequence][node] for sequence, node in nodes], np.int64)
        return self._pick(len(self._split.draft.layers), rows)

    def finish(
        self, segments: Sequence[Segment], device_tokens: DeviceTokens | None = None
    ) -> Rows:
        """The rest of the pass, once: what `ModelRunner.run` returns."""
        split, runner = self._split, self._split.runner
        runner.model_seconds = 0.0
        done = [len(self._rows_of(segment)) for segment in segments]
        # Nobody drafts from what is left, so that it need not go behind the gap.
        self._run(split.below, *remainder(segments, device_tokens, done))
        seconds = runner.model_seconds
        batch = runner.pack(segments, device_tokens)
        order = np.concatenate([self._rows_of(segment) for segment in segments])
        order = np.pad(order, (0, batch.input_ids.shape[1] - len(order)), mode="edge")
        above = {
            place: LayerView.LAST if place == split.count else place - split.shared
            for place in self._hidden.values()
            if place > split.shared
        }
        shared = self._pick(split.shared, order)
        logits, states = split.rest.run(self._store, batch, set(above.values()), shared)
        runner.model_seconds += seconds
        hidden = {
            layer: states[above[place]] if place in above else self._pick(place, order)
            for layer, place in self._hidden.items()
        }
        return Rows(logits, hidden, batch.first_token)

    def _rows_of(self, segment: Segment) -> Ints:
        return self._rows.get(segment.sequence, np.zeros(0, np.int64))

    def _pick(self, name: int, rows: Ints) -> Tensor:
        states = self._states[name]
        return states.index_select(0, torch.from_numpy(rows).to(states.device))


class DraftLayers:
    """What a draft builder asks while the drafts of a step grow."""

    def __init__(
        self, split: SplitModel, store: KVStore, work: Sequence[Work], hidden: Sequence[int]
    ) -> None:
        """Prepare for a step's work; the other arguments are those of `SplitPass`."""
        self.target_pass = SplitPass(split, store, hidden)
        self._draft_view, self._work = split.draft, work
        self._decoding = [i for i, item in enumerate(work) if item.decodes]

    def states(self, draft: Draft, requests: Ints, nodes: Ints) -> Tensor:
        """Hidden states after the draft layers, [M, H]; runs what was not run of these requests.

        Args:
            draft: what has been drafted so far.
            requests, nodes: rows of the draft and places in them, [M].
        """
        asked = [self._decoding[b] for b in requests.tolist()]
        self.target_pass.advance(*lay_out(self._work, draft), only=set(asked))
        return self.target_pass.drafted(
            [
                (self._work[i].sequence, self._work[i].context - 1 + node)
                for i, node in zip(asked, nodes.tolist(), strict=True)
            ]
        )

    def logits(self, states: Tensor) -> Tensor:
        """What the target's norm and head make of hidden states: [M, H] -> [M, V]."""
        return self._draft_view.logits(states)


def _probe(split: SplitModel) -> float:
    """Compare a pass in parts, its draft rows in advance and level by level, with whole passes.

    Returns:
        The worst row's root mean square difference, in standard deviations of the logits.

    Raises:
        UnsupportedModelError: it exceeds what rounding explains for the dtype, or a pass fails.
    """
    name = type(split.runner.model).__name__
    try:
        error = _probe_error(split)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as cause:
        raise UnsupportedModelError(
            f"{name}: expected layers of which some can be run apart from the others, got "
            f"{type(cause).__name__}: {cause}; use a drafter without draft layers"
        ) from cause
    if not error <= tolerance(split.runner.dtype):
        raise UnsupportedModelError(
            f"{name}: expected a pass in two parts to equal a whole one, got logits that differ by {error:.2g} "
            "standard deviations; use a drafter without draft layers"
        )
    return error


@torch.inference_mode()
def _probe_error(split: SplitModel) -> float:
    runner = split.runner
    length = probe_length(runner)
    vocab_size = runner.model.config.get_text_config(decoder=True).vocab_size
    text = np.random.default_rng(0).integers(0, vocab_size, length + len(TREE))
    read, context = length // 2, length - length // 2
    memory = KVMemory(num_blocks=len(text) // 4 + 2, block_size=4, prefix_cache=False)
    sequence = memory.open(text.tolist())
    whole, parts = runner.new_store(memory.num_slots), runner.new_store(memory.num_slots)
    parents = np.concatenate([np.arange(-1, context), context - 1 + TREE[1:]])
    got: list[Tensor] = []
    expected: list[Tensor] = []
    with memory.transaction() as transaction:
        transaction.reserve(sequence, len(text))
        chunk = Segment(sequence, text[:read], np.arange(-1, read - 1), np.arange(read))
        expected.append(runner.run(whole, [chunk]).logits)
        got.append(SplitPass(split, parts).finish([chunk]).logits)
        expected.append(expected[-1])
        got.append(_head_of_whole(split, parts, chunk))
        transaction.commit(sequence, text.tolist(), read)
        grown = [
            Segment(sequence, text[read : read + rows], parents[:rows], np.arange(rows))
            for rows in (context, context + 1, len(parents))
        ]
        expected.append(runner.run(whole, grown[-1:]).logits)
        in_parts = SplitPass(split, parts)
        for segment in grown[:-1]:
            in_parts.advance([segment])
        got.append(in_parts.finish(grown[-1:]).logits)
    return logit_distance(torch.cat(got).double(), torch.cat(expected).double())


def _head_of_whole(split: SplitModel, store: KVStore, segment: Segment) -> Tensor:
    """The logits of a segment by way of `LayerView.logits` behind the last layer."""
    batch = split.runner.pack([segment], None)
    _, below = split.draft.run(store, batch, {split.shared})
    last = split.count - split.shared
    _, above = split.rest.run(store, batch, {last}, below[split.shared])
    return split.draft.logits(above[last][: len(segment.tokens)])
