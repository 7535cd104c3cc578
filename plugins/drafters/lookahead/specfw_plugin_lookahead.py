"""The drafter `lookahead`: n-grams that the target itself makes up beside the text, in the passes that run anyway.

Lookahead decoding (Fu et al., 2402.02057). A window of columns and levels of not yet right tokens
rides in each pass as extra rows; what the target would say after each column's newest token is the
column's next token (a Jacobi iteration). Columns that have become n-grams go into a pool, and the
n-grams that begin with the text's last token are drafted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from random import Random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    DraftLimits,
    Feedback,
    RequestView,
    TargetInfo,
)
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["LookaheadDrafter", "LookaheadOptions"]

specfw_api = API_VERSION

log = logging.getLogger("specfw")

Gram = tuple[int, ...]
"""The tokens of an n-gram behind its first one."""


class LookaheadOptions(Options):
    """How far the window reaches, and how much of the pool is tried."""

    window: Annotated[int, Field(ge=1)] = 7
    """Columns of the window (W): positions for which n-grams are made up at a time."""
    level: Annotated[int, Field(ge=2)] = 5
    """Tokens of an n-gram, its first one included (N). The window has `level - 1` levels."""
    guesses: Annotated[int, Field(ge=1)] = 7
    """N-grams that are drafted in a step, and that are remembered for each first token (G)."""
    from_text: bool = True
    """Whether the n-grams of the prompt and of what was emitted go into the pool too."""
    max_entries: Annotated[int, Field(ge=1)] = 100_000
    """First tokens that each request's pool remembers; of more, those used longest ago are forgotten."""


class _Pool:
    """The n-grams of one request by their first token, those used last at the end."""

    def __init__(self, options: LookaheadOptions) -> None:
        self._options = options
        self._grams: dict[int, dict[Gram, None]] = {}

    def __len__(self) -> int:
        return len(self._grams)

    def add(self, first: int, gram: Gram) -> None:
        grams = self._touch(first)
        grams.pop(gram, None)
        grams[gram] = None
        if len(grams) > self._options.guesses:
            del grams[next(iter(grams))]
        if len(self._grams) > self._options.max_entries:
            del self._grams[next(iter(self._grams))]

    def add_text(self, tokens: Sequence[int], start: int) -> None:
        """Add the n-grams of a text that end at `start` or later."""
        level = self._options.level
        for end in range(max(start, level - 1), len(tokens)):
            self.add(tokens[end - level + 1], tuple(tokens[end - level + 2 : end + 1]))

    def get(self, first: int) -> list[Gram]:
        """The n-grams that begin with `first`, the newest first."""
        return list(self._touch(first))[::-1] if first in self._grams else []

    def _touch(self, first: int) -> dict[Gram, None]:
        grams = self._grams.pop(first, None)
        self._grams[first] = grams = {} if grams is None else grams
        return grams


