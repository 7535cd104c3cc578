"""The plain data that goes in and comes out: sampling parameters, outputs, usage and statistics.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specfw.errors import ConfigError

__all__ = [
    "FinishReason",
    "Guarantee",
    "Output",
    "Piece",
    "SamplingParams",
    "SpeculationParams",
    "SpeculationStats",
    "TokenLogprob",
    "Usage",
    "explain_validation_error",
]

Guarantee = Literal["same-text", "exact-law", "lossy"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


def explain_validation_error(who: str, error: ValidationError, accepted: Sequence[str] = ()) -> str:
    """Turn a pydantic error into one sentence that names the key, what came and what is accepted."""
    from difflib import get_close_matches

    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "value"
        if item["type"] == "extra_forbidden":
            close = get_close_matches(str(item["loc"][-1]), accepted, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            parts.append(f"unknown option {key!r}{hint} (accepted: {', '.join(sorted(accepted))})")
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
    """Per-request speculation: on or off, and tighter draft limits than the pipeline's."""

    enabled: bool = True
    max_nodes: Annotated[int, Field(ge=0)] | None = None
    max_depth: Annotated[int, Field(ge=0)] | None = None
    max_width: Annotated[int, Field(ge=1)] | None = None


class SamplingParams(_Params):
    """What one request asks of the target's law, and when it ends.

    Temperature 0 takes the most likely token (the lowest id on ties). The settings apply in this
    order at every position, each with that position's own history: logit bias, repetition,
    presence and frequency penalty, minimum length, temperature, top-k, top-p, min-p.
    Presence and frequency penalties count generated tokens; the repetition penalty counts the
    prompt too, as in transformers.
    """

    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    logit_bias: Mapping[int, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    speculation: SpeculationParams = SpeculationParams()

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not stop for stop in value):
            raise ValueError("a stop string must not be empty")
        return value

    @model_validator(mode="after")
    def _lengths_agree(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}; "
                "lower the first or raise the second"
            )
        return self


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The target's own log-probability of an emitted token (before temperature and filters)."""

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
    stop_reason: str | int | None = None
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
