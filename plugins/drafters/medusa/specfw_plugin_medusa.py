"""The drafter `medusa`: trees from Medusa heads, small networks that each predict one further token.

Medusa (Cai et al., 2401.10774): head i reads the target's last hidden state, after the final norm, at
the last position that went through the target, and predicts the token i + 1 places after the newest
one, whatever lies between. So each head's law is the same for all nodes of its depth, and a valid one.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    DraftLimits,
    Feedback,
    RequestView,
    Requirements,
    TargetInfo,
)
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from specfw.decoding.builder import DraftBuilder

# torch is imported where it is needed, so that finding the plugin stays quick.

__all__ = ["MedusaDrafter", "MedusaOptions", "MedusaTree", "NodePath"]

specfw_api = API_VERSION

log = logging.getLogger("specfw.medusa")

NodePath = tuple[int, ...]
"""A node of a tree: the rank of the token at each depth, from the first head's down; 0 is the best."""

_Weights = tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]

_LAST_LAYER = -1
"""Of transformers' hidden states, the one after the final norm, which those before it lack."""

_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin",
)
"""What the heads' file may be called, in the order of preference."""


def _parents_first(paths: tuple[NodePath, ...]) -> tuple[NodePath, ...]:
    """The same nodes in the same order, but each parent before its children."""
    listed = set(paths)
    ordered: dict[NodePath, None] = {}
    for path in paths:
        for depth in range(1, len(path) + 1):
            if path[:depth] not in listed:
                raise ValueError(
                    f"the tree has the node {list(path)} but not its parent {list(path[:depth])}"
                )
            ordered[path[:depth]] = None
    return tuple(ordered)


class MedusaOptions(Options):
    """Which heads, and the shape of their tree: of `tree`, `accuracy` and `widths`, one at most."""

    path: Path | None = None
    """The checkpoint's folder, or the heads' file (`.pt`, `.bin` or `.safetensors`)."""
    untrained: Annotated[int, Field(ge=1)] | None = None
    """In place of `path`: so many heads as they are before training, which repeat the target's own
    prediction; for trials only."""
    mode: Literal["sampled", "point"] = "sampled"
    """`sampled` draws each child from its head's law under the request's settings; `point` takes each
    head's most likely tokens, as they are, whatever the settings."""
    max_nodes: Annotated[int, Field(ge=1)] = 7
    """Draft nodes for each request and step; of a larger tree, the first ones."""
    tree: (
        Annotated[
            tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)], ...],
            Field(min_length=1),
            AfterValidator(_parents_first),
        ]
        | None
    ) = None
    """The nodes as paths of ranks, the most useful first: `[[0], [0, 0], [1]]`."""
    accuracy: Annotated[tuple[_Weights, ...], Field(min_length=1)] | None = None
    """For each head how often its best token, its second and so on were right, as measured; the tree
    of those `max_nodes` nodes that are then kept most often."""
    widths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None = None
    """For each head how many children a node of its depth gets at most, each rank and each further
    depth counting half of the one before; unless a shape is given, as many as there is room for."""

    @model_validator(mode="after")
    def _one_of_each(self) -> MedusaOptions:
        if (self.path is None) == (self.untrained is None):
            raise ValueError("give either path or untrained")
        if sum(shape is not None for shape in (self.tree, self.accuracy, self.widths)) > 1:
            raise ValueError("give only one of tree, accuracy and widths")
        return self


