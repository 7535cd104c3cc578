"""Whether drafter, verifier and schedulers together keep the target's law: computed, not sampled.

Small table models stand in for the target. In each case every outcome of every draw of one request is
enumerated through the real engine, and the law of what is emitted is compared with plain decoding's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specfw.builtins import NoDrafter
from specfw.decoding.random import KeyedSource
from specfw.engine.fixed import FixedScheduler
from specfw.errors import ConfigError
from specfw.testing.cases import (
    EOS,
    MEMORY_CASES,
    SETTINGS,
    WATCHED,
    Case,
    DrafterFactory,
    MemoryCase,
    SchedulerFactories,
    VerifierFactory,
    build_engine,
    deep_enough,
    make_cases,
    table_runner,
)
from specfw.testing.laws import Emission, Enumerated, Law, output_law, target_law, total_variation
from specfw.testing.table_model import LawKind, TableTokenizer
from specfw.types import Guarantee, SamplingParams

__all__ = ["Certificate", "Counterexample", "certify", "enumerate_case"]

_KEYED_RUNS = 3
"""Texts compared with plain decoding's, for each case of a same-text verifier."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The smallest case found in which the laws differ."""

    case: Case
    tv: float
    prefix: tuple[int, ...]
    """The shortest emitted prefix after which the next token's laws differ."""
    expected: Mapping[int, float]
    """The target's law after the prefix."""
    got: Mapping[int, float]
    """The law of what was emitted after the prefix."""
    expected_law: Law
    got_law: Law

    def __str__(self) -> str:
        return (
            f"total variation {self.tv:.3g} in {self.case.paste()}: after {list(self.prefix)} "
            f"expected {_rounded(self.expected)}, got {_rounded(self.got)}"
        )


def _rounded(law: Mapping[int, float]) -> dict[int, float]:
    return {token: round(share, 6) for token, share in sorted(law.items())}


@dataclass(slots=True)
class Certificate:
    """What was checked, and the largest distance from the target's law."""

    guarantee: Guarantee
    ok: bool = True
    """The guarantee holds in every case; a lossy verifier promises nothing."""
    max_tv: float = 0.0
    combinations: int = 0
    prefixes: int = 0
    """Committed prefixes from which steps were enumerated, over all cases."""
    leaves: int = 0
    """Runs enumerated."""
    drafted: int = 0
    """Draft tokens checked, over all runs; zero means that nothing was."""
    accepted: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    """What the drafter did wrong, by cause: each costs drafts that would have been checked."""
    counterexample: Counterexample | None = None

    def __str__(self) -> str:
        verdict = "holds" if self.ok else "is broken"
        text = (
            f"{self.guarantee} {verdict}: total variation {self.max_tv:.2g} over {self.combinations} combinations, "
            f"{self.prefixes} prefixes and {self.leaves} runs with {self.drafted} draft tokens"
        )
        return f"{text}; {self.counterexample}" if self.counterexample else text

    def merged(self, other: Certificate) -> Certificate:
        """One certificate for the cases of both, with the first counterexample."""
        worse = self if self.counterexample or not other.counterexample else other
        return Certificate(
            guarantee=self.guarantee,
            ok=self.ok and other.ok,
            max_tv=max(self.max_tv, other.max_tv),
            combinations=self.combinations + other.combinations,
            prefixes=self.prefixes + other.prefixes,
            leaves=self.leaves + other.leaves,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            preemptions=self.preemptions + other.preemptions,
            hit_tokens=self.hit_tokens + other.hit_tokens,
            faults=self.faults + other.faults,
            counterexample=worse.counterexample,
        )

    def _add(self, seen: Enumerated, tv: float) -> None:
        self.combinations += 1
        self.max_tv = max(self.max_tv, tv)
        self.prefixes += len(seen.prefixes)
        self.leaves += seen.leaves
        self.drafted += seen.drafted
        self.accepted += seen.accepted
        self.preemptions += seen.preemptions
        self.hit_tokens += seen.hit_tokens
        self.faults += seen.faults


def certify(
    drafter: DrafterFactory,
    verifier: VerifierFactory,
    schedulers: SchedulerFactories | None = None,
    *,
    settings: Mapping[str, SamplingParams] = SETTINGS,
    batch_sizes: Sequence[int] = (1, 3),
    memory_cases: Sequence[MemoryCase] = MEMORY_CASES,
    kinds: Sequence[LawKind] = ("dense", "sparse", "one_hot"),
    sizes: Sequence[tuple[int, int]] = ((3, 2), (2, 3), (3, 3)),
    seed: int = 0,
    cases: Sequence[Case] | None = None,
    drafters: Mapping[str, DrafterFactory] | None = None,
    tolerance: float = 1e-9,
    progress: Callable[[int, int, Case], None] | None = None,
) -> Certificate:
    """Compare the law of what is emitted with the target's, in every case.

    A drafter is attached to a `TableLM` target of `vocab_size` tokens with a `TableTokenizer`.

    Args:
        drafter, verifier, schedulers: make the components, anew for each run.
        settings, batch_sizes, memory_cases, kinds, sizes, seed: see `make_cases`.
        cases: these cases instead.
        drafters: those that the cases' requests ask for by name.
        tolerance: largest total variation that rounding explains.
        progress: called before each case with its number, how many there are, and the case.
    """
    if schedulers is None:
        schedulers = [lambda: FixedScheduler(3, 2, 2)]
    if cases is None:
        cases = list(make_cases(settings, batch_sizes, memory_cases, kinds, sizes, seed))
    cases = [deep_enough(case, drafter) for case in cases]
    guarantee = verifier().guarantee
    certificate = Certificate(guarantee)
    check = _Check(drafter, verifier, schedulers, guarantee, drafters)
    worst: Case | None = None
    for number, case in enumerate(cases):
        if progress is not None:
            progress(number, len(cases), case)
        expected, seen = check.laws(case)
        tv = total_variation(expected, seen.law)
        certificate._add(seen, tv)
        if tv > tolerance and (worst is None or _size(case) < _size(worst)):
            worst = case
    if worst is not None:
        certificate.counterexample = check.smallest(worst, tolerance)
        certificate.ok = guarantee == "lossy"
    return certificate


