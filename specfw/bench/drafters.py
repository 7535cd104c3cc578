"""`specfw bench drafters`: what drafters bring, by category of prompts, against drafting nothing.

All drafters run in turn on each prompt, on one loaded target, so that whatever else the machine does
hits all of them alike; of several rounds the medians count. Acceptance lengths do not depend on time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specfw.bench.plots import new_figure
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

__all__ = [
    "ALL",
    "MEAN",
    "NONE",
    "DraftersBench",
    "bench_drafters",
    "first_of_each",
    "in_turn",
    "plot_drafters",
]

ALL = "all"
"""The category of the rows over all prompts."""
MEAN = "mean"
"""The category of the rows with the mean of the categories."""
REPEATING = ("extraction", "summarization")
"""The categories whose answers repeat their prompts; they have a row together where there are both."""
NONE = "none"
"""The drafter that all others are compared with."""

_WARM_UP = 8
"""Tokens of the first prompt that are decoded before anything counts."""


@dataclass(slots=True)
class _Sum:
    """What some prompts took with one drafter."""

    tokens: float = 0
    passes: float = 0
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

    @classmethod
    def median(cls, rounds: Sequence[_Sum]) -> _Sum:
        """The median of each."""
        each = zip(*map(astuple, rounds), strict=True)
        return cls(*(statistics.median(values) for values in each))


@dataclass(slots=True)
class DraftersBench:
    """The sums of every drafter and category, and the table that follows from them."""

    max_new_tokens: int
    """Most tokens for each prompt."""
    dtype: str
    rounds: int = 1
    """How often each prompt was decoded with each drafter."""
    sums: dict[tuple[str, str], _Sum] = field(default_factory=dict)
    """By drafter, as it was written, and category."""

    @property
    def drafters(self) -> list[str]:
        """The compared drafters, in order; `NONE` is not one of them."""
        return list(dict.fromkeys(drafter for drafter, _ in self.sums if drafter != NONE))

    @property
    def categories(self) -> list[str]:
        """The categories in the order of the prompts."""
        return list(dict.fromkeys(category for _, category in self.sums))

    def total(self, drafter: str, categories: Iterable[str] | None = None) -> _Sum:
        """The sums of one drafter over some categories, all unless given."""
        wanted = set(self.categories if categories is None else categories)
        parts = [
            part
            for (name, category), part in self.sums.items()
            if name == drafter and category in wanted
        ]
        return sum(parts, start=_Sum())

    def rows(self) -> list[dict[str, Any]]:
        """One row a drafter and category: `acceptance_length` in tokens a target pass, `draft_share` of
        the steps' time spent on drafting and observing, and `ratio_vs_none` of tokens a second.

        After the categories come `REPEATING` together, `MEAN` and `ALL`.
        """
        return [row for drafter in self.drafters for row in self._rows(drafter)]

    def _rows(self, drafter: str) -> list[dict[str, Any]]:
        rows = [self._row(drafter, name, [name]) for name in self.categories]
        over_all = self._row(drafter, ALL, self.categories)
        means = {
            key: statistics.fmean(row[key] for row in rows)
            for key, value in over_all.items()
            if isinstance(value, float)
        }
        if set(REPEATING) <= set(self.categories):
            rows.append(self._row(drafter, "+".join(REPEATING), REPEATING))
        return [*rows, over_all | {"category": MEAN} | means, over_all]

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw bench drafters --json`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "rounds": self.rounds,
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

    def _row(self, drafter: str, category: str, members: Sequence[str]) -> dict[str, Any]:
        own, plain = self.total(drafter, members), self.total(NONE, members)
        return {
            "drafter": drafter,
            "category": category,
            "acceptance_length": own.tokens / own.passes,
            "draft_share": own.draft_seconds / own.step_seconds,
            "ratio_vs_none": (own.tokens / own.seconds) / (plain.tokens / plain.seconds),
        }


def bench_drafters(
    drafters: Sequence[str],
    limit_per_category: int = 2,
    max_new_tokens: int = 128,
    prompts_file: Path | None = None,
    dtype: str = "bfloat16",
    rounds: int = 1,
    target: object = "demo",
    progress: Callable[[str], None] = lambda text: None,
) -> DraftersBench:
    """Decode greedily with each drafter, and with none, one prompt at a time.

    Args:
        drafters: names or expressions, as in a config.
        limit_per_category: how many prompts of each category, from the first on; their first turns
            count.
        max_new_tokens: most tokens for each prompt.
        prompts_file: prompts in Spec-Bench's format; the project's own if None.
        dtype: what the target's weights become; a ready loader keeps its own.
        rounds: how often each prompt is decoded with each; medians count.
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
    result = DraftersBench(max_new_tokens, dtype, rounds)
    with Pipeline.from_config(
        {"target": target, "drafter": switch, "engine": {"prefix_cache": False}, **settings}
    ) as pipeline:
        chosen = first_of_each(load_prompts(prompts_file), limit_per_category)
        for number, prompt in enumerate([chosen[0], *chosen]):  # the first one warms up
            ids = pipeline.encode([{"role": "user", "content": prompt.turns[0]}])
            seen: dict[str, list[_Sum]] = {}
            for turn in range(rounds if number else 1):
                for name in in_turn([NONE, *drafters], number + turn):
                    progress(f"prompt {number} of {len(chosen)} ({prompt.category}): {name}")
                    switch.use(name)
                    one = _decode(pipeline, ids, max_new_tokens if number else _WARM_UP)
                    seen.setdefault(name, []).append(one)
            for name in [NONE, *drafters] if number else []:
                key = (name, prompt.category)
                result.sums[key] = result.sums.get(key, _Sum()) + _Sum.median(seen[name])
    return result


def plot_drafters(result: DraftersBench, path: Path) -> None:
    """Draw acceptance length and speed against none by category as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    rows = result.rows()
    categories = list(dict.fromkeys(row["category"] for row in rows))
    figure = new_figure("bench drafters", 1.5 + 0.7 * len(categories), 7)
    width = 0.8 / len(result.drafters)
    panels = {"acceptance_length": "tokens a pass", "ratio_vs_none": "speed against none"}
    for axes, (key, label) in zip(figure.subplots(2, sharex=True), panels.items(), strict=True):
        for number, drafter in enumerate(result.drafters):
            heights = [row[key] for row in rows if row["drafter"] == drafter]
            places = [place + width * number for place in range(len(categories))]
            axes.bar(places, heights, width, label=drafter)
        axes.axhline(1.0, color="0.3", linewidth=0.8)
        axes.set_ylabel(label)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(categories))],
        categories,
        rotation=60,
        ha="right",
        rotation_mode="anchor",
    )
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False
    )
    figure.savefig(path, format="png", dpi=150)


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


def in_turn(names: Sequence[str], number: int) -> list[str]:
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
