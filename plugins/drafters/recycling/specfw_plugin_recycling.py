"""The drafter `recycling`: trees of the tokens that the target itself ranked highest when it was last here.

Token recycling (Luo et al., 2408.08696) with one more token of context: the target's best tokens
after each scored node, refused ones included, are kept for the node's token and for the pair that it
makes with the token before. They come from the passes that are run anyway.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    DraftLimits,
    Feedback,
    RankedRows,
    RequestView,
    Requirements,
    TargetInfo,
)
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["RecyclingDrafter", "RecyclingOptions", "WarmTable"]

specfw_api = API_VERSION

Successors = Sequence[int]
"""Tokens, the likeliest first."""
Context = tuple[int, ...]
"""The last one or two tokens."""


def _best_first(weights: tuple[float, ...]) -> tuple[float, ...]:
    if list(weights) != sorted(weights, reverse=True):
        raise ValueError("weights must not rise, for the first is the best token's")
    return weights


_Weights = Annotated[
    tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...],
    Field(min_length=1),
    AfterValidator(_best_first),
]
"""Weights by rank, from the best one down."""


class RecyclingOptions(Options):
    """What is remembered, and how the tree is shaped."""

    k: Annotated[int, Field(ge=1)] = 8
    """Successors that are remembered for each context."""
    max_nodes: Annotated[int, Field(ge=1)] = 7
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path; None leaves it to `max_nodes`."""
    pairs: bool = True
    """Whether successors of pairs of tokens are remembered too, and come before those of single ones."""
    pair_weights: _Weights = (0.6, 0.12, 0.06, 0.03)
    """How likely the successors of a known pair are, the best first; those beyond count as the last."""
    rank_weights: _Weights = (0.25, 0.1, 0.08, 0.04, 0.03)
    """The same where only the single token is known."""
    across_requests: bool = False
    """Whether what one request teaches serves the others too, and those that come later."""
    max_entries: Annotated[int, Field(ge=1)] = 100_000
    """Contexts that are remembered, by each request or, with `across_requests`, in all; of more, those
    used longest ago are forgotten."""
    file: Path | None = None
    """A warm table (safetensors), as `WarmTable.save` writes it; it is read only."""


