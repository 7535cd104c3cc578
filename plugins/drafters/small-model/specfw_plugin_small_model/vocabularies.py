"""How the target's tokens and the draft model's meet: the same ones, those that both have, or through text.

Each way says, as a function of the committed tokens alone, which ids the draft model reads for them.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from specfw.contracts import LoadedTarget, TargetInfo
from specfw.errors import ConfigError

__all__ = ["Retokenized", "Same", "Shared", "Vocabularies", "Way", "meet"]

log = logging.getLogger("specfw.small-model")

Way = Literal["auto", "same", "shared", "retokenize"]

_ENOUGH_SHARED = 0.5
"""The part of the target's tokens that the draft model must have as well for `auto` to draw from them."""

_ANCHOR_TOKENS = 8
"""Most tokens before a draft that are encoded again with it, to find how its text goes on from them."""

_REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not, or not yet, a character."""


def meet(
    draft: LoadedTarget, target: TargetInfo, way: Way, width: int
) -> Same | Shared | Retokenized:
    """The way in which the two vocabularies meet; `auto` says so if they differ.

    Raises:
        ConfigError: they do not meet in this way.
    """
    if draft.tokenizer is None or target.tokenizer is None:
        _refuse_other_sizes(draft, target, way)
        return Same()
    difference = _difference(draft, target)
    if way == "same" or (way == "auto" and difference is None):
        if difference is not None:
            raise ConfigError(difference)
        _compare_special_ids(draft, target)
        return Same()
    shared = _common(draft, target)
    share = len(shared) / max(1, len(target.tokenizer.get_vocab()))
    if way == "auto":
        way = "shared" if share >= _ENOUGH_SHARED or (width > 1 and shared) else "retokenize"
        log.warning(
            "drafter small-model: the draft model %r has another tokenizer than the target %r, with %.0f %% of "
            "the target's tokens; drafts by tokenizer=%r, which the option can change",
            draft.name,
            target.name,
            100 * share,
            way,
        )
    if way == "shared":
        if not shared:
            raise ConfigError(
                f"drafter small-model: the draft model {draft.name!r} has no token of the target "
                f"{target.name!r}, so none can be drawn from; use tokenizer='retokenize'."
            )
        return Shared(draft, target, shared)
    if width > 1:
        raise ConfigError(
            f"drafter small-model: tokenizer='retokenize' guesses chains, but width is {width}; use "
            "width=1, or tokenizer='shared'."
        )
    return Retokenized(draft, target)


class Vocabularies(ABC):
    """The target's vocabulary and the draft model's."""

    appends: ClassVar[bool] = False
    """Whether more tokens only ever append ids to a context."""

    @abstractmethod
    def context(self, tokens: Sequence[int]) -> Sequence[int]:
        """The draft model's ids for committed tokens, a function of these alone; empty if there are none."""


