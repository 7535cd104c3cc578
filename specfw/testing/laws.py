"""Two laws of what a request emits: by the definition, and by everything an engine can do.

The first is plain sequential decoding in numpy, written apart from the framework's own code. The second
enumerates every run of an engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specfw.decoding.random import RandomSource
from specfw.engine.engine import Engine
from specfw.engine.requests import Request
from specfw.testing.enumeration import enumerate_runs
from specfw.types import SamplingParams

__all__ = [
    "Emission",
    "Enumerated",
    "Law",
    "NoToken",
    "next_token_law",
    "output_law",
    "target_law",
    "total_variation",
]

Vector = NDArray[np.float64]


class NoToken(ValueError):
    """The settings leave no token after some prefix, so that there is no law."""


class Emission(NamedTuple):
    """What a request emits, and why it ends."""

    tokens: tuple[int, ...]
    finish_reason: str


Law = Mapping[Emission, float]
"""Probabilities of emissions; those left out have probability zero."""


class LanguageModel(Protocol):
    """Whatever has a law for the token after a prefix (`TableLM` has)."""

    def law(self, prefix: Sequence[int]) -> Vector: ...


def target_law(
    model: LanguageModel,
    prompt: Sequence[int],
    horizon: int,
    params: SamplingParams,
    eos_ids: Iterable[int] = (),
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> dict[Emission, float]:
    """The law of plain sequential decoding.

    Args:
        model: gives the law before any setting.
        prompt: token ids.
        horizon: the request ends after this many tokens (or `params.max_new_tokens`, if fewer).
        params: the request's settings.
        eos_ids: tokens that end it unless `params.ignore_eos`.
        text_of: the text of emitted tokens, needed for stop strings and choices.

    Raises:
        NoToken: the settings leave no token after a prefix that can come about.
    """
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    last = min(horizon, params.max_new_tokens)
    law: dict[Emission, float] = defaultdict(float)

    def go_on(emitted: tuple[int, ...], weight: float) -> None:
        own = model.law([*prompt, *emitted])
        step = next_token_law(own, prompt, emitted, params, stop_ids, text_of)
        for token in np.flatnonzero(step).tolist():
            longer = (*emitted, token)
            if reason := _ends(prompt, longer, params, stop_ids, last, text_of):
                law[Emission(longer, reason)] += weight * float(step[token])
            else:
                go_on(longer, weight * float(step[token]))

    go_on((), 1.0)
    return dict(law)


def next_token_law(
    law: Vector,
    prompt: Sequence[int],
    emitted: Sequence[int],
    params: SamplingParams,
    stop_ids: Iterable[int],
    text_of: Callable[[Sequence[int]], str] | None = None,
) -> Vector:
    """The law of one token under the settings, in their documented order: [V] -> [V].

    Of the structures that a text can have, only choices are known here; any finite one can be written so.

    Raises:
        NoToken: they leave none.
    """
    with np.errstate(divide="ignore"):
        logits = np.log(law)
    text = [*prompt, *emitted]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for ids, bias in params.sequence_bias:
        if _would_complete(text, ids):
            logits[ids[-1]] += bias
    for token in range(len(logits)):
        count = list(emitted).count(token)
        if count or token in prompt:
            logits[token] *= (
                params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
            )
        if count:
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for token in range(len(logits)):
        if _repeats(text, token, params.no_repeat_ngram_size):
            logits[token] = -np.inf
    for ids in params.bad_words_ids:
        if _would_complete(text, ids):
            logits[ids[-1]] = -np.inf
    if len(emitted) < params.min_new_tokens:
        logits[list(stop_ids)] = -np.inf
    if params.forced_eos_token_id and len(emitted) == params.max_new_tokens - 1:
        logits = np.full_like(logits, -np.inf)
        logits[list(params.forced_eos_token_id)] = 0.0
    if params.exponential_decay_length_penalty is not None:
        start, factor = params.exponential_decay_length_penalty
        for token in stop_ids if len(emitted) > start else ():
            if np.isfinite(logits[token]):
                logits[token] += abs(logits[token]) * (factor ** (len(emitted) - start) - 1)
    logits[list(params.suppress_tokens)] = -np.inf
    if not emitted:
        logits[list(params.begin_suppress_tokens)] = -np.inf
    allowed = np.full(len(logits), True)
    if params.choices is not None:
        assert text_of is not None
        allowed = _continuing(params.choices, emitted, stop_ids, text_of, len(logits))
    logits[~allowed] = -np.inf
    for processor in params.logits_processors:
        row = processor(torch.tensor([text]), torch.from_numpy(logits.copy())[None])
        logits = row[0].numpy()
    logits[~allowed] = -np.inf
    if not np.isfinite(logits).any():
        raise NoToken(f"no token is left after {text}")
    if params.temperature == 0:
        return _one_hot(logits)
    return _filter(logits / params.temperature, params)


def _continuing(
    choices: Sequence[str],
    emitted: Sequence[int],
    stop_ids: Iterable[int],
    text_of: Callable[[Sequence[int]], str],
    size: int,
) -> NDArray[np.bool_]:
    """The tokens with which the text can still become one of some texts, or ends as one: bool [V]."""
    longer = [text_of([*emitted, token]) for token in range(size)]
    allowed = np.array([any(choice.startswith(text) for choice in choices) for text in longer])
    allowed[list(stop_ids)] = text_of(emitted) in choices
    return allowed


def _would_complete(text: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether the last of `ids` would complete them at the end of `text`."""
    before = list(ids[:-1])
    return list(text[len(text) - len(before) :]) == before and len(text) >= len(before)


