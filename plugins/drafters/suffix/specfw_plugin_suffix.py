"""The drafter `suffix`: continues the text as its longest repeated suffixes were continued before.

Suffix decoding (Oliaro et al., 2411.04975) on suffix automata (Blumer et al., 1985), which grow by a
token at a time: over the request's own tokens, and over past outputs if asked to.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    DraftLimits,
    Feedback,
    RequestView,
    TargetInfo,
)
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["Library", "SuffixAutomaton", "SuffixDrafter", "SuffixOptions"]

specfw_api = API_VERSION

_COUNTED = 64
"""Suffixes that each token counts for; only in long runs of the same words are there more."""
_WINDOW = 16
"""Tokens of the text that are looked up in past outputs."""
_CONTEXTS = 4
"""Suffixes of each text that speak for a continuation: the longest repeated one, and shorter ones."""
_BUSY = 64
"""Different continuations beyond which a suffix says nothing."""
_USED = 8
"""Tokens that must match for a past output to count as used."""
_LEAD = 8
"""Tokens before an output that are remembered with it, so that its beginning can be found again."""


class SuffixOptions(Options):
    """How much to draft, and whether past outputs are looked at too."""

    max_nodes: Annotated[int, Field(ge=1)] = 7
    """Draft nodes for each request and step, over all continuations."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path; None leaves it to `max_nodes`."""
    factor: Annotated[float, Field(ge=0.0)] = 2.0
    """A path may have this many nodes for each matched token, and `offset` more."""
    offset: Annotated[int, Field(ge=0)] = 3
    """Nodes that a path may have whatever the match."""
    min_match: Annotated[int, Field(ge=1)] = 1
    """Tokens of the shortest suffix that is continued; raise it to draft less often and better."""
    min_probability: Annotated[float, Field(ge=0.0, le=1.0)] = 0.07
    """Estimated probability of a path below which it is not drafted."""
    across_requests: bool = False
    """Whether outputs of past requests are looked at, besides the request's own tokens."""
    max_tokens: Annotated[int, Field(ge=4)] = 100_000
    """Tokens of past outputs that are remembered; of more, those used longest ago are forgotten."""
    file: Path | None = None
    """Where past outputs are kept between runs (safetensors): read at start, written at the end."""

    @model_validator(mode="after")
    def _options_agree(self) -> SuffixOptions:
        most = type(self).model_fields["max_tokens"].default
        if not self.across_requests and (self.file is not None or self.max_tokens != most):
            raise ValueError(
                "file and max_tokens are about past outputs, which across_requests=false leaves "
                "out; set it to true or remove them"
            )
        return self


