"""The prompts that benchmarks run on: the project's own set, or a file in the same format.

A file holds one JSON object a line, in Spec-Bench's format: `question_id`, `category` and `turns`,
the user's messages of one conversation in order. Other fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from specfw.errors import ConfigError

__all__ = ["CATEGORIES", "Prompt", "demo_prompts", "load_prompts"]

CATEGORIES = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
    "translation",
    "summarization",
    "qa",
    "math_reasoning",
    "rag",
)
"""The categories of the project's own set, which are Spec-Bench's; a file may have others."""

_DEMO_IDS = (27, 23, 39)
"""A chat answer, an extraction from a long text, a summary."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation, of which only the user's side is given."""

    id: int | str
    category: str
    turns: tuple[str, ...]
    """The user's messages; each is sent after the answer to the one before."""


def load_prompts(path: Path | None = None) -> list[Prompt]:
    """Read the prompts of a JSONL file, or the project's own, four for each of `CATEGORIES`.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no prompt; names file and line.
    """
    source: Traversable = files("specfw.bench") / "prompts.jsonl" if path is None else Path(path)
    prompts: dict[int | str, Prompt] = {}
    for where, line in _lines(source):
        prompt = _parse(where, line)
        if prompt.id in prompts:
            raise ConfigError(
                f"{where}: question_id {prompt.id!r} was used before; give each prompt its own."
            )
        prompts[prompt.id] = prompt
    if not prompts:
        raise ConfigError(f"{source}: expected one prompt a line, found none; add at least one.")
    return list(prompts.values())


def demo_prompts() -> list[Prompt]:
    """Three of the project's own prompts: a chat answer, an extraction from a long text, a summary."""
    prompts = {prompt.id: prompt for prompt in load_prompts()}
    return [prompts[identifier] for identifier in _DEMO_IDS]


def _lines(source: Traversable) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, each with `file, line number` for messages."""
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{source}: expected a JSONL file of prompts in UTF-8, but it cannot be read ({error})."
        ) from error
    # Only \n ends a line of JSONL; str.splitlines would also cut at characters that JSON may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{source}, line {number}", line


def _parse(where: str, line: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: expected a JSON object on one line, got {error}.") from error
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where}: expected a JSON object with question_id, category and turns, "
            f"got {_shown(record)}."
        )
    return Prompt(
        id=_field(where, record, "question_id", _is_id, "a whole number or a text"),
        category=_field(where, record, "category", _is_text, "a text"),
        turns=tuple(
            _field(where, record, "turns", _is_texts, "a list of texts, at least one, none empty")
        ),
    )


def _field(
    where: str, record: dict[str, Any], name: str, valid: Callable[[Any], bool], expected: str
) -> Any:
    if name not in record:
        raise ConfigError(f"{where}: {name} is missing; give {expected}.")
    value = record[name]
    if not valid(value):
        raise ConfigError(f"{where}: {name} must be {expected}, got {_shown(value)}.")
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_id(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, int) and not isinstance(value, bool))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