class _Memory:
    """The successors of the contexts that were seen last, of at most `most` contexts."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lists: dict[Context, Successors] = {}  # by last use

    def __len__(self) -> int:
        return len(self._lists)

    def learn(self, context: Context, successors: Successors) -> None:
        self._lists.pop(context, None)
        self._lists[context] = successors
        if len(self._lists) > self._most:
            del self._lists[next(iter(self._lists))]

    def get(self, context: Context) -> Successors | None:
        successors = self._lists.get(context)
        if successors is not None:
            del self._lists[context]
            self._lists[context] = successors
        return successors

    def items(self) -> Iterator[tuple[Context, Successors]]:
        yield from self._lists.items()


@dataclass(frozen=True)
class WarmTable:
    """Successors that were learned earlier: what is known before anything is seen."""

    singles: NDArray[np.int32]
    """The successors of each token, the likeliest first: [V, k]; -1 where there are none."""
    pairs: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """Pairs of tokens in order, [P, 2]."""
    pair_successors: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """Their successors, [P, k]; -1 where there are fewer."""

    def save(self, path: Path) -> None:
        """Write the table to a safetensors file, which is complete whenever it exists."""
        from safetensors.numpy import save_file

        aside = path.with_name(f".{path.name}.{os.getpid()}")
        arrays = {"singles": self.singles}
        if len(self.pairs):
            arrays |= {"pairs": self.pairs, "pair_successors": self.pair_successors}
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, aside)
        aside.replace(path)

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> WarmTable:
        """Read a table.

        Raises:
            ConfigError: the file cannot be read, or is no table for this vocabulary.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(path)
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError(
                f"drafter recycling: expected a warm table in {path}, but it cannot be read "
                f"({error}); name another file"
            ) from error
        unknown = arrays.keys() - {"singles", "pairs", "pair_successors"}
        if (
            "singles" not in arrays
            or unknown
            or ("pairs" in arrays) != ("pair_successors" in arrays)
        ):
            raise ConfigError(
                f"drafter recycling: expected singles, and pairs with pair_successors or neither, in "
                f"{path}, got {', '.join(sorted(arrays)) or 'nothing'}; write it with WarmTable.save"
            )
        table = cls(**arrays)
        table.check(path, vocab_size)
        return table

    def check(self, path: Path, vocab_size: int) -> None:
        """Compare shapes, dtypes and ids with what is documented.

        Raises:
            ConfigError: one of them differs.
        """
        for name in ("singles", "pairs", "pair_successors"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 2:
                raise ConfigError(
                    f"drafter recycling: expected {name} in {path} to be int32 with two dimensions, got "
                    f"{array.dtype} {list(array.shape)}; write it with WarmTable.save"
                )
            if array.size and not -1 <= array.min() <= array.max() < vocab_size:
                raise ConfigError(
                    f"drafter recycling: expected ids from -1 to {vocab_size - 1} in {name} of {path}, got "
                    f"{array.min()} to {array.max()}; use a table of the same target"
                )
        if len(self.singles) > vocab_size or len(self.pairs) != len(self.pair_successors):
            raise ConfigError(
                f"drafter recycling: expected at most {vocab_size} singles, and as many pairs as "
                f"pair_successors, in {path}, got {len(self.singles)}, {len(self.pairs)} and "
                f"{len(self.pair_successors)}; use a table of the same target"
            )
        if len(self.pairs) and self.pairs.shape[1] != 2:
            raise ConfigError(
                f"drafter recycling: expected pairs [P, 2] in {path}, got {list(self.pairs.shape)}; "
                "write it with WarmTable.save"
            )

    def get(self, context: Context) -> Successors | None:
        """The successors of one or two tokens; None if nothing is known."""
        if len(context) == 1:
            row = self.singles[context[0]] if context[0] < len(self.singles) else ()
        else:
            number = self._rows.get(context)
            row = () if number is None else self.pair_successors[number]
        return [int(token) for token in row if token >= 0] or None

    @cached_property
    def _rows(self) -> dict[Context, int]:
        return {(a, b): row for row, (a, b) in enumerate(self.pairs.tolist())}


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What is known about the next token of one request."""

    memory: _Memory
    warm: WarmTable | None
    options: RecyclingOptions

    def ranked(self, before: int | None, token: int) -> Iterator[tuple[int, float]]:
        """The likeliest tokens after `token`, the best first, each with its weight.

        The longer context decides; of two sources that know it, what was learned in this run does.
        """
        options = self.options
        sources: list[_Memory | WarmTable] = [self.memory]
        if self.warm is not None:
            sources.append(self.warm)
        contexts: list[tuple[Context, tuple[float, ...]]] = [((token,), options.rank_weights)]
        if options.pairs and before is not None:
            contexts.insert(0, ((before, token), options.pair_weights))
        for context, weights in contexts:
            for source in sources:
                if (successors := source.get(context)) is not None:
                    for rank, successor in enumerate(successors[: options.k]):
                        yield successor, weights[min(rank, len(weights) - 1)]
                    return


class _Tree:
    """Grows one request's draft, the likeliest path first."""

    def __init__(
        self, builder: DraftBuilder, request: int, lookup: _Lookup, limits: DraftLimits
    ) -> None:
        self._builder, self._request, self._lookup = builder, request, lookup
        self._limits = limits
        self._waiting: list[tuple[float, int, int, int, int, int]] = []
        self._order = count()

    def grow(self, before: int | None, last: int) -> None:
        """Draft what follows the last token, `before` being the one in front of it."""
        if not self._limits.max_nodes:
            return
        self._push(1.0, before, last, int(self._builder.roots[self._request]), 0)
        most = self._added() + self._limits.max_nodes
        while self._waiting and self._added() < most:
            score, _, before, token, parent, depth = heappop(self._waiting)
            for node in self._builder.guess(parent, [token]):
                self._push(-score, before, token, node, depth)

    def _push(self, score: float, before: int | None, token: int, node: int, depth: int) -> None:
        """Let what may follow `token` wait to be drafted below `node`, which carries it."""
        if depth < self._limits.max_depth:
            for successor, weight in self._lookup.ranked(before, token):
                entry = (-score * weight, next(self._order), token, successor, node, depth + 1)
                heappush(self._waiting, entry)

    def _added(self) -> int:
        return int(self._builder.added[self._request])


class RecyclingDrafter(Drafter):
    """Guesses the tokens that the target ranked highest after the same last tokens.

    What it has learned is a statistic on purpose: of each request on its own, or of all of them.
    """

    reads_ahead: ClassVar[bool] = True
    """`propose` takes tokens beyond the observed ones as given for that call only."""

    def __init__(self, options: RecyclingOptions | None = None) -> None:
        self._options = options or RecyclingOptions()
        self._shared = _Memory(self._options.max_entries) if self._options.across_requests else None
        self._own: dict[int, _Memory] = {}
        self._warm: WarmTable | None = None
        self._vocab_size = 0

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        """The best `k` tokens of every scored node."""
        return Requirements(top_k=self._options.k)

    def attach(self, target: TargetInfo) -> None:
        """Read the warm table, if one is named.

        Raises:
            ConfigError: it is no table for this target.
        """
        self._vocab_size = target.vocab_size
        if self._options.file is not None:
            self._warm = WarmTable.load(self._options.file, target.vocab_size)

    def begin(self, request: RequestView) -> None:
        own = _Memory(self._options.max_entries) if self._shared is None else self._shared
        self._own[request.id] = own

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        options = self._options
        depth = options.max_nodes if options.max_depth is None else options.max_depth
        own = DraftLimits(options.max_nodes, depth, options.max_nodes)
        for i, (request, limits) in enumerate(zip(requests, builder.limits, strict=True)):
            lookup = _Lookup(self._own[request.id], self._warm, options)
            tokens = request.tokens
            before = tokens[-2] if len(tokens) > 1 else None
            _Tree(builder, i, lookup, limits & own).grow(before, tokens[-1])

    def observe(self, feedback: Feedback) -> None:
        for request, emitted, rows in zip(
            feedback.requests, feedback.emitted, feedback.ranked, strict=True
        ):
            root = len(request.tokens) - len(emitted) - 1
            self._learn(request, rows, request.tokens[root - 1] if root > 0 else None)

    def end(self, request: RequestView) -> None:
        self._own.pop(request.id, None)

    def save(self, path: Path) -> None:
        """Write what was learned across requests as a warm table.

        Raises:
            ConfigError: nothing was, for `across_requests` is off.
        """
        if self._shared is None:
            raise ConfigError(
                "drafter recycling: expected across_requests=true to save a warm table, got false, "
                "where all is forgotten with each request; switch it on"
            )
        k = self._options.k
        singles = np.full((self._vocab_size, k), -1, np.int32)
        pairs, pair_successors = [], []
        for context, successors in self._shared.items():
            padded = [*successors, *[-1] * (k - len(successors))]
            if len(context) == 1:
                singles[context[0]] = padded
            else:
                pairs.append(context)
                pair_successors.append(padded)
        WarmTable(
            singles,
            np.array(pairs, np.int32).reshape(-1, 2),
            np.array(pair_successors, np.int32).reshape(-1, k),
        ).save(path)

    def _learn(self, request: RequestView, rows: RankedRows, before_root: int | None) -> None:
        """Remember what follows each scored node, and each pair that it ends."""
        memory = self._own[request.id]
        tokens = rows.tokens.tolist()
        top = rows.top[:, : self._options.k].tolist()
        for token, parent, successors in zip(tokens, rows.parents.tolist(), top, strict=True):
            memory.learn((token,), successors)
            before = tokens[parent] if parent >= 0 else before_root
            if self._options.pairs and before is not None:
                memory.learn((before, token), successors)


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "recycling": Component(
            RecyclingDrafter,
            RecyclingOptions,
            "Trees of the tokens that the target ranked highest when it was last here.",
        )
    }
