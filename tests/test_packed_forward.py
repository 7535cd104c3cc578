"""The packed forward equals the model's own full-context forward, whatever shares the pass.

One check, `drive`, runs random ragged batches: prefill chunks, random trees, rollback, compaction,
requests that join and leave, several attention groups. Every scored row is compared with the stock
forward over that row's own path. The mutants show that this one check sees each kind of mistake.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specfw.engine import attention, batching, model_runner
from specfw.engine.attention import KVStore
from specfw.engine.batching import AttentionGroup, Segment, pack
from specfw.engine.memory import KVMemory, KVSequence, Transaction
from specfw.engine.model_runner import ModelRunner
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, WINDOW, build, tiny

TOLERANCE = 1e-5
"""Of a logit, divided by the largest stock logit of its row where that exceeds 1.

Stock float32 logits of these models (up to about 4) are reproduced to about 2e-6: two orders of
summation, each a few ulps of 4.
"""

LONG_CHUNK = 24  # more than a decode with its tree, so that it has an attention group of its own


@dataclass
class Live:
    """A request of the drive."""

    tokens: list[int]
    sequence: KVSequence
    parents: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    nodes: list[int] = field(default_factory=list)

    @property
    def todo(self) -> list[int]:
        return self.tokens[self.sequence.n_kv :]

    def path(self, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]


class Drive:
    """Random steps of a ragged batch through the packed forward, each row checked."""

    def __init__(self, runner: ModelRunner, rng: random.Random, poison: bool = False) -> None:
        self.runner, self.rng, self.poison = runner, rng, poison
        block_size = rng.choice([1, 3, 4, 8])
        self.memory = KVMemory(
            num_blocks=640 // block_size, block_size=block_size, prefix_cache=False
        )
        self.store = runner.new_store(self.memory.num_slots)
        self.live: list[Live] = []
        self.worst = 0.0
        self.most_groups = 0

    def step(self) -> None:
        while not self.live or (len(self.live) < 4 and self.rng.random() < 0.5):
            self.join()
        with self.memory.transaction() as transaction:
            segments = [self.propose(request, transaction) for request in self.live]
            self.most_groups = max(self.most_groups, len(pack(segments, self.runner.device).groups))
            self.compare(self.score(segments))
            moves = [self.keep(request, transaction) for request in self.live]
            source, target = (np.concatenate(side) for side in zip(*moves, strict=True))
            if len(source):
                self.store.move(torch.from_numpy(source), torch.from_numpy(target))
        for request in self.live:  # a token without KV; at times two, as after a preemption
            request.tokens += self.random_tokens(self.rng.choice([1, 1, 1, 2]))
            if not request.todo:  # where a mutant counts too much as done
                request.tokens += self.random_tokens(1)
        if self.rng.random() < 0.3:
            self.memory.release(self.live.pop(self.rng.randrange(len(self.live))).sequence)
        if self.poison:
            self.poison_free_slots()
        self.memory.check()

    def score(self, segments: Sequence[Segment]) -> torch.Tensor:
        return self.runner.run(self.store, segments).logits

    def join(self) -> None:
        tokens = self.random_tokens(self.rng.choice([1, 2, 5, 9, 18, 40]))
        self.live.append(Live(tokens, self.memory.open(tokens)))

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(count)]

    def propose(self, request: Live, transaction: Transaction) -> Segment:
        """A prefill chunk, or the committed tokens that are left with a random tree below the last."""
        context = request.todo[: self.rng.choice([1, 6, LONG_CHUNK])]
        decodes = len(context) == len(request.todo)
        drafted = self.rng.choice([0, 1, 3, 7]) if decodes else 0
        chain = list(range(-1, len(context) - 1))
        tree = [
            self.rng.randrange(len(context) - 1, len(context) + node) for node in range(drafted)
        ]
        request.nodes = context + self.random_tokens(drafted)
        request.parents = np.array(chain + tree)
        transaction.reserve(request.sequence, len(request.nodes))
        return Segment(
            request.sequence,
            np.array(request.nodes),
            request.parents,
            np.arange(len(request.nodes)),
        )

    def compare(self, logits: torch.Tensor) -> None:
        """Each leaf's path is one stock forward, which gives the rows of all nodes on the path."""
        first = 0
        for request in self.live:
            n_kv = request.sequence.n_kv
            for leaf in sorted(set(range(len(request.nodes))) - set(request.parents.tolist())):
                path = request.path(leaf)
                text = request.tokens[:n_kv] + [request.nodes[node] for node in path]
                expected = self.runner.stock_logits(text)[n_kv:]
                got = logits[[first + node for node in path]]
                scale = expected.abs().amax(-1, keepdim=True).clamp_min(1)
                difference = float(((got - expected).abs() / scale).amax())
                self.worst = max(self.worst, difference if np.isfinite(difference) else np.inf)
            first += len(request.nodes)

    def keep(self, request: Live, transaction: Transaction) -> tuple[np.ndarray, np.ndarray]:
        """Accept a random path below the context; the KV moves that this needs."""
        n_kv, context = request.sequence.n_kv, len(request.todo[: len(request.nodes)])
        drafted = range(context, len(request.nodes))
        path = request.path(self.rng.choice([context - 1, *drafted]))
        moved = [(node, place) for place, node in enumerate(path) if node != place]
        slots = request.sequence.slots(n_kv, n_kv + len(request.nodes))
        request.tokens += [request.nodes[node] for node in path[context:]]
        transaction.commit(request.sequence, request.tokens, n_kv + len(path))
        source, target = np.array(moved, np.int64).reshape(-1, 2).T
        return slots[source], slots[target]

    @torch.inference_mode()
    def poison_free_slots(self) -> None:
        """What a freed slot holds is anybody's guess; not a number is the worst guess."""
        held = [r.sequence.slots(0, r.sequence.n_kv) for r in self.live]
        free = torch.ones(self.memory.num_slots, dtype=torch.bool)
        free[torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *held]))] = False
        free[: self.memory.block_size] = False  # padding reads the trash block
        for layer in self.store.layers.values():
            for store in layer:
                store[free] = torch.nan


