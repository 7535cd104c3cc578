"""Structured output: which tokens a JSON schema, regex, grammar or list of choices lets come next.

The library llguidance (extra `specfw[grammar]`) parses and makes the masks. Here is what it does not
know: which tokens end a request's text, and where drafts lead.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarError", "Grammars", "Matcher"]

log = logging.getLogger("specfw")

_AS_JSON_DUMPS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spaced: in one way only, so that no text ends in blanks, and long runs are forced."""


class GrammarError(Exception):
    """A grammar cannot go on with a text; one clause, without the place."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What tokens mean to one request."""

    tokenizer: LLTokenizer
    size: int
    ends: NDArray[np.int64]
    """Tokens that end its text."""
    never: NDArray[np.int64]
    """Tokens that are no text."""
    has_gaps: bool
    """Whether there is text that no tokens spell."""


class Matcher:
    """Where one text is in its grammar."""

    def __init__(self, inner: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self._allowed: NDArray[np.bool_] | None = None
        self._failed = ""
        self.over = False
        """Whether a token has ended the text."""
        self.astray = False
        """Whether a token came that the grammar forbids."""

    def fork(self) -> Matcher:
        """An independent copy in the same state."""
        twin = copy(self)
        twin._inner = self._inner.deep_copy()
        return twin

    def advance(self, token: int) -> None:
        """The text goes on with this token; what follows an end, or a forbidden token, is not followed."""
        self._allowed = None
        if self.over or self.astray:
            return
        if token in self._vocabulary.ends:
            self.over = self._inner.is_accepting()
            self.astray = not self.over
        elif token in self._vocabulary.never or self._inner.validate_tokens([token]) != 1:
            self.astray = True
        elif not self._inner.consume_token(token):
            self._failed = _clause(self._inner.get_error())

    def allowed(self) -> NDArray[np.bool_] | None:
        """The tokens that may come next, bool [V]; None if nothing is to be said, as the text is over or astray.

        Raises:
            GrammarError: none may, or the grammar is too complex here.
        """
        if self.over or self.astray:
            return None
        if self._allowed is None:
            self._allowed = self._compute()
        return self._allowed

    def _compute(self) -> NDArray[np.bool_]:
        known = self._vocabulary
        if self._failed:
            raise GrammarError(self._failed)
        if known.has_gaps and not _spells(known.tokenizer, self._inner.compute_ff_bytes()):
            raise GrammarError("no tokens of the target's vocabulary spell what must come")
        accepting = self._inner.is_accepting()
        packed = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, bitorder="little", count=known.size)
        allowed = bits.astype(np.bool_)
        allowed[known.never] = False
        allowed[known.ends] = accepting
        if self._inner.stop_reason() in _TOO_COMPLEX:
            raise GrammarError(_clause(self._inner.get_error()))
        if not allowed.any():
            raise GrammarError("no token of the target's vocabulary continues the text")
        return allowed


_TOO_COMPLEX = ("MaxTokensTotal", "MaxTokensParser", "ParserTooComplex", "LexerTooComplex")
"""Why llguidance gives up on a text that may be right."""


