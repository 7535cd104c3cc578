"""The drafter itself: a smaller model reads what was committed, and grows each request's tree or text.

Each step it reads the committed tokens that it has not seen yet, all requests in one pass, and then
grows their trees level by level, one pass a level. With another tokenizer than the target's, what
it reads are its own ids for the committed tokens; where these change, it goes back and reads again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.contracts import (
    DraftLimits,
    Feedback,
    LoadedTarget,
    RequestView,
    Scorer,
    TargetInfo,
)
from specfw.errors import ContractError
from specfw.fingerprint import KEY, check_fingerprint
from specfw.runner import KVMemory, KVSequence, KVStore, ModelRunner, Segment, Transaction
from specfw_plugin_small_model import KV_TOKENS
from specfw_plugin_small_model.vocabularies import Retokenized, Same, Shared, Way, meet

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder
    from specfw.decoding.draft import Draft

__all__ = ["SmallModelDrafter"]

log = logging.getLogger("specfw.small-model")

_BLOCK_SIZE = 16
_CHUNK = 512
"""Most tokens of one request in one pass."""

Ints = NDArray[np.int64]


@dataclass(eq=False, slots=True)
class _Tree:
    """What this drafter adds for one request in one step."""

    request: RequestView
    ids: Sequence[int]
    """The draft model's ids for the committed tokens."""
    sequence: KVSequence
    limits: DraftLimits
    live: list[int]
    """Handles of the deepest level."""
    room: int
    """Nodes that there is KV room for."""
    written: list[int] = field(default_factory=list)
    """Its own continuation, where the target gets only the text; the last one is not read."""
    drawn: int = 0
    """Nodes so far."""
    places: dict[int, int] = field(default_factory=dict)
    """Handle -> place behind the committed KV, of the nodes that have KV."""
    parents: list[int] = field(default_factory=list)
    """Their parents' places, -1 at the root."""

    def wishes(self, depth: int, builder: DraftBuilder) -> Iterator[_Wish]:
        """The nodes of the deepest level, at `depth`, that are to get children, and how many."""
        left = self.limits.max_nodes - self.drawn
        if depth < self.limits.max_depth:
            for handle, more in zip(
                self.live, builder.wants_more(np.array(self.live)), strict=True
            ):
                children = min(self.limits.max_width, left) if more else 0
                if children:
                    left -= children
                    yield _Wish(self, handle, children)

    def place(self, handle: int, parent: int) -> None:
        """Give a node the next place; `parent` is its parent's handle."""
        self.places[handle] = len(self.parents)
        self.parents.append(self.places.get(parent, -1))


@dataclass(frozen=True, slots=True)
class _Wish:
    """A node whose children are to be drawn."""

    tree: _Tree
    handle: int
    children: int


