"""State that follows a text: one state for what is committed, and forks of it for drafted paths.

Whatever a request's law reads step by step, a user's logits processor or a grammar, is moved by each
committed token once, in order. A drafted path moves forks, which last until something is committed, so
that all laws of a step which share a beginning share its fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

__all__ = ["Forkable", "Forks"]


class Forkable(Protocol):
    """Something with a state that tokens move."""

    def fork(self) -> Self:
        """An independent copy in the same state."""

    def advance(self, token: int) -> None:
        """The text goes on with this token."""


State = TypeVar("State", bound=Forkable)


class Forks(Generic[State]):
    """The states of one thing at the committed text, and wherever drafts have led since."""

    def __init__(self, state: State) -> None:
        """Begin with a fork of `state`, which itself stays as it is."""
        self._at: dict[tuple[int, ...], State] = {(): state.fork()}

    @property
    def committed(self) -> State:
        """The state after the committed tokens."""
        return self._at[()]

    def at(self, path: Sequence[int]) -> State:
        """The state after drafted tokens, for looking only."""
        ways = [tuple(path[:length]) for length in range(len(path) + 1)]
        known = max(length for length, way in enumerate(ways) if way in self._at)
        for way in ways[known + 1 :]:
            state = self._at[way[:-1]].fork()
            state.advance(way[-1])
            self._at[way] = state
        return self._at[ways[-1]]

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        self._at = {(): self.committed}
        for token in tokens:
            self.committed.advance(token)
