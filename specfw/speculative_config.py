"""The key `speculative_config`: vLLM's dictionary for drafting, as the drafter and scheduler it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from specfw.errors import ConfigError

__all__ = ["KEY", "with_speculative_config"]

KEY = "speculative_config"

_SHARED = ("method", "num_speculative_tokens")


def with_speculative_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a pipeline in which the dictionary, if there is one, became a drafter.

    The scheduler, unless given, becomes one that allows as many tokens as the dictionary says.

    Raises:
        ConfigError: the dictionary has an unknown key or method, or a drafter is given too.
    """
    result = dict(settings)
    given = result.pop(KEY, None)
    if given is None:
        return result
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{KEY}: expected a mapping such as {{'method': 'ngram', 'num_speculative_tokens': 5}}, "
            f"got {given!r}."
        )
    if "drafter" in result:
        raise ConfigError(
            f"config: {KEY} names a drafter, and drafter={result['drafter']!r} is given too; leave "
            "one of them out."
        )
    method = _method(given)
    translate, accepted = _METHODS[method]
    _check_keys(given, method, accepted)
    count = _count(given, "num_speculative_tokens")
    result["drafter"] = translate(given, count)
    result.setdefault(
        "scheduler", {"name": "fixed", "max_nodes": count, "max_depth": count, "max_width": 1}
    )
    return result


def _method(given: Mapping[str, Any]) -> str:
    method = given.get("method")
    if method is None:  # as vLLM guesses it
        method = "ngram" if given.get("model") in (None, "ngram", "[ngram]") else "draft_model"
    if method not in _METHODS:
        raise ConfigError(
            f"{KEY}: expected one of the methods {', '.join(_METHODS)}, got {method!r}; name a drafter "
            "of specfw under 'drafter' instead (`specfw plugins` lists them)."
        )
    return str(method)


def _check_keys(given: Mapping[str, Any], method: str, accepted: tuple[str, ...]) -> None:
    known = sorted({*_SHARED, *accepted})
    for key in given:
        if key not in known:
            close = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"{KEY}: unknown key {key!r} for method {method!r}{hint} (accepted: {', '.join(known)})."
            )


def _count(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{KEY}: expected {key} to be an integer from 1, got {value!r}; set it.")
    return value


def _ngram(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    drafter = {
        "name": "ngram",
        "max_nodes": count,
        "max_depth": count,
        "depth_per_token": count,
        "continuations": 1,
    }
    asked = [
        key for key in ("prompt_lookup_max", "prompt_lookup_min") if given.get(key) is not None
    ]
    if asked:  # one alone stands for both
        longest, shortest = asked[0], asked[-1]
        drafter |= {"max_ngram": _count(given, longest), "min_ngram": _count(given, shortest)}
    return drafter


def _draft_model(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    model = given.get("model")
    if not isinstance(model, (str, Mapping)) or not model:
        raise ConfigError(
            f"{KEY}: expected 'model' to be a local folder or a hub id, got {model!r}; set it."
        )
    loaded: Any = model
    if isinstance(model, str):
        revision = {"revision": given["revision"]} if given.get("revision") else {}
        loaded = {"name": "transformers", "model": model, **revision}
    return {"name": "small-model", "model": loaded, "max_nodes": count, "max_depth": count}


def _suffix(given: Mapping[str, Any], count: int) -> dict[str, Any]:
    names = {
        "suffix_decoding_max_spec_factor": "factor",
        "suffix_decoding_min_token_prob": "min_probability",
    }
    asked = {ours: given[theirs] for theirs, ours in names.items() if given.get(theirs) is not None}
    return {"name": "suffix", "max_nodes": count, "max_depth": count, **asked}


_METHODS: Mapping[
    str, tuple[Callable[[Mapping[str, Any], int], dict[str, Any]], tuple[str, ...]]
] = {
    "ngram": (_ngram, ("model", "prompt_lookup_max", "prompt_lookup_min")),
    "draft_model": (_draft_model, ("model", "revision")),
    "suffix": (
        _suffix,
        ("model", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    ),
}
"""Method -> what it becomes, and its keys besides the shared ones."""
