"""Costs of passes are measured once and kept, and a bad or missing file costs nothing but that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from specfw_plugin_adaptive_k import AdaptiveKOptions, AdaptiveKScheduler

from specfw import Pipeline, cost_cache
from specfw.contracts import DraftLimits, SchedulerView
from specfw.cost_cache import remembered
from specfw.testing.simulation import SimulatedRequest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("SPECFW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


class Measure:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> dict[int, float]:
        self.times += 1
        return {1: 0.5, 8: 1.0}


def test_measured_once_for_each_identity(folder: Path) -> None:
    """Costs of another dtype are not this one's; those known already need no time at start."""
    measure = Measure()
    for identity in ({"dtype": "a"}, {"dtype": "a"}, {"dtype": "b"}, {"dtype": "a"}):
        assert remembered(identity, measure) == {1: 0.5, 8: 1.0}
    assert measure.times == 2
    kept = sorted(folder.iterdir())
    assert len(kept) == 2  # and nothing left aside
    assert {json.loads(path.read_text())["dtype"] for path in kept} == {"a", "b"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"curve": [{"rows": "x"}]}'])
def test_a_bad_file_is_measured_anew(folder: Path, text: str) -> None:
    """A half-written or foreign file must neither be believed nor stop the start."""
    measure = Measure()
    remembered({}, measure)
    [path] = folder.iterdir()
    path.write_text(text)
    assert remembered({}, measure) == {1: 0.5, 8: 1.0}
    assert measure.times == 2
    assert remembered({}, measure) == {1: 0.5, 8: 1.0}
    assert measure.times == 2


def test_a_folder_that_cannot_be_written_is_done_without(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("no folder")
    assert remembered({}, Measure()) == {1: 0.5, 8: 1.0}


def test_who_asks_is_told_what_passes_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times pass at start, only if a scheduler wants them, for what takes its own time."""
    monkeypatch.setattr(cost_cache, "_ROWS", (1, 2, 4, 1000))
    threads = torch.get_num_threads()
    with Pipeline.from_config({"target": "table"}) as pipeline:
        assert not folder.exists()
        costs = pipeline.engine.info.pass_seconds
        assert costs is not None
        assert sorted(costs()) == [1, 2, 4]  # 1000 rows do not fit
        [path] = folder.iterdir()
        identity = json.loads(path.read_text())
        assert identity["target"].startswith("table")
        assert identity["threads"] == threads
        assert set(identity["versions"]) == {"specfw", "torch", "transformers"}
        assert costs() is costs()
    with Pipeline.from_config({"target": "table(seed=1, vocab_size=4)"}) as other:
        assert other.engine.info.pass_seconds is not None
        other.engine.info.pass_seconds()
    assert len(list(folder.iterdir())) == 2


def test_schedulers_know_costs_from_the_first_step() -> None:
    """A scheduler that is told must not try out what cannot pay; one that is not told must."""
    view = SchedulerView([SimulatedRequest()], [DraftLimits(8, 8, 1)], 1)
    with Pipeline.from_config({"target": "table"}) as pipeline:
        for profile, expected in (("auto", [0.1, 0.8]), (None, [1.0, 1.0])):
            options = AdaptiveKOptions(profile=profile)
            scheduler = AdaptiveKScheduler(options)
            info = pipeline.engine.info
            object.__setattr__(info, "pass_seconds", lambda: {1: 0.1, 8: 0.8})
            scheduler.attach(info)
            assert [scheduler._costs(1, nodes, 0) for nodes in (0, 7)] == expected
            assert scheduler.plan(view)
