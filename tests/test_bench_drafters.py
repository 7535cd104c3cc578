"""`bench_drafters`: what it counts, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from specfw.bench.drafters import ALL, NONE, DraftersBench, _Sum, bench_drafters
from specfw.errors import ConfigError, UnknownComponentError
from tests.byte_models import save_tiny_chat


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
    math, rag, over_all = result.rows()
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
    assert len(result.markdown().splitlines()) == 2 + 3


def test_every_drafter_and_category_has_a_row(tmp_path: Path) -> None:
    """Fault: a drafter is built but another one drafts; or more prompts than asked for are run."""
    save_tiny_chat(tmp_path / "model")
    seen: list[str] = []
    result = bench_drafters(
        ["ngram", "merge(suffix, recycling)"],
        per_category=1,
        tokens=24,
        prompts_file=prompts_file(tmp_path, ["math", "rag", "math"]),
        dtype="float32",
        target=str(tmp_path / "model"),
        progress=seen.append,
    )
    rows = result.mapping()["rows"]
    assert [(row["drafter"], row["category"]) for row in rows] == [
        (drafter, category)
        for drafter in ("ngram", "merge(suffix, recycling)")
        for category in ("math", "rag", ALL)
    ]
    for row in rows:
        assert row["acceptance_length"] >= 1
        assert 0 < row["draft_share"] < 1
        assert row["ratio_vs_none"] > 0
    plain = result.total(NONE)
    assert plain.tokens == plain.passes == result.total("ngram").tokens
    assert result.total("ngram").passes < plain.passes
    assert len(seen) == 3 * 3  # one prompt of each category, and one to warm up


@pytest.mark.parametrize("drafters", [[], ["ngram", "none"], ["ngram", "ngram"]])
def test_what_cannot_be_compared_is_refused(drafters: list[str]) -> None:
    with pytest.raises(ConfigError, match="different drafters"):
        bench_drafters(drafters)


def test_an_unknown_drafter_is_refused_before_the_target_is_loaded() -> None:
    with pytest.raises(UnknownComponentError, match="ngrm"):
        bench_drafters(["ngrm"], target="nowhere/at-all")
