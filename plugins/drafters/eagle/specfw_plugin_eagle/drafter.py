"""The drafter: it keeps each request's features as they come, and grows drafts from where they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from specfw.contracts import (
    Drafter,
    DraftLimits,
    Feedback,
    ReadChunk,
    RequestView,
    Requirements,
    TargetInfo,
)
from specfw.decoding.builder import DraftBuilder
from specfw.fingerprint import check_fingerprint
from specfw_plugin_eagle.checkpoints import Checkpoint
from specfw_plugin_eagle.head import Head
from specfw_plugin_eagle.state import HeadState, read_features
from specfw_plugin_eagle.trees import guess_confident, sample_tree
from specfw_plugin_eagle.untrained import make_untrained

__all__ = ["EagleDrafter"]

_MOST_CONFIDENT_DEPTH = 6


class EagleDrafter(Drafter):
    """Drafts with a head that continues the target's hidden states.

    Features exist for positions that the target has run in front of this drafter. Where the prefix
    cache spared it some, the head begins at the first position that has one, and sees less.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        *,
        max_nodes: int = 4,
        max_depth: int | None = None,
        width: int = 1,
        mode: Literal["sampled", "point"] = "sampled",
        other_target: bool = False,
    ) -> None:
        """Set up; the arguments are the options of the same names, None an untrained head."""
        if max_depth is None:
            max_depth = min(max_nodes, _MOST_CONFIDENT_DEPTH) if mode == "point" else max_nodes
        self._own = DraftLimits(max_nodes, max_depth, width)
        self._checkpoint, self._mode, self._other_target = checkpoint, mode, other_target
        self._states: dict[int, HeadState] = {}

    def attach(self, target: TargetInfo) -> None:
        """Fit the head to this target.

        Raises:
            ConfigError: the head lacks tensors, or has another width than the target, or was trained for another.
        """
        if self._checkpoint is not None and not self._other_target:
            check_fingerprint(
                self._checkpoint.fingerprint,
                target,
                f"drafter eagle: the weights of {self._checkpoint.name}",
                "train a head for this target, or set other_target=true to use this one all the same",
            )
        self._head = Head(self._checkpoint or make_untrained(target), target)
        layers = tuple(dict.fromkeys(self._head.feature_layers))
        self.requires = Requirements(hidden_layers=layers)  # type: ignore[misc]  # known only now

    def begin(self, request: RequestView) -> None:
        self._states[request.id] = HeadState(request)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        chosen = [
            (state, int(root), allowed)
            for request, root, limits in zip(requests, builder.roots, builder.limits, strict=True)
            if (state := self._states.get(request.id)) is not None and state.ready
            if (allowed := limits & self._own).max_nodes > 0 and allowed.max_depth > 0
        ]
        if not chosen:
            return
        states, roots, limits = zip(*chosen, strict=True)
        read_features(self._head, states)
        if self._mode == "point":
            guess_confident(self._head, states, roots, limits, self._own.max_width, builder)
        else:
            sample_tree(self._head, states, roots, limits, builder)

    def observe(self, feedback: Feedback) -> None:
        """Keep the features of the rows that the target has run; draft rows were never kept."""
        read = [*_finished(feedback), *feedback.chunks]
        if not read:
            return
        states = [
            torch.cat([chunk.hidden[layer] for chunk in read])
            for layer in self._head.feature_layers
        ]
        counts = [len(chunk.hidden[self._head.feature_layers[0]]) for chunk in read]
        features = torch.split(self._head.fuse(states), counts)
        for chunk, rows in zip(read, features, strict=True):
            if (state := self._states.get(chunk.request.id)) is not None:
                state.add(chunk.first, rows)

    def end(self, request: RequestView) -> None:
        self._states.pop(request.id, None)

    def close(self) -> None:
        self._states.clear()


def _finished(feedback: Feedback) -> Iterator[ReadChunk]:
    """What was read of requests that emitted: rows up to their old root, then those of kept nodes."""
    for i, (request, emitted, kept) in enumerate(
        zip(feedback.requests, feedback.emitted, feedback.kept, strict=True)
    ):
        hidden = {layer: rows[i] for layer, rows in feedback.hidden.items()}
        if hidden:
            root = len(request.tokens) - len(emitted) - 1
            rows = len(next(iter(hidden.values())))
            yield ReadChunk(request, root + len(kept) + 1 - rows, hidden)
