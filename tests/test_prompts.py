"""The project's own prompts, and the reading of prompt files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfw.bench.prompts import CATEGORIES, Prompt, demo_prompts, load_prompts
from specfw.errors import ConfigError

GOOD: dict[str, Any] = {"question_id": 7, "category": "qa", "turns": ["Why?", "Really?"]}


def words(prompt: Prompt) -> int:
    return sum(len(turn.split()) for turn in prompt.turns)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_own_set_covers_every_category() -> None:
    """Guards: a category lost from the set, or the file left out of the package's data."""
    counts = Counter(prompt.category for prompt in load_prompts())
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 4


def test_own_set_has_long_prompts_where_the_categories_have_them() -> None:
    """Guards: a set of short prompts only, on which drafters that copy from the prompt look useless."""
    long = [prompt for prompt in load_prompts() if 300 <= words(prompt) <= 700]
    assert len(long) >= 8
    assert {"summarization", "rag", "extraction", "translation"} <= {p.category for p in long}


def test_demo_prompts_are_a_chat_answer_an_extraction_and_a_summary() -> None:
    """Guards: other prompts shown after the set was renumbered."""
    chat, extraction, summary = demo_prompts()
    assert (chat.category, words(chat) < 60) == ("stem", True)
    assert (extraction.category, words(extraction) >= 300) == ("extraction", True)
    assert (summary.category, words(summary) >= 300) == ("summarization", True)


texts = st.text(min_size=1).filter(str.strip)
records = st.fixed_dictionaries(
    {
        "question_id": st.integers() | texts,
        "category": texts,
        "turns": st.lists(texts, min_size=1, max_size=3),
    },
    optional={"reference": st.lists(texts)},
)


@given(st.lists(records, min_size=1, unique_by=lambda record: record["question_id"]))
def test_a_file_is_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, Any]]
) -> None:
    """Guards: characters that look like line ends, blank lines or further fields upsetting the reader."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in made]
    path = written(tmp_path_factory.mktemp("prompts"), *lines)
    assert load_prompts(path) == [
        Prompt(record["question_id"], record["category"], tuple(record["turns"])) for record in made
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{'question_id': 1}", "JSON object"),
        ("[1, 2]", "JSON object"),
        *[
            (json.dumps({k: v for k, v in GOOD.items() if k != name}), f"{name} is missing")
            for name in GOOD
        ],
        (json.dumps({**GOOD, "question_id": True}), "question_id must be"),
        (json.dumps({**GOOD, "question_id": 1.5}), "question_id must be"),
        (json.dumps({**GOOD, "category": ""}), "category must be"),
        (json.dumps({**GOOD, "turns": "Why?"}), "turns must be"),
        (json.dumps({**GOOD, "turns": []}), "turns must be"),
        (json.dumps({**GOOD, "turns": ["Why?", " "]}), "turns must be"),
        (json.dumps({**GOOD, "question_id": 1}), "used before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """Guards: a traceback, or a message that leaves the user to search a long file."""
    first = json.dumps({**GOOD, "question_id": 1})
    path = written(tmp_path, first, "", line)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_prompts(path)
    assert f"{path}, line 3" in str(caught.value)


def test_a_long_bad_value_is_shortened(tmp_path: Path) -> None:
    """Guards: a whole prompt printed as part of a message."""
    path = written(tmp_path, json.dumps({**GOOD, "turns": "word " * 1000}))
    with pytest.raises(ConfigError) as caught:
        load_prompts(path)
    assert len(str(caught.value)) < len(str(path)) + 200


def test_an_unreadable_or_empty_file_is_named(tmp_path: Path) -> None:
    """Guards: an empty benchmark that ends with a division by zero."""
    with pytest.raises(ConfigError, match=r"absent\.jsonl.*cannot be read"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match=r"mine\.jsonl.*found none"):
        load_prompts(written(tmp_path, "", " "))
    (tmp_path / "latin.jsonl").write_bytes('{"category": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.jsonl.*UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")