@dataclass(frozen=True)
class MedusaTree:
    """The nodes of a draft tree, each parent before its children, the most useful first."""

    paths: tuple[NodePath, ...]

    @classmethod
    def best_first(cls, weights: Sequence[Sequence[float]], nodes: int) -> MedusaTree:
        """The `nodes` likeliest nodes, if the token of rank r at depth d is right `weights[d - 1][r]` of
        the time, whatever came before; those that never are stay out."""
        waiting: list[tuple[float, int, NodePath]] = []
        order = count()

        def push_children(of: NodePath, share: float) -> None:
            ranks = weights[len(of)] if len(of) < len(weights) else ()
            for rank, weight in enumerate(ranks):
                if weight > 0:
                    heappush(waiting, (-share * weight, next(order), (*of, rank)))

        paths: list[NodePath] = []
        push_children((), 1.0)
        while waiting and len(paths) < nodes:
            share, _, path = heappop(waiting)
            paths.append(path)
            push_children(path, -share)
        return cls(tuple(paths))

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @property
    def width(self) -> int:
        """One more than the highest rank."""
        return max((1 + max(path) for path in self.paths), default=0)

    @cached_property
    def levels(self) -> list[dict[NodePath, list[NodePath]]]:
        """For each depth the nodes above it that have children, and these."""
        levels: list[dict[NodePath, list[NodePath]]] = [{} for _ in range(self.depth)]
        for path in self.paths:
            levels[len(path) - 1].setdefault(path[:-1], []).append(path)
        for level in levels:
            for children in level.values():
                children.sort()
        return levels

    def cut(self, depth: int, width: int) -> MedusaTree:
        """The nodes of which no path is longer than `depth`, and no rank is `width` or more."""
        return MedusaTree(
            tuple(path for path in self.paths if len(path) <= depth and max(path) < width)
        )

    def within(self, limits: DraftLimits) -> MedusaTree:
        """The first nodes that respect the limits, in the same order."""
        kept: dict[NodePath, None] = {}
        children: Counter[NodePath] = Counter()
        for path in self.paths:
            parent = path[:-1]
            fits = len(path) <= limits.max_depth and children[parent] < limits.max_width
            if len(kept) < limits.max_nodes and fits and (not parent or parent in kept):
                kept[path] = None
                children[parent] += 1
        return MedusaTree(tuple(kept))


@dataclass(frozen=True, slots=True)
class _Head:
    """One head: residual blocks, then a projection on the vocabulary."""

    blocks: Sequence[tuple[Tensor, Tensor | None]]
    """Weight [H, H] and bias [H] of each block."""
    projection: Tensor | None
    """[Vd, H]; None for the target's own."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The heads that a file holds, in the order of the tokens that they predict."""

    heads: Sequence[_Head]
    vocab: Tensor | None = None
    """The target's id of each draft id, int64 [Vd], if the draft's vocabulary is reduced."""


class _Heads:
    """The heads on the target's device, in its dtype."""

    def __init__(self, checkpoint: _Checkpoint, target: TargetInfo) -> None:
        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(target.device, target.dtype)

        self._heads = [
            _Head(
                [(placed(w), None if b is None else placed(b)) for w, b in head.blocks],
                None if head.projection is None else placed(head.projection),
            )
            for head in checkpoint.heads
        ]
        self.vocab = None if checkpoint.vocab is None else checkpoint.vocab.to(target.device)
        self._device, self._dtype = target.device, target.dtype
        self._size = target.vocab_size
        self._output: Callable[[Tensor], Tensor] = target.model.get_output_embeddings()

    def stack(self, states: Iterable[Tensor]) -> Tensor:
        """Hidden states of several requests, [M, H], where the heads are."""
        import torch

        return torch.stack(list(states)).to(self._device, self._dtype)

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """The raw logits of one head, [M, Vd], from hidden states [M, H]."""
        from torch.nn import functional

        for weight, bias in self._heads[head].blocks:
            hidden = hidden + functional.silu(functional.linear(hidden, weight, bias))
        projection = self._heads[head].projection
        if projection is not None:
            return functional.linear(hidden, projection)[:, : self._size]
        logits = self._output(hidden)
        return logits[:, : self._size] if self.vocab is None else logits[:, self.vocab]

    def best(self, head: int, hidden: Tensor, width: int) -> Tensor:
        """The target's ids of one head's most likely tokens, the best first: int64 [M, width]."""
        best = self.logits(head, hidden).topk(width, -1).indices
        return best if self.vocab is None else self.vocab[best]


@dataclass(frozen=True, slots=True)
class _Feature:
    """The hidden state at the last position that went through the target."""

    tokens: int
    """How many tokens were committed when it was seen: the one at its place, and one more."""
    state: Tensor
    """[H]."""


@dataclass(frozen=True, slots=True)
class _Growing:
    """One request's draft."""

    tree: MedusaTree
    state: Tensor
    nodes: dict[NodePath, int]
    """The handle of each node that is there; the root's path is empty."""