def _repeats(text: Sequence[int], token: int, size: int) -> bool:
    """Whether `token` would end an n-gram of this size that is in `text` already."""
    longer = [*text, token]
    grams = [tuple(longer[i : i + size]) for i in range(len(longer) - size + 1)]
    return size > 0 and len(grams) > 0 and grams[-1] in grams[:-1]


def _one_hot(logits: Vector) -> Vector:
    law = np.zeros_like(logits)
    law[int(np.argmax(logits))] = 1.0
    return law


def _filter(logits: Vector, params: SamplingParams) -> Vector:
    """Top-h, top-k (ties with the k-th stay), top-p, min-p, typical, epsilon and eta."""
    if params.top_h is not None:
        logits = _top_h(logits, params.top_h)
    if params.top_k is not None and params.top_k < len(logits):
        kth = np.sort(logits)[-params.top_k]
        logits = np.where(logits >= kth, logits, -np.inf)
    law = _softmax(logits)
    if params.top_p is not None and params.top_p < 1:
        kept, mass = np.zeros(len(law), np.bool_), 0.0
        for token in np.argsort(-law, kind="stable"):  # until the mass is reached
            kept[token] = mass < params.top_p
            mass += law[token]
        law = np.where(kept, law, 0.0)
    if params.min_p:
        law = np.where(law >= params.min_p * law.max(), law, 0.0)
    law = law / law.sum()
    if params.typical_p is not None and params.typical_p < 1:
        law = _typical(law, params.typical_p)
    law = _at_least(law, params.epsilon_cutoff)
    eta = params.eta_cutoff
    return _at_least(law, min(eta, float(np.sqrt(eta) * np.exp(-_entropy(law)))))


def _softmax(logits: Vector) -> Vector:
    law: Vector = np.exp(logits - logits.max())
    law /= law.sum()
    return law


def _entropy(law: Vector) -> float:
    return -sum(float(p * np.log(p)) for p in law if p > 0)


def _at_least(law: Vector, bound: float) -> Vector:
    """Only the tokens of at least this probability, and the most likely one."""
    law = np.where((law >= bound) | (law == law.max()), law, 0.0)
    law /= law.sum()
    return law


