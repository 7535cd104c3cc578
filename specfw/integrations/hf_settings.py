"""What `generate` of transformers prepared for a batch, as the settings of each of its rows.

Processors that transformers built itself become the settings of the same meaning, as long as they come
in the order in which specfw applies these; from the first other one on, each is called as it is, with
one row. So the order, on which the scores depend, is always that of the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.generation import stopping_criteria as hf_stopping

from specfw.errors import ConfigError
from specfw.types import SamplingParams, StatefulProcessor, why_inexact

__all__ = ["Row", "row_settings"]

Settings = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One row of the batch."""

    number: int
    rows: int
    """Rows of the batch, with every prompt repeated for each of its samples."""
    padding: Tensor
    """The ids in front of the prompt, int64 [p]; processors and criteria see them."""
    prompt: list[int]

    @property
    def length(self) -> int:
        """Of the padded prompt."""
        return len(self.padding) + len(self.prompt)

    @property
    def padded(self) -> bool:
        return len(self.padding) > 0

    def with_padding(self, ids: Tensor) -> Tensor:
        """A history [1, n] as transformers has it."""
        return torch.cat([self.padding[None], ids.to(self.padding.device)], 1)


def row_settings(
    row: Row,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    do_sample: bool,
    seed: int,
) -> SamplingParams:
    """The settings with which specfw decodes a row.

    Raises:
        ConfigError: a processor or setting cannot be exact, or settings contradict each other.
    """
    settings = _stops(row, criteria)
    natives, customs, warpers = _split(processors, row, settings)
    for found in natives:
        settings |= found
    if do_sample:
        settings["temperature"] = 1.0
        for found in warpers:
            settings |= found
    settings["logits_processors"] = tuple(_for_row(one, row) for one in customs)
    return SamplingParams(seed=seed, ignore_eos=True, **settings)


def _stops(row: Row, criteria: Sequence[Any]) -> Settings:
    settings: Settings = {}
    others, longest = [], None
    for criterion in criteria:
        kind = type(criterion)
        if kind is hf_stopping.MaxLengthCriteria:
            longest = min(criterion.max_length, longest or criterion.max_length)
        elif kind is hf_stopping.EosTokenCriteria:
            known = settings.get("stop_token_ids", ())
            settings["stop_token_ids"] = (*known, *_ids(criterion.eos_token_id))
        else:
            others.append(_criterion(criterion, row))
    if longest is None or longest <= row.length:
        raise ConfigError(
            f"generate: expected a max_length beyond the {row.length} tokens of the prompt, got "
            f"{longest}; set max_new_tokens"
        )
    return settings | {
        "max_new_tokens": longest - row.length,
        "stopping_criteria": tuple(others),
    }


def _criterion(criterion: Callable[..., Any], row: Row) -> Callable[..., bool]:
    def ends(ids: Tensor, scores: None) -> bool:
        return bool(criterion(row.with_padding(ids), scores))

    ends.__name__ = type(criterion).__name__
    return ends


def _ids(tokens: Any) -> list[int]:
    return [int(token) for token in torch.as_tensor(tokens).reshape(-1).tolist()]


def _split(
    processors: Sequence[Any], row: Row, settings: Settings
) -> tuple[list[Settings], list[Any], list[Settings]]:
    """What comes before, within and after the processors that must be called as they are."""
    left = [one for one in processors if type(one) is not hf.LogitNormalization]
    before = _leading(left, _RULES, row, settings)
    rest = left[len(before) :]
    for start in range(len(rest) + 1):
        after = _leading(rest[start:], _WARPERS, row, settings)
        if len(after) == len(rest) - start:
            return before, rest[:start], after
    raise AssertionError("nothing is always translated")


def _leading(
    processors: Sequence[Any], order: Mapping[type, Translation], row: Row, settings: Settings
) -> list[Settings]:
    """The settings of the first processors, as far as they can be translated and are in order."""
    places, found, last, known = list(order), list[Settings](), -1, dict(settings)
    for processor in processors:
        place = places.index(type(processor)) if type(processor) in order else -1
        translated = order[type(processor)](processor, row, known) if place > last else None
        if translated is None:
            break
        known |= translated
        found.append(translated)
        last = place
    return found


Translation = Callable[[Any, Row, Settings], Settings | None]
"""A processor as settings; None if it must be called as it is."""


def _sequence_bias(one: Any, row: Row, settings: Settings) -> Settings | None:
    bias = {tuple(ids): float(value) for ids, value in one.sequence_bias.items()}
    looks_back = any(len(ids) > 1 for ids in bias)
    if (row.padded and looks_back) or not all(map(math.isfinite, bias.values())):
        return None
    return {"sequence_bias": tuple(bias.items())}


def _repetition(one: Any, row: Row, settings: Settings) -> Settings | None:
    ignored = one.prompt_ignore_length
    if isinstance(ignored, Tensor):
        ignored = int(ignored[row.number])
    if (ignored or 0) != len(row.padding):
        return None
    return {"repetition_penalty": float(one.penalty)}


def _ngrams(one: Any, row: Row, settings: Settings) -> Settings | None:
    return None if row.padded else {"no_repeat_ngram_size": one.ngram_size}


def _bad_words(one: Any, row: Row, settings: Settings) -> Settings | None:
    words = tuple(one.sequence_bias)
    if row.padded and any(len(word) > 1 for word in words):
        return None
    return {"bad_words_ids": words}


