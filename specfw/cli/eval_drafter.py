"""`specfw eval-drafter`: acceptance of a pipeline by position and category."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specfw.cli.options import (
    Dtype,
    JsonOutput,
    Overrides,
    Target,
    Verifier,
    print_json,
    read_config,
)

__all__ = ["NAME", "command"]

NAME = "eval-drafter"

_SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def command(
    pipeline: Annotated[str, typer.Argument(help="A config file, or a drafter's expression.")],
    prompts: Annotated[
        Path | None, typer.Option(help="A JSONL file in Spec-Bench's format; default: our own.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=0, help="Draft nodes a step; also of parts that set no max_nodes."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    limit_per_category: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each category; default: all.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens for each prompt.")] = 128,
    seed: Annotated[int, typer.Option(help="The seed of all chance.")] = 0,
    target: Target = None,
    verifier: Verifier = None,
    dtype: Dtype = None,
    overrides: Overrides = None,
    as_json: JsonOutput = False,
) -> None:
    """Decode prompts with a pipeline, and say how much of its drafts the target kept."""
    from specfw.bench.evaluation import evaluate, with_nodes
    from specfw.pipeline import Pipeline

    file = Path(pipeline) if pipeline.endswith(_SUFFIXES) else None
    config = read_config(
        file,
        overrides,
        default_target="demo",
        target=target,
        drafter=None if file else pipeline,
        verifier=verifier,
        dtype=dtype,
    )
    with (
        Console(stderr=True).status("loading") as status,
        Pipeline.from_config(with_nodes(config, nodes)) as built,
    ):
        result = evaluate(
            built,
            prompts,
            nodes=nodes,
            temperature=temperature,
            per_category=limit_per_category,
            max_new_tokens=max_new_tokens,
            seed=seed,
            progress=status.update,
        ).mapping()
    if as_json:
        print_json(result)
        return
    print(
        f"{result['acceptance_length']:.2f} tokens a pass over {result['prompts']} prompts "
        f"({result['guarantee']}); {result['draft_share']:.1%} of the time is drafting"
    )
    for what, count in (("position", "tested"), ("rank", "seen")):
        table = Table(what, count, "kept")
        for number, one in enumerate(result[f"by_{what}"], start=1):
            table.add_row(str(number), str(one[count]), f"{one['rate']:.1%}")
        Console().print(table)
    if result["by_confidence"]:
        table = Table(
            "confidence",
            "seen",
            "kept",
            title=f"calibration error {result['calibration_error']:.1%}",
        )
        for one in result["by_confidence"]:
            table.add_row(f"{one['confidence']:.1%}", str(one["seen"]), f"{one['rate']:.1%}")
        Console().print(table)
    table = Table("category", "tokens a pass")
    for category, length in result["by_category"].items():
        table.add_row(category, f"{length:.2f}")
    Console().print(table)
