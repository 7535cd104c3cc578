"""The KV memory: block tables, prefix sharing, eviction, and that no step leaves a trace.

The state machine keeps, beside the memory, what a real pool would hold: for every slot the token
and the prefix it was computed for. Whatever happens in whatever order, each sequence must read
its own tokens after its own prefix.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from specfw.engine.memory import TRASH, KVMemory, KVSequence, OutOfBlocks, Transaction
from specfw.errors import ConfigError, ContractError


def fill(memory: KVMemory, tokens: Sequence[int], n_kv: int) -> KVSequence:
    """A sequence of `tokens`, the first `n_kv` of them committed in one transaction."""
    sequence = memory.open(tokens)
    with memory.transaction() as tx:
        tx.reserve(sequence, n_kv - sequence.n_kv)
        tx.commit(sequence, tokens, n_kv)
    return sequence


# Block tables


def test_slots_follow_the_block_table() -> None:
    """Guards against offsets taken from the wrong block, and against the trash block in a table."""
    memory = KVMemory(4, 3)
    sequence = memory.open([5] * 9)
    with memory.transaction() as tx:
        tx.reserve(sequence, 8)
        expected = [sequence.blocks[p // 3] * 3 + p % 3 for p in range(8)]
        slots = sequence.slots(0, 8)
        assert slots.dtype == np.int64
        assert slots.tolist() == expected
        assert sequence.slots(4, 8).tolist() == expected[4:8]
        assert sequence.slots(7, 7).tolist() == []
        assert len(set(expected)) == 8
        assert min(expected) >= 3
        assert max(expected) < memory.num_slots
        assert TRASH not in sequence.blocks


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_slots_outside_the_table_are_refused(start: int, stop: int) -> None:
    """Guards against a negative index that silently reads another block."""
    memory = KVMemory(4, 2)
    sequence = fill(memory, [1, 2, 3, 4, 5], 4)
    with pytest.raises(ContractError, match="reserve room first"):
        sequence.slots(start, stop)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    """Guards against a division by zero deep in a step."""
    with pytest.raises(ConfigError, match="at least 1"):
        KVMemory(num_blocks, block_size)


def test_every_usable_block_is_handed_out_once() -> None:
    """Guards against an off-by-one that loses a block or hands out the trash block."""
    memory = KVMemory(5, 2)
    sequence = memory.open([0])
    with memory.transaction() as tx:
        tx.reserve(sequence, 10)
        assert sorted(sequence.blocks) == [1, 2, 3, 4, 5]
        assert memory.available == 0
        memory.check()


# Transactions


@pytest.mark.parametrize("kept", range(6))
def test_draft_slots_are_freed(kept: int) -> None:
    """Guards against draft room that outlives its step, a slow leak if blocks hold many tokens."""
    memory = KVMemory(8, 2)
    sequence = fill(memory, [1, 2, 3, 4], 3)
    with memory.transaction() as tx:
        tx.reserve(sequence, 6)
        tx.commit(sequence, [1, 2, 3, 4, 5, 6, 7, 8, 9], 3 + kept)
    assert sequence.n_kv == 3 + kept
    assert len(sequence.blocks) == memory.used == -(-(3 + kept) // 2)
    memory.check()


def test_an_exception_undoes_what_was_not_committed() -> None:
    """Guards against state that is right only when a step ends well."""
    memory = KVMemory(9, 2)
    done, open_ = fill(memory, [1, 1, 1], 2), fill(memory, [2, 2, 2, 2], 3)
    before = list(open_.blocks)

    def failing_step() -> None:
        with memory.transaction() as tx:
            tx.reserve(done, 5)
            tx.reserve(open_, 5)
            tx.commit(done, [1, 1, 1, 1, 1], 4)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert (done.n_kv, len(done.blocks)) == (4, 2)
    assert (open_.n_kv, open_.blocks) == (3, before)
    memory.check()
    with memory.transaction() as tx:
        tx.reserve(open_, 1)


def test_running_out_changes_nothing() -> None:
    """Guards against blocks lost by a reservation that got half of what it wanted."""
    memory = KVMemory(4, 2)
    memory.release(fill(memory, [9, 9, 9], 2))
    first, second = memory.open([1]), memory.open([2])
    with memory.transaction() as tx:
        tx.reserve(first, 4)
        assert memory.blocks_needed(second, 5) == 3
        with pytest.raises(OutOfBlocks) as caught:
            tx.reserve(second, 5)
        assert (caught.value.needed, caught.value.available) == (3, 2)
        assert (second.blocks, memory.available, memory.cached) == ([], 2, 1)
        memory.check()
        tx.reserve(second, 4)
    assert (memory.used, memory.available) == (0, 4)


def test_reserving_twice_adds_no_room_twice() -> None:
    """Guards against counting room that is already there."""
    memory = KVMemory(4, 2)
    sequence = memory.open([1] * 9)
    with memory.transaction() as tx:
        tx.reserve(sequence, 4)
        tx.reserve(sequence, 3)
        assert len(sequence.blocks) == 2
        tx.commit(sequence, [1] * 9, 4)
        tx.reserve(sequence, 1)
        assert len(sequence.blocks) == 3
        memory.check()


def test_commit_refuses_what_cannot_be_true() -> None:
    """Guards against n_kv beyond written slots or known tokens, and against going back unseen."""
    memory = KVMemory(4, 4)
    sequence = fill(memory, [1, 2, 3], 2)
    with memory.transaction() as tx:
        with pytest.raises(ContractError, match="reserve enough room"):
            tx.commit(sequence, [1, 2, 3], 3)
        tx.reserve(sequence, 2)
        for n_kv in (1, 4, 5):
            with pytest.raises(ContractError, match=f"to 3 .* got {n_kv};"):
                tx.commit(sequence, [1, 2, 3], n_kv)
        tx.commit(sequence, [1, 2, 3], 3)
    assert sequence.n_kv == 3


def test_misuse_of_transactions_is_refused() -> None:
    """Guards against draft slots that no exit would free."""
    memory = KVMemory(4, 2)
    sequence = memory.open([1, 2])
    with memory.transaction() as tx:
        with pytest.raises(ContractError, match="end the first"), memory.transaction():
            pass
        with pytest.raises(ContractError, match="at least 0"):
            tx.reserve(sequence, -1)
        tx.reserve(sequence, 1)
        with pytest.raises(ContractError, match="without reserved slots"):
            memory.truncate(sequence, 0)
    for late in (lambda: tx.reserve(sequence, 1), lambda: tx.commit(sequence, [1, 2], 1)):
        with pytest.raises(ContractError, match="running transaction"):
            late()
    memory.check()


def test_release_within_a_transaction_frees_the_drafts_too() -> None:
    """Guards against a cancelled or preempted request whose pending draft keeps its blocks."""
    memory = KVMemory(6, 2, prefix_cache=False)
    sequence = fill(memory, [1, 2, 3, 4], 3)
    with memory.transaction() as tx:
        tx.reserve(sequence, 7)
        memory.release(sequence)
        assert memory.used == 0
        with pytest.raises(ContractError, match="released"):
            tx.commit(sequence, [1, 2, 3, 4], 3)
        again = memory.open([1, 2, 3, 4])
        tx.reserve(again, 4)
    assert (again.n_kv, again.blocks, memory.available) == (0, [], 6)
    memory.check()


def test_release_is_once_and_at_home() -> None:
    """Guards against a double free, which would hand one block to two requests."""
    memory, other = KVMemory(4, 2), KVMemory(4, 2)
    sequence = fill(memory, [1, 2, 3], 2)
    with pytest.raises(ContractError, match="belongs to another"):
        other.release(sequence)
    memory.release(sequence)
    with pytest.raises(ContractError, match="released"):
        memory.release(sequence)
    memory.check()


# The prefix cache


@pytest.mark.parametrize(
    ("tokens", "shared"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 6),
        ([1, 2, 3, 4, 5, 6], 4),  # the sixth is the last committed token: it has no KV yet
        ([1, 2, 3, 4, 9, 9, 9], 4),
        ([1, 2, 9, 9, 5, 6, 7], 2),
        ([3, 4, 5, 6, 7], 0),  # known blocks, but after another prefix
        ([1, 2], 0),
        ([1], 0),
        ([], 0),
    ],
)
def test_the_longest_published_prefix_is_shared(tokens: list[int], shared: int) -> None:
    """Guards against a block found by its own tokens alone, and against sharing the last token."""
    memory = KVMemory(8, 2)
    source = fill(memory, [1, 2, 3, 4, 5, 6, 7, 8], 7)
    asked = memory.query_tokens
    sequence = memory.open(tokens)
    assert sequence.n_kv == memory.hit_tokens == shared
    assert sequence.blocks == source.blocks[: shared // 2]
    assert memory.query_tokens - asked == len(tokens)
    assert memory.used == 4
    memory.check()


def test_without_the_prefix_cache_nothing_is_shared_or_kept() -> None:
    """Guards against a switch that only hides the cache."""
    memory = KVMemory(8, 2, prefix_cache=False)
    fill(memory, [1, 2, 3, 4, 5], 4)
    again = fill(memory, [1, 2, 3, 4, 5], 4)
    assert (memory.hit_tokens, memory.used) == (0, 4)
    memory.release(again)
    assert (memory.used, memory.cached, memory.available) == (2, 0, 6)


def test_a_block_is_findable_only_once_its_kv_is_written() -> None:
    """Guards against publishing at reservation: a request of the same step would read garbage."""
    memory = KVMemory(8, 4)
    prompt = list(range(13))
    first = memory.open(prompt)
    with memory.transaction() as tx:
        tx.reserve(first, 13 + 5)
        second = memory.open(prompt)
        assert second.n_kv == 0
        tx.commit(first, prompt, 7)
        third = memory.open(prompt)
        assert third.n_kv == 4
    assert memory.open(prompt).n_kv == 4


def test_rejected_draft_tokens_are_never_published() -> None:
    """Guards against a full block of which only a part was kept."""
    memory = KVMemory(8, 4)
    sequence = fill(memory, [1, 2, 3, 4], 3)
    with memory.transaction() as tx:
        tx.reserve(sequence, 6)
        tx.commit(sequence, [1, 2, 3, 4, 5, 9], 5)
    assert memory.open([1, 2, 3, 4, 5, 6, 7, 8, 0]).n_kv == 4
    with memory.transaction() as tx:
        tx.reserve(sequence, 3)
        tx.commit(sequence, [1, 2, 3, 4, 5, 9, 9, 9, 9], 8)
    assert memory.open([1, 2, 3, 4, 5, 6, 7, 8, 0]).n_kv == 4
    assert memory.open([1, 2, 3, 4, 5, 9, 9, 9, 0]).n_kv == 8


def test_equal_blocks_computed_side_by_side_become_one() -> None:
    """Guards against two owners of one key, of which one would be unfindable or freed twice."""
    memory = KVMemory(8, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    first, second = memory.open(tokens), memory.open(tokens)
    with memory.transaction() as tx:
        for sequence in (first, second):
            tx.reserve(sequence, 5)
        for sequence in (first, second):
            tx.commit(sequence, tokens, 5)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert memory.used == 4
    memory.check()
    memory.release(first)
    memory.check()
    memory.release(second)
    assert (memory.used, memory.cached, memory.available) == (0, 2, 8)


def test_a_released_prefix_is_found_until_it_is_evicted() -> None:
    """Guards against a cache that forgets on release, or that still finds what was evicted."""
    memory = KVMemory(4, 2)
    memory.release(fill(memory, [1, 2, 3, 4, 5], 5))
    assert (memory.cached, memory.available) == (2, 4)
    back = memory.open([1, 2, 3, 4, 5])
    assert (back.n_kv, memory.cached, memory.available) == (4, 0, 2)
    memory.release(back)
    taker = fill(memory, [7] * 8, 8)
    assert memory.cached == 0
    assert memory.open([1, 2, 3, 4, 5]).n_kv == 0
    memory.release(taker)
    memory.check()


def test_eviction_takes_the_longest_unused_and_children_first() -> None:
    """Guards against evicting what was just used, and a parent before its children."""
    memory = KVMemory(4, 2)
    memory.release(fill(memory, [1, 1, 2, 2, 0], 4))
    memory.release(fill(memory, [5, 5, 0], 2))
    memory.release(memory.open([1, 1, 0]))  # the parent is used again, its child is not
    assert memory.available == 4
    for n, found in [(2, [4, 2]), (4, [2, 2]), (6, [2, 0]), (8, [0, 0])]:
        hog = memory.open([0])
        with memory.transaction() as tx:
            tx.reserve(hog, n)
        memory.release(hog)
        memory.check()
        probes = [memory.open([1, 1, 2, 2, 0]), memory.open([5, 5, 0])]
        assert [probe.n_kv for probe in probes] == found
        # In this order the blocks keep their places in the order of eviction.
        memory.release(probes[0])
        memory.release(probes[1])
        memory.release(memory.open([1, 1, 0]))


def test_a_new_block_in_an_evicted_place_adopts_no_children() -> None:
    """Guards against parents named by block id: a reused one would find another text's children."""
    memory = KVMemory(2, 2)
    memory.release(fill(memory, [1, 1, 2, 2, 0], 4))
    memory.release(fill(memory, [3, 3, 2, 2, 0], 4))
    assert memory.open([1, 1, 2, 2, 0]).n_kv == 0
    assert memory.open([3, 3, 2, 2, 0]).n_kv == 4
    memory.check()


