"""The texts that a target wrote, with its own ranking of what could have followed each token.

A folder holds them in numbered shards, each of them a safetensors file that is complete whenever it
exists. A shard follows from the run's settings and its number alone, so how many there are is all
that a resumed run needs to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specfw.errors import ConfigError
from specfw.training.files import whole_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Shard", "Texts"]


@dataclass(frozen=True)
class Shard:
    """Texts end to end."""

    tokens: NDArray[np.int32]
    """[N]."""
    ends: NDArray[np.int64]
    """Where each text ends, [T]."""
    top: NDArray[np.int32]
    """The target's best tokens after each token, the best first, [N, k]; -1 where it was not asked."""
    temperatures: NDArray[np.float32]
    """What each text was drawn at, [T]."""
    seconds: float = 0.0
    """How long it took to write."""

    @property
    def written(self) -> int:
        """Tokens that the target wrote itself."""
        return int((self.top[:, 0] >= 0).sum())

    def spans(self) -> Iterator[slice]:
        """Where each text is."""
        first = 0
        for end in self.ends.tolist():
            yield slice(first, end)
            first = end


class Texts:
    """A folder of shards."""

    def __init__(self, folder: Path) -> None:
        """Name the folder, which need not exist."""
        self.folder = folder
        self._written: dict[int, tuple[int, float]] = {}

    def __len__(self) -> int:
        """Complete shards, counted from 0 without a gap."""
        number = 0
        while self._path(number).exists():
            number += 1
        return number

    def __iter__(self) -> Iterator[Shard]:
        for number in range(len(self)):
            yield self.load(number)

    @property
    def written(self) -> int:
        """Tokens in all shards that the target wrote itself."""
        return sum(tokens for tokens, _ in map(self._sums, range(len(self))))

    @property
    def seconds(self) -> float:
        """How long all shards took to write."""
        return sum(seconds for _, seconds in map(self._sums, range(len(self))))

    def about(self) -> dict[str, str]:
        """The settings that the shards were written with; nothing if there are none."""
        return self._metadata(0) if len(self) else {}

    def load(self, number: int) -> Shard:
        """Read a shard.

        Raises:
            ConfigError: it cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self._path(number)
        try:
            arrays = load_file(path)
            return Shard(
                **{name: arrays[name] for name in ("tokens", "ends", "top", "temperatures")},
                seconds=self._sums(number)[1],
            )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(
                f"train: expected texts in {path}, but it cannot be read ({error}); remove it and all "
                "after it, and they are written again"
            ) from error

    def save(self, number: int, shard: Shard, about: Mapping[str, str]) -> None:
        """Write a shard, with the settings that it follows from."""
        from safetensors.numpy import save_file

        arrays = {name: getattr(shard, name) for name in ("tokens", "ends", "top", "temperatures")}
        counts = {"written": str(shard.written), "seconds": f"{shard.seconds:.3f}"}
        with whole_file(self._path(number)) as aside:
            save_file(arrays, aside, metadata={**about, **counts})

    def _path(self, number: int) -> Path:
        return self.folder / f"texts-{number:06}.safetensors"

    def _sums(self, number: int) -> tuple[int, float]:
        if number not in self._written:
            metadata = self._metadata(number)
            self._written[number] = (
                int(metadata.get("written", 0)),
                float(metadata.get("seconds", 0)),
            )
        return self._written[number]

    def _metadata(self, number: int) -> dict[str, str]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path(number), "numpy") as file:
                return dict(file.metadata() or {})
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"train: expected texts in {self._path(number)}, but it cannot be read ({error}); "
                "remove it and all after it, and they are written again"
            ) from error
