"""`specfw certify`: does this combination keep the target's law?"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from specfw.cli.options import (
    ConfigFile,
    Drafter,
    JsonOutput,
    Overrides,
    Schedulers,
    Verifier,
    print_json,
    read_config,
)
from specfw.plugins import PluginManager

__all__ = ["NAME", "command"]

NAME = "certify"


def command(
    drafter: Drafter = None,
    verifier: Verifier = None,
    scheduler: Schedulers = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Walk longer texts over more tokens.")
    ] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: JsonOutput = False,
) -> None:
    """Enumerate every random outcome of a combination on table models and compare its law with the target's.

    Exit code 1 if its guarantee is broken.
    """
    from specfw.testing.configured import certify_config

    manager = PluginManager()
    read = read_config(
        config,
        overrides,
        default_target="table",
        drafter=drafter,
        verifier=verifier,
        scheduler=scheduler or None,
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
    if as_json:
        print_json(_mapping(certificate))
    else:
        for cause, times in certificate.faults.items():
            console.print(
                f"drafts lost {times} times: the drafter {cause}", style="yellow", markup=False
            )
        print(certificate)
    if not certificate.ok:
        raise typer.Exit(1)


def _mapping(certificate: Any) -> dict[str, Any]:
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
        "counterexample": str(certificate.counterexample) if certificate.counterexample else None,
    }
