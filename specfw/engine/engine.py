"""The decode loop: plan, draft, pack, forward, verify, commit.

Between steps, for every running request: tokens[0:n_kv] have KV, n_kv is smaller than the number of
committed tokens, and no draft slot is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.contracts import (
    Drafter,
    Feedback,
    Outcome,
    RankedRows,
    ReadChunk,
    Scheduler,
    TargetInfo,
    Verifier,
)
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.draft import Draft, ExtraRows
from specfw.decoding.forced import guess_forced
from specfw.decoding.grammar import Grammars
from specfw.decoding.probabilities import NodeLaws, SamplingBatch
from specfw.decoding.random import RandomSource
from specfw.engine.drafting import OwnDrafters
from specfw.engine.layout import lay_out
from specfw.engine.memory import KVMemory, Transaction
from specfw.engine.model_runner import ModelRunner, Rows
from specfw.engine.planning import Plan, Planner, Work
from specfw.engine.prompt_logprobs import score_prompts, take_prompt_rows
from specfw.engine.ranking import best_tokens, rank_rows
from specfw.engine.requests import Request
from specfw.engine.split_pass import DraftLayers, SplitModel
from specfw.errors import CapacityError, ConfigError
from specfw.types import FinishReason, Output, SamplingParams

__all__ = ["Engine", "StepReport", "token_ids_of"]


@dataclass(slots=True)
class Round:
    """What one step brought one request that decoded."""

    request: Request
    drafted: int
    extra: int
    """Rows scored for the drafter besides the draft."""
    reached: list[list[int]] = field(default_factory=list)
    """Draft nodes by depth at which such were tested: the siblings there."""
    kept: list[int] = field(default_factory=list)
    """Draft nodes whose tokens were emitted."""
    emitted: list[int] = field(default_factory=list)
    ends: FinishReason | None = None
    error: str | None = None
    ranked: Sequence[RankedRows] = ()
    """The target's best tokens after the draft's nodes, and after the extra rows."""
    chances: Sequence[Sequence[float]] = ()
    """How likely each of the reached nodes was when it was drawn, if that was noted."""


@dataclass(slots=True)
class StepReport:
    """What one step did."""

    rows: int
    """Tokens that went through the target."""
    admitted: int
    preempted: int
    drafted: int
    extra_rows: int
    """Rows scored for drafters besides drafts."""
    accepted: int
    emitted: int
    finished: list[Output]
    seconds: dict[str, float]
    """Wall time by phase: plan, draft, forward, verify, commit, observe; `model` is a part of forward."""

    @classmethod
    def of(
        cls, plan: Plan, rounds: Sequence[Round], finished: list[Output], seconds: dict[str, float]
    ) -> StepReport:
        return cls(
            rows=_rows_scored(plan, rounds),
            admitted=len(plan.admitted),
            preempted=len(plan.preempted),
            drafted=sum(round.drafted for round in rounds),
            extra_rows=sum(round.extra for round in rounds),
            accepted=sum(len(round.kept) for round in rounds),
            emitted=sum(len(round.emitted) for round in rounds),
            finished=finished,
            seconds=seconds,
        )


class _Clock:
    """Splits the wall time of a step into phases."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._now = now
        self._last = now()

    def lap(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Engine:
    """Runs requests on one target with their drafters, one verifier and some schedulers."""

    def __init__(
        self,
        runner: ModelRunner,
        memory: KVMemory,
        info: TargetInfo,
        drafter: Drafter,
        verifier: Verifier,
        schedulers: Sequence[Scheduler],
        random: RandomSource,
        *,
        drafters: Mapping[str, Drafter] | None = None,
        max_batch: int = 16,
        max_step_tokens: int = 512,
        prefill_chunk: int = 256,
        prefill_share: float = 1.0,
        patience: int = 64,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Wire the parts.

        `drafters` are those that requests may name instead of `drafter`; `clock` gives the time in
        seconds, which schedulers may learn from.
        """
        self._clock = clock
        self.runner, self.memory, self.info = runner, memory, info
        self.drafters = OwnDrafters(drafter, drafters or {})
        self.verifier, self.schedulers, self.random = verifier, list(schedulers), random
        self.store = runner.new_store(memory.num_slots)
        self.planner = Planner(
            memory,
            schedulers,
            max_batch,
            max_step_tokens,
            prefill_chunk,
            verifier.supports_trees,
            prefill_share,
            patience,
        )
        self.grammars = Grammars(info)
        self.max_length = min(info.max_length, memory.num_blocks * memory.block_size)
        self.observers: list[Callable[[StepReport], None]] = []
        self._next_id = 0
        self.drafters.attach(info)
        layers = self.drafters.requires.draft_layers
        self._split = SplitModel(runner, layers) if layers else None
        for scheduler in schedulers:
            scheduler.attach(info)

    @property
    def faults(self) -> Mapping[str, int]:
        """Drafts lost, by cause; each drafter logs each cause once."""
        return self.drafters.faults

    @property
    def has_work(self) -> bool:
        return bool(self.planner.running or self.planner.waiting)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        index: int = 0,
        streams: bool = False,
    ) -> Request:
        """Queue a request.

        Raises:
            ConfigError: the prompt is empty or has ids outside the vocabulary, its grammar cannot
                be used, or no drafter has the name that it asks for.
            CapacityError: it does not fit into the context or the KV memory.
        """
        self._check_prompt(prompt, params)
        self.drafters.check(params.speculation)
        room = self.max_length - len(prompt)
        if params.max_new_tokens > room:
            params = params.model_copy(update={"max_new_tokens": room})
        request = Request(
            self._next_id,
            prompt,
            params,
            eos_token_ids=self.info.eos_token_ids,
            tokenizer=self.info.tokenizer,
            vocab_size=self.info.vocab_size,
            device=self.info.device,
            grammars=self.grammars,
            guarantee=self.verifier.guarantee,
            index=index,
            streams=streams,
        )
        self._next_id += 1
        self.planner.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, whatever state it is in; what it has emitted stays in its output."""
        if request.output is None:
            self._finish(request, "cancelled")

    @torch.inference_mode()
    def step(self) -> StepReport:
        """One round for every request that the plan picks; without any, an empty report."""
        clock = _Clock(self._clock)
        plan = self._plan()
        clock.lap("plan")
        if not plan.work:
            return StepReport.of(plan, [], [], clock.seconds)
        with self.memory.transaction() as memory:  # on any exit the invariant holds
            for work in plan.work:
                memory.reserve(work.sequence, work.context + work.limits.max_nodes)
            layers = self._draft_layers(plan.work)
            draft, builder, sampling = self._draft(plan.decoding, layers)
            clock.lap("draft")
            rows = self._forward(plan.work, draft, builder.extras, layers)
            clock.lap("forward")
            laws = NodeLaws(rows.logits, draft, sampling, rows.roots)
            outcome = self.verifier.verify(draft, laws, self.random)
            clock.lap("verify")
            rounds = self._commit(plan, draft, builder, rows, laws, outcome, memory)
        clock.lap("commit")
        self._observe(plan, rounds, draft, builder, rows, clock.seconds)
        finished = [
            self._finish(round.request, round.ends, round.error) for round in rounds if round.ends
        ]
        clock.lap("observe")
        seconds = clock.seconds | {"model": self.runner.model_seconds}
        report = StepReport.of(plan, rounds, finished, seconds)
        for observer in self.observers:
            observer(report)
        return report

    def _plan(self) -> Plan:
        plan = self.planner.plan()
        for request in plan.preempted:
            self._end(request)
        for request in plan.admitted:
            self._begin(request)
        return plan

    def _draft_layers(self, work: Sequence[Work]) -> DraftLayers | None:
        """The target's layers that this step's drafts go through, if the drafter requires some."""
        if self._split is None:
            return None
        return DraftLayers(self._split, self.store, work, self.drafters.requires.hidden_layers)

    def _draft(
        self, decoding: Sequence[Work], layers: DraftLayers | None
    ) -> tuple[Draft, DraftBuilder, SamplingBatch]:
        requests = [work.request for work in decoding]
        sampling = SamplingBatch([request.sampling for request in requests])
        root, start, seed = (
            torch.tensor(
                [[r.tokens[-1], len(r.tokens) - 1, r.seed] for r in requests], dtype=torch.long
            )
            .reshape(-1, 3)
            .T.to(self.info.device)
        )
        builder = DraftBuilder(
            root,
            start,
            seed,
            [work.limits for work in decoding],
            sampling,
            self.random,
            self.verifier.noise,
            self.info.vocab_size,
            self._may_draw if any(s.stops_drafts for s in self.schedulers) else None,
            [self.max_length - len(request.tokens) for request in requests],
            layers,
        )
        ahead = self.drafters.reads_ahead_of(requests)
        self.drafters.propose(*guess_forced(requests, builder, sampling, ahead))
        return builder.build(), builder, sampling

    def _may_draw(self, q: Tensor, path: Tensor) -> Tensor | None:
        asked = [s for s in self.schedulers if s.stops_drafts]
        answers = [one for s in asked for one in (s.before_draw(q), s.after_kept(path))]
        given = [answer for answer in answers if answer is not None]
        return torch.stack(given).all(0) if given else None

    def _forward(
        self,
        work: Sequence[Work],
        draft: Draft,
        extras: Sequence[ExtraRows],
        layers: DraftLayers | None,
    ) -> Rows:
        """Score the context, the draft and the extra rows of every request in one pass, or what is left of it."""
        segments, device_tokens = lay_out(work, draft, extras)
        score_prompts(work, segments)
        if layers is None:
            hidden = self.drafters.requires.hidden_layers
            scored = self.runner.run(self.store, segments, device_tokens, hidden)
        else:
            scored = layers.target_pass.finish(segments, device_tokens)
        begins = take_prompt_rows(scored.logits, work, segments)
        return replace(scored, roots=begins[[item.decodes for item in work]])

    def _commit(
        self,
        plan: Plan,
        draft: Draft,
        builder: DraftBuilder,
        rows: Rows,
        laws: NodeLaws,
        outcome: Outcome,
        memory: Transaction,
    ) -> list[Round]:
        """Keep what was accepted, cut at the first stop; the KV of everything else is gone afterwards."""
        faulty = [rows.long() for rows in builder.non_finite.values()]
        columns = torch.stack([outcome.node, outcome.next_token, laws.failed_at, *faulty], 1)
        top = best_tokens(rows.logits, self.drafters.requires.top_k or int(any(builder.extras)))
        noted = columns.new_empty(0) if draft.chance is None else draft.chance.view(torch.long)
        # the step's one synchronisation
        decided, tokens, best, chances = _fetch(columns, draft.token, top, noted)
        paths = [draft.path(b, int(node)) for b, node in enumerate(decided[:, 0])]
        self.store.compact(
            (work.sequence, work.sequence.n_kv + work.context, [node - 1 for node in path])
            for work, path in zip(plan.decoding, paths, strict=True)
        )
        rounds = [
            self._settle(b, work.request, draft, builder, paths[b], decided[b], tokens[b], laws)
            for b, work in enumerate(plan.decoding)
        ]
        for b, (round, root) in enumerate(zip(rounds, rows.roots, strict=True)):
            round.ranked = rank_rows(draft, builder.extras[b], b, tokens[b], best[root:])
            if draft.chance is not None:
                round.chances = [
                    chances.view(np.float64)[b, nodes].tolist() for nodes in round.reached
                ]
        kept = {round.request: len(round.kept) for round in rounds if round.error is None}
        for work in plan.work:
            if not work.decodes or work.request in kept:
                memory.commit(
                    work.sequence,
                    work.request.tokens,
                    work.sequence.n_kv + work.context + kept.get(work.request, 0),
                )
        return rounds

    def _settle(
        self,
        b: int,
        request: Request,
        draft: Draft,
        builder: DraftBuilder,
        path: list[int],
        decided: NDArray[np.int64],
        drafted_tokens: NDArray[np.int64],
        laws: NodeLaws,
    ) -> Round:
        """Emit what request `b` got, and count it."""
        _, next_token, failed_at, *faulty = decided.tolist()
        tokens = [*drafted_tokens[path].tolist(), next_token]
        for drafter, is_faulty in zip(builder.non_finite, faulty, strict=True):
            if is_faulty:
                drafter.stop(request, "handed over NaN or infinite logits")
        # As in plain decoding, what comes before a failure is emitted, and it may end the request.
        lawful, failure = self._failure(b, request, failed_at, laws)
        taken, ends = request.emit(tokens[:lawful], len(path))
        error = request.stopper.error
        if ends is None and failure is not None:
            ends, error = "error", failure
        kept = path[:taken]
        drafted, extra = int(draft.sizes[b]) - 1, len(builder.extras[b])
        reached = [nodes for nodes in draft.children_of(b, [0, *path]) if nodes][:taken]
        tested = len(reached)
        request.count(drafted, extra, tested, len(kept), taken)
        request.add_logprobs(laws, b, [0, *path][:taken])
        emitted = request.tokens[len(request.tokens) - taken :]
        return Round(
            request,
            drafted,
            extra,
            reached,
            kept=kept,
            emitted=emitted,
            ends=ends,
            error=error,
        )

    def _failure(
        self, b: int, request: Request, failed_at: int, laws: NodeLaws
    ) -> tuple[int | None, str | None]:
        """How many of the decided tokens come before there is no law any more, and why there is none."""
        committed = len(request.tokens)
        failures = [(failed_at - committed, _no_law(request, failed_at))] if failed_at >= 0 else []
        if b in laws.failures:
            failures.append(laws.failures[b])
        return min(failures, key=lambda one: one[0]) if failures else (None, None)

    def _observe(
        self,
        plan: Plan,
        rounds: Sequence[Round],
        draft: Draft,
        builder: DraftBuilder,
        rows: Rows,
        seconds: dict[str, float],
    ) -> None:
        """Tell the drafter and the schedulers what was kept."""
        told = [(b, round) for b, round in enumerate(rounds) if round.error is None]
        feedback = Feedback(
            requests=[round.request for _, round in told],
            emitted=[round.emitted for _, round in told],
            kept=[builder.handles_of(b, round.kept) for b, round in told],
            drafted=[round.drafted for _, round in told],
            hidden=_hidden_of(plan, rounds, rows),
            chunks=_chunks_of(plan, rows),
            ranked=[round.ranked[0] for _, round in told] if self.drafters.requires.top_k else (),
            extra=[round.ranked[1] for _, round in told] if any(builder.extras) else (),
            tested=[len(round.reached) for _, round in told],
            ranks=[draft.rank[b, round.kept].tolist() for b, round in told],
            siblings=[[len(nodes) for nodes in round.reached] for _, round in told],
            chances=[round.chances for _, round in told] if draft.chance is not None else (),
            rows=_rows_scored(plan, rounds),
            seconds=dict(seconds),
        )
        self.drafters.observe(feedback)
        for scheduler in self.schedulers:
            scheduler.observe(feedback)

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Output:
        self.planner.leave(request)
        self._end(request)
        return request.finish(reason, error)

    def _begin(self, request: Request) -> None:
        request.begun = True
        self.drafters.begin(request)

    def _end(self, request: Request) -> None:
        if request.begun:
            request.begun = False
            self.drafters.end(request)

    def _check_prompt(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not len(prompt):
            raise ConfigError(
                "request: expected at least one prompt token, got an empty prompt; give some text"
            )
        outside = next((token for token in prompt if not 0 <= token < self.info.vocab_size), None)
        if outside is not None:
            raise ConfigError(
                f"request: expected prompt token ids from 0 to {self.info.vocab_size - 1}, got {outside}; "
                "encode the prompt with the target's tokenizer"
            )
        for name, tokens in token_ids_of(params).items():
            outside = next(
                (token for token in tokens if not 0 <= token < self.info.vocab_size), None
            )
            if outside is not None:
                raise ConfigError(
                    f"request: expected {name} from 0 to {self.info.vocab_size - 1}, got {outside}; remove it"
                )
        if len(prompt) >= self.max_length:
            context = self.max_length == self.info.max_length
            raise CapacityError(
                f"request: expected a prompt shorter than {self.max_length} tokens, which is all that "
                f"{'the context' if context else 'the KV memory'} holds, got {len(prompt)}; "
                f"{'shorten it' if context else 'shorten it or raise engine.kv_tokens'}"
            )


def _no_law(request: Request, position: int) -> str:
    if request.params.structure is not None:
        name, _ = request.params.structure
        return (
            f"{name}: expected the other settings to leave a token of those that it allows at position "
            f"{position}, got none, or NaN logits; drop a setting that forbids or forces tokens, such as "
            "min_new_tokens"
        )
    return (
        f"target: expected finite logits at position {position}, got NaN or infinity, so no token can be "
        "drawn there; check the model's weights and dtype, and whether the request's settings "
        "leave any token"
    )


def _rows_scored(plan: Plan, rounds: Sequence[Round]) -> int:
    """Tokens that went through the target."""
    return sum(work.context for work in plan.work) + sum(
        round.drafted + round.extra for round in rounds
    )


def token_ids_of(params: SamplingParams) -> dict[str, list[int]]:
    """The token ids that a request's settings name."""
    return {
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": list(params.logit_bias),
        "sequence_bias": [token for ids, _ in params.sequence_bias for token in ids],
        "bad_words_ids": [token for ids in params.bad_words_ids for token in ids],
        "suppress_tokens": list(params.suppress_tokens),
        "begin_suppress_tokens": list(params.begin_suppress_tokens),
        "forced_eos_token_id": list(params.forced_eos_token_id),
    }


def _hidden_of(plan: Plan, rounds: Sequence[Round], rows: Rows) -> dict[int, list[Tensor]]:
    """Hidden states per layer and request that goes on: its context rows, then its kept nodes'."""
    if not rows.hidden:
        return {}
    by_request = {round.request: round for round in rounds if round.error is None}
    chosen = []
    for first, work in zip(rows.first_token, plan.work, strict=True):
        if (round := by_request.get(work.request)) is not None:
            kept = [work.context - 1 + node for node in round.kept]
            chosen.append(torch.tensor([*range(work.context), *kept]) + int(first))
    return {
        layer: [states[index.to(states.device)] for index in chosen]
        for layer, states in rows.hidden.items()
    }


def _chunks_of(plan: Plan, rows: Rows) -> list[ReadChunk]:
    """Hidden states of requests that only read; their KV is committed already."""
    if not rows.hidden:
        return []
    return [
        ReadChunk(
            work.request,
            work.sequence.n_kv - work.context,
            {layer: states[first : first + work.context] for layer, states in rows.hidden.items()},
        )
        for first, work in zip(rows.first_token.tolist(), plan.work, strict=True)
        if not work.decodes
    ]


def _fetch(*tables: Tensor) -> list[NDArray[np.int64]]:
    """Integer tables on the host, in one transfer."""
    flat = torch.cat([table.reshape(-1) for table in tables]).cpu().numpy()
    ends = np.cumsum([table.numel() for table in tables])
    parts = zip(np.split(flat, ends[:-1]), tables, strict=True)
    return [part.reshape(table.shape) for part, table in parts]