class Same(Vocabularies):
    """One vocabulary; widths may differ by padding."""

    appends: ClassVar[bool] = True

    def context(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens

    def ids_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """The draft model's ids of tokens that were drawn from its law."""
        return tokens

    def drafted(self, tokens: Tensor) -> Tensor:
        """The draft model's ids of drawn tokens, int64 [M]."""
        return tokens

    def law(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits to draw from, [M, Vd], and the target's ids of their columns."""
        return logits, None


class Shared(Vocabularies):
    """The tokens that both have, by their strings, and the two ends of text; the law is that of the draft
    model given that the token is one of them (Timor et al., arXiv 2502.05202, token-level intersection).

    Tokens that both have are read as they are, what stands between them through its text.
    """

    def __init__(self, draft: LoadedTarget, target: TargetInfo, shared: Mapping[int, int]) -> None:
        self._text = _Text(draft, target)
        self._to_draft = dict(shared)
        pairs = sorted(shared.items())
        self._target_ids = torch.tensor([theirs for theirs, _ in pairs])
        self._draft_ids = torch.tensor([ours for _, ours in pairs])
        self._table = torch.zeros(target.vocab_size, dtype=torch.long)
        self._table[self._target_ids] = self._draft_ids

    def context(self, tokens: Sequence[int]) -> Sequence[int]:
        ids: list[int] = []
        for known, run in groupby(tokens, self._to_draft.__contains__):
            if known:
                ids += [self._to_draft[token] for token in run]
            else:
                ids += self._text.encoded(list(run))
        return self._text.begun(ids)

    def ids_of(self, tokens: Sequence[int]) -> Sequence[int]:
        """The draft model's ids of tokens that were drawn from its law."""
        return [self._to_draft[token] for token in tokens]

    def drafted(self, tokens: Tensor) -> Tensor:
        """The draft model's ids of drawn tokens, int64 [M]."""
        self._table = self._table.to(tokens.device)
        return self._table[tokens]

    def law(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The logits to draw from, [M, Vd], and the target's ids of their columns."""
        self._draft_ids = self._draft_ids.to(logits.device)
        return logits[:, self._draft_ids], self._target_ids


class Retokenized(Vocabularies):
    """Two vocabularies with nothing in common but the text that they spell."""

    def __init__(self, draft: LoadedTarget, target: TargetInfo) -> None:
        self._text = _Text(draft, target)
        self._draft, self._target = draft.tokenizer, target.tokenizer
        self._draft_specials = {*_special_ids(draft.tokenizer)}
        self._specials = {*_special_ids(target.tokenizer)}
        self._to_target = {ours: theirs for theirs, ours in self._text.specials.items()}
        self._vocab_size = target.vocab_size

    def context(self, tokens: Sequence[int]) -> Sequence[int]:
        return self._text.begun(self._text.encoded(tokens))

    def ends(self, token: int) -> bool:
        """Whether the draft model's text ends with this id of its own."""
        return token in self._draft_specials

    def guess(
        self, tokens: Sequence[int], context: Sequence[int], written: Sequence[int]
    ) -> list[int]:
        """The target's tokens for what the draft model wrote after the context of `tokens`.

        Bytes at its end that do not yet form a character are left out. Every guess spells what was
        written, after the committed tokens, which stay as they are; else nothing is guessed.
        """
        words = _until(written, self._draft_specials)
        before = _tail(context, self._draft_specials)
        known = _decode(self._draft, before)
        text = _decode(self._draft, [*before, *words])
        if not text.startswith(known):
            return []
        guess = self._encoded_after(tokens, text[len(known) :].rstrip(_REPLACEMENT))
        if guess is not None and len(words) < len(written):
            special = self._to_target.get(written[len(words)])
            guess += [] if special is None else [special]
        return _until(guess or [], range(self._vocab_size, 1 << 62))

    def _encoded_after(self, tokens: Sequence[int], text: str) -> list[int] | None:
        """The target's ids of `text` after committed tokens; None if it cannot go on from them so."""
        if not text:
            return []
        longest = _tail(tokens, self._specials)
        for start in range(len(longest)):
            anchor = longest[start:]
            whole = _decode(self._target, anchor).rstrip(_REPLACEMENT) + text
            ids = _encode(self._target, whole)
            if ids[: len(anchor)] == anchor and _decode(self._target, ids) == whole:
                return ids[len(anchor) :]
        ids = _encode(self._target, text)
        whole = _decode(self._target, longest) + text
        return ids if _decode(self._target, [*longest, *ids]) == whole else None


class _Text:
    """Committed tokens as text, and their text as the draft model's ids."""

    def __init__(self, draft: LoadedTarget, target: TargetInfo) -> None:
        self._draft, self._target = draft.tokenizer, target.tokenizer
        self.specials = _common_specials(draft.tokenizer, target.tokenizer)
        """The target's special ids that the draft model has too, and its ids for them."""
        self._specials = {*_special_ids(target.tokenizer)}
        bos = getattr(draft.tokenizer, "bos_token_id", None)
        self._start = [] if bos is None else [int(bos)]

    def encoded(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's ids: of special tokens that it has too, and of the text between them.

        Bytes at the end that do not yet form a character are left out.
        """
        ids: list[int] = []
        for special, run in groupby(tokens, self._specials.__contains__):
            if special:
                ids += [self.specials[token] for token in run if token in self.specials]
            elif text := _decode(self._target, list(run)).rstrip(_REPLACEMENT):
                ids += _encode(self._draft, text)
        return ids

    def begun(self, ids: list[int]) -> list[int]:
        """`ids` behind the draft model's token for a beginning, if it has one."""
        return ids if ids[:1] == self._start else [*self._start, *ids]


def _tail(ids: Sequence[int], specials: set[int]) -> list[int]:
    """The last few ids, from the last special one on."""
    tail: list[int] = []
    for id in reversed(ids[-_ANCHOR_TOKENS:]):
        if id in specials:
            break
        tail.append(id)
    return tail[::-1]


def _until(ids: Sequence[int], ends: set[int] | range) -> list[int]:
    """The ids before the first one that is among `ends`."""
    return list(ids[: next((place for place, id in enumerate(ids) if id in ends), len(ids))])


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(id) for id in tokenizer.encode(text, add_special_tokens=False)]


def _special_ids(tokenizer: Any) -> list[int]:
    return [int(id) for id in getattr(tokenizer, "all_special_ids", ())]


def _common_specials(draft: Any, target: Any) -> dict[int, int]:
    """The target's special ids that mean to the draft model what they mean to the target, and its own."""
    ours = {draft.convert_ids_to_tokens(id): id for id in _special_ids(draft)}
    common = {
        id: ours[text]
        for id in _special_ids(target)
        if (text := target.convert_ids_to_tokens(id)) in ours
    }
    for role in ("bos_token_id", "eos_token_id"):
        theirs, own = getattr(target, role, None), getattr(draft, role, None)
        if theirs is not None and own is not None:
            common.setdefault(int(theirs), int(own))
    return common


def _common(draft: LoadedTarget, target: TargetInfo) -> dict[int, int]:
    """The target's ids of tokens that the draft model has too, and its ids for them."""
    size, ours = _vocab_size(draft.model), draft.tokenizer.get_vocab()
    specials = {*_special_ids(draft.tokenizer)}
    common = {
        id: ours[token]
        for token, id in target.tokenizer.get_vocab().items()
        if token in ours and ours[token] not in specials
    }
    for id in _special_ids(target.tokenizer):
        common.pop(id, None)
    common |= _common_specials(draft.tokenizer, target.tokenizer)
    return {
        theirs: own for theirs, own in common.items() if theirs < target.vocab_size and own < size
    }


def _refuse_other_sizes(draft: LoadedTarget, target: TargetInfo, way: Way) -> None:
    if way in ("shared", "retokenize"):
        raise ConfigError(
            f"drafter small-model: tokenizer={way!r} needs the tokenizers of both models, but there are not "
            "both; use tokenizer='same' and a draft model with the target's vocabulary."
        )
    size = _vocab_size(draft.model)
    if size != target.vocab_size:
        raise ConfigError(
            f"drafter small-model: without both tokenizers, the draft model {draft.name!r} must have "
            f"the {target.vocab_size} token ids of the target {target.name!r}, but it has {size}; "
            "use a draft model with the target's vocabulary."
        )


def _difference(draft: LoadedTarget, target: TargetInfo) -> str | None:
    """Why the two vocabularies are not the same, if they are not; widths may differ by padding."""
    ours, theirs = _tokens_by_id(draft.tokenizer), _tokens_by_id(target.tokenizer)
    differing = [id for id in ours.keys() | theirs.keys() if ours.get(id) != theirs.get(id)]
    if not differing:
        return None
    id = min(differing)
    return (
        f"drafter small-model: tokenizer='same' expects the draft model {draft.name!r} to have the tokenizer of "
        f"the target {target.name!r}, but token id {id} is {_shown(theirs, id)} for the target and "
        f"{_shown(ours, id)} for the draft model; use tokenizer='shared' or 'retokenize'."
    )


def _compare_special_ids(draft: LoadedTarget, target: TargetInfo) -> None:
    """Warn where the two disagree on where a text begins or ends."""
    differing = [
        f"{kind} is {theirs} for the target and {ours} for the draft model"
        for kind in ("bos_token_id", "eos_token_id")
        if (ours := getattr(draft.tokenizer, kind, None))
        != (theirs := getattr(target.tokenizer, kind, None))
    ]
    if differing:
        log.warning(
            "drafter small-model: %s; only the target's counts, and drafts may be accepted less often",
            " and ".join(differing),
        )


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {id: token for token, id in tokenizer.get_vocab().items()}


def _shown(tokens: Mapping[int, str], id: int) -> str:
    return repr(tokens[id]) if id in tokens else "no token"


def _vocab_size(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)