class MedusaDrafter(Drafter):
    """Drafts static trees from Medusa heads; a request has none until the target has read its prompt."""

    requires: ClassVar[Requirements] = Requirements(hidden_layers=(_LAST_LAYER,))

    def __init__(self, options: MedusaOptions) -> None:
        """Read the heads.

        Raises:
            ConfigError: the checkpoint is missing, unsafe, incomplete, or holds what is no head's.
        """
        self._options = options
        if options.path is None:
            self._checkpoint = _Checkpoint([_Head((), None)] * (options.untrained or 0))
        else:
            self._checkpoint = _load(options.path)
        self._features: dict[int, _Feature] = {}
        self._trees: dict[DraftLimits, MedusaTree] = {}

    def attach(self, target: TargetInfo) -> None:
        """Fit heads and tree to this target; a tree too deep or too wide is cut, with a warning.

        Raises:
            ConfigError: the heads are for another width or vocabulary.
        """
        _check_fit(self._checkpoint, target)
        self._heads = _Heads(self._checkpoint, target)
        vocab = self._checkpoint.vocab
        widest = target.vocab_size if vocab is None else len(vocab)
        projection = self._checkpoint.heads[0].projection
        if projection is not None:
            widest = min(widest, len(projection))
        self._tree = _make_tree(self._options, len(self._checkpoint.heads), widest)
        self._trees.clear()

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        growing = list(self._plant(requests, builder))
        if growing:
            if self._options.mode == "point":
                self._guess(growing, builder)
            else:
                self._sample(growing, builder)

    def observe(self, feedback: Feedback) -> None:
        """Keep the hidden state of each request's last position that went through the target."""
        if _LAST_LAYER not in feedback.hidden:
            return  # the states of earlier passes no longer fit, so the next step has no drafts
        for request, rows in zip(feedback.requests, feedback.hidden[_LAST_LAYER], strict=True):
            self._features[request.id] = _Feature(len(request.tokens), rows[-1].clone())

    def end(self, request: RequestView) -> None:
        self._features.pop(request.id, None)

    def _plant(self, requests: Sequence[RequestView], builder: DraftBuilder) -> Iterator[_Growing]:
        """The drafts to be grown: of requests that may draft, and whose hidden state was seen."""
        for request, root, limits in zip(requests, builder.roots, builder.limits, strict=True):
            feature = self._features.get(request.id)
            if feature is not None and feature.tokens == len(request.tokens):
                tree = self._tree_within(limits)
                if tree.paths:
                    yield _Growing(tree, feature.state, {(): int(root)})

    def _tree_within(self, limits: DraftLimits) -> MedusaTree:
        most = self._options.max_nodes
        limits = limits & DraftLimits(most, most, most)
        if limits not in self._trees:
            self._trees[limits] = self._tree.within(limits)
        return self._trees[limits]

    def _sample(self, growing: Sequence[_Growing], builder: DraftBuilder) -> None:
        """Draw the trees level by level, all requests at once."""
        hidden = self._heads.stack(draft.state for draft in growing)
        for depth in range(max(draft.tree.depth for draft in growing)):
            wishes: dict[int, list[tuple[int, NodePath, list[NodePath]]]] = {}
            for row, draft in enumerate(growing):
                for parent, children in _level(draft.tree, depth).items():
                    if parent in draft.nodes:
                        wishes.setdefault(len(children), []).append((row, parent, children))
            if not wishes:
                return
            logits = self._heads.logits(depth, hidden)
            for width, wished in wishes.items():
                parents = np.array([growing[row].nodes[parent] for row, parent, _ in wished])
                rows = logits[[row for row, _, _ in wished]]
                drawn = builder.sample(parents, rows, width, self._heads.vocab)
                for (row, _, children), handles in zip(wished, drawn.tolist(), strict=True):
                    there = ((c, h) for c, h in zip(children, handles, strict=True) if h >= 0)
                    growing[row].nodes.update(there)

    def _guess(self, growing: Sequence[_Growing], builder: DraftBuilder) -> None:
        """Guess the trees from each head's most likely tokens."""
        ranked = self._rank(growing)
        for row, draft in enumerate(growing):
            for path in draft.tree.paths:
                if (parent := draft.nodes.get(path[:-1])) is not None:
                    token = ranked[len(path) - 1][row][path[-1]]
                    for handle in builder.guess(parent, [token]):
                        draft.nodes[path] = handle

    def _rank(self, growing: Sequence[_Growing]) -> list[list[list[int]]]:
        """For each depth and draft the head's best tokens, as many as its tree has ranks."""
        import torch

        hidden = self._heads.stack(draft.state for draft in growing)
        depth = max(draft.tree.depth for draft in growing)
        width = max(draft.tree.width for draft in growing)
        best = [self._heads.best(head, hidden, width) for head in range(depth)]
        ranked: list[list[list[int]]] = torch.stack(best).tolist()  # the one synchronisation
        return ranked