class _Window:
    """Columns of tokens that may come to follow the text, level by level.

    `levels[l][i]` stands i + l behind the text's last token, which is `levels[0][0]`. A row of
    level 0 follows the one to its left; others follow the row above them. While levels are missing
    there is one more column for each of them, since each new level is one column shorter.
    """

    def __init__(self, options: LookaheadOptions, tokens: Sequence[int], stops: set[int]) -> None:
        self._options, self._stops = options, stops
        self._random = Random(0)
        self.levels: list[list[int]] = []
        self._settle([[]], tokens)

    def cut(self, rows: int, reach: int) -> bool:
        """Drop columns until the window has at most `rows` rows, `reach` deep; False if none can stay."""
        levels = len(self.levels)
        columns = min(len(self.levels[0]), (rows + 1) // levels, reach - levels + 2)
        if columns < 1:
            return False
        self.levels = [level[:columns] for level in self.levels]
        return True

    def rows(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the rows, level by level; the text's last token is no row."""
        columns = len(self.levels[0])
        tokens = [token for level in self.levels for token in level]
        left = range(-1, columns - 2)  # of level 0
        above = range(-1, columns * (len(self.levels) - 1) - 1)
        return tokens[1:], [*left, *above]

    def grams(self, new: Sequence[int]) -> Iterator[tuple[int, Gram]]:
        """First token and the rest of every column, if `new` completes them."""
        if len(self.levels) == self._options.level - 1:
            for first, *rest in zip(*self.levels, new, strict=True):
                yield first, tuple(rest)

    def advance(self, tokens: Sequence[int], emitted: int, new: Sequence[int] | None) -> None:
        """Follow the text to `tokens`, of which `emitted` are new; `new` is the next level, if there is one."""
        levels = [*self.levels, list(new)] if new is not None else self.levels
        if len(levels) == self._options.level:
            levels, emitted = levels[1:], emitted - 1
        self._settle([level[emitted:] for level in levels], tokens)

    def _settle(self, levels: Sequence[Sequence[int]], text: Sequence[int]) -> None:
        """Bring levels to their length with tokens of the text, which also replace those that would end it."""
        columns = self._options.window + self._options.level - 1 - len(levels)
        self.levels = [
            [
                self._random.choice(text) if token is None or token in self._stops else token
                for token in islice(chain(level, repeat(None)), columns)
            ]
            for level in levels
        ]
        self.levels[0][0] = text[-1]


class _State:
    """What is held for one request."""

    def __init__(self, options: LookaheadOptions, request: RequestView, stops: set[int]) -> None:
        self.pool = _Pool(options)
        if options.from_text:
            self.pool.add_text(request.tokens, 0)
        self.window = _Window(options, request.tokens, stops)
        self.asked: list[int] | None = None
        """Where the window's rows stand among the extra rows of this step; None if it is not in it."""


class LookaheadDrafter(Drafter):
    """Guesses n-grams that the target made up in the window, or wrote before.

    Window and pool are statistics that are learned on purpose, of each request on its own.
    """

    def __init__(self, options: LookaheadOptions | None = None) -> None:
        self._options = options or LookaheadOptions()
        self._states: dict[int, _State] = {}
        self._stops: set[int] = set()
        self._warned = False

    def attach(self, target: TargetInfo) -> None:
        self._stops = set(target.eos_token_ids)

    def begin(self, request: RequestView) -> None:
        self._states[request.id] = _State(self._options, request, self._stops)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root, left in zip(
            requests, builder.roots.tolist(), builder.extra_limits, strict=True
        ):
            state = self._states[request.id]
            grams = state.pool.get(request.tokens[-1])
            if left.max_nodes and state.window.cut(
                self._share(left, sum(map(len, grams))), left.max_depth
            ):
                state.asked = builder.extra(root, *state.window.rows())
            for gram in grams:
                builder.guess(root, gram)

    def observe(self, feedback: Feedback) -> None:
        for i, (request, emitted) in enumerate(
            zip(feedback.requests, feedback.emitted, strict=True)
        ):
            state = self._states[request.id]
            new = None
            if state.asked is not None:
                # of a window of one level, the text itself is what follows the first column
                known = feedback.extra[i].top[state.asked, 0].tolist() if state.asked else []
                new = [emitted[0], *known][-len(state.window.levels[0]) :]
                for first, gram in state.window.grams(new):
                    state.pool.add(first, gram)
            state.asked = None
            state.window.advance(request.tokens, len(emitted), new)
            if self._options.from_text:
                state.pool.add_text(request.tokens, len(request.tokens) - len(emitted))

    def end(self, request: RequestView) -> None:
        self._states.pop(request.id, None)

    def _share(self, left: DraftLimits, guesses: int) -> int:
        """Rows for the window: what guesses leave over; where that is too little, its part of all."""
        options = self._options
        most = options.window * (options.level - 1) - 1 + options.guesses * (options.level - 1)
        if left.max_nodes < most and not self._warned:
            self._warned = True
            log.warning(
                "drafter lookahead: window=%d, level=%d and guesses=%d take up to %d nodes a step, but "
                "%d are allowed, so the window is narrower and fewer guesses are drafted; raise "
                "max_nodes of the scheduler, or lower the options",
                options.window,
                options.level,
                options.guesses,
                most,
                left.max_nodes,
            )
        part = left.max_nodes * options.window // (options.window + options.guesses)
        return max(left.max_nodes - guesses, part)


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "lookahead": Component(
            LookaheadDrafter,
            LookaheadOptions,
            "N-grams that the target makes up beside the text, in its own passes.",
            example={"window": 2, "level": 2, "guesses": 2},
        )
    }
