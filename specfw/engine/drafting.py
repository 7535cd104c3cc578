"""Each request's own drafter: the one that it names, or the engine's default; all in one draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from specfw.combining import Combined, Member
from specfw.contracts import Drafter, RequestView
from specfw.engine.requests import Request
from specfw.errors import ConfigError
from specfw.types import SpeculationParams

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["OwnDrafters"]


class _Own(Member):
    """A drafter that requests have for themselves: without it, they do not draft."""

    def __init__(self, drafter: Drafter, label: str) -> None:
        super().__init__(drafter, label)
        self._followed: dict[int, Request] = {}

    def begin(self, request: RequestView) -> None:
        assert isinstance(request, Request)
        self._followed[request.id] = request
        super().begin(request)

    def end(self, request: RequestView) -> None:
        super().end(request)
        self._followed.pop(request.id, None)

    def _leave_out(self, request: RequestView) -> None:
        self._followed[request.id].drafting = False


class OwnDrafters(Combined):
    """The drafters of an engine; each request is followed and served by its own only."""

    def __init__(self, default: Drafter, named: Mapping[str, Drafter]) -> None:
        """`named` are those that a request can ask for by `speculation.drafter`."""
        self.default = default
        label = type(default).__name__
        self._own = {None: _Own(default, label)} | {
            name: _Own(drafter, f"{name!r} ({type(drafter).__name__})")
            for name, drafter in named.items()
        }
        self.members = list(self._own.values())

    def check(self, wish: SpeculationParams) -> None:
        """Refuse what a request cannot have.

        Raises:
            ConfigError: no drafter has the name that it asks for.
        """
        if wish.drafter not in self._own:
            named = ", ".join(name for name in self._own if name) or "none at all"
            raise ConfigError(
                f"request: expected speculation.drafter to be one that is held ready ({named}), got "
                f"{wish.drafter!r}; name it under 'drafters' in the config, or leave it out for the "
                "default"
            )

    def reads_ahead_of(self, requests: Sequence[RequestView]) -> list[bool]:
        """Whether each request's drafter continues what was guessed before its turn."""
        return [self.followers(request)[0].drafter.reads_ahead for request in requests]

    def followers(self, request: RequestView) -> Sequence[Member]:
        return [self._own[request.params.speculation.drafter]]

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for member in self.members:
            rows = [i for i, request in enumerate(requests) if member in self.followers(request)]
            if any(builder.limits[i].max_nodes for i in rows):
                shared = len(rows) < len(requests)
                view = builder.for_rows(rows) if shared else builder
                member.propose([requests[i] for i in rows], view)
