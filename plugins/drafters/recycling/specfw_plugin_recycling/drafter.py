"""The drafter: what it learns, and the trees that it makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from specfw.contracts import (
    Drafter,
    DraftLimits,
    Feedback,
    RankedRows,
    RequestView,
    Requirements,
    TargetInfo,
)
from specfw.errors import ConfigError
from specfw.fingerprint import check_fingerprint
from specfw_plugin_recycling.options import SHIPPED, RecyclingOptions
from specfw_plugin_recycling.table import Context, Successors, WarmTable

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["RecyclingDrafter"]


_PAIR_WEIGHTS = (0.6, 0.12, 0.06, 0.03)
_RANK_WEIGHTS = (0.25, 0.1, 0.08, 0.04, 0.03)


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

    def weights(self, context: Context) -> Sequence[float] | None:
        """Nothing was measured of what is learned as it comes."""
        return None

    def items(self) -> Iterator[tuple[Context, Successors]]:
        yield from self._lists.items()


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
        contexts: list[tuple[Context, Sequence[float] | None, Sequence[float]]] = [
            ((token,), options.rank_weights, _RANK_WEIGHTS)
        ]
        if options.pairs and before is not None:
            contexts.insert(0, ((before, token), options.pair_weights, _PAIR_WEIGHTS))
        for context, wished, usual in contexts:
            for source in sources:
                if (successors := source.get(context)) is not None:
                    weights = wished or source.weights(context) or usual
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
            self._warm = WarmTable.load(SHIPPED.path(self._options.file), target.vocab_size)
            if not self._options.other_target:
                check_fingerprint(
                    self._warm.fingerprint,
                    target,
                    f"drafter recycling: the statistics in {self._options.file}",
                    "train a table for this target, or set other_target=true to use this one all the same",
                )

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
