"""`specfw bench drafters`: what drafters bring, by category of prompts, against drafting nothing.

All drafters run in turn on each prompt, on one loaded target, so that whatever else the machine does
hits all of them alike. Acceptance lengths do not depend on time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specfw.bench.prompts import Prompt, load_prompts
from specfw.builtins import NoDrafter
from specfw.contracts import (
    Drafter,
    Feedback,
    RequestView,
    Requirements,
    TargetInfo,
    TargetLoader,
)
from specfw.decoding.builder import DraftBuilder
from specfw.engine.engine import StepReport
from specfw.errors import ConfigError
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager

__all__ = ["ALL", "NONE", "DraftersBench", "bench_drafters", "first_of_each"]

ALL = "all"
"""The category of the rows over all prompts."""
NONE = "none"
"""The drafter that all others are compared with."""


@dataclass(slots=True)
class _Sum:
    """What some prompts took with one drafter."""

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    draft_seconds: float = 0.0

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.seconds + other.seconds,
            self.step_seconds + other.step_seconds,
            self.draft_seconds + other.draft_seconds,
        )


@dataclass(slots=True)
class DraftersBench:
    """The sums of every drafter and category, and the table that follows from them."""

    tokens: int
    """Most tokens for each prompt."""
    dtype: str
    sums: dict[tuple[str, str], _Sum] = field(default_factory=dict)
    """By drafter, as it was written, and category."""

    @property
    def drafters(self) -> list[str]:
        """The compared drafters, in order; `NONE` is not one of them."""
        return list(dict.fromkeys(drafter for drafter, _ in self.sums if drafter != NONE))

    @property
    def categories(self) -> list[str]:
        """The categories in the order of the prompts, then `ALL`."""
        return [*dict.fromkeys(category for _, category in self.sums), ALL]

    def total(self, drafter: str, categories: Iterable[str] = (ALL,)) -> _Sum:
        """The sums of one drafter over some categories."""
        wanted = set(categories)
        parts = [
            part
            for (name, category), part in self.sums.items()
            if name == drafter and (category in wanted or ALL in wanted)
        ]
        return sum(parts, start=_Sum())

    def rows(self) -> list[dict[str, Any]]:
        """One row a drafter and category: `acceptance_length` in tokens a target pass, `draft_share` of
        the steps' time spent on drafting and observing, and `ratio_vs_none` of tokens a second."""
        return [
            self._row(drafter, category)
            for drafter in self.drafters
            for category in self.categories
        ]

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw bench drafters --json`."""
        return {
            "tokens": self.tokens,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "rows": self.rows(),
        }

    def markdown(self) -> str:
        """The rows as a table in Markdown."""
        lines = [
            "| drafter | category | tokens a pass | share of drafting | speed against none |",
            "|---|---|---:|---:|---:|",
        ]
        for row in self.rows():
            lines.append(
                f"| `{row['drafter']}` | {row['category']} | {row['acceptance_length']:.2f} | "
                f"{row['draft_share']:.1%} | {row['ratio_vs_none']:.2f}x |"
            )
        return "\n".join(lines) + "\n"

    def _row(self, drafter: str, category: str) -> dict[str, Any]:
        own, plain = self.total(drafter, [category]), self.total(NONE, [category])
        return {
            "drafter": drafter,
            "category": category,
            "acceptance_length": own.tokens / own.passes,
            "draft_share": own.draft_seconds / own.step_seconds,
            "ratio_vs_none": (own.tokens / own.seconds) / (plain.tokens / plain.seconds),
        }


def bench_drafters(
    drafters: Sequence[str],
    per_category: int = 2,
    tokens: int = 128,
    prompts_file: Path | None = None,
    dtype: str = "bfloat16",
    target: object = "demo",
    progress: Callable[[str], None] = lambda text: None,
) -> DraftersBench:
    """Decode greedily with each drafter, and with none, one prompt at a time.

    Args:
        drafters: names or expressions, as in a config.
        per_category: how many prompts of each category, from the first on; their first turns count.
        tokens: most tokens for each prompt.
        prompts_file: prompts in Spec-Bench's format; the project's own if None.
        dtype: what the target's weights become; a ready loader keeps its own.
        target: as in a config.
        progress: told what runs now.

    Raises:
        ConfigError: a drafter, the file or the target is wrong.
    """
    if not drafters or NONE in drafters or len(set(drafters)) != len(drafters):
        raise ConfigError(
            f"bench drafters: expected different drafters to compare with {NONE!r}, got "
            f"{', '.join(drafters) or 'nothing'}; name each once, and {NONE!r} not at all"
        )
    manager = PluginManager()
    switch = _Switch({name: manager.bind("drafter", name).build() for name in drafters})
    settings = {} if isinstance(target, TargetLoader) else {"dtype": dtype}
    result = DraftersBench(tokens, dtype)
    with Pipeline.from_config(
        {"target": target, "drafter": switch, "engine": {"prefix_cache": False}, **settings}
    ) as pipeline:
        chosen = first_of_each(load_prompts(prompts_file), per_category)
        for number, prompt in enumerate([chosen[0], *chosen]):  # the first one warms up
            ids = pipeline.encode([{"role": "user", "content": prompt.turns[0]}])
            for name in _in_turn([NONE, *drafters], number):
                progress(f"prompt {number} of {len(chosen)} ({prompt.category}): {name}")
                switch.use(name)
                seen = _decode(pipeline, ids, tokens if number else min(tokens, 8))
                if number:
                    key = (name, prompt.category)
                    result.sums[key] = result.sums.get(key, _Sum()) + seen
    return result


class _Switch(Drafter):
    """One of several drafters at a time; the others are as if they were not there."""

    def __init__(self, drafters: dict[str, Drafter]) -> None:
        self._drafters = {NONE: NoDrafter(), **drafters}
        self._current: Drafter = self._drafters[NONE]

    def use(self, name: str) -> None:
        """Draft with this drafter, while no request runs."""
        self._current = self._drafters[name]

    @property
    def requires(self) -> Requirements:  # type: ignore[override]
        return self._current.requires

    def attach(self, target: TargetInfo) -> None:
        for drafter in self._drafters.values():
            drafter.attach(target)

    def begin(self, request: RequestView) -> None:
        self._current.begin(request)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self._current.propose(requests, builder)

    def observe(self, feedback: Feedback) -> None:
        self._current.observe(feedback)

    def end(self, request: RequestView) -> None:
        self._current.end(request)

    def close(self) -> None:
        for drafter in self._drafters.values():
            drafter.close()


def first_of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of each category."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= count:
            chosen.append(prompt)
    return chosen


def _in_turn(names: Sequence[str], number: int) -> list[str]:
    """The names, beginning with another one for each prompt, so that none is always first."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def _decode(pipeline: Pipeline, ids: list[int], tokens: int) -> _Sum:
    """Decode one prompt and count."""
    seen = _Sum()

    def note(report: StepReport) -> None:
        seen.step_seconds += sum(
            seconds for phase, seconds in report.seconds.items() if phase != "model"
        )
        seen.draft_seconds += report.seconds["draft"] + report.seconds["observe"]

    pipeline.engine.observers.append(note)
    began = time.perf_counter()
    (output,) = pipeline.generate(ids, max_new_tokens=tokens, temperature=0.0, progress=False)
    seen.seconds = time.perf_counter() - began
    pipeline.engine.observers.remove(note)
    seen.tokens = output.speculation.emitted
    seen.passes = output.speculation.target_passes
    return seen
