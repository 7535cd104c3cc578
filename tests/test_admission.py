"""Who is let in and who runs: first come, first served, by priority, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from specfw import PipelineConfig
from specfw.decoding.grammar import Grammars
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import KVMemory
from specfw.engine.planning import Plan, Planner
from specfw.engine.requests import Request
from specfw.errors import ConfigError
from specfw.testing.cases import Case, target_info
from specfw.types import SamplingParams

BLOCK = 2
GRAMMARS = Grammars(target_info(Case()))


def request_of(id: int, prompt: int = 3, new: int = 2, priority: int = 0) -> Request:
    """A request whose text is its own, so that no prefix is shared."""
    return Request(
        id,
        [10 * id + place for place in range(prompt)],
        SamplingParams(max_new_tokens=new, priority=priority, ignore_eos=True),
        eos_token_ids=(),
        tokenizer=None,
        vocab_size=10_000,
        device=torch.device("cpu"),
        grammars=GRAMMARS,
        guarantee="same-text",
    )


class Server:
    """A planner, and what an engine without a model does with its plans."""

    def __init__(
        self,
        blocks: int = 40,
        max_batch: int = 3,
        max_step_tokens: int = 8,
        prefill_chunk: int = 4,
        prefill_share: float = 1.0,
        patience: int = 2,
    ) -> None:
        self.memory = KVMemory(blocks, BLOCK)
        self.planner = Planner(
            self.memory,
            [FixedScheduler(2, 2, 1)],
            max_batch,
            max_step_tokens,
            prefill_chunk,
            prefill_share=prefill_share,
            patience=patience,
        )
        self.admitted: list[int] = []
        """Ids in the order in which they were first let in."""
        self.preempted: Counter[int] = Counter()

    def add(self, *requests: Request) -> None:
        self.planner.waiting.extend(requests)

    def step(self) -> Plan:
        plan = self.planner.plan()
        self.admitted += [r.id for r in plan.admitted if r.id not in self.admitted]
        self.preempted.update(r.id for r in plan.preempted)
        with self.memory.transaction() as transaction:
            for work in plan.work:
                transaction.reserve(work.sequence, work.context + work.limits.max_nodes)
            for work in plan.work:
                n_kv = work.sequence.n_kv + work.context
                if work.decodes:
                    work.request.tokens.append(5)
                transaction.commit(work.sequence, work.request.tokens, n_kv)
        self.memory.check()
        for work in plan.decoding:
            if len(work.request.emitted) == work.request.params.max_new_tokens:
                self.planner.leave(work.request)
        return plan

    def run(self) -> None:
        while self.planner.running or self.planner.waiting:
            self.step()


def test_first_come_first_served() -> None:
    """Equals must not overtake each other."""
    server = Server()
    server.add(*(request_of(i, prompt=1 + 3 * i % 5) for i in range(8)))
    server.run()
    assert server.admitted == list(range(8))


def test_priority_comes_first() -> None:
    """Among those that wait, urgent ones are let in first, and equals in order of arrival."""
    server = Server(max_batch=1, patience=9)
    server.add(*(request_of(i, priority=p) for i, p in enumerate([0, 2, 1, 2, -1])))
    server.run()
    assert server.admitted == [1, 3, 2, 0, 4]


def test_patience_ends() -> None:
    """A stream of urgent requests would keep others out for ever."""
    server = Server(max_batch=1, patience=2)
    server.add(request_of(0), *(request_of(i, priority=5) for i in range(1, 6)))
    server.run()
    assert server.admitted == [1, 2, 0, 3, 4, 5]


def test_the_least_urgent_gives_its_memory_back() -> None:
    """If the latest were preempted, an urgent one would wait for one that can wait."""
    server = Server(blocks=6, max_batch=2, patience=9)
    server.add(request_of(0, prompt=3, new=6))
    server.step()
    server.add(request_of(1, prompt=3, new=6, priority=1))
    server.run()
    assert set(server.preempted) == {0}


def test_prompts_leave_room_for_those_that_decode() -> None:
    """With a share of a half, three tokens of six are read at most beside a decoding request."""
    server = Server(max_step_tokens=6, prefill_chunk=6, prefill_share=0.5)
    server.add(request_of(0, prompt=6, new=9))
    assert [work.context for work in server.step().work] == [6]  # alone, all of it
    server.add(request_of(1, prompt=8), request_of(2, prompt=8))
    plan = server.step()
    assert [(work.request.id, work.context) for work in plan.work] == [(0, 1), (1, 3)]
    assert plan.work[0].decodes


def test_settings_are_checked() -> None:
    """A share of nothing would read no prompt."""
    for key, value in (("prefill_share", 0), ("prefill_share", 1.5), ("patience", 0)):
        with pytest.raises(ConfigError, match=key):
            PipelineConfig(target="table", engine={key: value})
    assert PipelineConfig(target="table", engine={"prefill_share": 1}).engine.prefill_share == 1


class Admission(RuleBasedStateMachine):
    """Any arrivals, priorities and lengths, with little memory: nobody waits longer than is said."""

    def __init__(self) -> None:
        super().__init__()
        self.patience = 2
        self.server = Server(blocks=9, patience=self.patience, prefill_share=0.5)
        self.requests: list[Request] = []

    @precondition(lambda self: len(self.requests) < 12)
    @rule(prompt=st.integers(1, 8), new=st.integers(1, 6), priority=st.integers(-1, 1))
    def arrive(self, prompt: int, new: int, priority: int) -> None:
        request = request_of(len(self.requests), prompt, new, priority)
        self.requests.append(request)
        self.server.add(request)

    @rule()
    def step(self) -> None:
        busy = bool(self.server.planner.running or self.server.planner.waiting)
        plan = self.server.step()
        assert bool(plan.work) == busy
        assert sum(work.context for work in plan.work) <= 8
        served = {work.request for work in plan.work}
        for request in self.server.planner.running:  # none that decodes is left out
            assert request in served or request.uncomputed > 1

    def teardown(self) -> None:
        steps = 0
        while self.server.planner.running or self.server.planner.waiting:
            self.step()
            steps += 1
            assert steps < 1000
        admitted = self.server.admitted
        assert sorted(admitted) == list(range(len(self.requests)))
        for place, id in enumerate(admitted):
            assert sum(other > id for other in admitted[:place]) <= self.patience


Admission.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestAdmission = Admission.TestCase