class SuffixAutomaton:
    """All substrings of some texts, and how often each occurs and by what it was followed.

    A state stands for all substrings that occur at the same places, of which the longest has
    `length[state]` tokens; `link[state]` is the state of its longest suffix with more places.
    """

    __slots__ = ("_last", "count", "length", "link", "next", "seen", "size")

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        """The state after each token that follows a state's substrings."""
        self.link, self.length = [-1], [0]
        self.count = [0]
        """How often a state's substrings occur."""
        self.seen = [0]
        """Where they ended last, counted over all texts."""
        self.size = 0
        """Tokens over all texts."""
        self._last = 0

    def append(self, token: int) -> None:
        """Go on with the current text, in constant amortised time."""
        self.size += 1
        self._last = state = self._state_after(self._last, token)
        link, count, seen = self.link, self.count, self.seen
        for _ in range(_COUNTED):
            if state <= 0:
                break
            count[state] += 1
            seen[state] = self.size
            state = link[state]

    def start_text(self) -> None:
        """Let the next token begin another text."""
        self._last = 0

    @property
    def repeated(self) -> tuple[int, int]:
        """The longest suffix of the current text that occurs elsewhere too: state and length."""
        state = max(self.link[self._last], 0)
        return state, self.length[state]

    def match(self, tokens: Sequence[int], state: int = 0, length: int = 0) -> tuple[int, int]:
        """The longest suffix of a known suffix, followed by `tokens`, that occurs: state and length."""
        follows, link = self.next, self.link
        for token in tokens:
            after = follows[state].get(token)
            while after is None and state:
                state = link[state]
                length = self.length[state]
                after = follows[state].get(token)
            if after is not None:
                state, length = after, length + 1
        return state, length

    def _state_after(self, last: int, token: int) -> int:
        known = self.next[last].get(token)  # only in a second text
        if known is not None:
            return self._exactly(last, known, token)
        new = self._add(self.length[last] + 1, {}, 0)
        state, follows, link = last, self.next, self.link
        while state >= 0 and token not in follows[state]:
            follows[state][token] = new
            state = link[state]
        link[new] = 0 if state < 0 else self._exactly(state, follows[state][token], token)
        return new

    def _exactly(self, state: int, after: int, token: int) -> int:
        """The state of just the longest of `state` and `token`, split off `after` if need be."""
        if self.length[after] == self.length[state] + 1:
            return after
        split = self._add(self.length[state] + 1, dict(self.next[after]), self.link[after])
        self.count[split], self.seen[split] = self.count[after], self.seen[after]
        self.link[after] = split
        while state >= 0 and self.next[state].get(token) == after:
            self.next[state][token] = split
            state = self.link[state]
        return split

    def _add(self, length: int, follows: dict[int, int], link: int) -> int:
        self.next.append(follows)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        self.seen.append(0)
        return len(self.next) - 1


class _Generation:
    """Texts that are forgotten together, unless they have been used."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.texts: list[list[int]] = []
        self._starts: list[int] = []
        self._used: dict[int, None] = {}  # by last use

    def add(self, text: list[int]) -> None:
        self._starts.append(self.automaton.size)
        self.texts.append(text)
        self.automaton.start_text()
        for token in text:
            self.automaton.append(token)

    def note_use(self, state: int) -> None:
        """The text in which a state's substrings occurred last has been of use."""
        number = bisect_right(self._starts, self.automaton.seen[state] - 1) - 1
        self._used.pop(number, None)
        self._used[number] = None

    def used(self, most: int) -> list[list[int]]:
        """The texts used last, of at most `most` tokens in all; the last used one at the end."""
        chosen: list[list[int]] = []
        for number in reversed(self._used):
            most -= len(self.texts[number])
            if most < 0:
                break
            chosen.append(self.texts[number])
        return chosen[::-1]


