"""Rules that read a node's whole history on the host: n-grams, sequences, grammars, logits processors.

What a request has committed is kept up to date here; a node's history is that and its drafted path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.decoding.forks import Forks
from specfw.decoding.grammar import GrammarError, Matcher
from specfw.types import LogitsProcessor, SamplingParams, StatefulProcessor

__all__ = ["History", "RuleError"]

Cells = list[tuple[int, float]]
"""Tokens, and what is added to their scores."""


class RuleError(Exception):
    """A request's own rule leaves it without a law: a processor that fails, a dead end; one sentence."""


class History:
    """One request's committed tokens, and the rules that read them."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        matcher: Matcher | None = None,
    ) -> None:
        self._tokens: list[int] = list(prompt)
        self._biased = _by_last([(ids, bias) for ids, bias in params.sequence_bias if len(ids) > 1])
        self._bad = _by_last([(ids, -torch.inf) for ids in params.bad_words_ids if len(ids) > 1])
        self._size = params.no_repeat_ngram_size
        self._followers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self._grammar = None if matcher is None else Forks(matcher)
        self._processors: list[LogitsProcessor | Forks[_Guarded]] = [
            Forks(_Guarded(one)) if isinstance(one, StatefulProcessor) else one
            for one in params.logits_processors
        ]
        self._broken: RuleError | None = None  # why the rules with a state cannot go on
        self._ids: Tensor | None = None  # of the committed tokens, made when first asked for
        if self._size:
            self._note_ngrams(0)
        self.advance(output)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether any rule of these settings reads the history on the host."""
        sequences = [ids for ids, _ in params.sequence_bias] + list(params.bad_words_ids)
        return bool(
            params.no_repeat_ngram_size
            or params.structure
            or params.logits_processors
            or any(len(ids) > 1 for ids in sequences)
        )

    @property
    def processes(self) -> bool:
        """Whether there are logits processors."""
        return bool(self._processors)

    @property
    def constrains(self) -> bool:
        """Whether there is a grammar."""
        return self._grammar is not None

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        self._ids = None
        if self._size:
            self._note_ngrams(start)
        try:
            for processor in self._processors:
                if isinstance(processor, Forks):
                    processor.advance(tokens)
        except RuleError as error:  # tokens are committed all the same
            self._broken = error
        if self._grammar is not None:
            self._grammar.advance(tokens)
            if self._grammar.committed.astray:
                self._broken = RuleError(
                    "grammar: expected tokens that it allows, got another from a lossy verifier; "
                    "use one that keeps the law"
                )

    def biases(self, path: Sequence[int]) -> Cells:
        """What sequence biases add to the token after `path`."""
        return list(self._completing(self._biased, path))

    def bans(self, path: Sequence[int]) -> Cells:
        """The tokens that would complete a bad word or repeat an n-gram after `path`."""
        cells = list(self._completing(self._bad, path))
        if self._size:
            cells += [(token, -torch.inf) for token in self._repeating(path)]
        return cells

    def allowed(self, path: Sequence[int]) -> NDArray[np.bool_] | None:
        """The tokens that the grammar allows after `path`, bool [V]; None where it says nothing.

        Raises:
            RuleError: it allows none.
        """
        assert self._grammar is not None
        if self._broken is not None:
            raise self._broken
        try:
            return self._grammar.at(path).allowed()
        except GrammarError as error:
            raise RuleError(
                f"grammar: expected a token that goes on with the text at position "
                f"{len(self._tokens) + len(path)}, got a dead end ({error}); change the grammar"
            ) from None

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether the grammar lets a token follow `path`; nothing follows the end of the text."""
        try:
            allowed = self.allowed(path)
        except RuleError:
            return False
        return allowed is not None and bool(allowed[token])

    def forced(self, most: int) -> list[int]:
        """The next tokens, `most` at most, as far as the grammar leaves no choice."""
        run: list[int] = []
        try:
            while len(run) < most:
                allowed = self.allowed(run)
                if allowed is None or np.count_nonzero(allowed) != 1:
                    break
                run.append(int(allowed.argmax()))
        except RuleError:  # whoever draws there is told
            pass
        return run

    def process(self, scores: Tensor, path: Sequence[int]) -> Tensor:
        """What the logits processors make of one row: [V] -> [V].

        Raises:
            RuleError: one of them raised, or did not return scores [1, V].
        """
        if self._broken is not None:
            raise self._broken
        ids = self._with(path, scores.device)
        row = scores[None].clone()
        for processor in self._processors:
            own = processor.at(path).processor if isinstance(processor, Forks) else processor
            row = _call(own, ids, row)
        return row[0].to(scores.dtype)

    def _with(self, path: Sequence[int], device: torch.device) -> Tensor:
        if self._ids is None or self._ids.device != device:
            self._ids = torch.tensor([self._tokens], dtype=torch.long, device=device)
        if not path:
            return self._ids.clone()
        return torch.cat([self._ids, self._ids.new_tensor([list(path)])], 1)

    def _completing(
        self, sequences: Iterable[tuple[tuple[int, ...], int, float]], path: Sequence[int]
    ) -> Iterator[tuple[int, float]]:
        return (
            (last, value)
            for before, last, value in sequences
            if self._last(len(before), path) == before
        )

    def _last(self, count: int, path: Sequence[int]) -> tuple[int, ...]:
        """The last `count` tokens of the history, or all if it is shorter."""
        missing = count - len(path)
        committed = self._tokens[-missing:] if missing > 0 else []
        return (*committed, *path[max(0, -missing) :])

    def _note_ngrams(self, start: int) -> None:
        for end in range(max(start, self._size - 1), len(self._tokens)):
            before = tuple(self._tokens[end - self._size + 1 : end])
            self._followers[before].add(self._tokens[end])

    def _repeating(self, path: Sequence[int]) -> set[int]:
        before = self._last(self._size - 1, path)
        found = set(self._followers.get(before, ()))
        text = self._last(self._size - 1 + len(path), path)  # the n-grams that end in the path
        for end in range(self._size - 1, len(text)):
            if text[end - self._size + 1 : end] == before:
                found.add(text[end])
        return found if len(before) == self._size - 1 else set()


def _by_last(
    sequences: Iterable[tuple[tuple[int, ...], float]],
) -> list[tuple[tuple[int, ...], int, float]]:
    return [(ids[:-1], ids[-1], value) for ids, value in sequences]


class _Guarded:
    """A user's processor, whose errors become sentences."""

    def __init__(self, processor: StatefulProcessor) -> None:
        self.processor = processor

    def fork(self) -> _Guarded:
        return _Guarded(self.processor.fork())

    def advance(self, token: int) -> None:
        try:
            self.processor.advance(int(token))
        except Exception as error:
            raise _raised(self.processor, f"in advance({token})", error) from error


def _call(processor: LogitsProcessor, ids: Tensor, row: Tensor) -> Tensor:
    try:
        result = processor(ids, row)
    except Exception as error:
        raise _raised(processor, f"at position {ids.shape[1]}", error) from error
    if (
        not isinstance(result, Tensor)
        or result.shape != row.shape
        or not result.is_floating_point()
    ):
        came = (
            f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        )
        raise RuleError(
            f"logits processor {_name(processor)}: expected to get floating-point scores "
            f"{list(row.shape)} back, got {came} at position {ids.shape[1]}; return one for each token"
        )
    return result


def _raised(processor: LogitsProcessor, where: str, error: Exception) -> RuleError:
    return RuleError(
        f"logits processor {_name(processor)}: raised {type(error).__name__} {where} ({error}); "
        "mend it, or leave it out of this request"
    )


def _name(processor: LogitsProcessor) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))
