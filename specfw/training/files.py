"""Files that are whole or not there, and room for what is going to be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specfw.errors import CapacityError, ConfigError

__all__ = ["check_room", "exclusive", "whole_file", "whole_folder"]

_ASIDE = ".unfinished"
_LAST = "config.json"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it takes that name when the block ends, and goes if the block fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write files to, which go over to `folder` when the block ends, config.json at last.

    So `folder` is no checkpoint before all of it is there. Only one may write to it; see `exclusive`.
    """
    aside = folder / _ASIDE
    shutil.rmtree(aside, ignore_errors=True)  # what was killed left it
    aside.mkdir(parents=True)
    try:
        yield aside
        (folder / _LAST).unlink(missing_ok=True)
        made = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
        for name in sorted(made, key=lambda name: name == Path(_LAST)):
            with (aside / name).open("rb") as written:
                os.fsync(written.fileno())
            (folder / name).parent.mkdir(exist_ok=True)
            (aside / name).replace(folder / name)
    finally:
        shutil.rmtree(aside)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Make `folder`, and let nobody else in while the block runs; what killed writers left is removed.

    Raises:
        ConfigError: another process is in.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        try:
            fcntl.flock(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # the kernel lets go of it after a kill
        except OSError:
            raise ConfigError(
                f"train: expected {folder} to be free, but another run writes to it; wait for it, or name "
                "another folder"
            ) from None
        for left in folder.glob(".*.safetensors.*"):
            left.unlink()
        yield


def check_room(folder: Path, disk: int, memory: int) -> None:
    """Compare what is going to be needed with what there is, in bytes.

    Raises:
        CapacityError: there is less.
    """
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    for what, needed, free, remedy in (
        ("disk", disk, shutil.disk_usage(existing).free, "free some, or name another folder"),
        ("memory", memory, _available_memory(), "close other programs, or ask for fewer tokens"),
    ):
        if needed > free:
            raise CapacityError(
                f"train: expected about {_size(needed)} of free {what} for {folder}, got {_size(free)}; {remedy}"
            )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _available_memory() -> int:
    """Bytes of memory that may be used, as far as the host says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return 1 << 62
    line = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return 1 << 62 if line is None else int(line.split()[1]) * 1024