def _top_h(logits: Vector, share: float) -> Vector:
    """The most likely tokens, as long as their part of the entropy is at most this share of it."""
    law = _softmax(logits)
    kept, entropy = np.zeros(len(law), np.bool_), 0.0
    for place, token in enumerate(np.argsort(-law, kind="stable")):
        if law[token] > 0:
            entropy -= float(law[token] * np.log(law[token]))
        kept[token] = place == 0 or entropy <= share * _entropy(law)
    return np.where(kept, logits, -np.inf)


def _typical(law: Vector, mass: float) -> Vector:
    """The tokens whose surprise is nearest the entropy, until they have this mass."""
    with np.errstate(divide="ignore"):
        strangeness = np.abs(-np.log(law) - _entropy(law))
    reached = 0.0
    last = np.inf
    for token in np.argsort(strangeness, kind="stable"):
        last = strangeness[token]
        reached += law[token]
        if reached >= mass:
            break
    law = np.where(strangeness <= last, law, 0.0)
    law /= law.sum()
    return law


def _ends(
    prompt: Sequence[int],
    emitted: tuple[int, ...],
    params: SamplingParams,
    stop_ids: set[int],
    last: int,
    text_of: Callable[[Sequence[int]], str] | None,
) -> str | None:
    """Why a request ends with its last token, if it does."""
    if emitted[-1] in stop_ids and len(emitted) > params.min_new_tokens:
        return "stop"
    if text_of and len(emitted) >= params.min_new_tokens:
        text, old = text_of(emitted), len(text_of(emitted[:-1]))
        if any(text.find(stop, max(0, old - len(stop) + 1)) >= 0 for stop in params.stop):
            return "stop"
    ids = torch.tensor([[*prompt, *emitted]])
    if any(criterion(ids, None) for criterion in params.stopping_criteria):
        return "stop"
    return "length" if len(emitted) == last else None


@dataclass(slots=True)
class Enumerated:
    """The law of an engine's output, and what it took to know it."""

    law: dict[Emission, float]
    leaves: int
    """Runs."""
    prefixes: set[tuple[int, ...]]
    """The committed tokens with which a step of the watched request began."""
    preemptions: int
    hit_tokens: int
    """Tokens found in the prefix cache."""
    drafted: int
    """Draft tokens of the watched request, over all runs."""
    accepted: int
    faults: Counter[str]
    """What drafters did wrong, by cause: each costs the drafts that would have been checked."""


def output_law(
    build: Callable[[RandomSource], tuple[Engine, Sequence[Request]]],
    watch: int | None = None,
    index: int = 0,
    max_steps: int = 100,
) -> Enumerated:
    """The law of what one request of an engine emits, over every outcome of every draw.

    Args:
        build: makes an engine with its requests queued, all anew.
        watch: enumerate only the draws of the request with this seed; None enumerates all.
        index: which of the requests.
        max_steps: a run with more is a fault.
    """
    seen = Enumerated({}, 0, set(), 0, 0, 0, 0, Counter())

    def run(source: RandomSource) -> Emission:
        engine, requests = build(source)
        request = requests[index]
        for _ in range(max_steps):
            if request.output is not None:
                break
            seen.prefixes.add(tuple(request.tokens))
            seen.preemptions += engine.step().preempted
            engine.memory.check()
        output = request.output
        seen.hit_tokens += engine.memory.hit_tokens
        seen.drafted += request.stats.drafted
        seen.accepted += request.stats.accepted
        seen.faults += engine.faults
        if output is None:
            return Emission(tuple(request.emitted), f"no end within {max_steps} steps")
        return Emission(tuple(output.token_ids), output.error or output.finish_reason)

    for weight, emission in enumerate_runs(run, watch):
        seen.leaves += 1
        seen.law[emission] = seen.law.get(emission, 0.0) + weight
    return seen


def total_variation(a: Law, b: Law) -> float:
    """Half the sum of the absolute differences, from 0 to 1."""
    return 0.5 * sum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in {*a, *b})