class Library:
    """Past outputs, of at most `max_tokens` in all; those used longest ago are forgotten first.

    They are in two generations, each of half the size. When the younger one is full, the older one
    is dropped, but for those of its texts that have been used: half of the next generation is for
    them. So a token is added twice at most for each time that it is learned or kept.
    """

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens // 2
        self._young, self._old = _Generation(), _Generation()

    @property
    def size(self) -> int:
        """Tokens held."""
        return self._young.automaton.size + self._old.automaton.size

    def add(self, text: Sequence[int]) -> None:
        """Remember a text, of a very long one only its end."""
        kept = list(text[-(self._most // 2) :])
        if self._young.automaton.size + len(kept) > self._most:
            saved = self._old.used(self._most // 2)
            self._old, self._young = self._young, _Generation()
            for old in saved:
                self._young.add(old)
        self._young.add(kept)

    def lookup(self, tokens: Sequence[int]) -> list[tuple[SuffixAutomaton, int, int]]:
        """Where the end of `tokens` occurs: automaton, state and match length of each generation.

        A long match counts as a use of the text in which it occurs.
        """
        found = []
        for generation in (self._young, self._old):
            state, length = generation.automaton.match(tokens)
            if length >= _USED:
                generation.note_use(state)
            found.append((generation.automaton, state, length))
        return found

    def texts(self) -> list[list[int]]:
        """What is remembered, the older generation first."""
        return [*self._old.texts, *self._young.texts]

    def save(self, path: Path) -> None:
        """Write all texts to a file, which is complete whenever it exists."""
        from safetensors.numpy import save_file

        texts = self.texts()
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(
            {
                "tokens": np.array([token for text in texts for token in text], np.int64),
                "lengths": np.array([len(text) for text in texts], np.int64),
            },
            aside,
        )
        aside.replace(path)

    def load(self, path: Path, vocab_size: int) -> None:
        """Add the texts of a file that `save` has written.

        Raises:
            ConfigError: the file cannot be read, is none of these, or has ids beyond the vocabulary.
        """
        tokens, lengths = _read(path)
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ConfigError(
                f"drafter suffix: expected token ids from 0 to {vocab_size - 1} in {path}, got "
                f"{int(tokens.min())} to {int(tokens.max())}; use a file of the same target"
            )
        start = 0
        for length in lengths.tolist():
            self.add(tokens[start : start + length].tolist())
            start += length


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays = load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(
            f"drafter suffix: expected past outputs in {path}, but it cannot be read ({error}); "
            "name another file or remove this one"
        ) from error
    tokens, lengths = arrays.get("tokens"), arrays.get("lengths")
    if (
        tokens is None
        or lengths is None
        or tokens.dtype != np.int64
        or lengths.dtype != np.int64
        or tokens.ndim != 1
        or lengths.ndim != 1
        or (len(lengths) and lengths.min() < 0)
        or int(lengths.sum()) != len(tokens)
    ):
        raise ConfigError(
            f"drafter suffix: expected int64 tokens [N] and lengths [D] that sum to N in {path}, got "
            f"{ {name: (str(array.dtype), list(array.shape)) for name, array in arrays.items()} }; "
            "name a file that this drafter wrote"
        )
    return tokens, lengths


@dataclass(slots=True)
class _Text:
    """The tokens of one request, indexed."""

    begun: int
    """Tokens that it had when it entered."""
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens`, all committed ones, has beyond those of the last call."""
        for place in range(self.automaton.size, len(tokens)):
            self.automaton.append(tokens[place])


@dataclass(frozen=True, slots=True)
class _Head:
    """A suffix that has been continued before, or what a draft that begins there has come to."""

    automaton: SuffixAutomaton
    state: int
    match: int
    """Tokens, those drafted included."""
    weight: float
    """Estimated probability that it is this suffix which decides, and that the text gets here."""

    @property
    def trust(self) -> float:
        """Estimated probability that the next token is one that followed here before.

        It grows with the match and with the occurrences, and falls with the number of different
        continuations. The formula fits how often greedy texts of the demo model were foreseen:
        0.29, 0.53, 0.67, 0.73 and 0.75 after one occurrence of 1 to 5 matched tokens.
        """
        return self._trust(self._counts())

    def continuations(self, least: float) -> Iterator[tuple[int, _Head]]:
        """Tokens that followed, and where they lead, if that weighs `least` or more."""
        counts = self._counts()
        if not (trust := self._trust(counts)):
            return
        share = self.weight * trust / sum(counts)
        follows = self.automaton.next[self.state]
        for (token, state), times in zip(follows.items(), counts, strict=True):
            if (weight := share * times) >= least:
                yield token, _Head(self.automaton, state, self.match + 1, weight)

    def _trust(self, counts: Sequence[int]) -> float:
        if not counts:
            return 0.0
        evidence = sum(counts) * self.match**1.25
        return float(evidence / (evidence + 2 * len(counts)))

    def _counts(self) -> Sequence[int]:
        """How often each continuation of the suffix occurred; none of a suffix that has too many."""
        follows, count = self.automaton.next[self.state], self.automaton.count
        return [count[state] for state in follows.values()] if len(follows) <= _BUSY else ()


class _Tree:
    """Grows one request's draft, the likeliest path first."""

    def __init__(self, builder: DraftBuilder, request: int, options: SuffixOptions) -> None:
        self._builder, self._request, self._options = builder, request, options
        own = DraftLimits(
            options.max_nodes,
            options.max_nodes if options.max_depth is None else options.max_depth,
            options.max_nodes,
        )
        self._limits = builder.limits[request] & own
        self._waiting: list[tuple[float, int, int, _Head, int, int]] = []
        self._order = count()

    def grow(self, heads: Iterable[_Head]) -> None:
        """Draft what follows the heads, best first over all of them."""
        if not self._limits.max_nodes or not self._limits.max_depth:
            return
        root = int(self._builder.roots[self._request])
        for head in heads:
            depth = int(self._options.factor * head.match + self._options.offset)
            self._push(head, root, min(depth, self._limits.max_depth))
        most = self._added() + self._limits.max_nodes
        while self._waiting and self._added() < most:
            _, _, token, head, parent, depth = heappop(self._waiting)
            for node in self._builder.guess(parent, [token]):
                self._push(head, node, depth)

    def _push(self, head: _Head, node: int, depth: int) -> None:
        """Let what follows `head` wait to be drafted below `node`, at most `depth` nodes deep."""
        if depth <= 0:
            return
        for token, after in head.continuations(self._options.min_probability):
            entry = (-after.weight, next(self._order), token, after, node, depth - 1)
            heappush(self._waiting, entry)

    def _added(self) -> int:
        return int(self._builder.added[self._request])


class SuffixDrafter(Drafter):
    """Guesses the likeliest continuations of the suffixes that have occurred before.

    What it holds of a request is a function of the request's own tokens, and ends with the
    request. With `across_requests` it also learns from outputs, on purpose.
    """

    reads_ahead: ClassVar[bool] = True
    """`propose` takes tokens beyond the observed ones as given for that call only."""

    def __init__(self, options: SuffixOptions | None = None) -> None:
        self._options = options or SuffixOptions()
        self._texts: dict[int, _Text] = {}
        self.library = Library(self._options.max_tokens) if self._options.across_requests else None
        """Past outputs, with `across_requests`."""

    def attach(self, target: TargetInfo) -> None:
        """Read the file of past outputs, if there is one.

        Raises:
            ConfigError: it is not a file of past outputs, or its folder is missing.
        """
        path = self._options.file
        if path is None or self.library is None:
            return
        if path.exists():
            self.library.load(path, target.vocab_size)
        elif not path.parent.is_dir():
            raise ConfigError(
                f"drafter suffix: expected a folder to write {path.name} to, but {path.parent} is "
                "none; make it or name another file"
            )

    def begin(self, request: RequestView) -> None:
        self._texts[request.id] = text = _Text(len(request.tokens))
        text.extend(request.tokens)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for i, request in enumerate(requests):
            _Tree(builder, i, self._options).grow(self._heads(request))

    def observe(self, feedback: Feedback) -> None:
        for request in feedback.requests:
            self._texts[request.id].extend(request.tokens)

    def end(self, request: RequestView) -> None:
        text = self._texts.pop(request.id, None)
        if text is None or self.library is None:
            return
        if len(request.tokens) > text.begun:
            # What came before a preemption was remembered when that happened.
            self.library.add(request.tokens[max(0, text.begun - _LEAD) :])

    def close(self) -> None:
        if self.library is not None and self._options.file is not None:
            self.library.save(self._options.file)

    def _heads(self, request: RequestView) -> Iterator[_Head]:
        """What speaks for a continuation: suffixes in the own text, then in past outputs."""
        own = self._texts[request.id].automaton
        ahead = request.tokens[own.size :]
        found = [(own, *own.match(ahead, *own.repeated))]
        if self.library is not None:
            found += self.library.lookup(request.tokens[-_WINDOW:])
        for automaton, state, match in found:
            left = 1.0
            for _ in range(_CONTEXTS):
                if match < self._options.min_match:
                    break
                head = _Head(automaton, state, match, left)
                yield head
                left *= 1 - head.trust
                state = automaton.link[state]
                match = automaton.length[state]


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "suffix": Component(
            SuffixDrafter,
            SuffixOptions,
            "Continues repeated suffixes of the text, and of past outputs, by their counts.",
        )
    }
