"""What the head holds for each request: keys and values of committed positions, and features not yet read.

Draft rows are never stored, so a rollback has nothing to do: kept positions are read again, with the
features that the target's own pass gave them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specfw.contracts import RequestView
from specfw_plugin_eagle.head import Head, Past

__all__ = ["HeadState", "pad_past", "read_features"]

_CHUNK = 512
"""Most rows of one request in one pass of the head."""


@dataclass(eq=False, slots=True)
class HeadState:
    """One request's; rows are positions from `start` on, each of them with a feature."""

    request: RequestView
    start: int = 0
    read: int = 0
    """Rows with keys and values."""
    past: list[Tensor] = field(default_factory=list)
    """Those by layer, each [2, KVH, read, D]."""
    unread: list[Tensor] = field(default_factory=list)
    """Features [n, d] of the positions that follow."""
    last: Tensor | None = None
    """The head's output at the last row read, [d]."""

    @property
    def end(self) -> int:
        """The first position that has no feature yet."""
        return self.start + self.read + sum(map(len, self.unread))

    @property
    def ready(self) -> bool:
        """Whether each position from the first feature to the one before the root has one."""
        return self.start < self.end == len(self.request.tokens) - 1

    def add(self, first: int, features: Tensor) -> None:
        """Features [n, d] of the positions from `first` on; where some were left out, begin anew there."""
        if first != self.end:
            self.start, self.read, self.past, self.unread, self.last = first, 0, [], [], None
        self.unread.append(features)

    def take(self, most: int) -> Tensor:
        """The next unread features, [n, d]."""
        features = torch.cat(self.unread)
        self.unread = [features[most:]] if len(features) > most else []
        return features[:most]


def read_features(head: Head, states: Sequence[HeadState]) -> None:
    """Run the head over everything unread of all requests, a chunk of each in one pass."""
    while unread := [state for state in states if state.unread]:
        _read_chunk(head, unread)


def _read_chunk(head: Head, states: Sequence[HeadState]) -> None:
    features = [state.take(_CHUNK) for state in states]
    device = features[0].device
    firsts = [state.start + state.read for state in states]
    tokens = [
        torch.tensor(state.request.tokens[first + 1 : first + 1 + len(rows)], device=device)
        for state, first, rows in zip(states, firsts, features, strict=True)
    ]
    past, seen = pad_past(head, states)
    padded = pad_sequence(features, batch_first=True)
    place = torch.arange(padded.shape[1], device=device)
    positions = torch.tensor(firsts, device=device)[:, None] + place
    causal = (place <= place[:, None]).expand(len(states), -1, -1)
    mask = torch.cat([seen[:, None].expand(-1, len(place), -1), causal], -1)
    outputs, grown = head.run(pad_sequence(tokens, batch_first=True), padded, positions, past, mask)
    width = seen.shape[1]
    for b, (state, rows) in enumerate(zip(states, features, strict=True)):
        new = [layer[:, b, :, width : width + len(rows)] for layer in grown]
        before = state.past or [layer[:, b, :, :0] for layer in grown]
        state.past = [torch.cat(pair, -2) for pair in zip(before, new, strict=True)]
        state.read += len(rows)
        state.last = outputs[b, len(rows) - 1]


def pad_past(head: Head, states: Sequence[HeadState]) -> tuple[Past, Tensor]:
    """The keys and values of requests side by side, and which rows are there: bool [B, S]."""
    lengths = [state.read for state in states]
    empty = head.no_past(1)
    past = [
        torch.stack(
            [
                torch.nn.functional.pad(
                    state.past[layer] if state.past else none[:, 0],
                    (0, 0, 0, max(lengths) - state.read),
                )
                for state in states
            ],
            1,
        )
        for layer, none in enumerate(empty)
    ]
    place = torch.arange(max(lengths), device=past[0].device)
    return past, place < torch.tensor(lengths, device=past[0].device)[:, None]
