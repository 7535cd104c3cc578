"""Which plugins are installed, and whether what they require is: read from metadata, importing none.

A distribution counts once however many `sys.path` entries lead to it. Of several copies the one
that `import` would find counts: first on `sys.path`, then `.dist-info` before a stale `.egg-info`,
then the higher version.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from specfw.errors import PluginError
from specfw.version import __version__

__all__ = ["GROUP", "Candidate", "check_requirements", "installed_plugins"]

GROUP = "specfw"
"""The entry point group of plugins."""


@dataclass(frozen=True)
class Candidate:
    """A plugin that could be loaded."""

    name: str
    """The entry point's name; of a passed object, its `__name__` or its class's."""
    distribution: str
    """Normalised name of the distribution; empty for a passed object."""
    version: str
    requires: tuple[str, ...]
    load: Callable[[], object]

    @property
    def label(self) -> str:
        """The plugin and where it comes from, for messages."""
        origin = f"{self.distribution} {self.version}".strip() or "passed in"
        return f"{self.name!r} ({origin})"

    def answers_to(self, name: str) -> bool:
        """Whether `name` is the plugin's own name or its distribution's."""
        return name == self.name or canonicalize_name(name) == self.distribution


def installed_plugins() -> list[Candidate]:
    """The entry points of the group `specfw`, sorted by (distribution, name)."""
    found = [
        candidate
        for name, distribution in _distributions().items()
        for candidate in _candidates(name, distribution)
    ]
    return sorted(found, key=lambda candidate: (candidate.distribution, candidate.name))


def check_requirements(requires: Sequence[str]) -> None:
    """Compare requirements in a distribution's metadata with what is installed.

    Raises:
        PluginError: one is not met.
    """
    for text in requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _installed_version(requirement.name)
        if version is None:
            raise PluginError(f"it requires {text!r}, but {requirement.name} is not installed")
        if not requirement.specifier.contains(version, prereleases=True):
            raise PluginError(
                f"it requires {text!r}, but {requirement.name} {version} is installed"
            )


def _candidates(name: str, distribution: metadata.Distribution) -> list[Candidate]:
    requires = tuple(distribution.requires or ())
    try:
        entries = {
            entry.name: entry.load for entry in distribution.entry_points.select(group=GROUP)
        }
    except Exception as error:
        # Unreadable metadata must cost this plugin only, and must be told like any other failure.
        entries = {name: partial(_fail, error)}
    return [
        Candidate(entry, name, distribution.version, requires, load)
        for entry, load in entries.items()
    ]


def _fail(error: Exception) -> object:
    raise error


def _installed_version(name: str) -> str | None:
    if canonicalize_name(name) == "specfw":
        return __version__  # right also where specfw runs from a checkout
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _distributions() -> dict[str, metadata.Distribution]:
    """Of each name that has plugins in any copy, the copy that counts."""
    names = {
        canonicalize_name(name)
        for distribution in metadata.distributions()
        if f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or "")
        # What a broken uninstall leaves behind has no metadata, hence no name.
        if (name := distribution.metadata and distribution.metadata["Name"])
    }
    return {name: max(_copies(name), key=lambda copy: copy[0])[1] for name in names}


def _copies(name: str) -> Iterator[tuple[tuple[int, bool, Version], metadata.Distribution]]:
    """Every copy of a distribution, each with its rank: the highest counts."""
    for position, entry in enumerate(dict.fromkeys(sys.path)):
        for distribution in metadata.distributions(name=name, path=[entry]):
            is_dist_info = distribution.read_text("METADATA") is not None
            yield (-position, is_dist_info, _version(distribution)), distribution


def _version(distribution: metadata.Distribution) -> Version:
    try:
        return Version(distribution.version)
    except (InvalidVersion, TypeError):
        return Version("0")
