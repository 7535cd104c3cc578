"""Requests with drafters of their own share a draft: who is asked and told what, and what a fault costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specfw.builtins import NoDrafter
from specfw.combining import Combined
from specfw.contracts import Drafter, Feedback, RequestView, Requirements, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.errors import ConfigError
from specfw.testing import MixtureDrafter, ScriptedDrafter, TableDrafter, certify
from specfw.testing.cases import SETTINGS, Case
from specfw.types import SamplingParams, SpeculationParams
from tests.engine_kit import OracleDrafter, TwinDrafter, make_engine, outputs, prompt_of, run
from tests.tiny_models import VOCAB_SIZE, tiny

VERIFIERS = [CoupledVerifier, RejectionVerifier]


def wish(name: str | None, **settings: Any) -> SamplingParams:
    speculation = SpeculationParams(drafter=name)
    return SamplingParams(ignore_eos=True, speculation=speculation, **settings)


class Noting(Drafter):
    """Guesses token 9 twice and notes whom it is asked for and told of."""

    def __init__(self, **requires: Any) -> None:
        self.requires = Requirements(**requires)  # type: ignore[misc]
        self.held: set[int] = set()
        self.asked: list[int] = []
        self.feedback: list[Feedback] = []
        self.closed = False

    def begin(self, request: RequestView) -> None:
        assert request.id not in self.held
        self.held.add(request.id)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        assert len(requests) == len(builder.roots) == len(builder.limits)
        for request, root in zip(requests, builder.roots.tolist(), strict=True):
            assert request.id in self.held
            assert int(builder.tokens_of(root)) == request.tokens[-1]
            self.asked.append(request.id)
            builder.guess(root, [9, 9])

    def observe(self, feedback: Feedback) -> None:
        assert {request.id for request in feedback.requests} <= self.held
        self.feedback.append(feedback)

    def end(self, request: RequestView) -> None:
        self.held.remove(request.id)

    def close(self) -> None:
        self.closed = True


class Raising(OracleDrafter):
    """Knows the text, and raises after its fifth draft."""

    drafts = 0

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        super().propose(requests, builder)
        self.drafts += 1
        if self.drafts == 5:
            raise RuntimeError("on purpose")


class Overflowing(TwinDrafter):
    """The target's own logits, and from its fifth draft on NaN."""

    drafts = 0

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self.drafts += 1
        super().propose(requests, builder)

    def _logits(self, texts: Any) -> torch.Tensor:
        logits = super()._logits(texts)
        return logits if self.drafts < 5 else logits * torch.nan


MIXED = ("tree", None, "script")


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("setting", ["temperature", "greedy", "penalties"])
def test_the_law_is_the_targets_whoever_drafts_for_the_others(
    verifier: type[Verifier], setting: str
) -> None:
    """Fault: draws or handles of one drafter land in a request of another."""
    for drafters in (MIXED, MIXED[1:] + MIXED[:1], MIXED[2:] + MIXED[:2]):
        cases = [
            Case(SETTINGS[setting], "dense", size, horizon, 3, memory, 1, drafters=drafters)  # type: ignore[arg-type]
            for size, horizon, memory in [(3, 2, "plain"), (2, 3, "preemption")]
        ]
        certificate = certify(
            lambda: TableDrafter("near", depth=2, width=2),
            verifier,
            cases=cases,
            drafters={"tree": lambda: MixtureDrafter("near"), "script": lambda: ScriptedDrafter(3)},
        )
        assert certificate.ok, certificate.counterexample
        assert certificate.max_tv <= 1e-9
        assert certificate.drafted
        assert not certificate.faults


def test_each_drafter_hears_of_its_own_requests_only() -> None:
    """Fault: a drafter begins, drafts, observes or ends for a request that named another."""
    plain, ranks, states = Noting(), Noting(top_k=3), Noting(hidden_layers=(1,), top_k=1)
    named = {"ranks": ranks, "states": states}
    engine = make_engine("llama", plain, drafters=named, max_batch=4, prefill_chunk=3)
    names = [None, "ranks", "states", "ranks", None, "states", "states"]
    requests = [
        engine.add(prompt_of(4 + i, i), wish(name, max_new_tokens=6))
        for i, name in enumerate(names)
    ]
    run(engine)
    assert engine.drafters.requires == Requirements((1,), 3)
    for drafter, name in ((plain, None), *((d, n) for n, d in named.items())):
        own = {r.id for r, asked in zip(requests, names, strict=True) if asked == name}
        assert set(drafter.asked) == own
        assert {r.id for one in drafter.feedback for r in one.requests} == own
        assert not drafter.held
        for one in drafter.feedback:
            assert [len(x) for x in one.kept] == [len(x) - 1 for x in one.emitted]
            for request, emitted in zip(one.requests, one.emitted, strict=True):
                assert set(emitted) <= set(request.tokens)
            assert {rows.top.shape[1] for rows in one.ranked} <= {drafter.requires.top_k}
            assert len(one.ranked) == (len(one.requests) if drafter.requires.top_k else 0)
            assert set(one.hidden) <= {*drafter.requires.hidden_layers}
            for hidden in one.hidden.values():
                assert len(hidden) == len(one.requests)
            assert {chunk.request.id for chunk in one.chunks} <= own
    assert any(one.chunks for one in states.feedback)
    assert not any(one.chunks for one in (*plain.feedback, *ranks.feedback))
    assert not engine.faults
    engine.drafters.close()
    assert plain.closed
    assert ranks.closed


