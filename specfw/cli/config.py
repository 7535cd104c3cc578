"""`specfw config`: the resolved config, or the schema of config files."""

from __future__ import annotations

from typing import Annotated

import typer

from specfw.cli.options import (
    ConfigFile,
    Drafter,
    Dtype,
    Overrides,
    Schedulers,
    Target,
    Verifier,
    print_json,
    read_config,
)
from specfw.config import PipelineConfig

__all__ = ["NAME", "command"]

NAME = "config"


def command(
    schema: Annotated[
        bool, typer.Option(help="Print the JSON schema of config files instead.")
    ] = False,
    target: Target = None,
    drafter: Drafter = None,
    verifier: Verifier = None,
    scheduler: Schedulers = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Print the config as JSON, with every default filled in; nothing is loaded."""
    if schema:
        print_json(PipelineConfig.json_schema())
        return
    read = read_config(
        config,
        overrides,
        default_target="demo",
        target=target,
        drafter=drafter,
        verifier=verifier,
        scheduler=scheduler,
        dtype=dtype,
    )
    print_json(read.resolved())
