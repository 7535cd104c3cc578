"""`specfw bench`: measurements, each on the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specfw.cli.options import JsonOutput, print_json, read_counts
from specfw.cli.progress import showing_progress
from specfw.references import split_references

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure speed on the demo model.")


@app.callback()
def _bench() -> None:
    """Measure speed on the demo model."""


DRAFTERS = "ngram, suffix, recycling, merge(suffix, recycling)"
"""What is compared unless said otherwise."""


@app.command("drafters")
def drafters(
    drafters: Annotated[
        list[str] | None,
        typer.Option(help="Names or expressions by comma, or the option repeated."),
    ] = None,
    limit_per_category: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens for each prompt.")] = 128,
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of each prompt with each drafter; medians count.")
    ] = 3,
    prompts: Annotated[
        Path | None, typer.Option(help="A JSONL file in Spec-Bench's format.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    markdown: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the table into this PNG; needs matplotlib.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Drafters against drafting nothing, by category of prompts."""
    from specfw.bench.drafters import bench_drafters, plot_drafters
    from specfw.bench.plots import new_figure

    if plot is not None:
        new_figure("bench drafters", 1, 1)  # refused before anything is measured
    chosen = [name for text in drafters or [DRAFTERS] for name in split_references(text)]
    with showing_progress() as progress:
        result = bench_drafters(
            chosen, limit_per_category, max_new_tokens, prompts, dtype, rounds, progress=progress
        )
    if markdown is not None:
        markdown.write_text(result.markdown(), encoding="utf-8")
    if plot is not None:
        plot_drafters(result, plot)
    if as_json:
        print_json(result.mapping())
    else:
        print(result.markdown())


@app.command("engine")
def engine(
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to emit for each prompt.")
    ] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians count.")] = 5,
    prompts: Annotated[
        Path | None, typer.Option(help="A JSONL file in Spec-Bench's format.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    as_json: JsonOutput = False,
) -> None:
    """Plain decoding of this engine against transformers, at batch 1 and 16."""
    from specfw.bench.engine import bench_engine

    with showing_progress() as progress:
        result = bench_engine(max_new_tokens, rounds, prompts, dtype, progress).mapping()
    if as_json:
        print_json(result)
        return
    table = Table("contender", "tokens/s")
    for name, speed in result["tokens_per_second"].items():
        table.add_row(name, f"{speed:.1f}")
    Console().print(table)
    for name, ratio in result["ratio"].items():
        print(f"{name}: {ratio:.2f}x")
    print(
        f"engine work outside the model at batch 1: {result['overhead_share']['batch1']:.1%} of a step"
    )


@app.command("schedulers")
def schedulers(
    drafter: Annotated[
        str, typer.Option(help="A name or an expression.")
    ] = "ngram(continuations=1, max_nodes=16)",
    depths: Annotated[str, typer.Option(help="The fixed depths, by comma.")] = "0,1,2,4,8",
    requests: Annotated[str, typer.Option(help="Requests at once, by comma.")] = "1,4,16",
    limit_per_class: Annotated[int, typer.Option(min=1, help="Prompts of each class.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens for each prompt.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians count.")] = 2,
    prompts: Annotated[
        Path | None, typer.Option(help="A JSONL file in Spec-Bench's format.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the speeds into this PNG; needs matplotlib.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """adaptive-k against fixed depths, and goodput against plain decoding and a fixed depth."""
    from specfw.bench.schedulers import bench_schedulers, plot_schedulers

    with showing_progress() as progress:
        result = bench_schedulers(
            drafter,
            read_counts("bench schedulers", "--depths", depths, least=0),
            read_counts("bench schedulers", "--requests", requests),
            limit_per_class,
            max_new_tokens,
            rounds,
            prompts,
            dtype,
            progress=progress,
        )
    if markdown is not None:
        markdown.write_text(result.markdown(), encoding="utf-8")
    if plot is not None:
        plot_schedulers(result, plot)
    if as_json:
        print_json(result.mapping())
    else:
        print(result.markdown())


@app.command("quantized")
def quantized(
    target: Annotated[
        list[str] | None,
        typer.Option(help="An expression such as \"torch-int(target='demo')\"; may be repeated."),
    ] = None,
    drafter: Annotated[str, typer.Option(help="For the speculative runs.")] = "ngram",
    limit_per_category: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to emit for each prompt.")
    ] = 64,
    prompts: Annotated[
        Path | None, typer.Option(help="A JSONL file in Spec-Bench's format.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the table here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it into this PNG; needs matplotlib.")
    ] = None,
    as_json: JsonOutput = False,
) -> None:
    """Quantised targets against the bfloat16 one: speed, memory, acceptance, quality."""
    from specfw.bench.quantized import TARGETS, bench_quantized

    with showing_progress() as progress:
        result = bench_quantized(
            target or TARGETS, drafter, limit_per_category, max_new_tokens, prompts, progress
        )
    if markdown is not None:
        markdown.write_text(result.markdown(), encoding="utf-8")
    if plot is not None:
        result.plot(plot)
    if as_json:
        print_json(result.mapping())
    else:
        print(result.markdown())


@app.command("verifiers")
def verifiers(
    layers: Annotated[
        str, typer.Option(help="Layers of the truncated copies that draft, by comma.")
    ] = "24,28",
    per_text: Annotated[int, typer.Option(min=1, help="Places in each of six texts.")] = 8,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables here.")] = None,
    as_json: JsonOutput = False,
) -> None:
    """Which sibling laws and verifiers keep most, computed from laws of real models; nothing is timed."""
    from specfw.bench.verifiers import bench_verifiers

    counts = read_counts("bench verifiers", "--layers", layers)
    with showing_progress() as progress:
        result = bench_verifiers(counts, per_text=per_text, dtype=dtype, progress=progress)
    if markdown is not None:
        markdown.write_text(result.markdown(), encoding="utf-8")
    if as_json:
        print_json(result.mapping())
    else:
        print(result.markdown())
