"""`specfw certify`: does this combination keep the target's law?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specfw.cli.options import (
    ConfigFile,
    Drafter,
    JsonOutput,
    Overrides,
    Schedulers,
    Target,
    Verifier,
    print_json,
    read_config,
)
from specfw.components import Kind
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.types import Guarantee

__all__ = ["NAME", "command"]

NAME = "certify"


def command(
    drafter: Drafter = None,
    verifier: Verifier = None,
    scheduler: Schedulers = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Walk longer texts over more tokens.")
    ] = False,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Walk every combination of what is installed, or of what is named."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --all: a folder for certificate.json and certificate.md."),
    ] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="With --all: processes that share the work.")
    ] = 2,
    target: Target = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: JsonOutput = False,
) -> None:
    """Enumerate every random outcome of a combination on table models and compare its law with the target's.

    Exit code 1 if its guarantee is broken.
    """
    if every:
        if config or overrides or target:
            raise ConfigError(
                "certify: expected --all alone or with names of components, got a config, --set or --target "
                "as well; leave these out"
            )
        _certify_all(drafter, verifier, scheduler, deep, out, processes, as_json)
        return
    from specfw.testing.configured import certify_config

    manager = PluginManager()
    read = read_config(
        config,
        overrides,
        default_target="table",
        drafter=drafter,
        verifier=verifier,
        scheduler=scheduler,
    )
    console = Console(stderr=True)
    with console.status("enumerating") as status:
        certificate = certify_config(
            read,
            manager,
            deep,
            progress=lambda number, total, case: status.update(
                f"case {number + 1} of {total}: {case.paste()}"
            ),
        )
    on_target = None if target is None else _measure(target, certificate.guarantee)
    if as_json:
        print_json(_mapping(certificate, on_target))
    else:
        for cause, times in certificate.faults.items():
            console.print(
                f"drafts lost {times} times: the drafter {cause}", style="yellow", markup=False
            )
        print(certificate)
        if on_target is not None:
            print(f"on {target}: {on_target}")
    if not certificate.ok:
        raise typer.Exit(1)


def _certify_all(
    drafter: str | None,
    verifier: str | None,
    schedulers: list[str] | None,
    deep: bool,
    out: Path | None,
    processes: int,
    as_json: bool,
) -> None:
    """Certify all combinations; exit code 1 if one breaks its guarantee or fails."""
    from specfw.testing.matrix import certify_all

    named: dict[Kind, list[str]] = {
        "drafter": [drafter] if drafter else [],
        "verifier": [verifier] if verifier else [],
        "scheduler": schedulers or [],
    }
    with Console(stderr=True).status("enumerating") as status:
        matrix = certify_all(
            deep=deep,
            processes=processes,
            only=named,
            controls=not any(named.values()),
            progress=lambda done, total: status.update(f"combination {done} of {total}"),
        )
    if out is not None:
        matrix.write(out)
    if as_json:
        print_json(matrix.mapping())
    else:
        print(matrix.summary())
    if not matrix.ok:
        raise typer.Exit(1)


def _measure(target: str, guarantee: Guarantee) -> str:
    """What the guarantee means on a real target, whose passes round as their shape has it."""
    from specfw.bench.shapes import guarantee_on, shape_dependence
    from specfw.pipeline import Pipeline

    with Pipeline.from_config({"target": target}) as pipeline:
        shapes = shape_dependence(pipeline.engine.runner)
        return guarantee_on(guarantee, pipeline.target.quantization, shapes)


def _mapping(certificate: Any, on_target: str | None = None) -> dict[str, Any]:
    """The stable keys of `specfw certify --json`."""
    return {
        "ok": certificate.ok,
        "guarantee": certificate.guarantee,
        "max_tv": certificate.max_tv,
        "combinations": certificate.combinations,
        "prefixes": certificate.prefixes,
        "leaves": certificate.leaves,
        "drafted": certificate.drafted,
        "accepted": certificate.accepted,
        "faults": dict(certificate.faults),
        "on_target": on_target,
        "counterexample": str(certificate.counterexample) if certificate.counterexample else None,
    }
