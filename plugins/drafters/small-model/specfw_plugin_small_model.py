"""The drafter `small-model`: a smaller causal language model with the target's tokenizer.

Each step it reads the committed tokens that it has not seen yet, all requests in one pass, and then
grows their trees level by level, one pass a level.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from specfw.components import Component, NestedTarget, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    DraftLimits,
    Feedback,
    LoadedTarget,
    RequestView,
    TargetInfo,
)
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from specfw.decoding.builder import DraftBuilder
    from specfw.runner import KVMemory, KVSequence, KVStore, ModelRunner, Segment, Transaction

# torch and specfw.runner are imported where they are needed, so that finding the plugin stays quick.

__all__ = ["SmallModelDrafter", "SmallModelOptions"]

specfw_api = API_VERSION

log = logging.getLogger("specfw.small-model")

KV_TOKENS = 16384
"""Room for the keys and values of this many tokens, over all requests, unless set otherwise."""

_BLOCK_SIZE = 16
_CHUNK = 512
"""Most tokens of one request in one pass."""

Ints = NDArray[np.int64]


class SmallModelOptions(Options):
    """Which model drafts, and how much."""

    model: NestedTarget
    """The draft model: any target component, such as `demo(layers=4)`, or a mapping."""
    max_nodes: Annotated[int, Field(ge=1)] = 4
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path, each a pass of the draft model; None leaves it to `max_nodes`."""
    width: Annotated[int, Field(ge=1)] = 1
    """Siblings to draw below each node: 1 makes chains, more makes trees."""
    kv_tokens: Annotated[int, Field(ge=1)] = KV_TOKENS
    """KV capacity of the draft model in tokens, over all requests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """What the draft model's weights become once loaded; `auto` leaves them as they are."""


@dataclass(eq=False, slots=True)
class _Tree:
    """What this drafter adds for one request in one step."""

    request: RequestView
    sequence: KVSequence
    limits: DraftLimits
    live: list[int]
    """Handles of the deepest level."""
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