def _level(tree: MedusaTree, depth: int) -> Mapping[NodePath, list[NodePath]]:
    return tree.levels[depth] if depth < tree.depth else {}


def _make_tree(options: MedusaOptions, heads: int, widest: int) -> MedusaTree:
    """The tree that the options ask for, as far as there are heads and tokens for it."""
    if options.tree is not None:
        wanted = MedusaTree(options.tree)
        depth, width = wanted.depth, wanted.width
    else:
        weights = options.accuracy or _halving(
            options.widths or [min(widest, options.max_nodes)] * heads
        )
        depth, width = len(weights), max(map(len, weights))
        fitting = [ranks[:widest] for ranks in weights[:heads]]
        wanted = MedusaTree.best_first(fitting, options.max_nodes)
    for asked, has, what in (
        (depth, heads, "heads deep, but the checkpoint has"),
        (width, widest, "tokens wide, but the heads' vocabulary has"),
    ):
        if asked > has:
            log.warning(
                "drafter medusa: the tree is %d %s %d, so it is cut to %d", asked, what, has, has
            )
    return wanted.cut(heads, widest)


def _halving(widths: Sequence[int]) -> list[list[float]]:
    """Weights that halve from rank to rank, for so many ranks of each head."""
    return [[0.5 ** (rank + 1) for rank in range(width)] for width in widths]


def _text_config(target: TargetInfo) -> Any:
    return target.model.config.get_text_config(decoder=True)


def _refuse(what: str) -> NoReturn:
    raise ConfigError(f"drafter medusa: {what}")


def _check_fit(checkpoint: _Checkpoint, target: TargetInfo) -> None:
    """Refuse heads of another width or vocabulary than the target's; padding may differ."""
    width = int(_text_config(target).hidden_size)
    tokens = target.vocab_size
    if target.tokenizer is not None:
        tokens = min(tokens, len(target.tokenizer))
    for i, head in enumerate(checkpoint.heads):
        sizes = [weight.shape[1] for weight, _ in head.blocks]
        if head.projection is not None:
            sizes.append(head.projection.shape[1])
        for size in sizes:
            if size != width:
                _refuse(
                    f"expected heads for the hidden size {width} of the target {target.name!r}, got head {i} "
                    f"for {size}; use heads that were trained for this target"
                )
        if checkpoint.vocab is None and head.projection is not None:
            size = len(head.projection)
            if not tokens <= size <= target.vocab_size:
                _refuse(
                    f"expected heads for {_span(tokens, target.vocab_size)} tokens of the target "
                    f"{target.name!r}, got head {i} for {size}; use heads that were trained for this target"
                )
        if head.projection is None and target.model.get_output_embeddings() is None:
            _refuse(
                f"head {i} has no vocabulary projection, and the target {target.name!r} has none to lend; "
                "use heads with projections"
            )
    if checkpoint.vocab is not None:
        ids = checkpoint.vocab
        if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
            _refuse(
                f"expected a token_map of ids from 0 to {target.vocab_size - 1}, got {int(ids.min())} to "
                f"{int(ids.max())}; use heads that were trained for the target {target.name!r}"
            )


def _span(least: int, most: int) -> str:
    return f"the {most}" if least == most else f"{least} to {most}"


def _load(path: Path) -> _Checkpoint:
    """Read the heads of a checkpoint; how many there are is told by its tensors, not by its config.

    Raises:
        ConfigError: it is missing, unsafe, incomplete, or holds what is no head's.
    """
    tensors = {name: tensor for file in _find(path) for name, tensor in _read(file).items()}
    if not tensors:
        _refuse(
            f"expected Medusa heads in {path}, got a model without any; name the heads' checkpoint"
        )
    return _Parser(path, tensors).checkpoint()


def _find(path: Path) -> list[Path]:
    """The files that hold the heads."""
    if path.is_dir():
        found = next((path / name for name in _FILES if (path / name).is_file()), None)
        if found is None:
            _refuse(f"expected one of {', '.join(_FILES)} in {path}, got none; name another folder")
        path = found
    if not path.is_file():
        _refuse(f"expected a checkpoint at {path}, got no such file or folder; correct path")
    return _shards(path) if path.suffix == ".json" else [path]


