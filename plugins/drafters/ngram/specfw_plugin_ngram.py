"""The drafter `ngram`: prompt lookup, which repeats what followed the same words earlier in the text.

Saxena, "Prompt Lookup Decoding" (2023), with an index that grows with the text instead of a search
in every step, and with several continuations at once, as a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator

from specfw.components import Component, Options
from specfw.contracts import API_VERSION, Drafter, DraftLimits, Feedback, RequestView
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["NgramDrafter", "NgramOptions"]

specfw_api = API_VERSION


class NgramOptions(Options):
    """How far to look and how much to draft."""

    max_nodes: Annotated[int, Field(ge=1)] = 7
    """Draft nodes for each request and step, over all continuations."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path; None leaves it to `max_nodes`."""
    depth_per_token: Annotated[int, Field(ge=1)] = 2
    """Draft nodes on one path for each token of the suffix that was found: short finds mislead more."""
    max_ngram: Annotated[int, Field(ge=1)] = 4
    """Tokens of the longest suffix that is looked up."""
    min_ngram: Annotated[int, Field(ge=1)] = 1
    """Tokens of the shortest suffix that is looked up; raise it to draft less often and better."""
    continuations: Annotated[int, Field(ge=1)] = 2
    """Continuations to draft at once, each with another first token."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> NgramOptions:
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}; "
                "lower the first or raise the second"
            )
        return self


class _Index:
    """Where each n-gram of one request's tokens was last continued, and by what.

    An n-gram leads to the places of the tokens that followed it: one place for each distinct
    token, at most `breadth`, the most recent first.
    """

    def __init__(self, lengths: range, breadth: int) -> None:
        self._lengths, self._breadth = lengths, breadth
        self._tokens: Sequence[int] = ()
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens`, all committed ones, has beyond those of the last call."""
        self._tokens = tokens
        for place in range(self._indexed, len(tokens)):
            for gram in self._grams_before(place, tokens):
                self._places[gram] = self._remembered(place, self._places.get(gram, ()))
        self._indexed = len(tokens)

    def continuations(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Places to go on from, each with another token, and the lengths of the suffixes found there.

        `tokens` may run ahead of the committed ones, in which alone suffixes are found. At most `breadth`, the likeliest first: a longer suffix counts for more than a recent place.
        """
        found: dict[int, tuple[int, int]] = {}
        for gram in self._grams_before(len(tokens), tokens):
            for place in self._places.get(gram, ()):
                found.setdefault(self._tokens[place], (place, len(gram)))
            if len(found) >= self._breadth:
                break
        return list(found.values())[: self._breadth]

    def _grams_before(self, place: int, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The n-grams of `tokens` that end right before `place`, the longest first."""
        window = tuple(tokens[max(0, place - self._lengths.stop + 1) : place])
        for length in reversed(self._lengths):
            if length <= len(window):
                yield window[-length:]

    def _remembered(self, place: int, earlier: tuple[int, ...]) -> tuple[int, ...]:
        token = self._tokens[place]
        others = [other for other in earlier if self._tokens[other] != token]
        return (place, *others[: self._breadth - 1])


def _copy(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """The `count` tokens from `place` on; beyond the end of the text the copy repeats itself."""
    copied = list(tokens[place : place + count])
    period = len(tokens) - place
    while len(copied) < count:
        copied.append(copied[len(copied) - period])
    return copied


class NgramDrafter(Drafter):
    """Guesses that the text goes on as it did after the same last few tokens.

    What it holds of a request is a function of the request's own tokens, and ends with the request.
    """

    reads_ahead: ClassVar[bool] = True
    """`propose` looks up tokens beyond the observed ones, and remembers only observed ones."""

    def __init__(self, options: NgramOptions | None = None) -> None:
        self._options = options or NgramOptions()
        self._indexes: dict[int, _Index] = {}

    def begin(self, request: RequestView) -> None:
        lengths = range(self._options.min_ngram, self._options.max_ngram + 1)
        self._indexes[request.id] = index = _Index(lengths, self._options.continuations)
        index.extend(request.tokens)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        own = self._own_limits()
        for request, root, limits in zip(requests, builder.roots, builder.limits, strict=True):
            allowed = limits & own
            if allowed.max_nodes and allowed.max_depth:
                self._guess(request, int(root), allowed, builder)

    def observe(self, feedback: Feedback) -> None:
        for request in feedback.requests:
            self._indexes[request.id].extend(request.tokens)

    def end(self, request: RequestView) -> None:
        self._indexes.pop(request.id, None)

    def _own_limits(self) -> DraftLimits:
        options = self._options
        depth = options.max_nodes if options.max_depth is None else options.max_depth
        return DraftLimits(options.max_nodes, depth, options.continuations)

    def _guess(
        self, request: RequestView, root: int, limits: DraftLimits, builder: DraftBuilder
    ) -> None:
        """Draft the continuations one after the other, so that the likeliest needs no compaction."""
        left = limits.max_nodes
        found = self._indexes[request.id].continuations(request.tokens)[: limits.max_width]
        for rest, (place, length) in zip(reversed(range(len(found))), found, strict=True):
            share = left - left // 3 if rest else left
            depth = min(limits.max_depth, self._options.depth_per_token * length)
            left -= len(builder.guess(root, _copy(request.tokens, place, min(share, depth))))


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "ngram": Component(
            NgramDrafter, NgramOptions, "Repeats what followed the same words earlier in the text."
        )
    }
