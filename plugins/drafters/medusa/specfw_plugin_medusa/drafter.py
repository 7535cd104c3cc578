"""The drafter: heads on the target's device, and the trees that are drawn or guessed from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specfw.contracts import (
    Drafter,
    DraftLimits,
    Feedback,
    RequestView,
    Requirements,
    TargetInfo,
)
from specfw.fingerprint import check_fingerprint
from specfw_plugin_medusa.checkpoints import Checkpoint, Head, load_checkpoint, refuse
from specfw_plugin_medusa.options import SHIPPED, MedusaOptions
from specfw_plugin_medusa.trees import MedusaTree, NodePath

if TYPE_CHECKING:
    from torch import Tensor

    from specfw.decoding.builder import DraftBuilder

# torch is imported where it is needed, so that finding the plugin stays quick.

__all__ = ["Heads", "MedusaDrafter", "check_fit"]

log = logging.getLogger("specfw.medusa")

_LAST_LAYER = -1
"""Of transformers' hidden states, the one after the final norm, which those before it lack."""


class Heads:
    """The heads on the target's device, in its dtype."""

    def __init__(self, checkpoint: Checkpoint, target: TargetInfo) -> None:
        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(target.device, target.dtype)

        self._heads = [
            Head(
                [(placed(w), None if b is None else placed(b)) for w, b in head.blocks],
                None if head.projection is None else placed(head.projection),
            )
            for head in checkpoint.heads
        ]
        self.vocab = None if checkpoint.vocab is None else checkpoint.vocab.to(target.device)
        self._device, self._dtype = target.device, target.dtype
        self._size = target.vocab_size
        self._output = _shared_output(target, self.vocab)

    def __len__(self) -> int:
        return len(self._heads)

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
        if projection is None:
            return self._output(hidden)
        return functional.linear(hidden, projection)[:, : self._size]

    def best(self, head: int, hidden: Tensor, width: int) -> Tensor:
        """The target's ids of one head's most likely tokens, the best first: int64 [M, width]."""
        best = self.logits(head, hidden).topk(width, -1).indices
        return best if self.vocab is None else self.vocab[best]


def _shared_output(target: TargetInfo, vocab: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The target's own vocabulary projection, of a reduced vocabulary's rows only."""
    from torch.nn import functional

    module = target.model.get_output_embeddings()
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if vocab is not None and weight is not None:
        weight, bias = weight[vocab], None if bias is None else bias[vocab]
        return lambda hidden: functional.linear(hidden, weight, bias)
    return lambda hidden: module(hidden)[:, : target.vocab_size]


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
            self._checkpoint = Checkpoint([Head((), None)] * (options.untrained or 0))
        else:
            self._checkpoint = load_checkpoint(SHIPPED.path(options.path))
        self._features: dict[int, _Feature] = {}
        self._trees: dict[DraftLimits, MedusaTree] = {}

    def attach(self, target: TargetInfo) -> None:
        """Fit heads and tree to this target; a tree too deep or too wide is cut, with a warning.

        Raises:
            ConfigError: the heads are for another width, vocabulary or target.
        """
        if not self._options.other_target:
            check_fingerprint(
                self._checkpoint.fingerprint,
                target,
                f"drafter medusa: the weights in {self._options.path}",
                "train heads for this target, or set other_target=true to use these all the same",
            )
        check_fit(self._checkpoint, target)
        self._heads = Heads(self._checkpoint, target)
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


def check_fit(checkpoint: Checkpoint, target: TargetInfo) -> None:
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
                refuse(
                    f"expected heads for the hidden size {width} of the target {target.name!r}, got head {i} "
                    f"for {size}; use heads that were trained for this target"
                )
        if checkpoint.vocab is None and head.projection is not None:
            size = len(head.projection)
            if not tokens <= size <= target.vocab_size:
                refuse(
                    f"expected heads for {_span(tokens, target.vocab_size)} tokens of the target "
                    f"{target.name!r}, got head {i} for {size}; use heads that were trained for this target"
                )
        if head.projection is None and target.model.get_output_embeddings() is None:
            refuse(
                f"head {i} has no vocabulary projection, and the target {target.name!r} has none to lend; "
                "use heads with projections"
            )
    if checkpoint.vocab is not None:
        ids = checkpoint.vocab
        if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
            refuse(
                f"expected a token_map of ids from 0 to {target.vocab_size - 1}, got {int(ids.min())} to "
                f"{int(ids.max())}; use heads that were trained for the target {target.name!r}"
            )


def _span(least: int, most: int) -> str:
    return f"the {most}" if least == most else f"{least} to {most}"
