"""`specfw bench schedulers`: arms run what they say, in turn, on the same texts, and ratios follow from speeds."""

from __future__ import annotations

import importlib.util
import json
from itertools import count
from pathlib import Path

import pytest

from specfw.bench.engines import engine_beside
from specfw.bench.held_texts import HeldTexts, HeldVerifier
from specfw.bench.schedulers import (
    CLASSES,
    SchedulersBench,
    bench_schedulers,
    plot_schedulers,
)
from specfw.engine.engine import Engine, StepReport
from specfw.engine.fixed import FixedScheduler
from specfw.errors import ConfigError
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from tests.byte_models import save_tiny_chat


def by_hand() -> SchedulersBench:
    """Two classes and two loads with speeds that are easily compared."""
    result = SchedulersBench("ngram", 8, "float32", [0, 2])
    slow, fast = {"K=0": [10.0, 10, 10], "K=2": [5.0, 8, 5]}, {"K=0": [10.0] * 3, "K=2": [20.0] * 3}
    result.classes["chat"] = slow | {
        "adaptive-k": [9.8, 9.9, 9.7],
        "adaptive-k, useless drafter": [9.9] * 3,
    }
    result.classes["code"] = fast | {
        "adaptive-k": [19.0] * 3,
        "adaptive-k, useless drafter": [9.8, 9.7, 1.0],
    }
    result.loads[1] = {"K=0": [10.0] * 3, "K=4": [20.0] * 3, "goodput": [19.0, 21.0, 25.0]}
    result.loads[4] = {"K=0": [20.0] * 3, "K=4": [16.0] * 3, "goodput": [19.0, 19.6, 19.8]}
    return result


def test_ratios_follow_from_speeds() -> None:
    """The best fixed depth is another one in each class; medians pass over one bad round."""
    about = by_hand().mapping()
    assert [one["best_fixed"] for one in about["classes"]] == [0, 2]
    assert about["ratio"]["adaptive_vs_best_fixed_min"] == pytest.approx(0.95)
    assert about["ratio"]["adaptive_useless_drafter"] == pytest.approx((0.98 + 0.99) / 2)
    assert [one["goodput_vs_better"] for one in about["loads"]] == pytest.approx([1.05, 0.98])
    assert about["ratio"]["goodput_min"] == pytest.approx(0.98)
    table = by_hand().markdown()
    assert "| chat | 1.00x | 0.50x | 0.98x | 0.99x | 0.980 |" in table
    assert "| 4 | 1.00x | 0.80x | 0.98x | 0.980 |" in table


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plot(tmp_path: Path) -> None:
    plot_schedulers(by_hand(), tmp_path / "speeds.png")
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def prompts_file(folder: Path, categories: list[str]) -> Path:
    lines = [
        {"question_id": i, "category": category, "turns": [f"{category} " * 6]}
        for i, category in enumerate(categories)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_arms_take_turns_on_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm that runs alone meets another machine; one with another text has another race to win."""
    save_tiny_chat(tmp_path / "model")
    steps: list[tuple[Engine, int]] = []
    texts: dict[Engine, list[list[int]]] = {}
    step = Engine.step

    def watched(self: Engine) -> StepReport:
        report = step(self)
        steps.append((self, report.emitted))
        texts.setdefault(self, []).extend(output.token_ids for output in report.finished)
        return report

    monkeypatch.setattr(Engine, "step", watched)
    ticks = count(0.0, 0.01)
    result = bench_schedulers(
        depths=[2],
        loads=[1, 3],
        per_class=1,
        max_new_tokens=12,
        rounds=2,
        prompts_file=prompts_file(tmp_path, [*CLASSES.values()]),
        dtype="float32",
        target=str(tmp_path / "model"),
        clock=lambda: next(ticks),
    )
    assert result.depths == [0, 2]
    assert list(result.classes) == list(CLASSES)
    for speeds in result.classes.values():
        assert {len(rounds) for rounds in speeds.values()} == {2}
    singles, batches = (
        list(texts.values())[1:5],
        list(texts.values())[5:],
    )  # the first wrote the texts
    assert len(batches) == 2 * 3
    assert all(one == singles[0] for one in singles)
    for three in (batches[:3], batches[3:]):
        assert all(sorted(one) == sorted(three[0]) for one in three)
    arms = [engine for engine, _ in steps if engine is not steps[0][0]]
    assert len(set(arms[4:8])) == 4  # after each arm's prompt was read
    assert result.mapping()["ratio"]["goodput_min"] > 0
    assert result.mapping()["max_new_tokens"] == 12


def test_a_held_text_is_written_whatever_the_target_says(tmp_path: Path) -> None:
    """Arms whose texts part for rounding race on texts of different difficulty."""
    save_tiny_chat(tmp_path / "model")
    prompt, other = [5, 6, 7], [9, 8] * 4
    with Pipeline.from_config({"target": str(tmp_path / "model"), "dtype": "float32"}) as pipeline:
        texts = HeldTexts(pipeline, [prompt], 8)
        params = texts.params(prompt, 8)
        assert texts.by_seed[params.seed][: len(prompt)] == prompt
        texts.by_seed[params.seed] = [*prompt, *other]
        drafter = PluginManager().bind("drafter", "ngram").build()
        with engine_beside(
            pipeline, drafter, HeldVerifier(texts), FixedScheduler(2, 2, 1), 1, 64
        ) as engine:
            request = engine.add(prompt, params)
            while engine.has_work:
                engine.step()
    assert list(request.emitted) == other
    assert request.stats.accepted > 0


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'coding'"):
        bench_schedulers(per_class=1, prompts_file=prompts_file(tmp_path, ["writing"]))
    with pytest.raises(ConfigError, match="depths"):
        bench_schedulers(depths=[0])
