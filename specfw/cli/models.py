"""`specfw models`: which kinds of models run exactly, and why others do not."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from specfw.cli.options import JsonOutput, print_json
from specfw.engine.survey import surveyed_models

__all__ = ["NAME", "command"]

NAME = "models"


def command(as_json: JsonOutput = False) -> None:
    """List the surveyed model types: supported, refused (and why), or not surveyed (and why)."""
    survey = surveyed_models()
    if as_json:
        print_json(
            {"transformers": survey.transformers, "models": [asdict(row) for row in survey.rows]}
        )
        return
    table = Table(
        "model type", "verdict", "why", title=f"Causal models of transformers {survey.transformers}"
    )
    for row in survey.rows:
        table.add_row(row.model_type, row.verdict, row.reason)
    Console().print(table)
