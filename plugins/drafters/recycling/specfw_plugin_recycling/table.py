"""The warm table: successors that were learned earlier, with how likely they were found to be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specfw.errors import ConfigError
from specfw.fingerprint import KEY, read_metadata

__all__ = ["Context", "Successors", "WarmTable"]

Successors = Sequence[int]
"""Tokens, the likeliest first."""
Context = tuple[int, ...]
"""The last one or two tokens."""

_ARRAYS = (
    "singles",
    "pairs",
    "pair_successors",
    "single_levels",
    "single_hits",
    "pair_levels",
    "pair_hits",
)
_TOKENS = "tokens"
"""The key of the number of tokens among a file's metadata."""


@dataclass(frozen=True)
class WarmTable:
    """Successors that were learned earlier: what is known before anything is seen."""

    singles: NDArray[np.int32]
    """The successors of each token, the likeliest first: [V, k]; -1 where there are none."""
    pairs: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    """Pairs of tokens in order, [P, 2]."""
    pair_successors: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """Their successors, [P, k]; -1 where there are fewer."""
    single_levels: NDArray[np.uint8] | None = None
    """How often each token was seen, as an index into `single_hits`, [V]; None if that was not measured."""
    single_hits: NDArray[np.float32] | None = None
    """How often the successor of each rank was right, by level: [L, k]."""
    pair_levels: NDArray[np.uint8] | None = None
    """The same for pairs, [P]."""
    pair_hits: NDArray[np.float32] | None = None
    """The same for pairs, [L, k]."""
    fingerprint: str | None = None
    """Of the target that it was made for; see `specfw.fingerprint`."""
    tokens: int = 0
    """That it was made from; 0 if that is not known."""

    def save(self, path: Path) -> None:
        """Write the table to a safetensors file, which is complete whenever it exists."""
        from safetensors.numpy import save_file

        aside = path.with_name(f".{path.name}.{os.getpid()}")
        arrays = {
            name: np.ascontiguousarray(array)
            for name in _ARRAYS
            if (array := getattr(self, name)) is not None and (name == "singles" or array.size)
        }
        metadata = {_TOKENS: str(self.tokens)}
        if self.fingerprint is not None:
            metadata[KEY] = self.fingerprint
        try:
            save_file(arrays, aside, metadata=metadata)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

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
        unknown = arrays.keys() - set(_ARRAYS)
        if (
            "singles" not in arrays
            or unknown
            or ("pairs" in arrays) != ("pair_successors" in arrays)
        ):
            raise ConfigError(
                f"drafter recycling: expected singles, and pairs with pair_successors or neither, in "
                f"{path}, got {', '.join(sorted(arrays)) or 'nothing'}; write it with WarmTable.save"
            )
        about = read_metadata(path)
        table = cls(**arrays, fingerprint=about.get(KEY), tokens=int(about.get(_TOKENS, 0)))
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
        self._check_hits(path, "single", len(self.singles))
        self._check_hits(path, "pair", len(self.pairs))
        if len(self.pairs) and self.pairs.shape[1] != 2:
            raise ConfigError(
                f"drafter recycling: expected pairs [P, 2] in {path}, got {list(self.pairs.shape)}; "
                "write it with WarmTable.save"
            )

    def _check_hits(self, path: Path, kind: str, count: int) -> None:
        levels, hits = getattr(self, f"{kind}_levels"), getattr(self, f"{kind}_hits")
        if levels is None and hits is None:
            return
        good = (
            levels is not None
            and hits is not None
            and (levels.dtype, levels.shape) == (np.uint8, (count,))
            and (hits.dtype, hits.ndim) == (np.float32, 2)
            and min(hits.shape) > 0
            and (not count or levels.max() < len(hits))
            and 0 <= hits.min() <= hits.max() <= 1
        )
        if not good:
            raise ConfigError(
                f"drafter recycling: expected {kind}_levels uint8 [{count}] below the rows of {kind}_hits, float32 "
                f"[L, k] from 0 to 1, in {path}, but they are not; write it with WarmTable.save"
            )

    def get(self, context: Context) -> Successors | None:
        """The successors of one or two tokens; None if nothing is known."""
        row = self._row(context)
        if row is None:
            return None
        successors = self.singles if len(context) == 1 else self.pair_successors
        return [token for token in successors[row].tolist() if token >= 0] or None

    def weights(self, context: Context) -> Sequence[float] | None:
        """How often the successors of a known context were right, by rank; None if that was not measured."""
        row = self._row(context)
        single = len(context) == 1
        levels = self.single_levels if single else self.pair_levels
        hits = self.single_hits if single else self.pair_hits
        if row is None or levels is None or hits is None:
            return None
        weights: list[float] = hits[levels[row]].tolist()
        return weights

    def _row(self, context: Context) -> int | None:
        if len(context) == 1:
            return context[0] if context[0] < len(self.singles) else None
        return self._rows.get(context)

    @cached_property
    def _rows(self) -> dict[Context, int]:
        return {(a, b): row for row, (a, b) in enumerate(self.pairs.tolist())}
