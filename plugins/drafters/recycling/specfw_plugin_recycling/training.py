"""Training a warm table: counts of what the target ranked highest after each token and each pair.

A successor's score is the sum, over all places of its context, of how often the target's token of
that rank came next. How far a table's order can be trusted is measured on held-out texts, by how
often a context was seen and by rank; these hit rates are the weights of the drafter's tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from specfw.components import Options
from specfw.contracts import TargetInfo, Trained, Trainer
from specfw.errors import ConfigError
from specfw.fingerprint import check_fingerprint, fingerprint
from specfw_plugin_recycling.options import SHIPPED
from specfw_plugin_recycling.table import WarmTable

if TYPE_CHECKING:
    from specfw.training import Shard, TrainingRun

__all__ = ["TableTrainer", "TableTrainerOptions", "make_table"]

_HELD_OUT = 10
"""Of so many texts, one measures the table that is made of the others."""
_LEVELS = 12
"""Counts of contexts are told apart by their binary logarithm, up to this."""
_BYTES_PER_SUCCESSOR = 48
"""Memory while counting, for each successor at each place."""
_DOUBT = 20.0
"""Places that the level below counts as in a level's hit rate."""
_HEADER = 4096
"""Bytes of a file besides its numbers, at most."""


class TableTrainerOptions(Options):
    """How large the table gets."""

    k: Annotated[int, Field(ge=1)] = 8
    """Successors of each context, at most what the texts have."""
    max_bytes: Annotated[int, Field(ge=1)] = 20_000_000
    """Size of the file; of more pairs, those seen most often stay."""
    start: Path | None = None
    """A table to go on from, or `demo`: each of its contexts counts about as often as it was seen."""


class TableTrainer(Trainer):
    """Makes `table.safetensors`."""

    text_share = 1.0

    def __init__(self, options: TableTrainerOptions | None = None) -> None:
        self._options = options or TableTrainerOptions()
        self._seen: dict[tuple[int, int], int] = {}
        self._start: WarmTable | None = None

    def attach(self, target: TargetInfo) -> None:
        """Refuse a vocabulary whose table of single tokens alone would be too large.

        Raises:
            ConfigError: it would, or the table to start from is another target's.
        """
        least = 4 * self._options.k * target.vocab_size
        if least > self._options.max_bytes:
            raise ConfigError(
                f"trainer recycling: expected max_bytes of at least {least} for {target.vocab_size} tokens with "
                f"k={self._options.k} successors each, got {self._options.max_bytes}; raise it or lower k"
            )
        if self._options.start is not None:
            path = SHIPPED.path(self._options.start)
            self._start = WarmTable.load(path, target.vocab_size)
            check_fingerprint(
                self._start.fingerprint,
                target,
                f"trainer recycling: the table in {path}",
                "leave start out to make a new one",
            )

    def room(self, tokens: int) -> tuple[int, int]:
        return 2 * self._options.max_bytes, tokens * self._options.k * _BYTES_PER_SUCCESSOR

    def watch(self, shard: Shard) -> str:
        """Compare the shard with what was seen before it, by the best token after each pair only."""
        places = _Places.of([shard])
        pairs = list(map(tuple, places.pairs.tolist()))
        best = [self._seen.get(pair) for pair in pairs]
        right = sum(a == b for a, b in zip(best, places.following.tolist(), strict=True))
        self._seen.update(zip(pairs, places.top[:, 0].tolist(), strict=True))
        if not pairs:
            return ""
        known, share = 1 - best.count(None) / len(pairs), right / len(pairs)
        return f"{known:.0%} of pairs known, chains about {1 / (1 - min(share, 0.9)):.2f} tokens a pass"

    def train(self, run: TrainingRun) -> Trained:
        shards = list(run.texts)
        table, facts = make_table(shards, run.target.vocab_size, self._options, self._start)
        table = WarmTable(**{**vars(table), "fingerprint": fingerprint(run.target)})
        path = run.folder / "table.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(path)
        return Trained({"name": "recycling", "file": str(path)}, facts)


