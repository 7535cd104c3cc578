"""`bench_drafters`: what it counts, and what it refuses."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specfw.bench.drafters import (
    ALL,
    MEAN,
    NONE,
    DraftersBench,
    _Sum,
    bench_drafters,
    plot_drafters,
)
from specfw.cli.main import app
from specfw.errors import ConfigError, UnknownComponentError
from specfw.references import split_references
from tests.byte_models import save_tiny_chat
from tests.test_docs import documented_json, flat_keys


def prompts_file(folder: Path, categories: Sequence[str]) -> Path:
    """A file of one prompt for each entry of `categories`."""
    path = folder / "prompts.jsonl"
    lines = [
        json.dumps({"question_id": i, "category": category, "turns": [f"ab {i} ab"]})
        for i, category in enumerate(categories)
    ]
    path.write_text("\n".join(lines))
    return path


def test_rows_are_ratios_of_sums() -> None:
    """Fault: ratios of single prompts are averaged, so that a short prompt counts like a long one."""
    result = DraftersBench(10, "float32")
    result.sums = {
        (NONE, "math"): _Sum(10, 10, 5.0, 4.0, 0.0),
        (NONE, "rag"): _Sum(20, 20, 10.0, 8.0, 0.0),
        ("a", "math"): _Sum(10, 5, 2.5, 2.0, 0.2),
        ("a", "rag"): _Sum(20, 20, 5.0, 4.0, 1.0),
    }
    math, rag, mean, over_all = result.rows()
    assert math == {
        "drafter": "a",
        "category": "math",
        "acceptance_length": 2.0,
        "draft_share": 0.1,
        "ratio_vs_none": 2.0,
    }
    assert (rag["category"], rag["acceptance_length"], rag["draft_share"]) == ("rag", 1.0, 0.25)
    assert over_all["category"] == ALL
    assert over_all["acceptance_length"] == pytest.approx(30 / 25)
    assert over_all["ratio_vs_none"] == pytest.approx((30 / 7.5) / (30 / 15))
    assert mean == {
        "drafter": "a",
        "category": MEAN,
        "acceptance_length": 1.5,
        "draft_share": pytest.approx(0.175),
        "ratio_vs_none": 2.0,
    }
    assert len(result.markdown().splitlines()) == 2 + 4


def test_categories_that_repeat_their_prompts_have_a_row_together() -> None:
    result = DraftersBench(10, "float32")
    for category, passes in (("extraction", 5), ("qa", 9), ("summarization", 10)):
        result.sums[NONE, category] = _Sum(20, 20, 4.0, 4.0, 0.0)
        result.sums["a", category] = _Sum(20, passes, 2.0, 2.0, 0.1)
    together = result.rows()[3]
    assert together["category"] == "extraction+summarization"
    assert together["acceptance_length"] == pytest.approx(40 / 15)


def test_of_several_rounds_the_medians_count() -> None:
    """Fault: one round that was disturbed decides."""
    rounds = [_Sum(10, 5, seconds, seconds / 2, 0.1) for seconds in (1.0, 30.0, 2.0)]
    assert _Sum.median(rounds) == _Sum(10, 5, 2.0, 1.0, 0.1)


def test_every_drafter_and_category_has_a_row(tmp_path: Path) -> None:
    """Fault: a drafter is built but another one drafts; or more prompts than asked for are run."""
    save_tiny_chat(tmp_path / "model")
    seen: list[str] = []
    result = bench_drafters(
        ["ngram", "merge(suffix, recycling)"],
        limit_per_category=1,
        max_new_tokens=24,
        prompts_file=prompts_file(tmp_path, ["math", "rag", "math"]),
        dtype="float32",
        rounds=2,
        target=str(tmp_path / "model"),
        progress=seen.append,
    )
    rows = result.mapping()["rows"]
    assert [(row["drafter"], row["category"]) for row in rows] == [
        (drafter, category)
        for drafter in ("ngram", "merge(suffix, recycling)")
        for category in ("math", "rag", MEAN, ALL)
    ]
    for row in rows:
        assert row["acceptance_length"] >= 1
        assert 0 < row["draft_share"] < 1
        assert row["ratio_vs_none"] > 0
    plain = result.total(NONE)
    assert plain.tokens == plain.passes == result.total("ngram").tokens
    assert result.total("ngram").passes < plain.passes
    assert len(seen) == (2 * 2 + 1) * 3  # one prompt of each category, twice, and one to warm up


@pytest.mark.parametrize("drafters", [[], ["ngram", "none"], ["ngram", "ngram"]])
def test_what_cannot_be_compared_is_refused(drafters: list[str]) -> None:
    with pytest.raises(ConfigError, match="different drafters"):
        bench_drafters(drafters)


def test_an_unknown_drafter_is_refused_before_the_target_is_loaded() -> None:
    with pytest.raises(UnknownComponentError, match="ngrm"):
        bench_drafters(["ngrm"], target="nowhere/at-all")


def test_the_command_writes_all_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an option that is not passed on; or a table on stdout between the JSON."""
    save_tiny_chat(tmp_path / "model")
    inner = functools.partial(bench_drafters, target=str(tmp_path / "model"))
    monkeypatch.setattr("specfw.bench.drafters.bench_drafters", inner)
    arguments = {
        "--drafters": "ngram, first(ngram, suffix)",
        "--prompts": prompts_file(tmp_path, ["math", "rag", "math"]),
        "--limit-per-category": 1,
        "--max-new-tokens": 5,
        "--rounds": 2,
        "--dtype": "float32",
        "--markdown": tmp_path / "table.md",
    }
    flat = [str(part) for pair in arguments.items() for part in pair]
    run = CliRunner().invoke(app, ["bench", "drafters", *flat, "--json"])
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["max_new_tokens"], found["rounds"], found["dtype"]) == (5, 2, "float32")
    names = ["ngram", "first(ngram, suffix)"]
    assert [row["drafter"] for row in found["rows"]] == [n for name in names for n in [name] * 4]
    assert flat_keys(found) == documented_json("specfw bench drafters")
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert all(f"| `{row['drafter']}` | {row['category']} |" in table for row in found["rows"])
    assert "prompt 2 of 2 (rag): first(ngram, suffix)" in run.stderr


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With matplotlib a PNG comes out; without it, a sentence says what to install, before anything runs."""
    path = tmp_path / "table.png"
    if importlib.util.find_spec("matplotlib") is not None:
        result = DraftersBench(10, "float32")
        for name in (NONE, "a", "b"):
            result.sums[name, "qa"] = _Sum(20, 20, 4.0, 4.0, 0.0)
        plot_drafters(result, path)
        assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = CliRunner().invoke(app, ["bench", "drafters", "--plot", str(path)])
    assert isinstance(run.exception, ConfigError)
    assert "install specfw[plot]" in str(run.exception)


@pytest.mark.parametrize(
    ("text", "references"),
    [
        ("ngram", ["ngram"]),
        (
            " ngram , merge(suffix, recycling(k=8)),suffix",
            ["ngram", "merge(suffix, recycling(k=8))", "suffix"],
        ),
        ("medusa(model='a,b)')", ["medusa(model='a,b)')"]),
        ("route(ngram, none, bounds=[0.5, 1]),", ["route(ngram, none, bounds=[0.5, 1])"]),
    ],
)
def test_a_list_of_references_is_split_between_them(text: str, references: list[str]) -> None:
    assert split_references(text) == references
