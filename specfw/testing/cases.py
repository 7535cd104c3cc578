"""The small worlds in which components are certified, and the engines that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, count
from typing import Any, Literal

from specfw.contracts import Drafter, Scheduler, TargetInfo, Verifier
from specfw.decoding.random import RandomSource
from specfw.engine.engine import Engine, token_ids_of
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.engine.requests import Request
from specfw.testing.table_model import LawKind, TableLM, TableTokenizer
from specfw.types import SamplingParams

__all__ = [
    "CHOICES",
    "EOS",
    "MEMORY_CASES",
    "SETTINGS",
    "WATCHED",
    "Case",
    "DrafterFactory",
    "MemoryCase",
    "SchedulerFactories",
    "VerifierFactory",
    "build_engine",
    "deep_enough",
    "fits",
    "forbids",
    "make_cases",
    "table_runner",
    "target_info",
]

MemoryCase = Literal["plain", "preemption", "prefix hit", "chunked prefill"]
MEMORY_CASES: tuple[MemoryCase, ...] = ("plain", "preemption", "prefix hit", "chunked prefill")

SETTINGS: Mapping[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=0.7, ignore_eos=True),
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top-k": SamplingParams(temperature=1.2, top_k=2, ignore_eos=True),
    "top-p": SamplingParams(temperature=1.0, top_p=0.6, ignore_eos=True),
    "min-p": SamplingParams(temperature=1.0, min_p=0.4, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=1.0,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        ignore_eos=True,
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={1: 0.8}, ignore_eos=True),
    "min tokens": SamplingParams(temperature=1.0, min_new_tokens=2),
    "end of text": SamplingParams(temperature=1.0),
    "stop string": SamplingParams(temperature=1.0, stop=("ba", "bb"), ignore_eos=True),
    "entropy filters": SamplingParams(
        temperature=1.3,
        top_h=0.9,
        typical_p=0.7,
        epsilon_cutoff=0.1,
        eta_cutoff=0.3,
        ignore_eos=True,
    ),
    "sequences": SamplingParams(
        temperature=1.0,
        sequence_bias=(((0,), 0.5), ((1, 0), -0.9), ((0, 1, 1), 2.0)),
        bad_words_ids=((1, 1),),
        no_repeat_ngram_size=4,
        ignore_eos=True,
    ),
    "first and last": SamplingParams(
        temperature=1.0,
        begin_suppress_tokens=(1,),
        exponential_decay_length_penalty=(0, 1.6),
        forced_eos_token_id=(0,),
    ),
}
"""The settings that a certification walks through; token 0 is the end of text, token 1 the letter b."""

CHOICES = ("bb", "bbb", "cb", "cbb", "ccb")
"""Texts that can be written with two tokens or more; some letters are forced, and no end within three is."""

if find_spec("llguidance") is not None:
    SETTINGS = {**SETTINGS, "grammar": SamplingParams(temperature=1.0, choices=CHOICES)}

EOS = 0
WATCHED = 7  # the seed of the request that is enumerated
_BLOCK_SIZE = 2
_PLACE = 1  # its place among three: behind one that outlives it when memory runs out

DrafterFactory = Callable[[], Drafter]
VerifierFactory = Callable[[], Verifier]
SchedulerFactories = Sequence[Callable[[], Scheduler]]
"""Components are made anew for each run, because they may have state."""


@dataclass(frozen=True, slots=True)
class Case:
    """One small world: a target, one request's settings, its batch-mates, and the memory."""

    params: SamplingParams = SETTINGS["temperature"]
    kind: LawKind = "dense"
    vocab_size: int = 3
    horizon: int = 3
    """Tokens that each request may emit."""
    batch: int = 1
    memory: MemoryCase = "plain"
    seed: int = 0
    """Names the target's table."""
    layers: int = 1
    """Layers of the target."""
    drafters: tuple[str | None, ...] = (None,)
    """Whom the requests ask to draft for them, in turn."""

    def paste(self) -> str:
        """This case as Python."""
        given = self.params.model_dump(exclude_unset=True)
        params = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return (
            f"Case(SamplingParams({params}), kind={self.kind!r}, vocab_size={self.vocab_size}, "
            f"horizon={self.horizon}, batch={self.batch}, memory={self.memory!r}, seed={self.seed}, "
            f"layers={self.layers}, drafters={self.drafters!r})"
        )

    @property
    def watched(self) -> int:
        """The place of the request that is enumerated."""
        return _PLACE if self.batch > _PLACE else 0

    @property
    def prompts(self) -> list[list[int]]:
        """One prompt a request; the watched request's is the same in every batch."""
        length = {"plain": 2, "preemption": 3, "prefix hit": 5, "chunked prefill": 5}[self.memory]
        lengths = [length if i == self.watched else 3 for i in range(self.batch)]
        return [
            [(3 * (i - self.watched) + j + j * j // 2) % self.vocab_size for j in range(n)]
            for i, n in enumerate(lengths)
        ]

    @property
    def requests(self) -> list[tuple[list[int], SamplingParams]]:
        """Prompts and settings; batch-mates have other settings than the watched request."""
        others = [params for params in SETTINGS.values() if params != self.params]
        chosen = [self.params if i == self.watched else others[i] for i in range(self.batch)]
        return [
            (prompt, self._own(params, i))
            for i, (prompt, params) in enumerate(zip(self.prompts, chosen, strict=True))
        ]

    def _own(self, params: SamplingParams, place: int) -> SamplingParams:
        own: dict[str, Any] = {
            "max_new_tokens": self.horizon,
            "min_new_tokens": min(params.min_new_tokens, self.horizon),
            "seed": WATCHED if place == self.watched else 100 + place,
        }
        if (drafter := self.drafters[place % len(self.drafters)]) is not None:
            own["speculation"] = params.speculation.model_copy(update={"drafter": drafter})
        return params.model_copy(update=own)


def forbids(params: SamplingParams) -> bool:
    """Whether the settings make tokens impossible that may be all that the target deems possible."""
    return bool(
        params.min_new_tokens
        or params.no_repeat_ngram_size
        or params.bad_words_ids
        or params.suppress_tokens
        or params.begin_suppress_tokens
        or params.structure
    )


def fits(params: SamplingParams, vocab_size: int) -> bool:
    """Whether all token ids that the settings name are in the vocabulary."""
    return all(token < vocab_size for ids in token_ids_of(params).values() for token in ids)


def make_cases(
    settings: Mapping[str, SamplingParams] = SETTINGS,
    batch_sizes: Sequence[int] = (1, 3),
    memory_cases: Sequence[MemoryCase] = MEMORY_CASES,
    kinds: Sequence[LawKind] = ("dense", "sparse", "one_hot"),
    sizes: Sequence[tuple[int, int]] = ((3, 2), (2, 3), (3, 3)),
    seed: int = 0,
) -> Iterator[Case]:
    """Every setting with every memory case; batch sizes, kinds and (vocabulary, horizon) take turns."""
    for i, params in enumerate(settings.values()):
        for j, memory in enumerate(memory_cases):
            turn = i + j
            kind = kinds[turn // 2 % len(kinds)]
            if forbids(params):
                kind = "dense"  # a sure token leaves no law when it is forbidden
            vocab_size, horizon = sizes[(i + turn // 2) % len(sizes)]
            batch = batch_sizes[turn % len(batch_sizes)]
            if memory == "preemption":
                batch = max(batch, 3)
            yield Case(params, kind, vocab_size, horizon, batch, memory, seed + turn)


@lru_cache(maxsize=64)
def _table(kind: LawKind, vocab_size: int, seed: int, layers: int) -> ModelRunner:
    # Laws with zeros have infinite logits, which the numeric probe cannot compare.
    model = TableLM(vocab_size, seed, kind, layers=layers)
    return ModelRunner(model, prepack=False, check=False)


def table_runner(case: Case) -> ModelRunner:
    return _table(case.kind, case.vocab_size, case.seed, case.layers)


def deep_enough(case: Case, drafter: DrafterFactory) -> Case:
    """The case with a target that has the layers which the drafter requires, and one above them."""
    layers = drafter().requires.draft_layers
    return replace(case, layers=max(case.layers, layers[-1] + 2)) if layers else case


def target_info(case: Case) -> TargetInfo:
    """What drafters and schedulers are told of the case's target."""
    runner = table_runner(case)
    return TargetInfo(
        "table",
        case.vocab_size,
        runner.max_length,
        (EOS,),
        TableTokenizer(case.vocab_size),
        runner.model,
        runner.device,
        runner.dtype,
    )


def build_engine(
    case: Case,
    drafter: DrafterFactory,
    verifier: VerifierFactory,
    schedulers: SchedulerFactories,
    source: RandomSource,
    seed: int | None = None,
    drafters: Mapping[str, DrafterFactory] | None = None,
) -> tuple[Engine, list[Request]]:
    """An engine for the case with its requests queued; `seed` replaces the watched request's.

    `drafters` are those that the case's requests may ask for by name.
    """
    runner, info = table_runner(case), target_info(case)
    memory = KVMemory(_num_blocks(case), _BLOCK_SIZE)
    chunk = 2 if case.memory == "chunked prefill" else 16
    engine = Engine(
        runner,
        memory,
        info,
        drafter(),
        verifier(),
        [make() for make in schedulers],
        source,
        drafters={name: make() for name, make in (drafters or {}).items()},
        prefill_chunk=chunk,
        clock=_steady_clock(),
    )
    if case.memory == "prefix hit":
        _fill_cache(engine, case.prompts[case.watched])
    requests = []
    for i, (prompt, params) in enumerate(case.requests):
        if i == case.watched and seed is not None:
            params = params.model_copy(update={"seed": seed})
        requests.append(engine.add(prompt, params))
    return engine, requests


def _num_blocks(case: Case) -> int:
    """Memory for everything, or where some must make room, just enough for one request alone."""
    if case.memory != "preemption":
        return 24
    longest = max(map(len, case.prompts)) + case.horizon
    return max(4, -(-longest // _BLOCK_SIZE))


def _steady_clock() -> Callable[[], float]:
    """Time that is the same in every run, though uneven, so that what schedulers learn from it is."""
    times = accumulate(1.0 + 0.1 * (number * number % 7) for number in count())
    return lambda: next(times)


def _fill_cache(engine: Engine, prompt: Sequence[int]) -> None:
    """Run another request with the same prompt, so that its blocks are in the prefix cache."""
    engine.add(prompt, SamplingParams(max_new_tokens=2, temperature=1.0, seed=99, ignore_eos=True))
    while engine.has_work:
        engine.step()
