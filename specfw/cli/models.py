"""`specfw models`: which kinds of models run exactly, and why others do not."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from specfw.cli.options import JsonOutput, print_json

__all__ = ["NAME", "command"]

NAME = "models"


def command(as_json: JsonOutput = False) -> None:
    """List the surveyed model types: supported, refused (and why), or not surveyed."""
