"""Where a request ends, token by token: a block of emitted tokens is cut as plain decoding would.

A step emits up to draft length plus one tokens at once. Whatever ends a request may lie anywhere in
such a block, and the earliest end in token order wins, whichever rule it comes from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from specfw.decoding.detokenizer import REPLACEMENT, Detokenizer, Tokenizer
from specfw.errors import ConfigError, ContractError
from specfw.types import FinishReason, SamplingParams, Usage

__all__ = ["Stopper"]


class Stopper:
    """Collects the emitted tokens of one request, decides where it ends, and hands out its text.

    For every token the rules apply in this order:

    1. An EOS token (unless `ignore_eos`) or one of `stop_token_ids` ends the request with "stop",
       except among the first `min_new_tokens` tokens, where the law forbids it anyway.
    2. A stop string that this token completes ends the request with "stop", if at least
       `min_new_tokens` tokens, this one included, are emitted. One completed earlier is ordinary
       text for good. Of several, the one completed first in the text counts; of those completed by
       the same character, the longest.
    3. A stopping criterion that is true of the text so far ends it with "stop", at any length.
    4. After `max_time` seconds, counted from the beginning, a token ends it with "length".
    5. The token number `max_new_tokens` ends the request with "length".

    A criterion that raises, or is neither true nor false, ends it with "error".

    `token_ids` end with the token that ended the request. `text` is their text without special
    tokens, cut where the stop string begins (with `include_stop`, where it ends), so
    `tokenizer.decode(token_ids, skip_special_tokens=True)` cut there is `text`. The prompt is not
    part of it. Nothing is decoded before somebody asks for text or there are stop strings.

    Raises:
        ConfigError: there are stop strings but no tokenizer.
    """

    token_ids: list[int]
    """The emitted tokens so far."""
    finish_reason: FinishReason | None
    """Why the request ended; None while it runs."""
    stop_reason: str | int | None
    """What ended the request: stop string, token id, criterion's name or "max_time"; None if none did."""
    error: str | None
    """What a stopping criterion did wrong, as one sentence."""

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError(
                f"Stopper: stop strings need a tokenizer, but the target has none and "
                f"stop={params.stop!r} was given; give a tokenizer, or use stop_token_ids"
            )
        self.token_ids = []
        self.finish_reason = None
        self.stop_reason = None
        self.error = None
        self._params = params
        self._prompt = list(prompt_token_ids)
        self._clock, self._began = clock, clock()
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= frozenset(eos_token_ids)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._detokenized = 0  # tokens
        self._searched = 0  # characters in which no stop string can newly end
        self._cut: int | None = None  # characters
        self._taken = 0  # characters

    @property
    def text(self) -> str:
        """The text so far; final once the request has ended. Empty without a tokenizer."""
        detokenizer = self._read()
        return detokenizer.text[: self._cut] if detokenizer is not None else ""

    @property
    def usage(self) -> Usage:
        """Prompt tokens and emitted tokens."""
        return Usage(len(self._prompt), len(self.token_ids))

    def push(self, token_id: int) -> FinishReason | None:
        """Take the next emitted token and say whether the request ends with it.

        Raises:
            ContractError: the request had ended before.
        """
        self._refuse_if_finished(f"token {token_id}")
        self.token_ids.append(token_id)
        self.finish_reason = self._judge(token_id)
        return self.finish_reason

    def extend(self, token_ids: Iterable[int]) -> tuple[int, FinishReason | None]:
        """Push a block up to the first end: how many tokens were kept, and the reason if it ended.

        Raises:
            ContractError: the request had ended before.
        """
        before = len(self.token_ids)
        for token_id in token_ids:
            if self.push(token_id):
                break
        return len(self.token_ids) - before, self.finish_reason

    def finish(self, reason: FinishReason) -> None:
        """End the request for a reason outside its tokens (cancelled, failed, context full).

        Raises:
            ContractError: the request had ended before.
        """
        self._refuse_if_finished(f"the end {reason!r}")
        self.finish_reason = reason

    def take(self) -> str:
        """New text that is safe to show: never half a character, never text to be cut later.

        While the request runs, what could still become a stop string is held back; once it has
        ended, the rest comes. All pieces together are the final `text`. Empty without a tokenizer.
        """
        detokenizer = self._read()
        if detokenizer is None:
            return ""
        if self.finish_reason is None:
            text = detokenizer.settled
            end = len(text) - _possible_stop_length(text, self._params.stop)
        else:
            text = self.text
            end = len(text)
        piece = text[self._taken : end]
        self._taken = end
        return piece

    def _judge(self, token_id: int) -> FinishReason | None:
        count = len(self.token_ids)
        if token_id in self._stop_ids and count > self._params.min_new_tokens:
            self.stop_reason = token_id
            return "stop"
        if self._params.stop and self._completes_stop_string():
            return "stop"
        if self._params.stopping_criteria and (reason := self._ask_criteria()):
            return reason
        if (
            self._params.max_time is not None
            and self._clock() - self._began > self._params.max_time
        ):
            self.stop_reason = "max_time"
            return "length"
        return "length" if count >= self._params.max_new_tokens else None

    def _ask_criteria(self) -> FinishReason | None:
        import torch  # here, so that only those who have criteria pay for it

        ids = torch.tensor([self._prompt + self.token_ids], dtype=torch.long)
        for criterion in self._params.stopping_criteria:
            name = str(getattr(criterion, "__name__", type(criterion).__name__))
            try:
                ends = bool(criterion(ids, None))
            except Exception as error:
                self.error = (
                    f"stopping criterion {name}: expected true or false after token "
                    f"{len(self.token_ids)}, got {type(error).__name__} ({error}); mend it, or "
                    "leave it out of this request"
                )
                return "error"
            if ends:
                self.stop_reason = name
                return "stop"
        return None

    def _completes_stop_string(self) -> bool:
        """Search what the last token changed, and remember the stop string and the cut if found."""
        detokenizer = self._read()
        if detokenizer is None:
            return False
        text = detokenizer.text
        searched = self._searched
        # An incomplete character may still become part of a stop string.
        self._searched = max(searched, len(text.rstrip(REPLACEMENT)))
        if len(self.token_ids) < self._params.min_new_tokens:
            return False
        matches = [
            (start + len(stop), start, stop)
            for stop in self._params.stop
            if (start := text.find(stop, max(0, searched - len(stop) + 1))) >= 0
        ]
        if not matches:
            return False
        end, start, self.stop_reason = min(matches)
        self._cut = end if self._params.include_stop else start
        return True

    def _read(self) -> Detokenizer | None:
        """The detokenizer, brought up to the last token."""
        if self._detokenizer is not None and self._detokenized < len(self.token_ids):
            self._detokenizer.extend(self.token_ids[self._detokenized :])
            self._detokenized = len(self.token_ids)
        return self._detokenizer

    def _refuse_if_finished(self, what: str) -> None:
        if self.finish_reason is not None:
            raise ContractError(
                f"Stopper: {what} came after the request had ended ({self.finish_reason}) with "
                f"{len(self.token_ids)} tokens; drop what follows the end of a block"
            )


def _possible_stop_length(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a stop string begins."""
    return max(
        (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])),
        default=0,
    )