def _shards(index: Path) -> list[Path]:
    try:
        weights = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted({weights[name] for name in _select(weights)})
        return [index.parent / Path(name).name for name in names]  # never outside the folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"drafter medusa: expected an index of weights in {index}, but it cannot be read "
            f"({type(error).__name__}: {error}); name another checkpoint"
        ) from error


_PREFIX = re.compile(r"medusa_heads?\.")
_BASE = ("model.", "lm_head.", "transformer.", "base_model.")
"""How the names of the target's own tensors begin, where a file holds both."""


def _select(names: Iterable[str]) -> dict[str, str]:
    """The names that are not the base model's, and what they are without their prefix.

    Without a prefix on any, a file is the heads' own, unless it has a whole model's layers.
    """
    names = list(names)
    prefixed = any(_PREFIX.match(name) for name in names)
    whole = prefixed or any(name.startswith(_BASE) and "layers." in name for name in names)
    return {
        name: _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        for name in names
        if not (whole and name.startswith(_BASE))
    }


def _read(file: Path) -> dict[str, Tensor]:
    """The heads' tensors of one file, by name without prefix."""
    try:
        return _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    except ConfigError:
        raise
    except Exception as error:  # torch and safetensors raise what their parsers raise
        raise ConfigError(
            f"drafter medusa: expected a checkpoint in {file}, but it cannot be read "
            f"({type(error).__name__}: {error}); name another file"
        ) from error


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        stored_names = list(stored.keys())
        # Of tensors that share memory only one is stored; the metadata says which stands for which.
        aliases = {
            alias: name
            for alias, name in (stored.metadata() or {}).items()
            if name in stored_names and alias not in stored_names
        }
        return {
            short: stored.get_tensor(aliases.get(name, name))
            for name, short in _select([*stored_names, *aliases]).items()
        }


def _read_pickle(file: Path) -> dict[str, Tensor]:
    import pickle

    import torch

    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"drafter medusa: expected nothing but tensors in {file}, got a pickle that is broken or holds "
            "code, which is never run; convert it to safetensors where it is trusted"
        ) from error
    if not isinstance(stored, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in stored.items()
    ):
        _refuse(f"expected tensors by name in {file}, got something else; name another file")
    return {short: stored[name] for name, short in _select(stored).items()}


_BLOCK = re.compile(
    r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
)
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight")


