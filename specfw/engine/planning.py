"""Who runs in a step: admission, token budget, prefill chunks, preemption, draft limits.

Higher priority comes first, and first come is first served among equals. A request that was overtaken
`patience` times, or that lost its memory, is let in before all others, the oldest first. So a request waits
for those that were waiting before it and for at most `patience` that came later, however urgent these are.

Whoever decodes runs in every step, before prompts are read, so that a long prompt does not stall the others;
of those that read, the first in order reads at least one token. If memory runs out, the last in order gives
its own back, so the first always proceeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from specfw.contracts import DraftLimits, Scheduler, SchedulerView
from specfw.engine.memory import KVMemory, KVSequence
from specfw.engine.requests import Request

__all__ = ["Plan", "Planner", "Work", "compose_limits"]


@dataclass(slots=True)
class Work:
    """One request's share of a step: its next `context` committed tokens, and room for a draft behind them."""

    request: Request
    context: int
    limits: DraftLimits = field(default_factory=DraftLimits)

    decodes: bool = False
    """Whether the last committed token is run, so that something is emitted."""

    @property
    def sequence(self) -> KVSequence:
        assert self.request.sequence is not None
        return self.request.sequence


@dataclass(slots=True)
class Plan:
    """A step's work, and the requests that lost their memory or cannot run at all."""

    work: list[Work] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def decoding(self) -> list[Work]:
        return [work for work in self.work if work.decodes]


def compose_limits(schedulers: Sequence[Scheduler], view: SchedulerView) -> list[DraftLimits]:
    """The tightest of the caps and of every scheduler's plan, request by request."""
    limits = list(view.caps)
    for scheduler in schedulers:
        limits = [a & b for a, b in zip(limits, scheduler.plan(view), strict=True)]
    return limits


class Planner:
    """Keeps the queue and the running requests."""

    def __init__(
        self,
        memory: KVMemory,
        schedulers: Sequence[Scheduler],
        max_batch: int,
        max_step_tokens: int,
        prefill_chunk: int,
        trees: bool = True,
        prefill_share: float = 1.0,
        patience: int = 64,
    ) -> None:
        """Start empty.

        Args:
            memory, schedulers: as in the engine.
            max_batch: requests that run at once.
            max_step_tokens: tokens of one step, drafts included.
            prefill_chunk: prompt tokens of one request in one step.
            trees: without (the verifier takes chains only), no draft gets siblings.
            prefill_share: part of a step's tokens that prompts may take while somebody decodes.
            patience: how often a waiting request may be overtaken.
        """
        self._prefill_share, self._patience = prefill_share, patience
        self._trees = trees
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._memory, self._schedulers = memory, schedulers
        self._max_batch, self._max_step_tokens, self._prefill_chunk = (
            max_batch,
            max_step_tokens,
            prefill_chunk,
        )

    def plan(self) -> Plan:
        """Decide the next step's work."""
        plan = Plan()
        self._admit(plan)
        self._choose_work(plan)
        self._set_limits(plan)
        return plan

    def leave(self, request: Request) -> None:
        """Forget a request and free its memory."""
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        if request.sequence is not None:
            self._memory.release(request.sequence)
            request.sequence = None

    def _admit(self, plan: Plan) -> None:
        """Let waiting requests in while their whole text fits beside what the running ones still need."""
        promised = sum(self._blocks(request, request.uncomputed) for request in self.running)
        while self.waiting and len(self.running) < self._max_batch:
            request = min(self.waiting, key=self._turn)
            request.sequence = self._memory.open(request.tokens, request.reusable)
            promised += self._blocks(request, request.uncomputed)
            if promised > self._memory.available and self.running:
                self._release(request)
                break
            self.waiting.remove(request)
            self.running.append(request)
            plan.admitted.append(request)
            for other in self.waiting:
                other.overtaken += other.id < request.id

    def _turn(self, request: Request) -> tuple[bool, int, int]:
        """Whose turn it is among those that wait: the least."""
        waits = request.overtaken < self._patience
        return waits, -request.params.priority if waits else 0, request.id

    def _choose_work(self, plan: Plan) -> None:
        budget, needed = self._max_step_tokens, 0
        reading = {request for request in self.running if request.uncomputed > 1}
        share = 1.0 if len(reading) == len(self.running) else self._prefill_share
        prefill = max(1, int(share * budget))
        for request in sorted(self.running, key=lambda r: (r in reading, *self._order(r))):
            context = min(request.uncomputed, budget)
            if request in reading:
                context = min(context, prefill, self._prefill_chunk)
            if context == 0 or request not in self.running:
                continue
            blocks = self._blocks(request, context)
            while needed + blocks > self._memory.available:
                victim = max(self.running, key=self._order)
                needed -= self._drop_work(plan, victim)
                self._preempt(plan, victim)
                if victim is request:
                    break
            else:
                needed += blocks
                budget -= context
                prefill -= context if request in reading else 0
                plan.work.append(Work(request, context, decodes=context == request.uncomputed))

    @staticmethod
    def _order(request: Request) -> tuple[int, int]:
        """Who is served first among those that run: the least."""
        return -request.params.priority, request.id

    def _drop_work(self, plan: Plan, victim: Request) -> int:
        """Take a request's work back; how many blocks it was going to need."""
        dropped = [work for work in plan.work if work.request is victim]
        plan.work = [work for work in plan.work if work.request is not victim]
        return sum(self._blocks(work.request, work.context) for work in dropped)

    def _preempt(self, plan: Plan, victim: Request) -> None:
        self.running.remove(victim)
        self._release(victim)
        self.waiting.appendleft(victim)
        victim.overtaken = self._patience
        if victim in plan.admitted:
            plan.admitted.remove(victim)
        else:
            plan.preempted.append(victim)

    def _set_limits(self, plan: Plan) -> None:
        decoding = plan.decoding
        if not decoding:
            return
        rows = sum(work.context for work in plan.work)
        share = max(0, self._max_step_tokens - rows) // len(decoding)
        widest = share if self._trees else 1
        caps = [work.request.draft_cap() & DraftLimits(share, share, widest) for work in decoding]
        view = SchedulerView([work.request for work in decoding], caps, rows)
        spare = self._memory.available - sum(
            self._blocks(work.request, work.context) for work in plan.work
        )
        for work, limits in zip(decoding, compose_limits(self._schedulers, view), strict=True):
            spare -= self._fit(work, limits, spare)

    def _fit(self, work: Work, limits: DraftLimits, spare: int) -> int:
        """Cut the draft to the blocks that are left; how many of them it takes."""
        size, base = self._memory.block_size, work.sequence.n_kv + work.context
        free_slots = -base % size + max(spare, 0) * size
        work.limits = limits & DraftLimits(free_slots, limits.max_depth, limits.max_width)
        return -(-(base + work.limits.max_nodes) // size) - -(-base // size)

    def _blocks(self, request: Request, count: int) -> int:
        assert request.sequence is not None
        return self._memory.blocks_needed(request.sequence, count)
