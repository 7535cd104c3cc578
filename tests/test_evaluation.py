"""`specfw eval-drafter`: what it counts, and what `--nodes` reaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specfw.bench.evaluation import Evaluation, Ranks, evaluate, with_nodes
from specfw.config import PipelineConfig
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.types import SpeculationStats
from tests.byte_models import Oracle, Scripted, ids_of

ANSWER = ids_of(*"abcdefghijkl")


def test_counts_are_sums_over_prompts() -> None:
    """Fault: means of means; or positions that no draft reached count as refused."""
    one = SpeculationStats(
        emitted=6, target_passes=2, tested_by_depth=[2, 1], accepted_by_depth=[2, 1]
    )
    two = SpeculationStats(emitted=4, target_passes=3, tested_by_depth=[2], accepted_by_depth=[0])
    found = Evaluation(
        "same-text", {"math": [one], "rag": [two]}, draft_seconds=1.0, step_seconds=4.0
    ).mapping()
    assert found["acceptance_length"] == 2.0
    assert found["by_category"] == {"math": 3.0, "rag": pytest.approx(4 / 3)}
    assert found["by_position"] == [
        {"tested": 4, "kept": 2, "rate": 0.5},
        {"tested": 1, "kept": 1, "rate": 1.0},
    ]
    assert (found["prompts"], found["tokens"], found["draft_share"]) == (2, 10, 0.25)


def test_ranks_are_counted_at_reached_nodes() -> None:
    """Fault: a rank that few nodes have looks worse than it is."""
    ranks = Ranks()
    ranks.add([2, 3], [1, 0])
    ranks.add([1], [])
    ranks.add([], [])
    assert ranks.mapping() == [
        {"seen": 3, "kept": 1, "rate": pytest.approx(1 / 3)},
        {"seen": 2, "kept": 1, "rate": 0.5},
        {"seen": 1, "kept": 0, "rate": 0.0},
    ]


def prompts(folder: Path, *texts: str) -> Path:
    path = folder / "prompts.jsonl"
    lines = [
        json.dumps({"question_id": i, "category": "math" if i % 2 else "rag", "turns": [text]})
        for i, text in enumerate(texts)
    ]
    path.write_text("\n".join(lines))
    return path


def test_what_is_drafted_right_is_counted(tmp_path: Path) -> None:
    """Fault: prompts that do not fit end everything, or limits do not reach the draft."""
    chat = [*ids_of("<|user|>", "a", "b", "</s>", "<|assistant|>")]
    oracle = Oracle({tuple(chat): ANSWER})
    file = prompts(tmp_path, "ab", "x" * 99, "ab")
    settings: dict[str, Any] = {
        "target": Scripted(len(chat), ANSWER, 32), "drafter": oracle, "engine": {"prefix_cache": False}
    }  # fmt: skip
    with Pipeline.from_config(settings) as pipeline:
        found = evaluate(pipeline, file, nodes=3, per_category=1, max_new_tokens=12).mapping()
        every = evaluate(pipeline, file, nodes=3, max_new_tokens=12).mapping()
    assert (found["prompts"], found["skipped"], found["tokens"]) == (1, 1, 12)
    assert found["acceptance_length"] == 4.0  # three drafts of three, the first behind the prompt
    assert all(one["rate"] == 1.0 for one in found["by_position"])
    assert len(found["by_position"]) == 3
    assert found["by_rank"] == [{"seen": 9, "kept": 9, "rate": 1.0}]
    assert (every["prompts"], every["by_category"]) == (2, {"rag": 4.0})


def test_nodes_reach_parts_that_leave_them_open() -> None:
    """Fault: a combination is measured with fewer nodes than it was asked for."""
    config = PipelineConfig(
        target="demo", drafter="merge(suffix(max_nodes=3), recycling)", scheduler="fixed"
    )
    resolved = with_nodes(config, 15).resolved(PluginManager())
    assert [one["max_nodes"] for one in resolved["drafter"]["drafters"]] == [3, 15]
    assert resolved["scheduler"][0]["max_nodes"] == 15
    assert with_nodes(config, None) is config
