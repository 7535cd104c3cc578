"""`specfw eval-drafter`: what it counts, and what `--nodes` reaches."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specfw.bench.evaluation import Confidence, Evaluation, Ranks, evaluate, with_nodes
from specfw.config import PipelineConfig
from specfw.contracts import Drafter, RequestView
from specfw.decoding.builder import DraftBuilder
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.types import SpeculationStats
from tests.byte_models import VOCAB_SIZE, Oracle, Scripted, ids_of

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


def test_confidence_is_compared_with_what_was_kept() -> None:
    """Fault: guesses count as certain, siblings of a kept node as untested, or the error forgets a sign."""
    confidence = Confidence(parts=2)
    confidence.add([[0.7, 0.2], [math.nan], [0.9]], [1, 0])  # what was drawn last was refused
    confidence.add([[0.6]], [0])
    confidence.add([], [])
    assert confidence.mapping() == [
        {"from": 0.0, "to": 0.5, "seen": 1, "kept": 1, "confidence": 0.2, "rate": 1.0},
        {"from": 0.5, "to": 1.0, "seen": 3, "kept": 1, "confidence": pytest.approx(2.2 / 3),
         "rate": pytest.approx(1 / 3)},
    ]  # fmt: skip
    assert confidence.error() == pytest.approx((0.8 + 1.2) / 4)
    assert Confidence().mapping() == []
    assert Confidence().error() is None


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


class Stating(Drafter):
    """Deems the right token 60 % likely and another one 30 %, below a right guess if `guesses`."""

    def __init__(self, prompt: int, guesses: bool = False) -> None:
        self._prompt, self._guesses = prompt, guesses

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for parent, request in zip(builder.roots, requests, strict=True):
            place = len(request.tokens) - self._prompt
            if self._guesses:
                (parent,) = builder.guess(int(parent), ANSWER[place : place + 1]) or [-1]
                place += 1
            if parent >= 0 and place < len(ANSWER):
                law = torch.full((1, VOCAB_SIZE), 0.1 / (VOCAB_SIZE - 2))
                law[0, [ANSWER[place], ids_of("z")[0]]] = torch.tensor([0.6, 0.3])
                builder.sample(np.array([parent]), law.log(), 2)


@pytest.mark.parametrize("guesses", [False, True])
def test_stated_laws_are_compared_and_guesses_left_out(tmp_path: Path, guesses: bool) -> None:
    """Fault: chances belong to other nodes than were kept, or a lookup looks overconfident."""
    chat = [*ids_of("<|user|>", "a", "b", "</s>", "<|assistant|>")]
    settings: dict[str, Any] = {
        "target": Scripted(len(chat), ANSWER, 32), "drafter": Stating(len(chat), guesses)
    }  # fmt: skip
    with Pipeline.from_config(settings) as pipeline:
        found = evaluate(pipeline, prompts(tmp_path, "ab"), nodes=3, max_new_tokens=12).mapping()
    low, high = found["by_confidence"]
    assert (low["confidence"], low["rate"]) == (pytest.approx(0.3), 0.0)
    assert (high["confidence"], high["rate"]) == (pytest.approx(0.6), 1.0)
    assert low["seen"] == high["seen"] == (4 if guesses else 6)
    assert found["calibration_error"] == pytest.approx(0.35)


def test_nodes_reach_parts_that_leave_them_open() -> None:
    """Fault: a combination is measured with fewer nodes than it was asked for."""
    config = PipelineConfig(
        target="demo", drafter="merge(suffix(max_nodes=3), recycling)", scheduler="fixed"
    )
    resolved = with_nodes(config, 15).resolved(PluginManager())
    assert [one["max_nodes"] for one in resolved["drafter"]["drafters"]] == [3, 15]
    assert resolved["scheduler"][0]["max_nodes"] == 15
    assert with_nodes(config, None) is config
