"""How texts begin: the model writes the user's turn itself, or is given it, or starts from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specfw.bench.prompts import load_prompts
from specfw.errors import ConfigError

__all__ = ["Opening", "Turn", "opening_of", "read_prompts"]

_MARK = "specfwturn"
"""Stands for the user's turn while the chat template is taken apart."""
_MORE = "…"
"""Ends turns that the target goes on with."""


@dataclass(frozen=True)
class Turn:
    """A user's turn, or how it begins."""

    tokens: tuple[int, ...] = ()
    unfinished: bool = True
    """The target writes the rest."""


@dataclass(frozen=True)
class Opening:
    """The tokens before and after the user's turn."""

    before: tuple[int, ...]
    after: tuple[int, ...] = ()
    """None at all means that there are no turns: the text goes on from `before`."""
    note: str = ""
    """What a user should know about it."""


def opening_of(tokenizer: Any, config: Any) -> Opening:
    """The opening of a target's texts: its chat template's, or its begin-of-text token.

    Raises:
        ConfigError: it has neither.
    """
    if getattr(tokenizer, "chat_template", None):
        if (opening := _chat_opening(tokenizer)) is not None:
            return opening
        why = "the target's chat template cannot be taken apart"
    else:
        why = "the target has no chat template"
    for source in (tokenizer, config):
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(source, name, None)
            token = token[0] if isinstance(token, list) and token else token
            if isinstance(token, int):
                return Opening((token,), note=f"{why}, so texts are sampled from token {token} on")
    raise ConfigError(
        "train: expected a target with a chat template, or with a token that begins or ends texts, to sample "
        "texts from, got one with neither; give --prompts FILE"
    )


def _chat_opening(tokenizer: Any) -> Opening | None:
    """What the chat template puts around the user's first turn; None if it changes the turn."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
    except Exception:  # a template is a program of its own
        return None
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after or not before or not after:
        return None
    ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after)]
    return Opening(tuple(ids[0]), tuple(ids[1])) if all(ids) else None


def read_prompts(path: Path, tokenizer: Any) -> list[Turn]:
    """The user's turns in a file: a `.jsonl` in Spec-Bench's format, or text with one on each line.

    A turn that ends in "…" is unfinished; "…" alone leaves all of it to the target.

    Raises:
        ConfigError: the file cannot be read or holds none, or there is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError(
            "train: expected a target with a tokenizer for --prompts, got one without; leave them out"
        )
    texts: Sequence[str]
    if path.suffix == ".jsonl":
        texts = [turn for prompt in load_prompts(path) for turn in prompt.turns[:1]]
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"train: expected a text file of prompts in {path}, but it cannot be read ({error}); "
                "name another file"
            ) from error
        texts = [line.strip() for line in lines]
    turns = [_turn_of(text, tokenizer) for text in texts if text]
    if not (turns := [turn for turn in turns if turn.tokens or turn.unfinished]):
        raise ConfigError(f"train: expected at least one prompt in {path}, got none; add some")
    return turns


def _turn_of(text: str, tokenizer: Any) -> Turn:
    unfinished = text.endswith(_MORE)
    if unfinished:
        text = text.removesuffix(_MORE).rstrip()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else ()
    return Turn(tuple(ids), unfinished)
