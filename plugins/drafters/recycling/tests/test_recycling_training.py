"""The trainer `recycling`: what it counts, how it measures itself, and how large the table gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from specfw_plugin_recycling import RecyclingDrafter, RecyclingOptions, WarmTable
from specfw_plugin_recycling.training import TableTrainer, TableTrainerOptions, make_table

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.fingerprint import fingerprint
from specfw.plugins import PluginManager
from specfw.testing.drafting import Text, draft
from specfw.training import Shard, Texts, TrainingRun

VOCAB = 32


def shard(texts: Sequence[Sequence[int]], second: int = 1) -> Shard:
    """Texts whose every token but the first was the target's best; `second` always ranked second."""
    tokens = [np.array(text, np.int32) for text in texts]
    top = [np.array([*([t, second] for t in text[1:]), [-1, -1]], np.int32) for text in texts]
    return Shard(
        np.concatenate(tokens),
        np.cumsum([len(text) for text in texts]),
        np.concatenate(top),
        np.zeros(len(texts), np.float32),
    )


def target(vocab: int = VOCAB) -> TargetInfo:
    return TargetInfo("x", vocab, 99, (), None, None, torch.device("cpu"), torch.float32)


def table(*shards: Shard, **options: int) -> WarmTable:
    return make_table(shards, VOCAB, TableTrainerOptions(**options))[0]


def test_the_most_frequent_successor_comes_first() -> None:
    """Fault: the last list seen wins, or ranks do not count."""
    made = table(shard([[9, 2, 3]] * 3 + [[9, 2, 4]] * 2))
    assert made.get((9, 2)) == [3, 4]
    assert made.get((2,)) == [3, 4]
    assert made.get((9,)) is None  # nothing shows what precedes it
    assert made.get((2, 9)) is None


def test_places_that_the_target_was_not_asked_at_teach_nothing() -> None:
    """Fault: a template's tokens are taken for what the target would say."""
    part = shard([[9, 2, 3]])
    part.top[1] = -1
    part.top[0] = [5, 6]
    with pytest.raises(ConfigError, match="expected texts, got none"):
        table(part)


def test_hit_rates_are_those_of_held_out_texts() -> None:
    """Fault: the rates of the texts that were learned, which are far too high."""
    learned = [[9, 2, 3]] * 9
    for held, rate in (([9, 2, 3], 1.0), ([9, 2, 1], 0.0)):
        made = table(shard([*learned, held] * 40))
        level = made.pair_levels[made._rows[9, 2]]
        assert made.weights((9, 2)) == made.pair_hits[level].tolist()
        # 360 places seen in training are level 8; each measured level outweighs what lies below it
        assert abs(made.pair_hits[8][0] - rate) < 0.4
        assert abs(made.pair_hits[8].sum() - 1.0) < 0.05


def test_a_table_goes_on_from_another(tmp_path: Path) -> None:
    """Fault: what an earlier table knows is lost, or outweighs or yields to all that is new."""
    first = replace(table(shard([[9, 2, 3]] * 8)), fingerprint=fingerprint(target()))
    assert first.tokens == 8
    first.save(tmp_path / "table.safetensors")
    for new, expected in ((2, [3, 4]), (40, [4, 3])):
        texts = Texts(tmp_path / f"texts{new}")
        texts.save(0, shard([[9, 2, 4]] * new + [[7, 8, 5]]), {})
        trainer = TableTrainer(TableTrainerOptions(start=tmp_path / "table.safetensors"))
        trainer.attach(target())
        trainer.train(TrainingRun(target(), texts, tmp_path / f"out{new}"))
        made = WarmTable.load(tmp_path / f"out{new}" / "table.safetensors", VOCAB)
        assert made.get((9, 2)) == expected
        assert made.get((7, 8)) == [5, 1]
        assert made.tokens == 8 + new + 1
    with pytest.raises(ConfigError, match="belong to another target"):
        trainer.attach(target(VOCAB + 1))


def test_of_too_many_pairs_the_most_frequent_stay(tmp_path: Path) -> None:
    """Fault: a file larger than asked for, or one that lacks what is used most."""
    random = np.random.default_rng(0)
    rare = [[int(t) for t in random.integers(2, VOCAB, 12)] for _ in range(30)]
    part = shard([*rare, *[[9, 2, 3]] * 20])
    size = 4 * 2 * VOCAB + VOCAB + 2 * 4 * 12 * 2 + 4096 + 20 * (4 * 4 + 1)
    small = table(part, max_bytes=size, k=2)
    every = table(part, k=2)
    assert len(small.pairs) == 20 < len(every.pairs)
    assert (9, 2) in small._rows
    small.save(tmp_path / "t.safetensors")
    assert (tmp_path / "t.safetensors").stat().st_size <= size
    with pytest.raises(ConfigError, match="max_bytes of at least"):
        TableTrainer(TableTrainerOptions(max_bytes=9)).attach(target())


def test_what_is_trained_is_drafted_from_and_bound_to_its_target(tmp_path: Path) -> None:
    """Fault: the table cannot be loaded as it was saved, or serves another target in silence."""
    texts = Texts(tmp_path / "texts")
    texts.save(0, shard([[9, 2, 3, 4, 5]] * 30), {})
    trainer = PluginManager().create("trainer", "recycling", {"k": 2})
    trainer.attach(target())
    assert trainer.watch(texts.load(0)).startswith("0% of pairs known")
    assert trainer.watch(texts.load(0)).startswith("100% of pairs known")
    trained = trainer.train(TrainingRun(target(), texts, tmp_path / "out"))
    path = Path(trained.drafter["file"])
    made, loaded = make_table([texts.load(0)], VOCAB, trainer._options)[0], None
    loaded = WarmTable.load(path, VOCAB)
    for name in ("singles", "pairs", "pair_successors", "pair_levels", "pair_hits", "single_hits"):
        assert getattr(loaded, name).tobytes() == getattr(made, name).tobytes()
    drafter = RecyclingDrafter(RecyclingOptions(file=path))
    drafter.attach(target())
    request = Text([9, 2])
    drafter.begin(request)
    drafted = draft(drafter, request)
    assert [int(drafted.token[0, i]) for i in range(1, 4)] == [3, 4, 5]
    with pytest.raises(ConfigError, match="belong to another target"):
        RecyclingDrafter(RecyclingOptions(file=path)).attach(target(VOCAB + 1))
    RecyclingDrafter(RecyclingOptions(file=path, other_target=True)).attach(target(VOCAB + 1))


def test_measured_rates_shape_the_tree_unless_weights_are_given() -> None:
    """Fault: calibration is stored but not used, or a user's weights are not."""
    hits = np.array([[0.01, 0.01], [0.9, 0.8]], np.float32)
    pairs = np.array([[1, 2], [2, 3], [2, 4]], np.int32)
    successors = np.array([[3, 4], [5, 6], [7, 8]], np.int32)
    singles, none = np.full((VOCAB, 2), -1, np.int32), np.zeros(VOCAB, np.uint8)
    made = WarmTable(singles, pairs, successors, none, hits, np.array([1, 0, 1], np.uint8), hits)
    expected = {None: [3, 4, 7, 8], (0.9, 0.01): [3, 5, 4, 6]}
    for weights, tokens in expected.items():
        drafter = RecyclingDrafter(RecyclingOptions(pair_weights=weights, max_nodes=4))
        drafter.attach(target())
        drafter._warm = made
        request = Text([1, 2])
        drafter.begin(request)
        drafted = draft(drafter, request)
        assert [int(drafted.token[0, i]) for i in range(1, 5)] == tokens
