"""A drafter that drafts nothing and notes what the target ranked highest, in the passes that are run anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from specfw.contracts import Drafter, Feedback, RequestView, Requirements

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specfw.decoding.builder import DraftBuilder

__all__ = ["Recorded", "RowRecorder"]


@dataclass
class Recorded:
    """One request: its tokens, and the best tokens after some of them."""

    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0
    top: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """Position -> token ids, the best first."""


class RowRecorder(Drafter):
    """Keeps what it saw of each request until `take` is called."""

    def __init__(self, k: int) -> None:
        self.requires = Requirements(top_k=k)  # type: ignore[misc]
        self._seen: dict[int, Recorded] = {}

    def begin(self, request: RequestView) -> None:
        self._seen.setdefault(request.id, Recorded())

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        """Leave every draft empty."""

    def observe(self, feedback: Feedback) -> None:
        for request, emitted, rows in zip(
            feedback.requests, feedback.emitted, feedback.ranked, strict=True
        ):
            self._seen[request.id].top[len(request.tokens) - len(emitted) - 1] = rows.top[0]

    def end(self, request: RequestView) -> None:
        seen = self._seen[request.id]
        seen.tokens, seen.prompt_length = list(request.tokens), request.prompt_length

    def take(self) -> list[Recorded]:
        """What was seen since the last call, by request in the order of their coming."""
        seen, self._seen = self._seen, {}
        return [seen[number] for number in sorted(seen)]