@pytest.mark.parametrize(
    ("make", "why"),
    [(Raising, "raised RuntimeError: on purpose"), (None, "handed over NaN or infinite logits")],
)
def test_a_faulty_drafter_costs_its_own_requests_only(
    make: Callable[..., Drafter] | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: drafts of all requests are lost when the drafter of one of them fails."""
    prompts = [prompt_of(5, seed) for seed in range(4)]
    params = [wish("bad" if i % 2 else None, max_new_tokens=24, seed=i) for i in range(4)]
    plain = [wish(None, max_new_tokens=24, seed=i) for i in range(4)]
    texts = [o.token_ids for o in outputs(make_engine("llama", NoDrafter()), prompts, plain)]
    told = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    bad = Overflowing(2) if make is None else make(told, depth=2)
    good = OracleDrafter(told, depth=2)
    engine = make_engine("llama", good, drafters={"bad": bad})
    results = outputs(engine, prompts, params)
    assert [result.token_ids for result in results] == texts
    assert engine.faults == {why: 2}
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"'bad' ({type(bad).__name__}) {why}" in record.getMessage()
    for number, result in enumerate(results):
        rounds = result.speculation.drafted_rounds
        assert (rounds <= 5) == bool(number % 2)
        assert rounds > 0


class Together(Combined):
    """All members draft below the root, one after the other."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for member in self.members:
            member.propose(requests, builder)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_faulty_member_costs_its_own_part_of_the_draft_only(
    overflows: bool, nested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: one bad drafter of a combination costs the whole combination's drafts."""
    prompts = [prompt_of(5, seed) for seed in range(3)]
    params = [SamplingParams(max_new_tokens=24, ignore_eos=True, seed=i) for i in range(3)]
    texts = [o.token_ids for o in outputs(make_engine("llama", NoDrafter()), prompts, params)]
    told = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    bad: Drafter = Overflowing(1) if overflows else Raising(told, depth=1)
    whole = Together([OracleDrafter(told, depth=2), bad])
    engine = make_engine("llama", Together([NoDrafter(), whole]) if nested else whole)
    results = outputs(engine, prompts, params)
    assert [result.token_ids for result in results] == texts
    for result in results:  # two drafted and one more, to the end
        assert result.speculation.target_passes == 8
    assert list(engine.faults.values()) == [3]
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"drafter {type(bad).__name__} (number 2 of Together)" in record.getMessage()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_faulty_member_keeps_the_law(verifier: type[Verifier]) -> None:
    """Fault: what a member drew before it failed is dropped, after a look at what was drawn."""

    class Unlucky(TableDrafter):
        def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
            super().propose(requests, builder)
            drawn = builder.tokens_of([int(root) + 1 for root in builder.roots])
            if bool((drawn == 1).any()):
                raise RuntimeError("it drew a one")

    certificate = certify(
        lambda: Together([Unlucky("near", depth=1), TableDrafter("unrelated", depth=2)]),
        verifier,
        settings={"temperature": SETTINGS["temperature"]},
        batch_sizes=(1,),
    )
    assert certificate.ok, certificate.counterexample
    assert set(certificate.faults) == {"raised RuntimeError: it drew a one"}


def test_an_unknown_drafter_is_one_requests_error() -> None:
    """Fault: a name that nobody has means the default, in silence."""
    engine = make_engine("llama", NoDrafter(), drafters={"fast": TwinDrafter(2)})
    with pytest.raises(ConfigError, match=r"held ready \(fast\), got 'fsat'"):
        engine.add([3], wish("fsat"))
    [output] = outputs(engine, [[3]], wish("fast", max_new_tokens=4))
    assert output.speculation.drafted
    with pytest.raises(ConfigError, match="none at all"):
        make_engine("llama", NoDrafter()).add([3], wish("fast"))


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_B19_a_batch_of_all_kinds_gives_what_each_gives_alone(verifier: type[Verifier]) -> None:
    """Requests that differ in everything, drafters included, and change each other's texts."""
    drafters: dict[str, Callable[[], Drafter]] = {
        "chain": lambda: TwinDrafter(3),
        "tree": lambda: TwinDrafter(2, 2),
        "other": lambda: TwinDrafter(2, 1, tiny("llama", 1)),
        "nine": Noting,
    }

    def engine() -> Engine:
        named = {name: make() for name, make in drafters.items()}
        return make_engine("llama", Noting(), verifier, drafters=named, max_batch=5)

    def own(number: int) -> SamplingParams:
        name = [*drafters, None][number % 5]
        speculation = SpeculationParams(
            enabled=number != 7, drafter=name, max_nodes=None if number % 3 else 2
        )
        return SamplingParams(
            max_new_tokens=6 + number,
            temperature=[0.0, 0.7, 1.3][number % 3],
            top_k=20 if number % 4 == 1 else None,
            repetition_penalty=1.2 if number % 5 == 2 else 1.0,
            logit_bias={number: 2.0},
            seed=number,
            ignore_eos=True,
            speculation=speculation,
        )

    prompts = [prompt_of(1 + 3 * number, number) for number in range(12)]
    settings = [own(number) for number in range(12)]
    together = outputs(engine(), prompts, settings)
    for prompt, params, output in zip(prompts, settings, together, strict=True):
        [alone] = outputs(engine(), [prompt], params)
        assert alone.token_ids == output.token_ids
        assert max(output.token_ids) < VOCAB_SIZE
        assert bool(output.speculation.drafted) == params.speculation.enabled