@dataclass(frozen=True)
class _Places:
    """Where texts show what follows."""

    pairs: NDArray[np.int64]
    """The token before and the last token, [n, 2]."""
    following: NDArray[np.int64]
    """The token that came next, [n]."""
    top: NDArray[np.int32]
    """What the target ranked highest there, [n, k]."""

    @classmethod
    def of(cls, shards: Iterable[Shard], held_out: bool | None = None) -> _Places:
        """All places of some shards, or those of held-out texts, or of all others, only."""
        pairs, following, top = [], [], []
        for shard in shards:
            tokens = shard.tokens.astype(np.int64)
            for number, span in enumerate(shard.spans()):
                if held_out is not None and held_out != (number % _HELD_OUT == _HELD_OUT - 1):
                    continue
                places = np.arange(span.start + 1, span.stop - 1)
                places = places[shard.top[places, 0] >= 0]
                pairs.append(np.stack([tokens[places - 1], tokens[places]], 1))
                following.append(tokens[places + 1])
                top.append(shard.top[places])
        if not pairs:
            return cls(
                np.zeros((0, 2), np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
            )
        return cls(np.concatenate(pairs), np.concatenate(following), np.concatenate(top))

    def keys(self, length: int, vocab_size: int) -> NDArray[np.int64]:
        """The last token, or the last two as one number: [n]."""
        last = self.pairs[:, 1]
        return last if length == 1 else self.pairs[:, 0] * vocab_size + last


@dataclass(frozen=True)
class _Counts:
    """Contexts of one length."""

    keys: NDArray[np.int64]
    """Rising, [C]."""
    seen: NDArray[np.int64]
    """At how many places, [C]."""
    successors: NDArray[np.int32]
    """The best first, [C, k]; -1 where there are fewer."""

    @classmethod
    def of(
        cls,
        keys: NDArray[np.int64],
        top: NDArray[np.int32],
        rates: NDArray[np.float64],
        k: int,
        before: _Counts | None = None,
    ) -> _Counts:
        """Count places with `keys` [n] and `top` [n, K]; a successor of rank r scores `rates[r]`.

        What was counted `before` is as that many places with its successors.
        """
        times = np.ones(len(keys), np.int64)
        if before is not None:
            keys, times = np.concatenate([keys, before.keys]), np.concatenate([times, before.seen])
            wide = np.full((len(before.keys), top.shape[1]), -1, np.int32)
            width = min(before.successors.shape[1], top.shape[1])
            wide[:, :width] = before.successors[:, :width]
            top = np.concatenate([top, wide])
        found, row = np.unique(keys, return_inverse=True)
        seen = np.bincount(row, times, len(found)).astype(np.int64)
        base = int(top.max(initial=0)) + 1
        place, rank = np.nonzero(top >= 0)
        codes, which = np.unique(row[place] * base + top[place, rank], return_inverse=True)
        rows, tokens = np.divmod(codes, base)
        scores = np.bincount(which, times[place] * rates[rank], len(codes))
        order = np.lexsort((tokens, -scores, rows))
        rows, tokens = rows[order], tokens[order]
        within = np.arange(len(rows)) - np.searchsorted(rows, rows)
        successors = np.full((len(found), k), -1, np.int32)
        kept = within < k
        successors[rows[kept], within[kept]] = tokens[kept]
        return cls(found, seen, successors)

    @classmethod
    def of_table(cls, table: WarmTable | None, length: int, vocab_size: int) -> _Counts | None:
        """What a table with measured rates knows of contexts of one length; seen from 2^l to 2^(l + 1) - 1 times
        counts as 3/2 of the former."""
        levels = None if table is None else (table.single_levels, table.pair_levels)[length - 1]
        if table is None or levels is None:
            return None
        if length == 1:
            keys, successors = np.arange(len(table.singles)), table.singles
        else:
            first, last = table.pairs.astype(np.int64).T
            keys, successors = first * vocab_size + last, table.pair_successors
        known = successors[:, 0] >= 0
        seen = np.maximum(1, 3 * 2 ** levels.astype(np.int64) // 2)
        return cls(keys[known], seen[known], successors[known])

    @property
    def levels(self) -> NDArray[np.uint8]:
        return np.minimum(np.log2(self.seen), _LEVELS - 1).astype(np.uint8)

    def find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each key, -1 where it was not seen."""
        rows = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[rows] == keys, rows, -1)

    def hit_rates(
        self, keys: NDArray[np.int64], following: NDArray[np.int64], prior: NDArray[np.float64]
    ) -> NDArray[np.float32]:
        """How often each rank was right at each level, [L, k]; a level with little evidence is like the one below."""
        rows = self.find(keys)
        rows, following = rows[rows >= 0], following[rows >= 0]
        levels = self.levels[rows]
        right = self.successors[rows] == following[:, None]
        rates = np.empty((_LEVELS, self.successors.shape[1]))
        for level in range(_LEVELS):
            here = right[levels == level]
            prior = (here.sum(0) + _DOUBT * prior) / (len(here) + _DOUBT)
            rates[level] = prior
        return rates.astype(np.float32)


def make_table(
    shards: Sequence[Shard],
    vocab_size: int,
    options: TableTrainerOptions,
    start: WarmTable | None = None,
) -> tuple[WarmTable, dict[str, object]]:
    """A table of all texts, with hit rates that were measured on held-out ones.

    Args:
        shards: the texts.
        vocab_size: of their target.
        options: how large it gets.
        start: another one, whose knowledge it takes over.

    Returns:
        The table, without a fingerprint, and what its card can say of it.

    Raises:
        ConfigError: there are no texts.
    """
    learned, held = _Places.of(shards, held_out=False), _Places.of(shards, held_out=True)
    if not len(learned.following):
        raise ConfigError(
            "trainer recycling: expected texts, got none; write some with --tokens or --minutes"
        )
    k = min(options.k, learned.top.shape[1])
    rates = (learned.top == learned.following[:, None]).mean(0)
    before = {n: _Counts.of_table(start, n, vocab_size) for n in (1, 2)}
    singles, pairs = (
        _Counts.of(learned.keys(n, vocab_size), learned.top, rates, k, before[n]) for n in (1, 2)
    )
    keys = held.keys(2, vocab_size)
    new = pairs.find(keys) < 0  # only there do single tokens count
    pair_hits = pairs.hit_rates(keys, held.following, rates[:k])
    single_hits = singles.hit_rates(held.keys(1, vocab_size)[new], held.following[new], rates[:k])

    every = _Places.of(shards)
    singles, pairs = (
        _Counts.of(every.keys(n, vocab_size), every.top, rates, k, before[n]) for n in (1, 2)
    )
    levels = np.zeros(vocab_size, np.uint8)
    levels[singles.keys] = singles.levels
    successors = np.full((vocab_size, k), -1, np.int32)
    successors[singles.keys] = singles.successors
    fixed = successors.nbytes + levels.nbytes + 2 * pair_hits.nbytes + _HEADER
    most = max(0, options.max_bytes - fixed) // (4 * (2 + k) + 1)
    kept = np.sort(np.argsort(-pairs.seen, kind="stable")[:most])
    table = WarmTable(
        successors,
        np.stack(np.divmod(pairs.keys[kept], vocab_size), 1).astype(np.int32),
        pairs.successors[kept],
        levels,
        single_hits,
        pairs.levels[kept],
        pair_hits,
        tokens=len(every.following) + (0 if start is None else start.tokens),
    )
    facts = {
        "tokens written by the target": table.tokens,
        "pairs": f"{len(kept)} of {len(pairs.keys)}",
        "held-out places whose pair is known": f"{1 - new.mean():.1%}" if len(new) else "none",
        "hit rates of a pair's best token, by how often it was seen": ", ".join(
            f"{2**level}: {rate:.0%}" for level, rate in enumerate(pair_hits[:, 0].tolist())
        ),
    }
    return table, facts
