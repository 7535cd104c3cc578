"""`specfw profile`: what a target pass costs here, and how deep to draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specfw.cli.options import (
    ConfigFile,
    Dtype,
    JsonOutput,
    Overrides,
    Target,
    print_json,
    read_config,
    read_counts,
)

__all__ = ["NAME", "command"]

NAME = "profile"


def command(
    rows: Annotated[
        str, typer.Option(help="Rows of the passes to time, by comma.")
    ] = "1,2,3,4,5,6,8,12,16,24,32,48,64",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the rows.")] = 128,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed passes of each size; medians count.")
    ] = 5,
    draft_cost: Annotated[
        float,
        typer.Option(min=0.0, help="Time of one draft token, relative to a pass over one row."),
    ] = 0.05,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the curve into this PNG; needs matplotlib.")
    ] = None,
    target: Target = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: JsonOutput = False,
) -> None:
    """Time target passes by their rows, and print the best draft depth for each acceptance rate."""
    from specfw.bench.profile import plot_profile, profile_target
    from specfw.pipeline import Pipeline

    counts = read_counts("profile", "--rows", rows)
    read = read_config(config, overrides, default_target="demo", target=target, dtype=dtype)
    with Console(stderr=True).status("loading") as status, Pipeline.from_config(read) as pipeline:
        profile = profile_target(
            pipeline.engine.runner,
            counts,
            name=pipeline.target.name,
            context=context,
            repeats=repeats,
            draft_cost=draft_cost,
            progress=status.update,
        )
    if plot is not None:
        plot_profile(profile, plot)
    about = profile.mapping()
    if as_json:
        print_json(about)
        return
    console = Console()
    table = Table("rows", "ms", "relative")
    first = about["curve"][0]["seconds"]
    for point in about["curve"]:
        seconds = point["seconds"]
        table.add_row(str(point["rows"]), f"{1000 * seconds:.2f}", f"{seconds / first:.2f}")
    console.print(table)
    table = Table("acceptance", "best depth", "tokens a step", "speedup")
    for best in about["best"]:
        table.add_row(
            f"{best['acceptance']:.1f}",
            str(best["depth"]),
            f"{best['tokens']:.2f}",
            f"{best['speedup']:.2f}x",
        )
    console.print(table)
    example = about["expected_tokens"]
    print(
        f"expected tokens a step, (1 - a^(K+1)) / (1 - a): for a = {example['acceptance']} and "
        f"K = {example['depth']}, {example['tokens']:.4f}"
    )
