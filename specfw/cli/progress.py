"""What a long command is doing, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

__all__ = ["showing_progress"]


@contextmanager
def showing_progress(first: str = "loading") -> Iterator[Callable[[str], None]]:
    """A function that tells what runs now: one changing line on a terminal, else a line each."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
    else:
        yield lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