def enumerate_case(
    case: Case,
    drafter: DrafterFactory,
    verifier: VerifierFactory,
    schedulers: SchedulerFactories,
    drafters: Mapping[str, DrafterFactory] | None = None,
) -> Enumerated:
    """The law of what the case's watched request emits."""
    return output_law(
        lambda source: build_engine(case, drafter, verifier, schedulers, source, drafters=drafters),
        watch=WATCHED,
        index=case.watched,
    )


class _Check:
    """One combination under test."""

    def __init__(
        self,
        drafter: DrafterFactory,
        verifier: VerifierFactory,
        schedulers: SchedulerFactories,
        guarantee: Guarantee,
        drafters: Mapping[str, DrafterFactory] | None = None,
    ) -> None:
        self._named = drafters or {}
        self._drafter, self._verifier, self._schedulers = drafter, verifier, schedulers
        self._same_text = guarantee == "same-text"

    def laws(self, case: Case) -> tuple[Law, Enumerated]:
        """The law expected and the one found; texts that differ from plain decoding's replace them."""
        seen = enumerate_case(case, self._drafter, self._verifier, self._schedulers, self._named)
        if self._same_text:
            for seed in range(_KEYED_RUNS):
                plain, text = (
                    self._text(replace(case, drafters=(None,)), seed, NoDrafter),
                    self._text(case, seed, self._drafter),
                )
                if plain != text:
                    seen.law = {text: 1.0}
                    return {plain: 1.0}, seen
        prompt, params = case.requests[case.watched]
        text_of = TableTokenizer(case.vocab_size).decode
        return target_law(
            table_runner(case).model, prompt, case.horizon, params, (EOS,), text_of
        ), seen

    def _text(self, case: Case, seed: int, drafter: DrafterFactory) -> Emission:
        engine, requests = build_engine(
            case, drafter, self._verifier, self._schedulers, KeyedSource(), seed, self._named
        )
        while engine.has_work:
            engine.step()
        output = requests[case.watched].output
        assert output is not None
        return Emission(tuple(output.token_ids), output.error or output.finish_reason)

    def smallest(self, case: Case, tolerance: float) -> Counterexample:
        """Make a failing case smaller, one feature at a time, for as long as it fails."""
        shrunk: Case | None = case
        while shrunk is not None:
            case = shrunk
            shrunk = next((c for c in _smaller(case) if self._tv(c) > tolerance), None)
        expected, seen = self.laws(case)
        prefix, one, other = _first_difference(expected, seen.law, tolerance)
        return Counterexample(
            case, total_variation(expected, seen.law), prefix, one, other, expected, seen.law
        )

    def _tv(self, case: Case) -> float:
        try:
            expected, seen = self.laws(case)
        except ConfigError:  # a component was built for another vocabulary
            return 0.0
        return total_variation(expected, seen.law)


def _size(case: Case) -> tuple[int, ...]:
    return (MEMORY_CASES.index(case.memory), case.batch, case.horizon, case.vocab_size)


def _smaller(case: Case) -> Iterator[Case]:
    if case.memory != "plain":
        yield replace(case, memory="plain")
    if case.batch > 1 and case.memory != "preemption":
        yield replace(case, batch=1)
    if case.horizon > 1:
        yield replace(case, horizon=case.horizon - 1)
    if case.vocab_size > 2:
        yield replace(case, vocab_size=case.vocab_size - 1)
    plain = SETTINGS["temperature"]
    if case.params not in (plain, SETTINGS["greedy"]):
        yield replace(case, params=plain)


def _first_difference(
    expected: Law, got: Law, tolerance: float
) -> tuple[tuple[int, ...], dict[int, float], dict[int, float]]:
    """The shortest prefix after which the next token's laws differ, and both laws."""
    prefixes = {
        emission.tokens[:n] for emission in {*expected, *got} for n in range(len(emission.tokens))
    }
    for prefix in sorted(prefixes, key=lambda prefix: (len(prefix), prefix)):
        one, other = _after(expected, prefix), _after(got, prefix)
        if any(abs(one.get(t, 0.0) - other.get(t, 0.0)) > tolerance for t in {*one, *other}):
            return prefix, one, other
    return (), _after(expected, ()), _after(got, ())  # they differ in why requests end


def _after(law: Law, prefix: tuple[int, ...]) -> dict[int, float]:
    """The law of the token after an emitted prefix; empty where the prefix is impossible."""
    masses: dict[int, float] = defaultdict(float)
    for emission, weight in law.items():
        if len(emission.tokens) > len(prefix) and emission.tokens[: len(prefix)] == prefix:
            masses[emission.tokens[len(prefix)]] += weight
    total = sum(masses.values())
    return {token: mass / total for token, mass in masses.items()} if total else {}
