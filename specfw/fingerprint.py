"""Telling targets apart: a trained drafter carries the fingerprint of the target that it was trained for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError

__all__ = ["KEY", "check_fingerprint", "fingerprint", "read_metadata"]

KEY = "specfw_fingerprint"
"""Its key in the metadata of safetensors files, and in the config of a draft model."""


def fingerprint(target: TargetInfo) -> str:
    """Size of the vocabulary, width of the hidden states, and a hash of the tokens' texts and ids."""
    config = getattr(target.model, "config", None)
    text: Any = config.get_text_config(decoder=True) if config is not None else None
    width = getattr(text, "hidden_size", 0)
    vocab: Mapping[str, int] = target.tokenizer.get_vocab() if target.tokenizer is not None else {}
    digest = hashlib.sha256()
    for token, number in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number} {token}\0".encode("utf-8", "surrogatepass"))
    return f"{target.vocab_size}-{width}-{digest.hexdigest()[:16]}"


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; nothing where there is none or the file is of another kind."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}


def check_fingerprint(found: str | None, target: TargetInfo, what: str, way_out: str) -> None:
    """Refuse what was trained for another target; what carries no fingerprint passes.

    Args:
        found: the fingerprint that it carries.
        target: the target that it is going to draft for.
        what: who complains, and about what.
        way_out: what else can be done.

    Raises:
        ConfigError: it was trained for another target.
    """
    expected = fingerprint(target)
    if found is not None and found != expected:
        raise ConfigError(
            f"{what} belong to another target: expected the fingerprint {expected} of {target.name!r}, "
            f"got {found}; {way_out}"
        )
