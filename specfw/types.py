"""The plain data that goes in and comes out: sampling parameters, outputs, usage and statistics.

Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from specfw.errors import ConfigError

__all__ = [
    "FinishReason",
    "Guarantee",
    "LogitsProcessor",
    "Output",
    "Piece",
    "SamplingParams",
    "SpeculationParams",
    "SpeculationStats",
    "StatefulProcessor",
    "StoppingCriterion",
    "TokenLogprob",
    "Usage",
    "explain_validation_error",
    "why_inexact",
]

LogitsProcessor = Callable[..., Any]
"""A pure function `(input_ids, scores) -> scores`: int64 [1, n] and float [1, V] to float [1, V].

`input_ids` are the prompt and everything before the token in question, drafted tokens included.
"""

StoppingCriterion = Callable[..., Any]
"""A function `(input_ids, scores) -> bool`, called after each emitted token: int64 [1, n] and None."""


@runtime_checkable
class StatefulProcessor(Protocol):
    """A logits processor with state: calling it changes nothing, `advance` alone does.

    A request works on a fork of its own, which `advance` moves by each committed token, in order;
    drafted tokens move forks of that one, which are then dropped.
    """

    def fork(self) -> StatefulProcessor:
        """An independent copy in the same state."""

    def advance(self, token: int) -> None:
        """The text, after the prompt, goes on with this token."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """The new scores: int64 [1, n] and float [1, V] to float [1, V]."""


_SECRETLY_STATEFUL: Mapping[str, str] = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model on a text of its own",
    "ClassifierFreeGuidanceLogitsProcessor": "it needs each prompt twice in a batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it needs each prompt twice in a batch",
    "SynthIDTextWatermarkLogitsProcessor": "its watermark depends on how often it was called",
    "WhisperNoSpeechDetection": "it runs the model itself",
    "DiaEOSDelayPatternLogitsProcessor": "its state depends on how often it was called",
}
"""Processors of transformers that are no functions of their arguments, and why."""

Guarantee = Literal["same-text", "exact-law", "lossy"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


_MOST_SHOWN = 12
"""Accepted names that an error lists; of more, the nearest."""


def explain_validation_error(who: str, error: ValidationError, accepted: Sequence[str] = ()) -> str:
    """Turn a pydantic error into one sentence that names the key, what came and what is accepted."""
    from difflib import get_close_matches

    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            close = get_close_matches(str(item["loc"][-1]), accepted, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            shown = ", ".join(sorted(accepted))
            if len(accepted) > _MOST_SHOWN:
                name = str(item["loc"][-1])
                nearest = get_close_matches(name, accepted, n=_MOST_SHOWN, cutoff=0.0)
                shown = f"{', '.join(nearest)} and {len(accepted) - _MOST_SHOWN} others"
            parts.append(f"unknown option {key!r}{hint} (accepted: {shown})")
        else:
            message = item["msg"].removeprefix("Value error, ")
            whole = not item["loc"]  # about several keys, whose message says what they were
            parts.append(message if whole else f"{key}: {message} (got {item.get('input')!r})")
    return f"{who}: " + "; ".join(parts)


class _Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(
                explain_validation_error(type(self).__name__, error, list(type(self).model_fields))
            ) from None


class SpeculationParams(_Params):
    """Per-request speculation: on or off, by which drafter, and tighter draft limits than the pipeline's.

    `drafter` is one of those that the pipeline holds ready under `drafters`; None is its `drafter`.
    """

    enabled: bool = True
    drafter: str | None = None
    max_nodes: Annotated[int, Field(ge=0)] | None = None
    max_depth: Annotated[int, Field(ge=0)] | None = None
    max_width: Annotated[int, Field(ge=1)] | None = None


def why_inexact(processor: object) -> str | None:
    """Why a logits processor cannot be exact under speculation, if that is known of it."""
    for kind in type(processor).__mro__:
        if (why := _SECRETLY_STATEFUL.get(kind.__name__)) is not None:
            return (
                f"{type(processor).__name__} cannot be exact under speculation, because {why}; "
                "leave it out, or decode without speculation in transformers"
            )
    return None


_STRUCTURES = ("json_schema", "regex", "grammar", "choices")

_Sequence = Annotated[tuple[int, ...], Field(min_length=1)]
"""One or more token ids."""

_SHOWN = PlainSerializer(
    lambda objects: [f"<{_name_of(one)}>" for one in objects], when_used="json"
)
"""In JSON, an object is shown by its name, and cannot be loaded again."""


def _name_of(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


class SamplingParams(_Params):
    """What one request asks of the target's law, and when it ends.

    Temperature 0 takes the most likely token (the lowest id on ties). The settings apply in this
    order at every position, each with that position's own history: logit and sequence bias,
    repetition, presence and frequency penalty, n-grams and bad words, minimum length, forced end,
    length penalty, suppressed tokens, grammar, logits processors, the grammar again, temperature,
    top-h, top-k, top-p, min-p, typical, epsilon and eta. Presence and frequency penalties count
    generated tokens; everything else that looks back counts the prompt too, as in transformers.

    Requests of higher `priority` are let in and served first; the text does not depend on it.

    One of `json_schema`, `regex`, `grammar` and `choices` keeps the text within a language: a
    mapping or JSON text or a pydantic model; a regular expression for the whole text; a grammar in
    Lark's or llama.cpp's notation; texts of which one is to come. A token that ends the text (an
    EOS token unless `ignore_eos`, or one of `stop_token_ids`) may come exactly where the text is
    complete. This needs the extra `specfw[grammar]`.

    N-grams, sequences of several tokens, grammars and logits processors read drafted tokens on the
    host: on a GPU each position that a request with one of these reaches costs a synchronisation.

    `logits_processors` and `stopping_criteria` are Python objects (see `LogitsProcessor`,
    `StatefulProcessor` and `StoppingCriterion` in `specfw.types`), so a config file cannot have
    them. A criterion ends the request with "stop" and its own name as the reason.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_h: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    typical_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    epsilon_cutoff: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    eta_cutoff: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    logit_bias: Mapping[int, float] = Field(default_factory=dict)
    sequence_bias: tuple[tuple[_Sequence, Annotated[float, Field(allow_inf_nan=False)]], ...] = ()
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] = 0
    bad_words_ids: tuple[_Sequence, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_eos_token_id: tuple[int, ...] = ()
    exponential_decay_length_penalty: (
        tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(gt=0.0, allow_inf_nan=False)]]
        | None
    ) = None
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choices: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    max_time: Annotated[float, Field(gt=0.0)] | None = None
    priority: int = 0
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    speculation: SpeculationParams = SpeculationParams()
    logits_processors: SkipJsonSchema[Annotated[tuple[LogitsProcessor, ...], _SHOWN]] = ()
    stopping_criteria: SkipJsonSchema[Annotated[tuple[StoppingCriterion, ...], _SHOWN]] = ()

    @property
    def structure(self) -> tuple[str, Any] | None:
        """The setting that keeps the text within a language: its name and value; None without one."""
        return next(
            ((name, value) for name in _STRUCTURES if (value := getattr(self, name)) is not None),
            None,
        )

    @field_validator("json_schema", mode="before")
    @classmethod
    def _one_schema(cls, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseModel):
            return value.model_json_schema()
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError as error:
                raise ValueError(f"expected JSON, which this text is not: {error}") from None
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("forced_eos_token_id", mode="before")
    @classmethod
    def _one_token(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @field_validator("sequence_bias", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        return tuple(value.items()) if isinstance(value, Mapping) else value

    @field_validator("logits_processors", "stopping_criteria", mode="before")
    @classmethod
    def _one_callable(cls, value: Any) -> Any:
        return (value,) if callable(value) and not isinstance(value, Sequence) else value

    @field_validator("logits_processors")
    @classmethod
    def _functions_only(cls, value: tuple[LogitsProcessor, ...]) -> tuple[LogitsProcessor, ...]:
        for processor in value:
            if (why := why_inexact(processor)) is not None:
                raise ValueError(why)
        return value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not stop for stop in value):
            raise ValueError("a stop string must not be empty")
        return value

    @model_validator(mode="after")
    def _one_structure(self) -> SamplingParams:
        several = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(several) > 1:
            raise ValueError(
                f"{' and '.join(several)} are given together, but a text can follow one only; "
                "set the others to null"
            )
        return self

    @model_validator(mode="after")
    def _lengths_agree(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}; "
                "lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _an_end_can_be_forced(self) -> SamplingParams:
        forced = self.forced_eos_token_id
        left = set(forced) - set(self.suppress_tokens)
        if self.max_new_tokens == 1:
            left -= set(self.begin_suppress_tokens)
        if forced and not left:
            raise ValueError(
                f"forced_eos_token_id={list(forced)} is suppressed, which leaves no token; "
                "take it out of suppress_tokens and begin_suppress_tokens"
            )
        return self


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's own log-probability of a token (before temperature and filters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request.

    `drafted` and `accepted` count draft tokens really proposed and really kept in the output;
    `target_passes` counts target passes that emitted for this request;
    `extra_rows` counts rows that those passes scored for a drafter besides drafts;
    `drafted_rounds` counts those of them that had a draft;
    `accepted_histogram[n]` counts drafted rounds in which exactly n draft tokens were kept;
    `tested_by_depth` and `accepted_by_depth` count draft positions at which a draft token was
    tested and kept, by depth from 1 (index 0 is depth 1).
    """

    guarantee: Guarantee = "same-text"
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    target_passes: int = 0
    extra_rows: int = 0
    drafted_rounds: int = 0
    accepted_histogram: dict[int, int] = field(default_factory=dict)
    tested_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per target pass (tau)."""
        return self.emitted / self.target_passes if self.target_passes else 0.0


@dataclass(slots=True)
class Output:
    """One finished request. `text` is `token_ids` decoded and cut at the stop string, if any."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    seed: int
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of every prompt token but the first."""
    stop_reason: str | int | None = None
    """The stop string, the token id, the criterion's name or "max_time"; None if none of them ended it."""
    error: str | None = None


@dataclass(slots=True)
class Piece:
    """One streamed chunk.

    `text` may be empty while a character or a possible stop string is incomplete. `accepted[i]`
    says whether `token_ids[i]` was a kept draft token. The last piece carries `output`.
    """

    text: str
    token_ids: list[int]
    accepted: list[bool]
    index: int = 0
    output: Output | None = None
