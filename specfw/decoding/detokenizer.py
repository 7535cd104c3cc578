"""Text of a growing token sequence, at a cost per token that does not grow with the sequence.

Decoding a sequence again after every token would cost its length squared, and decoding each token
alone would be wrong: characters are split over tokens, and many decoders treat the first token
differently (its leading space, its word border). So a short *anchor* of tokens whose text is known
is decoded together with the new ones, and what the anchor did not say is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

__all__ = ["REPLACEMENT", "Detokenizer", "Tokenizer"]

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not, or not yet, a character."""

_ANCHOR_TOKENS = 8  # decoding this many costs little more than one; a new anchor costs one decode
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that decoding needs."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...


class Detokenizer:
    """Decodes a growing sequence without its special tokens, as one `decode` call over all would.

    `settled` is text that no further token can change; `text` is all of it, as if the sequence
    ended here. Unsettled are only an incomplete character and a run of byte tokens (`<0x0A>`):
    byte-fallback decoders turn the whole run into U+FFFD if one character of it stays incomplete.

    The cost is amortised O(1) tokens per token, except that asking for `text` within a run of
    byte tokens decodes the run. It holds for every decoder that only appends when tokens are
    appended, up to those two exceptions: byte-level, byte fallback, Metaspace, WordPiece, BPE.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.settled = ""
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._pending: list[int] = []
        self._borders: list[int] = []  # lengths of `_pending` at which a character may be complete

    @property
    def text(self) -> str:
        """The text of all tokens so far; it may end in U+FFFD while a character is incomplete."""
        return self.settled + self._text_of(len(self._pending))

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens and settle what they complete."""
        for token_id in token_ids:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            if token is None or self._is_special(token_id):
                continue  # a decoder never sees these, so that bytes on both sides may join
            self._pending.append(token_id)
            if not _BYTE_TOKEN.fullmatch(token):
                self._borders.append(len(self._pending))
        self._settle()

    def _is_special(self, token_id: int) -> bool:
        # Asked of `decode` itself: `all_special_ids` lacks special tokens that have no name.
        return token_id in self._added and (
            self._decode([token_id]) == "" != self._decode([token_id], skip_special_tokens=False)
        )

    def _settle(self) -> None:
        """Settle up to the last border that no character spans, if there is one."""
        later = ""
        for border in reversed(self._borders):
            text = self._text_of(border)
            # Only the last U+FFFD can still become a character: text before another one is final.
            goes_on = len(later) > len(text) and later.startswith(text)
            if goes_on or not text.endswith(REPLACEMENT):
                self._move_anchor(border, text)
                return
            later = text

    def _move_anchor(self, border: int, text: str) -> None:
        settled, self._pending = self._pending[:border], self._pending[border:]
        self._borders = [later - border for later in self._borders if later > border]
        self.settled += text
        # An anchor must have text, or the leading space of the next token would be lost.
        if text and len(self._anchor) + border > _ANCHOR_TOKENS:
            self._anchor = settled
            self._anchor_text = self._decode(settled)
        else:
            self._anchor += settled
            self._anchor_text += text

    def _text_of(self, length: int) -> str:
        """What the first `length` pending tokens add to the settled text."""
        if not length:
            return ""
        text = self._decode(self._anchor + self._pending[:length])
        return text[len(self._anchor_text) :]

    def _decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