class SmallModelDrafter(Scorer):
    """Draws drafts from the laws of a smaller model, which has KV memory of its own."""

    def __init__(
        self,
        model: LoadedTarget,
        *,
        max_nodes: int = 4,
        max_depth: int | None = None,
        width: int = 1,
        tokenizer: Way = "auto",
        kv_tokens: int = KV_TOKENS,
        other_target: bool = False,
    ) -> None:
        """Set up; the arguments are the options of the same names, with the model already loaded."""
        self._loaded = model
        self._own = DraftLimits(max_nodes, max_nodes if max_depth is None else max_depth, width)
        self._way: Way = tokenizer
        self._kv_tokens, self._other_target = kv_tokens, other_target
        self._trees: dict[int, _Tree] = {}
        self._sequences: dict[int, KVSequence] = {}  # by request, what to release first in front
        self._read: dict[int, Sequence[int]] = {}  # by request, the ids whose KV these hold
        self._step = ExitStack()
        self._transaction: Transaction | None = None
        self._was_full = False

    def attach(self, target: TargetInfo) -> None:
        """Prepare for this target.

        Raises:
            ConfigError: the draft model's vocabulary does not meet the target's in the way asked for, or it
                was trained for another target.
            UnsupportedModelError: the draft model cannot run on the packed forward.
        """
        if not self._other_target:
            check_fingerprint(
                getattr(self._loaded.model.config, KEY, None),
                target,
                f"drafter small-model: the weights of {self._loaded.name}",
                "train a draft model for this target, or set other_target=true to use this one all the same",
            )
        self._vocabularies = meet(self._loaded, target, self._way, self._own.max_width)
        self._target_device = target.device
        self._runner: ModelRunner = ModelRunner(self._loaded.model)
        self._memory: KVMemory = KVMemory(-(-self._kv_tokens // _BLOCK_SIZE), _BLOCK_SIZE)
        self._store: KVStore = self._runner.new_store(self._memory.num_slots)
        config = self._loaded.model.config.get_text_config(decoder=True)
        self._last_id = int(config.vocab_size) - 1

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self._end_step()  # the last one, if it failed before it was observed
        self._transaction = self._step.enter_context(self._memory.transaction())
        try:
            self._plant(requests, builder)
            if isinstance(self._vocabularies, Retokenized):
                self._write(self._vocabularies, builder)
            else:
                self._grow(self._vocabularies, builder)
        except BaseException:
            self._end_step()  # nothing that was half done is kept
            raise

    def score(self, requests: Sequence[RequestView], draft: Draft) -> tuple[Tensor, Sequence[bool]]:
        """Score another drafter's draft in one pass, after what was committed since the last one.

        Raises:
            ContractError: the draft model has another tokenizer than the target.
        """
        if not isinstance(self._vocabularies, Same):
            raise ContractError(
                "drafter small-model: expected a draft model with the target's tokenizer to score drafts, got "
                f"{self._loaded.name!r}; use another one"
            )
        self._end_step()
        self._transaction = self._step.enter_context(self._memory.transaction())
        try:
            return self._score(requests, draft)
        finally:
            self._end_step()

    def observe(self, feedback: Feedback) -> None:
        """Keep the KV of what was accepted; that of all others is gone afterwards."""
        accepted, changed = [], []
        for request, emitted, kept in zip(
            feedback.requests, feedback.emitted, feedback.kept, strict=True
        ):
            if (tree := self._trees.get(request.id)) is not None:
                places, alike = self._accepted_places(tree, emitted, kept)
                if alike < tree.sequence.n_kv:
                    changed.append((tree.sequence, alike))
                else:
                    accepted.append((tree, places))
        self._store.compact(
            (tree.sequence, tree.sequence.n_kv, places) for tree, places in accepted
        )
        for tree, places in accepted:
            self._commit(tree, tree.sequence.n_kv + len(places))
        self._end_step()
        for sequence, alike in changed:
            self._memory.truncate(sequence, alike)

    def end(self, request: RequestView) -> None:
        self._trees.pop(request.id, None)
        self._release(request.id)

    def close(self) -> None:
        self._end_step()
        for id in list(self._sequences):
            self._release(id)

    def _plant(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        """Start a tree for each request that may draft and whose tokens fit."""
        self._order_sequences(requests)
        for request, root, limits in zip(requests, builder.roots, builder.limits, strict=True):
            allowed = limits & self._own
            if not allowed.max_nodes or not allowed.max_depth:
                continue
            ids = self._vocabularies.context(request.tokens)
            # The deepest node is drawn but not read, so it may lie one beyond the last position.
            positions = self._runner.max_length + 1 - len(ids)
            if positions <= 0 or not ids:
                continue
            if isinstance(self._vocabularies, Retokenized):
                depth = min(allowed.max_nodes, allowed.max_depth)
                per_token = len(ids) / len(request.tokens)
                # One more, for how the last one is spelled depends on what follows.
                room = min(positions, math.ceil((depth + 1) * per_token))
            else:
                depth = min(allowed.max_depth, positions)
                room = allowed.max_nodes
            sequence = self._make_room(request, ids, room)
            if sequence is not None:
                allowed = replace(allowed, max_depth=depth)
                self._trees[request.id] = _Tree(
                    request, ids, sequence, allowed, live=[int(root)], room=room
                )

    def _order_sequences(self, requests: Sequence[RequestView]) -> None:
        """Put first what to release first: what this step does not use, then its last requests.

        Were it simply the longest unused, a memory too small for all requests would serve none.
        """
        for request in reversed(requests):
            if (sequence := self._sequences.pop(request.id, None)) is not None:
                self._sequences[request.id] = sequence

    def _make_room(self, request: RequestView, ids: Sequence[int], nodes: int) -> KVSequence | None:
        """The request's sequence, with room for its unread ids and `nodes` more, if that fits."""
        assert self._transaction is not None
        if request.id not in self._sequences:
            self._sequences[request.id] = self._memory.open(ids)
            self._read[request.id] = ids
        sequence = self._sequences[request.id]
        alike = self._alike(self._read[request.id], ids)
        self._read[request.id] = ids
        # The last one must be read, even if a step that failed has read it.
        self._memory.truncate(sequence, min(sequence.n_kv, alike, len(ids) - 1))
        room = len(ids) - sequence.n_kv + nodes
        while self._memory.blocks_needed(sequence, room) > self._memory.available:
            self._note_full()
            first = next(iter(self._sequences))
            if first in self._trees or first == request.id:
                self._release(request.id)
                return None
            self._release(first)
        self._transaction.reserve(sequence, room)
        return sequence

    def _score(
        self, requests: Sequence[RequestView], draft: Draft
    ) -> tuple[Tensor, Sequence[bool]]:
        self._order_sequences(requests)
        segments: list[Segment] = []
        rows: list[Ints] = []
        tokens: list[Tensor] = []
        for b, request in enumerate(requests):
            nodes = int(draft.sizes[b])
            deepest = int(draft.depth[b].max(initial=0))
            sequence = None
            if len(request.tokens) + deepest <= self._runner.max_length:
                sequence = self._make_room(request, request.tokens, nodes - 1)
            if sequence is None:
                continue
            tree = _Tree(request, request.tokens, sequence, DraftLimits(), [], nodes - 1)
            self._trees[request.id] = tree
            self._read_ahead(tree)
            context = self._context(tree, _CHUNK, scored=True)
            last = len(context.tokens) - 1
            parents = np.concatenate([context.parents, last + draft.parent[b, 1:nodes]])
            drafted = np.full(nodes - 1, -1)
            scored = np.arange(last, last + nodes)
            first_row = sum(len(one.tokens) for one in segments)
            segments.append(
                Segment(sequence, np.concatenate([context.tokens, drafted]), parents, scored)
            )
            rows.append(first_row + last + np.arange(1, nodes))
            tokens.append(draft.token[b, 1:nodes])
        served = [request.id in self._trees for request in requests]
        width = self._runner.vocab_size
        logits = torch.zeros(int(draft.sizes.sum()), width, device=self._target_device)
        if segments:
            device_tokens = torch.cat(tokens).to(self._runner.device)
            part = self._run(segments, (np.concatenate(rows), device_tokens))
            where = np.repeat(served, draft.sizes)
            logits = logits.to(part.dtype)
            logits[torch.from_numpy(where).to(logits.device)] = part
            for tree in self._trees.values():
                self._commit(tree, len(tree.ids))
        return logits, served

    def _alike(self, read: Sequence[int], ids: Sequence[int]) -> int:
        """How many ids, from the first on, `read` has in common with `ids`."""
        if self._vocabularies.appends:
            return len(read)
        pairs = enumerate(zip(read, ids, strict=False))
        return next((place for place, (a, b) in pairs if a != b), min(len(read), len(ids)))

    def _write(self, vocabularies: Retokenized, builder: DraftBuilder) -> None:
        """Go on with the most likely text, id by id, and guess what spells it for the target."""
        live = list(self._trees.values())
        logits = self._read_context(live) if live else None
        while logits is not None:
            for tree, id in zip(live, _best(logits), strict=True):
                tree.written.append(id)
            live = [
                tree
                for tree in live
                if len(tree.written) < tree.room and not vocabularies.ends(tree.written[-1])
            ]
            logits = self._run([_last_written(tree) for tree in live]) if live else None
        for tree in self._trees.values():
            guess = vocabularies.guess(tree.request.tokens, tree.ids, tree.written)
            builder.guess(tree.live[0], guess[: tree.limits.max_depth])

    def _grow(self, vocabularies: Same | Shared, builder: DraftBuilder) -> None:
        """Read and draw, level by level."""
        for depth in count():
            wishes = [wish for tree in self._trees.values() for wish in tree.wishes(depth, builder)]
            if not wishes:
                return
            if depth:
                logits = self._read_nodes(wishes, vocabularies, builder)
            else:
                logits = self._read_context([wish.tree for wish in wishes])
            self._draw(wishes, *vocabularies.law(logits), builder)

    def _read_context(self, trees: Sequence[_Tree]) -> Tensor:
        """Read the committed tokens without KV: logits [M, V] that follow the roots."""
        for tree in trees:
            self._read_ahead(tree)
        logits = self._run([self._context(tree, _CHUNK, scored=True) for tree in trees])
        for tree in trees:
            self._commit(tree, len(tree.ids))
        return logits

    def _read_ahead(self, tree: _Tree) -> None:
        """Read all of the committed tokens but what goes into one pass."""
        while len(tree.ids) - tree.sequence.n_kv > _CHUNK:
            self._run([self._context(tree, _CHUNK, scored=False)])
            self._commit(tree, tree.sequence.n_kv + _CHUNK)

    def _read_nodes(
        self, wishes: Sequence[_Wish], vocabularies: Same | Shared, builder: DraftBuilder
    ) -> Tensor:
        """Read drawn nodes: logits [M, V] that follow them."""
        handles = np.array([wish.handle for wish in wishes])
        first = {wish.tree: len(wish.tree.parents) for wish in wishes}
        for wish, parent in zip(wishes, builder.parent_of(handles), strict=True):
            wish.tree.place(wish.handle, int(parent))
        tokens = vocabularies.drafted(builder.tokens_of(handles)).to(self._runner.device)
        segments = [self._nodes(tree, start) for tree, start in first.items()]
        return self._run(segments, (np.arange(len(handles)), tokens))

    def _draw(
        self,
        wishes: Sequence[_Wish],
        logits: Tensor,
        vocab: Tensor | None,
        builder: DraftBuilder,
    ) -> None:
        """Draw the children of each wish; these become the deepest level."""
        for wish in wishes:
            wish.tree.live = []
        # More than one width only where a limit cuts a tree.
        for width in sorted({wish.children for wish in wishes}, reverse=True):
            rows = [row for row, wish in enumerate(wishes) if wish.children == width]
            parents = np.array([wishes[row].handle for row in rows])
            children = builder.sample(parents, logits[rows], width, vocab)
            for row, handles in zip(rows, children, strict=True):
                drawn = [int(handle) for handle in handles if handle >= 0]
                wishes[row].tree.live += drawn
                wishes[row].tree.drawn += len(drawn)

    def _context(self, tree: _Tree, most: int, scored: bool) -> Segment:
        start = tree.sequence.n_kv
        tokens = np.array(tree.ids[start : start + most], np.int64)
        chain = np.arange(len(tokens))
        # The target may emit ids of its padding that the draft model has no embedding for.
        return Segment(
            tree.sequence,
            tokens.clip(max=self._last_id),
            chain - 1,
            chain[-1:] if scored else chain[:0],
        )

    def _nodes(self, tree: _Tree, first: int) -> Segment:
        new = np.arange(first, len(tree.parents))
        return Segment(tree.sequence, np.full(len(new), -1), np.array(tree.parents), new, first)

    def _run(
        self, segments: Sequence[Segment], device_tokens: tuple[Ints, Tensor] | None = None
    ) -> Tensor:
        rows = self._runner.run(self._store, segments, device_tokens)
        return rows.logits.to(self._target_device)

    def _accepted_places(
        self, tree: _Tree, emitted: Sequence[int], kept: Sequence[int]
    ) -> tuple[list[int], int]:
        """Places of what has KV here and belongs to the text now, nothing below another drafter's node; and
        how many of all ids read belong to it."""
        if isinstance(self._vocabularies, Retokenized):
            places, ids = list(range(len(tree.written) - 1)), tree.written[:-1]
        else:
            places = [tree.places[handle] for handle in takewhile(tree.places.__contains__, kept)]
            ids = list(self._vocabularies.ids_of(emitted[: len(places)]))
        first, read = tree.sequence.n_kv, [*tree.ids[: tree.sequence.n_kv], *ids]
        tree.ids = self._read[tree.request.id] = self._vocabularies.context(tree.request.tokens)
        alike = self._alike(read, tree.ids)
        return places[: max(0, alike - first)], alike

    def _commit(self, tree: _Tree, n_kv: int) -> None:
        assert self._transaction is not None
        self._transaction.commit(tree.sequence, tree.ids, n_kv)

    def _end_step(self) -> None:
        """Forget the trees and the KV of everything that is not committed."""
        self._trees.clear()
        self._transaction = None
        self._step.close()

    def _release(self, id: int) -> None:
        self._read.pop(id, None)
        if (sequence := self._sequences.pop(id, None)) is not None:
            self._memory.release(sequence)

    def _note_full(self) -> None:
        if not self._was_full:
            log.warning(
                "drafter small-model: the draft model's KV memory of %d tokens is full, so some requests go on "
                "without drafts or have their tokens read again; raise kv_tokens",
                self._memory.num_blocks * self._memory.block_size,
            )
            self._was_full = True


def _best(logits: Tensor) -> list[int]:
    """The most likely ids, from logits [M, V].

    Raises:
        FloatingPointError: a row has no law.
    """
    best, finite = torch.stack([logits.argmax(-1), logits.amax(-1).isfinite().long()]).tolist()
    if not all(finite):
        raise FloatingPointError("the draft model gave NaN or infinite logits")
    return list(best)


def _last_written(tree: _Tree) -> Segment:
    """The last id of a tree's own continuation, to be read and scored."""
    place = len(tree.written) - 1
    chain = np.arange(-1, place)
    return Segment(tree.sequence, np.array(tree.written[-1:]), chain, np.array([place]), place)
