"""The `specfw` command: its application, and how errors end it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from specfw.cli import (
    bench,
    certify,
    chat,
    config,
    demo,
    doctor,
    eval_drafter,
    generate,
    models,
    plugins,
    profile,
    train,
)
from specfw.errors import SpecfwError
from specfw.plugins import PluginManager
from specfw.version import __version__

__all__ = ["app", "run"]

app = typer.Typer(
    name="specfw",
    help="Speculative decoding that never changes the target model's law.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (
    generate,
    chat,
    demo,
    doctor,
    plugins,
    models,
    certify,
    profile,
    train,
    eval_drafter,
    config,
):
    app.command(module.NAME)(module.command)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def run() -> None:
    """Run the command line; a user's error is one sentence on stderr and exit code 2."""
    with _each_warning_once():
        try:
            PluginManager().add_commands(app)
            app()
        except SpecfwError as error:
            console = Console(stderr=True, soft_wrap=True)
            console.print(f"error: {error}", style="red", markup=False, highlight=False)
            sys.exit(2)


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Show warnings on stderr, each once although a command may look for plugins several times."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        count = len(seen)
        seen.add(record.getMessage())
        return len(seen) > count

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    handler.addFilter(is_new)
    logger = logging.getLogger("specfw")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    run()