class Grammars:
    """Compiles the grammars of requests to one target; the tokenizer is read when the first one comes."""

    def __init__(self, info: TargetInfo) -> None:
        self._info = info
        self._tokenizer: LLTokenizer | None = None
        self._has_gaps = False
        self._start = lru_cache(_REMEMBERED)(self._compile)

    def matcher(self, params: SamplingParams, stop_ids: Sequence[int]) -> Matcher | None:
        """A new matcher for a request whose text `stop_ids` end; None if nothing constrains it.

        Raises:
            ConfigError: llguidance or a tokenizer is missing, no token can end the text, or the
                grammar is malformed, has no text, or says something that cannot be enforced.
        """
        if params.structure is None:
            return None
        name, value = params.structure
        size = self._info.vocab_size
        ends = [token for token in stop_ids if token < size]
        if not ends:
            raise ConfigError(
                f"{name}: expected a token that ends the text where it is complete, got none; "
                "leave out ignore_eos, or give stop_token_ids"
            )
        inner = self._start(name, value if isinstance(value, str) else json.dumps(value))
        assert self._tokenizer is not None
        eos = [token for token in self._tokenizer.eos_tokens if token < size]
        vocabulary = _Vocabulary(
            self._tokenizer,
            size,
            ends=np.array(ends, np.int64),
            never=np.array(eos, np.int64),
            has_gaps=self._has_gaps,
        )
        matcher = Matcher(inner, vocabulary).fork()
        try:
            matcher.allowed()
        except GrammarError as error:
            raise _refused(name, str(error)) from None
        return matcher

    def _compile(self, name: str, text: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise ConfigError(
                f"{name}: expected the package llguidance, which is not installed; "
                "install the extra specfw[grammar]"
            ) from None
        if self._tokenizer is None:
            self._tokenizer = _read_tokenizer(self._info, name)
            self._has_gaps = not all(_spells(self._tokenizer, bytes([i])) for i in _UTF8_BYTES)
        limits = LLParserLimits(verbose_errors=False)
        try:
            inner = LLMatcher(self._tokenizer, _WRITERS[name](text), log_level=0, limits=limits)
        except ValueError as error:
            raise _refused(name, str(error)) from None
        if inner.is_error():
            raise _refused(name, inner.get_error())
        for warning in inner.get_grammar_warnings():
            log.warning("%s: %s", name, _clause(warning))
        return inner


_REMEMBERED = 64
"""Compiled grammars that are kept."""


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name}: expected one that some text follows and that can be enforced, got one that "
        f"cannot be used ({_clause(why)}); change it"
    )


def _clause(message: str) -> str:
    """What went wrong, without the picture that llguidance may draw of it."""
    return " ".join(message.split("\n<state>")[0].split()).rstrip(".")


_UTF8_BYTES = [*range(0xC0), *range(0xC2, 0xF5)]


def _spells(tokenizer: LLTokenizer, text: bytes) -> bool:
    return tokenizer.decode_bytes(tokenizer.tokenize_bytes(text)) == text


def _read_tokenizer(info: TargetInfo, name: str) -> LLTokenizer:
    from llguidance import LLTokenizer

    backend = getattr(info.tokenizer, "backend_tokenizer", None)
    if backend is None:
        came = "none" if info.tokenizer is None else f"a {type(info.tokenizer).__name__}"
        raise ConfigError(
            f"{name}: expected a target with a fast tokenizer, whose tokens can be read as bytes, "
            f"got {came}; leave the setting out"
        )
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    size = max(info.vocab_size, backend.get_vocab_size(with_added_tokens=True))
    try:
        return LLTokenizer(
            backend.to_str(), n_vocab=size, eos_token=list(info.eos_token_ids) or None
        )
    except Exception as error:  # whatever a tokenizer's file makes of a foreign reader
        raise ConfigError(
            f"{name}: expected a tokenizer that llguidance can read, got one that it refuses "
            f"({_clause(str(error))}); leave the setting out"
        ) from error


def _write_schema(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(text, defaults=_AS_JSON_DUMPS)  # type: ignore[arg-type]


def _write_regex(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(text)


def _write_grammar(text: str) -> str:
    from llguidance import grammar_from

    return grammar_from("grammar", text)


def _write_choices(text: str) -> str:
    return _write_regex("|".join(map(_literally, json.loads(text))))


def _literally(text: str) -> str:
    return "".join(one if one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


_WRITERS: Mapping[str, Callable[[str], str]] = {
    "json_schema": _write_schema,
    "regex": _write_regex,
    "grammar": _write_grammar,
    "choices": _write_choices,
}
"""A setting's text as a grammar of llguidance."""