class _Parser:
    """Sorts named tensors into heads.

    Two layouts are known: `{head}.{block}.linear.weight` with the projection behind the last block, as
    Medusa's own; and `blocks.{head}.layers.{block}.weight` with `lm_heads.{head}.weight`, or one
    `lm_head.weight` for all, as converted for vLLM.
    """

    def __init__(self, source: Path, tensors: Mapping[str, Tensor]) -> None:
        self._source = source
        self._blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._projections: dict[int, Tensor] = {}
        self._depths: dict[int, int] = {}  # blocks by head, as the projection's name tells
        self._shared: Tensor | None = None
        self._vocab: Tensor | None = None
        for name, tensor in tensors.items():
            self._sort(name, tensor)

    def checkpoint(self) -> _Checkpoint:
        """The heads, checked to be complete and to have fitting shapes."""
        indices = self._blocks.keys() | self._projections.keys()
        heads = max(indices, default=-1) + 1
        if not heads:
            self._refuse_missing("0.0.linear.weight")
        for i in range(heads):
            if i not in indices:
                self._refuse_missing(f"the tensors of head {i} of {heads}")
        self._share_projections(heads)
        made = [self._head(i) for i in range(heads)]
        for i, head in enumerate(made):
            if len(head.blocks) != len(made[0].blocks):
                self._refuse_odd(i, "blocks", len(head.blocks), len(made[0].blocks))
            if (head.projection is None) != (made[0].projection is None):
                self._refuse_missing(
                    f"the vocabulary projection of head {0 if head.projection is not None else i}"
                )
            if head.projection is not None and made[0].projection is not None:
                ours, first = len(head.projection), len(made[0].projection)
                if ours != first:
                    self._refuse_odd(i, "tokens", ours, first)
        return _Checkpoint(made, self._vocab)

    def _sort(self, name: str, tensor: Tensor) -> None:
        if name == "token_map":
            self._vocab = self._checked_ids(name, tensor)
            return
        if not tensor.is_floating_point():
            self._refuse_tensor(name, tensor, "floating-point numbers")
        if found := _BLOCK.fullmatch(name):
            head, block, kind = (part for part in found.groups() if part is not None)
            self._checked_block(name, tensor, kind)
            self._blocks.setdefault(int(head), {}).setdefault(int(block), {})[kind] = tensor
        elif found := _PROJECTION.fullmatch(name):
            if tensor.ndim != 2:
                self._refuse_tensor(name, tensor, "shape [vocabulary, hidden size]")
            head = found[1] or found[3]
            if found[1]:
                if int(head) in self._depths:
                    _refuse(
                        f"expected one vocabulary projection for head {head} in {self._source}, got several; "
                        "use a complete checkpoint"
                    )
                self._depths[int(head)] = int(found[2])
            self._projections[int(head)] = tensor
        elif name == "lm_head.weight" and tensor.ndim == 2:
            self._shared = tensor
        else:
            _refuse(
                f"expected the tensors of Medusa heads in {self._source}, got {name!r}, which is none; "
                "name the heads' own checkpoint"
            )

    def _checked_block(self, name: str, tensor: Tensor, kind: str) -> None:
        if kind == "bias":
            if tensor.ndim != 1:
                self._refuse_tensor(name, tensor, "shape [hidden size]")
        elif tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1]:
            self._refuse_tensor(name, tensor, "shape [hidden size, hidden size]")

    def _checked_ids(self, name: str, tensor: Tensor) -> Tensor:
        ids = tensor.reshape(-1)
        if tensor.is_floating_point() or not len(ids) or len(set(ids.tolist())) != len(ids):
            self._refuse_tensor(name, tensor, "different token ids")
        return ids.long()

    def _share_projections(self, heads: int) -> None:
        """Give every head the one projection that a converted checkpoint may have for all."""
        if self._shared is None and set(self._projections) == {0} and not self._depths:
            self._shared = self._projections[0]
        if self._shared is not None:
            self._projections = dict.fromkeys(range(heads), self._shared) | self._projections

    def _head(self, i: int) -> _Head:
        blocks = self._blocks.get(i, {})
        depth = self._depths.get(i, max(blocks, default=-1) + 1)
        if len(blocks) == 1 and 0 in blocks:
            # Heads of several blocks were made of one block repeated, which may be stored once.
            blocks = dict.fromkeys(range(depth), blocks[0])
        if beyond := [block for block in blocks if block >= depth]:
            _refuse(
                f"expected the {depth} blocks that the projection of head {i} follows in {self._source}, got "
                f"block {max(beyond)} too; use a complete checkpoint"
            )
        with_bias = any(
            "bias" in block for each in self._blocks.values() for block in each.values()
        )
        made = []
        for block in range(depth):
            parts = blocks.get(block, {})
            for kind in ("weight", "bias") if with_bias else ("weight",):
                if kind not in parts:
                    self._refuse_missing(f"the {kind} of block {block} of head {i}")
            bias = parts.get("bias")
            if bias is not None and len(bias) != len(parts["weight"]):
                self._refuse_odd(i, "biases", len(bias), len(parts["weight"]))
            made.append((parts["weight"], bias))
        return _Head(made, self._reduced(self._projections.get(i)))

    def _reduced(self, projection: Tensor | None) -> Tensor | None:
        """The projection on the draft's vocabulary only."""
        if self._vocab is None or projection is None or len(projection) == len(self._vocab):
            return projection
        if int(self._vocab.max()) >= len(projection) or int(self._vocab.min()) < 0:
            _refuse(
                f"expected a token_map of ids below the {len(projection)} rows of the vocabulary projection "
                f"in {self._source}, got up to {int(self._vocab.max())}; use a complete checkpoint"
            )
        return projection[self._vocab]

    def _refuse_missing(self, what: str) -> NoReturn:
        _refuse(f"expected {what} in {self._source}, got none; use a complete checkpoint")

    def _refuse_odd(self, head: int, what: str, got: int, expected: int) -> NoReturn:
        _refuse(
            f"expected {expected} {what} for head {head} in {self._source}, got {got}; "
            "use a complete checkpoint"
        )

    def _refuse_tensor(self, name: str, tensor: Tensor, expected: str) -> NoReturn:
        _refuse(
            f"expected {expected} in {name!r} of {self._source}, got {tensor.dtype} "
            f"{list(tensor.shape)}; use a complete checkpoint"
        )


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "medusa": Component(
            MedusaDrafter,
            MedusaOptions,
            "Trees from Medusa heads on the target's last hidden state.",
            example={"untrained": 2, "max_nodes": 3},
        )
    }