def _minimum(one: Any, row: Row, settings: Settings) -> Settings | None:
    if _ids(one.eos_token_id) != list(settings.get("stop_token_ids", ())):
        return None
    total = one.min_length if type(one) is hf.MinLengthLogitsProcessor else None
    least = one.min_new_tokens if total is None else total - row.length
    if total is None and one.prompt_length_to_skip != row.length:
        return None
    least = max(least, settings.get("min_new_tokens", 0))
    return {"min_new_tokens": min(least, settings["max_new_tokens"])}


def _forced_end(one: Any, row: Row, settings: Settings) -> Settings | None:
    if one.max_length != row.length + settings["max_new_tokens"]:
        return None
    return {"forced_eos_token_id": tuple(_ids(one.eos_token_id))}


def _length_penalty(one: Any, row: Row, settings: Settings) -> Settings | None:
    start = one.regulation_start - row.length
    if start < 0 or _ids(one.eos_token_id) != list(settings.get("stop_token_ids", ())):
        return None
    return {"exponential_decay_length_penalty": (start, one.regulation_factor)}


def _suppressed(one: Any, row: Row, settings: Settings) -> Settings | None:
    return {"suppress_tokens": tuple(_ids(one.suppress_tokens))}


def _begin_suppressed(one: Any, row: Row, settings: Settings) -> Settings | None:
    if one.begin_index != row.length:
        return None
    return {"begin_suppress_tokens": tuple(_ids(one.begin_suppress_tokens))}


_RULES: Mapping[type, Translation] = {
    hf.SequenceBiasLogitsProcessor: _sequence_bias,
    hf.RepetitionPenaltyLogitsProcessor: _repetition,
    hf.NoRepeatNGramLogitsProcessor: _ngrams,
    hf.NoBadWordsLogitsProcessor: _bad_words,
    hf.MinLengthLogitsProcessor: _minimum,
    hf.MinNewTokensLengthLogitsProcessor: _minimum,
    hf.ForcedEOSTokenLogitsProcessor: _forced_end,
    hf.ExponentialDecayLengthPenalty: _length_penalty,
    hf.SuppressTokensLogitsProcessor: _suppressed,
    hf.SuppressTokensAtBeginLogitsProcessor: _begin_suppressed,
}
"""In the order in which specfw applies them."""


def _warper(setting: str, attribute: str) -> Translation:
    def translate(one: Any, row: Row, settings: Settings) -> Settings | None:
        usual = getattr(one, "filter_value", -math.inf) == -math.inf
        least = 1 if setting == "top_k" else getattr(one, "min_tokens_to_keep", 1)
        if not usual or least != 1:
            return None
        value = getattr(one, attribute)
        return {setting: int(value) if setting == "top_k" else float(value)}

    return translate


_WARPERS: Mapping[type, Translation] = {
    hf.TemperatureLogitsWarper: _warper("temperature", "temperature"),
    hf.TopHLogitsWarper: _warper("top_h", "top_h"),
    hf.TopKLogitsWarper: _warper("top_k", "top_k"),
    hf.TopPLogitsWarper: _warper("top_p", "top_p"),
    hf.MinPLogitsWarper: _warper("min_p", "min_p"),
    hf.TypicalLogitsWarper: _warper("typical_p", "mass"),
    hf.EpsilonLogitsWarper: _warper("epsilon_cutoff", "epsilon"),
    hf.EtaLogitsWarper: _warper("eta_cutoff", "epsilon"),
}


def _for_row(processor: Any, row: Row) -> Any:
    """A processor that was made for the batch, for one row."""
    if (why := why_inexact(processor)) is not None:
        raise ConfigError(f"generate: {why}")
    alone = _alone(processor, row)
    if isinstance(alone, StatefulProcessor):
        return _PaddedStateful(alone, row) if row.padded else alone

    def process(ids: Tensor, scores: Tensor) -> Any:
        result = alone(row.with_padding(ids), scores.to(row.padding.device))
        return result.to(scores.device) if isinstance(result, Tensor) else result

    process.__name__ = type(processor).__name__
    return process


def _alone(processor: Any, row: Row) -> Any:
    """Without what a processor holds of other rows."""
    kind = type(processor)
    if kind is hf.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, Tensor
    ):
        alone = copy(processor)
        alone.prompt_ignore_length = int(processor.prompt_ignore_length[row.number])
        return alone
    if kind is hf.EncoderRepetitionPenaltyLogitsProcessor:
        alone = copy(processor)
        prompt = row.number * len(processor.encoder_input_ids) // row.rows
        alone.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return alone
    if kind is hf.EncoderNoRepeatNGramLogitsProcessor:
        alone = copy(processor)
        prompt = row.number * processor.batch_size // row.rows
        alone.generated_ngrams, alone.batch_size = [processor.generated_ngrams[prompt]], 1
        return alone
    if kind is hf.PrefixConstrainedLogitsProcessor:
        allowed, prompt = processor._prefix_allowed_tokens_fn, row.number // processor._num_beams
        return kind(lambda _, ids: allowed(prompt, ids), 1)
    return processor


class _PaddedStateful:
    """A stateful processor that sees the padding too."""

    def __init__(self, inner: StatefulProcessor, row: Row) -> None:
        self._inner, self._row = inner, row

    def fork(self) -> _PaddedStateful:
        return _PaddedStateful(self._inner.fork(), self._row)

    def advance(self, token: int) -> None:
        self._inner.advance(token)

    def __call__(self, ids: Tensor, scores: Tensor) -> Any:
        return self._inner(self._row.with_padding(ids), scores)
