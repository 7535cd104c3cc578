"""Options that several commands share, and how they become a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specfw.config import PipelineConfig, apply_overrides, load_config
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.types import Output

__all__ = [
    "Choices",
    "ConfigFile",
    "DraftWith",
    "Drafter",
    "Dtype",
    "Grammar",
    "JsonOutput",
    "JsonSchema",
    "MinP",
    "Overrides",
    "Regex",
    "Schedulers",
    "Seed",
    "ShowAccepted",
    "Target",
    "Temperature",
    "TopK",
    "TopP",
    "Verifier",
    "given",
    "output_mapping",
    "print_json",
    "read_config",
    "read_counts",
    "structure",
]

Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens only.")]
TopP = Annotated[float | None, typer.Option(help="Sample from the smallest set of this mass.")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the best one's.")]
DraftWith = Annotated[
    str | None, typer.Option(help="One of the config's `drafters`, by its name there.")
]
Seed = Annotated[int | None, typer.Option(help="The seed of all chance.")]
JsonSchema = Annotated[
    str | None, typer.Option(help="Text that follows a JSON schema, given as a file or as JSON.")
]
Regex = Annotated[str | None, typer.Option(help="Text that a regular expression matches.")]
Grammar = Annotated[
    str | None,
    typer.Option(help="Text of a grammar in Lark's or llama.cpp's notation: a file, or as text."),
]
Choices = Annotated[
    list[str] | None, typer.Option("--choice", help="One of these texts; to be repeated.")
]
ShowAccepted = Annotated[bool, typer.Option(help="Colour steps in which drafted tokens were kept.")]

_PIPELINE = "Pipeline"

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", help="Config file (.yaml, .json, .toml).", rich_help_panel=_PIPELINE
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Set one key, as in drafter.k=5; may be repeated.", rich_help_panel=_PIPELINE
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="`demo`, a local folder, a hub id, or an expression.", rich_help_panel=_PIPELINE
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="A name or an expression, as in 'ngram(max_nodes=7)'.", rich_help_panel=_PIPELINE
    ),
]
Verifier = Annotated[
    str | None, typer.Option(help="A name or an expression.", rich_help_panel=_PIPELINE)
]
Schedulers = Annotated[
    list[str] | None,
    typer.Option(
        "--scheduler", help="A name or an expression; may be repeated.", rich_help_panel=_PIPELINE
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="auto, float32, bfloat16, float16 or float64.", rich_help_panel=_PIPELINE),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: neither None nor an empty list."""
    return {key: value for key, value in options.items() if value is not None and value != []}


def read_config(
    file: Path | None,
    overrides: list[str] | None,
    *,
    default_target: str | None = None,
    **options: Any,
) -> PipelineConfig:
    """The config file, then the options that were given, then every `--set`.

    Raises:
        ConfigError: any of them is wrong.
    """
    settings: dict[str, Any] = load_config(file) if file else {}
    settings |= given(**options)
    if default_target is not None:
        settings.setdefault("target", default_target)
    return PipelineConfig(**apply_overrides(settings, overrides or [], PluginManager()))


def read_counts(command: str, option: str, text: str, least: int = 1) -> list[int]:
    """Numbers by comma, in rising order.

    Raises:
        ConfigError: the text is something else, or a number is below `least`.
    """
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < least:
        raise ConfigError(
            f"{command}: expected {option} as numbers from {least}, by comma, got {text!r}; "
            "write 1,2,4,8"
        )
    return counts


def structure(
    json_schema: str | None, regex: str | None, grammar: str | None, choices: list[str] | None
) -> dict[str, Any]:
    """The settings that keep the text within a language, of which files are read.

    Raises:
        ConfigError: a file cannot be read.
    """
    return given(
        json_schema=_read_if_file("--json-schema", json_schema),
        regex=regex,
        grammar=_read_if_file("--grammar", grammar),
        choices=choices,
    )


def _read_if_file(option: str, value: str | None) -> str | None:
    try:
        if value is None or not Path(value).is_file():
            return value
    except OSError:  # a text that is too long for a path
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {value!r}: {error}") from None


def output_mapping(output: Output) -> dict[str, Any]:
    """An output with the stable keys of `specfw generate --json`."""
    speculation = asdict(output.speculation)
    speculation["acceptance_rate"] = output.speculation.acceptance_rate
    speculation["acceptance_length"] = output.speculation.acceptance_length
    return {**asdict(output), "speculation": speculation}


def print_json(value: Mapping[str, Any] | list[Any]) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