# Truncation


@pytest.mark.parametrize("n_kv", range(8))
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_truncate_stops_at_a_published_block(n_kv: int, prefix_cache: bool) -> None:
    """Guards against writing into a block that others may find or share."""
    memory = KVMemory(8, 3, prefix_cache)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    sequence = fill(memory, tokens, 7)
    left = memory.truncate(sequence, n_kv)
    # Blocks 0 and 1 are published, the last one holds position 6 only.
    assert left == sequence.n_kv == (n_kv if not prefix_cache or n_kv == 7 else n_kv // 3 * 3)
    assert len(sequence.blocks) == -(-left // 3)
    memory.check()
    assert memory.open(tokens).n_kv == (6 if prefix_cache else 0)


@pytest.mark.parametrize("n_kv", [-1, 4])
def test_truncate_goes_back_only(n_kv: int) -> None:
    """Guards against declaring KV that was never written."""
    memory = KVMemory(4, 2)
    sequence = fill(memory, [1, 2, 3, 4, 5], 3)
    with pytest.raises(ContractError, match="from 0 to 3"):
        memory.truncate(sequence, n_kv)


def test_check_sees_damage() -> None:
    """Guards against a check that passes whatever it is given."""
    damages = {
        "references": lambda memory, sequence: sequence.blocks.pop(),
        "partition": lambda memory, sequence: memory._free.append(memory._free[0]),
        "more or fewer": lambda memory, sequence: setattr(sequence, "n_kv", 2),
        "committed": lambda memory, sequence: memory._index.remove(sequence.blocks[0]),
        "found": lambda memory, sequence: memory._index._blocks.clear(),
        "follow": lambda memory, sequence: sequence.blocks.reverse(),
        "a free block": lambda memory, sequence: memory._index.add(0, (8, 8), memory._free[0]),
    }
    for fault, damage in damages.items():
        memory = KVMemory(8, 2)
        sequence = fill(memory, [1, 2, 3, 4, 5], 4)
        memory.check()
        damage(memory, sequence)
        with pytest.raises(ContractError, match=fault):
            memory.check()


# Many requests


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_thousand_short_requests_leave_the_pool_as_it_was(
    block_size: int, prefix_cache: bool
) -> None:
    """Guards against a leak at one of the ends: finished, cancelled, failed, preempted."""
    rng = random.Random(block_size)
    memory = KVMemory(160 // block_size, block_size, prefix_cache)
    for _ in range(1000):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
        sequence = memory.open(tokens)
        while True:
            end = rng.choice(["go on", "finish", "cancel", "fail", "preempt"])
            try:
                with memory.transaction() as tx:
                    drafted = rng.randrange(8)
                    tx.reserve(sequence, len(tokens) - sequence.n_kv + drafted)
                    if end == "cancel":
                        break
                    if end == "fail":
                        raise ArithmeticError
                    n_kv = len(tokens) + rng.randint(0, drafted)
                    tokens = tokens + [rng.randrange(3) for _ in range(n_kv + 1 - len(tokens))]
                    tx.commit(sequence, tokens, n_kv)
            except ArithmeticError:
                break
            if end == "finish" or len(tokens) > 60:
                break
            if end == "preempt":
                memory.release(sequence)
                sequence = memory.open(tokens)
        memory.release(sequence)
        assert memory.used == 0
    memory.check()
    assert memory.available == memory.num_blocks
    assert (memory.cached > 0) == (memory.hit_tokens > 0) == prefix_cache


# The state machine

Tokens = tuple[int, ...]
SOME_TOKENS = st.lists(st.integers(0, 1), max_size=9)


class Boom(Exception):
    """What a failing step raises."""


@dataclass(eq=False)
class Live:
    """A request of the model: what it has committed, and its sequence in the memory."""

    tokens: list[int]
    sequence: KVSequence
    held: list[int] = field(default_factory=list)
    """Its blocks before the running rule, to compare with after an undone step."""


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


class MemoryMachine(RuleBasedStateMachine):
    """Steps, ends, preemptions, failures and truncations in any order, against a simulated pool."""

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.sampled_from([2, 1, 3, 4]),
        prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.memory = KVMemory(num_blocks, block_size, prefix_cache)
        self.pool: dict[int, tuple[int, Tokens]] = {}
        """What each slot was last written with: a token and the prefix it was computed for."""
        self.live: list[Live] = []
        self.texts: list[list[int]] = [[0]]
        """All that was ever committed or drafted: where false hits would come from."""

    @property
    def size(self) -> int:
        return self.memory.block_size

    def write(self, live: Live, start: int, tokens: Sequence[int]) -> None:
        """Compute the KV of `tokens`, the sequence's text from position 0, from `start` on."""
        slots = live.sequence.slots(start, len(tokens)).tolist()
        for position, slot in enumerate(slots, start):
            assert slot >= self.size, "a sequence's rows went to the trash block"
            self.pool[slot] = (tokens[position], tuple(tokens[:position]))

    def enter(self, tokens: list[int]) -> Live:
        """Open a sequence; whatever live sequences have published of its text must be shared."""
        live = Live(tokens, self.memory.open(tokens))
        certain = 0
        if self.memory.prefix_cache:
            for other in self.live:
                same = min(common(tokens, other.tokens), other.sequence.n_kv, len(tokens) - 1)
                certain = max(certain, same // self.size * self.size)
        possible = len(tokens) - 1 if self.memory.prefix_cache else 0
        assert certain <= live.sequence.n_kv <= possible
        self.live.append(live)
        return live

    def leave(self, live: Live) -> None:
        self.live.remove(live)
        self.memory.release(live.sequence)
        with pytest.raises(ContractError):
            self.memory.release(live.sequence)

    @precondition(lambda self: len(self.live) < 4)
    @rule(data=st.data(), more=SOME_TOKENS)
    def open(self, data: st.DataObject, more: list[int]) -> None:
        """A new request, whose prompt extends a part of a known text."""
        text = data.draw(st.sampled_from(self.texts))
        kept = text[: data.draw(st.integers(0, len(text)))]
        self.enter([*kept, *more] or [0])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fails=st.sampled_from([None, None, None, "early", "late"]))
    def step(self, data: st.DataObject, fails: str | None) -> None:
        """One transaction over some requests: chunks and drafts, verification, commits."""
        chosen = data.draw(
            st.lists(st.sampled_from(self.live), min_size=1, max_size=3, unique=True)
        )
        for live in chosen:
            live.held = list(live.sequence.blocks)
        committed: list[Live] = []
        try:
            with self.memory.transaction() as tx:
                work = []
                for live in chosen:
                    chunk, draft = self.draw_work(data, live)
                    if self.reserve(tx, live, chunk + len(draft), data):
                        work.append((live, chunk, draft))
                self.memory.check()
                if fails == "early":
                    raise Boom
                for live, chunk, draft in work:
                    start = live.sequence.n_kv
                    self.write(live, start, [*live.tokens[: start + chunk], *draft])
                for live, chunk, draft in work:
                    if data.draw(st.integers(0, 7)) == 0:
                        self.leave(live)  # cancelled between draft and verification
                        continue
                    if fails == "late" and data.draw(st.booleans()):
                        raise Boom
                    self.commit(tx, live, chunk, draft, data)
                    committed.append(live)
        except Boom:
            pass
        for live in chosen:
            if live in self.live and live not in committed:
                assert live.sequence.blocks == live.held

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(), path=st.lists(st.integers(0, 1), min_size=2, max_size=9), ends=st.booleans()
    )
    def run(self, data: st.DataObject, path: list[int], ends: bool) -> None:
        """An undisturbed step of one request that keeps its whole draft, and perhaps its end."""
        live = data.draw(st.sampled_from(self.live))
        with self.memory.transaction() as tx:
            n_kv = len(live.tokens) + len(path)
            if self.reserve(tx, live, n_kv - live.sequence.n_kv, data):
                live.tokens = [*live.tokens, *path, 0]
                self.write(live, live.sequence.n_kv, live.tokens[:n_kv])
                tx.commit(live.sequence, live.tokens, n_kv)
                assert live.sequence.n_kv == n_kv
                self.texts.append(live.tokens)
        if ends and live in self.live:
            self.leave(live)

    def draw_work(self, data: st.DataObject, live: Live) -> tuple[int, list[int]]:
        """How many committed tokens to compute, and the draft, only after the last of them."""
        missing = len(live.tokens) - live.sequence.n_kv
        chunk = missing if data.draw(st.booleans()) else data.draw(st.integers(1, missing))
        draft = data.draw(SOME_TOKENS) if chunk == missing else []
        if draft:
            self.texts.append([*live.tokens, *draft])
        return chunk, draft

    def reserve(self, tx: Transaction, live: Live, count: int, data: st.DataObject) -> bool:
        """Reserve, or see that nothing changed and sometimes give way."""
        needed = self.memory.blocks_needed(live.sequence, count)
        fits = needed <= self.memory.available
        state = (list(live.sequence.blocks), self.memory.available, self.memory.cached)
        try:
            tx.reserve(live.sequence, count)
        except OutOfBlocks:
            assert not fits
            after = (live.sequence.blocks, self.memory.available, self.memory.cached)
            assert after == state
            if data.draw(st.booleans()):
                self.preempt(live)
            return False
        assert fits
        return True

    def commit(
        self, tx: Transaction, live: Live, chunk: int, draft: list[int], data: st.DataObject
    ) -> None:
        """Keep some draft nodes, move their rows into place, and emit one token more."""
        n_kv = live.sequence.n_kv + chunk
        if n_kv == len(live.tokens):
            picks = [data.draw(st.booleans()) for _ in draft]
            path = [token for token, kept in zip(draft, picks, strict=True) if kept]
            self.write(live, n_kv, [*live.tokens, *path])
            live.tokens = [*live.tokens, *path, data.draw(st.integers(0, 1))]
            n_kv += len(path)
        tx.commit(live.sequence, live.tokens, n_kv)
        assert live.sequence.n_kv == n_kv
        self.texts.append(live.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), how=st.sampled_from(["end", "preempt", "preempt twice"]))
    def end(self, data: st.DataObject, how: str) -> None:
        """Between steps a request ends (finished or cancelled) or is preempted, perhaps twice."""
        live = data.draw(st.sampled_from(self.live))
        if how == "end":
            self.leave(live)
        else:
            live = self.preempt(live)
        if how == "preempt twice":
            self.preempt(live)

    def preempt(self, live: Live) -> Live:
        self.leave(live)
        return self.enter(live.tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), other=st.integers(0, 1))
    def truncate(self, data: st.DataObject, other: int) -> None:
        """A rollback, after which the text goes on in another way."""
        live = data.draw(st.sampled_from(self.live))
        asked = data.draw(st.integers(0, live.sequence.n_kv))
        left = self.memory.truncate(live.sequence, asked)
        assert left == live.sequence.n_kv
        floor = asked // self.size * self.size if self.memory.prefix_cache else asked
        assert floor <= left <= asked
        live.tokens = [*live.tokens[:asked], other]

    @invariant()
    def every_sequence_reads_its_own_text(self) -> None:
        for live in self.live:
            assert live.sequence.n_kv < len(live.tokens)
            for position, slot in enumerate(live.sequence.slots(0, live.sequence.n_kv).tolist()):
                expected = (live.tokens[position], tuple(live.tokens[:position]))
                assert self.pool[slot] == expected

    @invariant()
    def nothing_leaks(self) -> None:
        self.memory.check()
        held = {block for live in self.live for block in live.sequence.blocks}
        assert self.memory.used == len(held)
        assert self.memory.available == self.memory.num_blocks - len(held)
        for live in self.live:
            assert len(live.sequence.blocks) == -(-live.sequence.n_kv // self.size)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for live in list(self.live):
            self.leave(live)
        self.memory.check()
        assert self.memory.used == 0
        assert self.memory.available == self.memory.num_blocks
        if not self.memory.prefix_cache:
            assert self.memory.cached == 0


TestMemoryMachine = MemoryMachine.TestCase