class SmallModelDrafter(Drafter):
    """Draws drafts from the laws of a smaller model, which has KV memory of its own."""

    def __init__(
        self,
        model: LoadedTarget,
        *,
        max_nodes: int = 4,
        max_depth: int | None = None,
        width: int = 1,
        kv_tokens: int = KV_TOKENS,
    ) -> None:
        """Set up; the arguments are the options of the same names, with the model already loaded."""
        self._loaded = model
        self._own = DraftLimits(max_nodes, max_nodes if max_depth is None else max_depth, width)
        self._kv_tokens = kv_tokens
        self._trees: dict[int, _Tree] = {}
        self._sequences: dict[int, KVSequence] = {}  # by request, what to release first in front
        self._step = ExitStack()
        self._transaction: Transaction | None = None
        self._was_full = False

    def attach(self, target: TargetInfo) -> None:
        """Prepare for this target.

        Raises:
            ConfigError: the draft model's vocabulary is not the target's.
            UnsupportedModelError: the draft model cannot run on the packed forward.
        """
        from specfw.runner import KVMemory, ModelRunner

        _check_vocabulary(self._loaded, target)
        self._target_device = target.device
        self._runner: ModelRunner = ModelRunner(self._loaded.model)
        self._memory: KVMemory = KVMemory(-(-self._kv_tokens // _BLOCK_SIZE), _BLOCK_SIZE)
        self._store: KVStore = self._runner.new_store(self._memory.num_slots)
        self._last_id = _vocab_size(self._loaded.model) - 1

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self._end_step()  # the last one, if it failed before it was observed
        self._transaction = self._step.enter_context(self._memory.transaction())
        try:
            self._plant(requests, builder)
            self._grow(builder)
        except BaseException:
            self._end_step()  # nothing that was half done is kept
            raise

    def observe(self, feedback: Feedback) -> None:
        """Keep the KV of own nodes that were accepted; that of all others is gone afterwards."""
        accepted = [
            (tree, self._accepted_places(tree, kept))
            for request, kept in zip(feedback.requests, feedback.kept, strict=True)
            if (tree := self._trees.get(request.id)) is not None
        ]
        self._store.compact(
            (tree.sequence, tree.sequence.n_kv, places) for tree, places in accepted
        )
        for tree, places in accepted:
            self._commit(tree, tree.sequence.n_kv + len(places))
        self._end_step()

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
            allowed = limits & self._own_limits(request)
            if not allowed.max_nodes or not allowed.max_depth:
                continue
            sequence = self._make_room(request, allowed.max_nodes)
            if sequence is not None:
                self._trees[request.id] = _Tree(request, sequence, allowed, live=[int(root)])

    def _own_limits(self, request: RequestView) -> DraftLimits:
        """The options' limits, within the positions that the draft model has."""
        # The deepest node is drawn but not read, so it may lie one beyond the last position.
        depth = self._runner.max_length + 1 - len(request.tokens)
        return self._own & DraftLimits(self._own.max_nodes, max(0, depth), self._own.max_width)

    def _order_sequences(self, requests: Sequence[RequestView]) -> None:
        """Put first what to release first: what this step does not use, then its last requests.

        Were it simply the longest unused, a memory too small for all requests would serve none.
        """
        for request in reversed(requests):
            if (sequence := self._sequences.pop(request.id, None)) is not None:
                self._sequences[request.id] = sequence

    def _make_room(self, request: RequestView, nodes: int) -> KVSequence | None:
        """The request's sequence, with room for its unread tokens and `nodes` more, if that fits."""
        assert self._transaction is not None
        if request.id not in self._sequences:
            self._sequences[request.id] = self._memory.open(request.tokens)
        sequence = self._sequences[request.id]
        # The last token must be read, even if a step that failed has read it.
        self._memory.truncate(sequence, min(sequence.n_kv, len(request.tokens) - 1))
        room = len(request.tokens) - sequence.n_kv + nodes
        while self._memory.blocks_needed(sequence, room) > self._memory.available:
            self._note_full()
            first = next(iter(self._sequences))
            if first in self._trees or first == request.id:
                self._release(request.id)
                return None
            self._release(first)
        self._transaction.reserve(sequence, room)
        return sequence

    def _grow(self, builder: DraftBuilder) -> None:
        """Read and draw, level by level."""
        for depth in count():
            wishes = [wish for tree in self._trees.values() for wish in tree.wishes(depth, builder)]
            if not wishes:
                return
            logits = self._read_nodes(wishes, builder) if depth else self._read_context(wishes)
            self._draw(wishes, logits, builder)

    def _read_context(self, wishes: Sequence[_Wish]) -> Tensor:
        """Read the committed tokens without KV: logits [M, V] that follow the roots."""
        trees = [wish.tree for wish in wishes]
        for tree in trees:
            while len(tree.request.tokens) - tree.sequence.n_kv > _CHUNK:
                self._run([self._context(tree, _CHUNK, scored=False)])
                self._commit(tree, tree.sequence.n_kv + _CHUNK)
        logits = self._run([self._context(tree, _CHUNK, scored=True) for tree in trees])
        for tree in trees:
            self._commit(tree, len(tree.request.tokens))
        return logits

    def _read_nodes(self, wishes: Sequence[_Wish], builder: DraftBuilder) -> Tensor:
        """Read drawn nodes: logits [M, V] that follow them."""
        handles = np.array([wish.handle for wish in wishes])
        first = {wish.tree: len(wish.tree.parents) for wish in wishes}
        for wish, parent in zip(wishes, builder.parent_of(handles), strict=True):
            wish.tree.place(wish.handle, int(parent))
        tokens = builder.tokens_of(handles).to(self._runner.device)
        segments = [self._nodes(tree, start) for tree, start in first.items()]
        return self._run(segments, (np.arange(len(handles)), tokens))

    def _draw(self, wishes: Sequence[_Wish], logits: Tensor, builder: DraftBuilder) -> None:
        """Draw the children of each wish; these become the deepest level."""
        for wish in wishes:
            wish.tree.live = []
        # More than one width only where a limit cuts a tree.
        for width in sorted({wish.children for wish in wishes}, reverse=True):
            rows = [row for row, wish in enumerate(wishes) if wish.children == width]
            parents = np.array([wishes[row].handle for row in rows])
            children = builder.sample(parents, logits[rows], width)
            for row, handles in zip(rows, children, strict=True):
                drawn = [int(handle) for handle in handles if handle >= 0]
                wishes[row].tree.live += drawn
                wishes[row].tree.drawn += len(drawn)

    def _context(self, tree: _Tree, most: int, scored: bool) -> Segment:
        from specfw.runner import Segment

        start = tree.sequence.n_kv
        tokens = np.array(tree.request.tokens[start : start + most], np.int64)
        chain = np.arange(len(tokens))
        # The target may emit ids of its padding that the draft model has no embedding for.
        return Segment(
            tree.sequence,
            tokens.clip(max=self._last_id),
            chain - 1,
            chain[-1:] if scored else chain[:0],
        )

    def _nodes(self, tree: _Tree, first: int) -> Segment:
        from specfw.runner import Segment

        new = np.arange(first, len(tree.parents))
        return Segment(tree.sequence, np.full(len(new), -1), np.array(tree.parents), new, first)

    def _run(
        self, segments: Sequence[Segment], device_tokens: tuple[Ints, Tensor] | None = None
    ) -> Tensor:
        rows = self._runner.run(self._store, segments, device_tokens)
        return rows.logits.to(self._target_device)

    def _accepted_places(self, tree: _Tree, kept: Sequence[int]) -> list[int]:
        """Places of the kept nodes that have KV here: none below another drafter's node."""
        places = []
        for handle in kept:
            if handle not in tree.places:
                break
            places.append(tree.places[handle])
        return places

    def _commit(self, tree: _Tree, n_kv: int) -> None:
        assert self._transaction is not None
        self._transaction.commit(tree.sequence, tree.request.tokens, n_kv)

    def _end_step(self) -> None:
        """Forget the trees and the KV of everything that is not committed."""
        self._trees.clear()
        self._transaction = None
        self._step.close()

    def _release(self, id: int) -> None:
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


def _check_vocabulary(draft: LoadedTarget, target: TargetInfo) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's; widths may differ by padding."""
    if draft.tokenizer is None or target.tokenizer is None:
        size = _vocab_size(draft.model)
        if size != target.vocab_size:
            raise ConfigError(
                f"drafter small-model: without both tokenizers, the draft model {draft.name!r} must have "
                f"the {target.vocab_size} token ids of the target {target.name!r}, but it has {size}; "
                "use a draft model with the target's vocabulary."
            )
        return
    ours, theirs = _tokens_by_id(draft.tokenizer), _tokens_by_id(target.tokenizer)
    differing = [id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)]
    if differing:
        id = min(differing)
        raise ConfigError(
            f"drafter small-model: the draft model {draft.name!r} must have the tokenizer of the target "
            f"{target.name!r}, but token id {id} is {_shown(theirs, id)} for the target and "
            f"{_shown(ours, id)} for the draft model; use a draft model with the target's tokenizer."
        )
    _compare_special_ids(draft, target)


def _compare_special_ids(draft: LoadedTarget, target: TargetInfo) -> None:
    """Warn where the two disagree on where a text begins or ends."""
    differing = [
        f"{kind} is {theirs} for the target and {ours} for the draft model"
        for kind in ("bos_token_id", "eos_token_id")
        if (ours := getattr(draft.tokenizer, kind, None))
        != (theirs := getattr(target.tokenizer, kind, None))
    ]
    if differing:
        log.warning(
            "drafter small-model: %s; only the target's counts, and drafts may be accepted less often",
            " and ".join(differing),
        )


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {id: token for token, id in tokenizer.get_vocab().items()}


def _shown(tokens: Mapping[int, str], id: int) -> str:
    return repr(tokens[id]) if id in tokens else "no token"


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _build(options: SmallModelOptions) -> Drafter:
    import torch

    loaded = options.model.build().load()
    if options.dtype != "auto":
        loaded.model.to(getattr(torch, options.dtype))
    return SmallModelDrafter(
        loaded,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        width=options.width,
        kv_tokens=options.kv_tokens,
    )


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "small-model": Component(
            _build,
            SmallModelOptions,
            "A smaller causal language model with the target's tokenizer.",
            example={"model": "table", "width": 2},
        )
    }