def drive(runner: ModelRunner, rng: random.Random, steps: int, poison: bool = False) -> Drive:
    run = Drive(runner, rng, poison)
    for _ in range(steps):
        run.step()
    return run


@pytest.fixture(scope="module", params=ARCHITECTURES)
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return ModelRunner(tiny(request.param))


@settings(
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a smaller failing batch tells no more
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(2, 6))
def test_packed_rows_equal_the_stock_forward(runner: ModelRunner, seed: int, steps: int) -> None:
    """Any error of position, slot, mask, window, rollback or compaction, in any mix of requests."""
    run = drive(runner, random.Random(seed), steps)
    assert run.worst <= TOLERANCE


def test_the_drive_uses_several_attention_groups() -> None:
    """A drive in which every request is padded into one group would not see a mix-up between groups."""
    runner = ModelRunner(tiny("llama"))
    assert max(drive(runner, random.Random(seed), 6).most_groups for seed in range(4)) > 1


def test_whatever_freed_slots_hold_reaches_nobody(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in freed slots leaking through zero attention weights (0 * NaN), and padded rows turning NaN."""
    finite = []
    inner = attention._attend_padded

    def watch(*arguments: object) -> torch.Tensor:
        out = inner(*arguments)  # type: ignore[arg-type]
        finite.append(bool(out.isfinite().all()))
        return out

    monkeypatch.setattr(attention, "_attend_padded", watch)
    for seed in range(4):
        assert drive(runner, random.Random(seed), 6, poison=True).worst <= TOLERANCE
    assert finite
    assert all(finite)


def test_padding_of_short_passes_leaves_no_trace() -> None:
    """A NaN token in a pass padded to two rows filling the trash slot, which every padded key reads."""
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    runner = ModelRunner(model, check=False)
    runner._linears.min_rows = 2
    memory = KVMemory(40, 4)
    store = runner.new_store(memory.num_slots)
    bad, short, long = (memory.open(tokens) for tokens in ([5], [7], [9] * 6))
    one = Segment(bad, np.array([5]), np.array([-1]), np.array([0]))
    both = [
        Segment(short, np.array([7]), np.array([-1]), np.array([0])),
        Segment(long, np.full(6, 9), np.arange(-1, 5), np.arange(6)),
    ]
    with memory.transaction() as transaction:
        for sequence, count in ((bad, 1), (short, 1), (long, 6)):
            transaction.reserve(sequence, count)
        assert runner.run(store, [one]).logits.isnan().all()
        logits = runner.run(store, both).logits
    expected = torch.cat([runner.stock_logits([7]), runner.stock_logits([9] * 6)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=4 * TOLERANCE)


def test_padding_of_short_passes_keeps_tokens_known_to_the_device_only() -> None:
    """The padding row overwriting the slot of the row it copies with the KV of a token not yet known."""
    runner = ModelRunner(tiny("llama"))
    runner._linears.min_rows = 2
    memory = KVMemory(8, 4)
    store = runner.new_store(memory.num_slots)
    sequence = memory.open([7, 9])
    try:
        with memory.transaction() as transaction:
            transaction.reserve(sequence, 2)
            for token in (7, 9):
                unknown = Segment(sequence, np.array([-1]), np.array([-1]), np.array([0]))
                logits = runner.run(store, [unknown], (np.array([0]), torch.tensor([token]))).logits
                transaction.commit(sequence, [7, 9], sequence.n_kv + 1)
    finally:
        runner._linears.min_rows = 1
    torch.testing.assert_close(logits, runner.stock_logits([7, 9])[-1:], rtol=0, atol=4 * TOLERANCE)


# Mutants: each is one plausible mistake in the product, which the check above must see.


def sibling_visible(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batching, "_ancestry", lambda parents: np.tri(len(parents), dtype=np.bool_))


def position_by_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batching, "_depths", lambda parents: np.arange(len(parents)))


def no_compaction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVStore, "move", lambda self, source, target: None)


def neighbours_slot(patch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object, **options: object) -> batching.PackedBatch:
        batch = pack(*arguments, **options)  # type: ignore[arg-type]
        batch.slots = batch.slots.roll(1)
        return batch

    patch.setattr(model_runner, "pack", wrong)


def window_one_wider(patch: pytest.MonkeyPatch) -> None:
    inner = AttentionGroup.windowed
    patch.setattr(
        AttentionGroup,
        "windowed",
        lambda self, window: inner(self, None if window is None else window + 1),
    )


def rejected_token_kept(patch: pytest.MonkeyPatch) -> None:
    inner = Transaction.commit

    def one_too_many(self: Transaction, sequence: KVSequence, tokens: list[int], n_kv: int) -> None:
        inner(self, sequence, tokens, n_kv)
        if n_kv < self._granted[sequence]:  # a draft slot lies behind: call it the next token's
            sequence.n_kv += 1

    patch.setattr(Transaction, "commit", one_too_many)


def padding_attended(patch: pytest.MonkeyPatch) -> None:
    inner = batching._group

    def wrong(*arguments: object) -> AttentionGroup:
        group = inner(*arguments)  # type: ignore[arg-type]
        if group.mask is not None:
            batch, _, keys = group.shape
            group.mask |= group.slots.view(batch, 1, 1, keys) == 0
        return group

    patch.setattr(batching, "_group", wrong)


@pytest.mark.parametrize(
    ("mutant", "architecture"),
    [
        (sibling_visible, "llama"),
        (sibling_visible, "gpt2"),
        (position_by_row, "llama"),
        (position_by_row, "gpt2"),
        (no_compaction, "llama"),
        (neighbours_slot, "llama"),
        (window_one_wider, "mistral"),
        (window_one_wider, "gemma3"),
        (rejected_token_kept, "llama"),
        (padding_attended, "llama"),
    ],
)
def test_the_check_sees(
    mutant: Callable[[pytest.MonkeyPatch], None], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that passes whatever the packed forward does."""
    runner = ModelRunner(
        tiny(architecture)
    )  # attached before, since the probe refuses most mutants too
    mutant(monkeypatch)
    worst = 0.0
    for seed in range(5):
        worst = max(worst, drive(runner, random.Random(seed), 6).worst)
    assert worst > 100 * TOLERANCE


def test_windows_are_short_enough_to_matter() -> None:
    """Prompts that never leave the window, so that no window mistake can show."""
    assert WINDOW < LONG_CHUNK
