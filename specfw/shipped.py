"""Trained files that come with a plugin: a plain name, such as `demo`, where else a path would stand.

They are package data, `shipped/NAME/` with what `specfw train` wrote for the target NAME.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from specfw.errors import ConfigError

__all__ = ["Shipped"]

_FOLDER = "shipped"
_WORD = re.compile(r"[A-Za-z0-9][\w-]*")


@dataclass(frozen=True)
class Shipped:
    """What a plugin ships for its drafter, whose trainer has the same name."""

    package: str
    """That holds the files."""
    drafter: str
    file: str = ""
    """What an option names, in each folder; empty means the folder itself."""

    def names(self) -> list[str]:
        """The targets that something is shipped for."""
        root = self._root()
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []

    def path(self, given: str | Path) -> Path:
        """The path that an option means: a path that exists or looks like one as it is, else what is shipped.

        Raises:
            ConfigError: it is a plain word, under which nothing exists or is shipped.
        """
        path, word = Path(given), str(given)
        if path.exists() or not _WORD.fullmatch(word):
            return path
        names = self.names()
        if word not in names:
            raise ConfigError(
                f"drafter {self.drafter}: expected a path, or the name of what is shipped with it "
                f"({', '.join(names) or 'nothing'}), got {word!r}, which is neither; train one with "
                f"`specfw train {self.drafter} --target {word} --out FOLDER --minutes 60` and give its path"
            )
        return self._root() / word / self.file

    def _root(self) -> Path:
        return Path(str(files(self.package))) / _FOLDER
