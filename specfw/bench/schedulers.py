"""`specfw bench schedulers`: do schedulers find what is fastest, whatever the text, the drafter and the load?

All arms decode the same prompts greedily on one loaded target, each in an engine of its own, and all
are held to the texts that plain decoding wrote. They take turns step by step, so that whatever else the
machine does hits all of them alike, and medians of the rounds' ratios count. Steps that read prompts are
left out of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import torch

from specfw.bench.engines import engine_beside
from specfw.bench.held_texts import HeldTexts, HeldVerifier
from specfw.bench.plots import new_figure
from specfw.bench.prompts import Prompt, load_prompts
from specfw.contracts import Drafter, RequestView, TargetInfo, TargetLoader
from specfw.decoding.builder import DraftBuilder
from specfw.engine.engine import Engine
from specfw.errors import ConfigError
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager

__all__ = ["CLASSES", "SchedulersBench", "bench_schedulers", "plot_schedulers"]

CLASSES: Mapping[str, str] = {
    "chat": "writing",
    "code": "coding",
    "summarise": "summarization",
    "extract": "extraction",
    "translate": "translation",
    "maths": "math",
}
"""The classes of prompts, and the category of the prompts that each takes."""
_ADAPTIVE, _USELESS, _PLAIN, _GOODPUT = (
    "adaptive-k",
    "adaptive-k, useless drafter",
    "K=0",
    "goodput",
)
_FIXED_FOR_BATCHES = 4
_LONGEST_PROMPT = 400

Speeds = dict[str, list[float]]
"""Tokens a second of every round, by arm."""


@dataclass(slots=True)
class SchedulersBench:
    """Speeds of all arms, and the ratios that follow."""

    drafter: str
    max_new_tokens: int
    """Most tokens for each prompt."""
    dtype: str
    depths: Sequence[int]
    classes: dict[str, Speeds] = field(default_factory=dict)
    """One request at a time, by class: each fixed depth, `adaptive-k`, and it with a useless drafter."""
    loads: dict[int, Speeds] = field(default_factory=dict)
    """Several requests at once, by their number: plain, a fixed depth and `goodput`."""

    def adaptive_vs_fixed(self, name: str) -> dict[int, float]:
        """Speed of `adaptive-k` against each fixed depth, in one class."""
        speeds = self.classes[name]
        return {depth: _ratio(speeds, _ADAPTIVE, _fixed(depth)) for depth in self.depths}

    def useless_vs_plain(self) -> float:
        """Speed of `adaptive-k` with a drafter that is always wrong against plain decoding, over all classes."""
        return statistics.median(
            chain.from_iterable(
                _ratios(speeds, _USELESS, _PLAIN) for speeds in self.classes.values()
            )
        )

    def goodput_vs_better(self, requests: int) -> float:
        """Speed of `goodput` against the better of plain decoding and a fixed depth."""
        speeds = self.loads[requests]
        return min(_ratio(speeds, _GOODPUT, other) for other in speeds if other != _GOODPUT)

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw bench schedulers --json`."""
        return {
            "drafter": self.drafter,
            "max_new_tokens": self.max_new_tokens,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "classes": [
                {
                    "class": name,
                    "tokens_per_second": _medians(speeds),
                    "best_fixed": min(versus, key=lambda depth: versus[depth]),
                    "adaptive_vs_best_fixed": min(versus.values()),
                }
                for name, speeds in self.classes.items()
                for versus in [self.adaptive_vs_fixed(name)]
            ],
            "loads": [
                {
                    "requests": requests,
                    "tokens_per_second": _medians(speeds),
                    "goodput_vs_better": self.goodput_vs_better(requests),
                }
                for requests, speeds in self.loads.items()
            ],
            "ratio": {
                "adaptive_vs_best_fixed_min": min(
                    min(self.adaptive_vs_fixed(name).values()) for name in self.classes
                ),
                "adaptive_useless_drafter": self.useless_vs_plain(),
                "goodput_min": min(map(self.goodput_vs_better, self.loads)),
            },
        }

    def markdown(self) -> str:
        """Speeds against plain decoding, as two tables, and the ratios."""
        about = self.mapping()
        parts = [
            _table(
                "class",
                self.classes,
                "adaptive-k against best fixed K",
                [one["adaptive_vs_best_fixed"] for one in about["classes"]],
            ),
            _table(
                "requests",
                {str(requests): speeds for requests, speeds in self.loads.items()},
                "goodput against the better",
                [one["goodput_vs_better"] for one in about["loads"]],
            ),
            "\n".join(f"{name}: {ratio:.3f}" for name, ratio in about["ratio"].items()),
        ]
        return "\n\n".join(parts) + "\n"


def bench_schedulers(
    drafter: str = "ngram(continuations=1, max_nodes=16)",
    depths: Sequence[int] = (0, 1, 2, 4, 8),
    loads: Sequence[int] = (1, 4, 16),
    per_class: int = 2,
    max_new_tokens: int = 96,
    rounds: int = 2,
    prompts_file: Path | None = None,
    dtype: str = "bfloat16",
    target: object = "demo",
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> SchedulersBench:
    """Race `adaptive-k` against fixed depths and `goodput` against plain decoding and a fixed depth.

    Args:
        drafter: a name or an expression, as in a config; every arm has one of its own.
        depths: the fixed depths; 0 is plain decoding and always there.
        loads: numbers of requests at once for `goodput`.
        per_class: prompts of each of `CLASSES`, from the first on.
        max_new_tokens: most tokens for each prompt.
        rounds: how often all is run; schedulers keep what they learned.
        prompts_file: prompts in Spec-Bench's format; the project's own if None.
        dtype: what the target's weights become; a ready loader keeps its own.
        target: as in a config.
        clock: gives the time in seconds.
        progress: told what runs now.

    Raises:
        ConfigError: a setting is wrong, or the file lacks one of the classes.
    """
    depths = sorted({0, *depths})
    if depths[0] < 0 or depths[-1] < 1:
        raise ConfigError(
            f"bench schedulers: expected depths from 0 with one above it, got {depths}; write 0,1,2,4,8"
        )
    manager = PluginManager()
    manager.bind("drafter", drafter)
    prompts = _by_class(load_prompts(prompts_file), per_class, max(loads))
    settings = {} if isinstance(target, TargetLoader) else {"dtype": dtype}
    result = SchedulersBench(drafter, max_new_tokens, dtype, depths)
    with Pipeline.from_config({"target": target, **settings}) as pipeline, ExitStack() as stack:
        ids = {name: [_encode(pipeline, one) for one in some] for name, some in prompts.items()}
        progress("writing the texts")
        texts = HeldTexts(pipeline, list(chain.from_iterable(ids.values())), max_new_tokens)

        def arm(scheduler: str, requests: int, own: Drafter | None = None) -> Engine:
            built = own or manager.bind("drafter", drafter).build()
            return stack.enter_context(
                engine_beside(
                    pipeline,
                    built,
                    HeldVerifier(texts),
                    manager.bind("scheduler", scheduler).build(),
                    requests,
                    _LONGEST_PROMPT + max_new_tokens,
                    clock,
                )
            )

        adaptive = f"adaptive-k(max_depth={depths[-1]})"
        singles = {_fixed(depth): arm(_fixed_scheduler(depth), 1) for depth in depths}
        singles[_ADAPTIVE] = arm(adaptive, 1)
        singles[_USELESS] = arm(adaptive, 1, _AlwaysWrong())
        batches = {
            requests: {
                _PLAIN: arm(_fixed_scheduler(0), requests),
                _fixed(_FIXED_FOR_BATCHES): arm(_fixed_scheduler(_FIXED_FOR_BATCHES), requests),
                _GOODPUT: arm("goodput", requests),
            }
            for requests in loads
        }
        for turn in range(rounds + 1):  # the first warms up
            most = max_new_tokens if turn else min(max_new_tokens, 8)
            for name, some in ids.items():
                progress(f"round {turn} of {rounds}: {name}")
                speeds = _race(singles, [[one] for one in some[:per_class]], texts, most, clock)
                _note(result.classes.setdefault(name, {}), speeds, bool(turn))
            for requests, arms in batches.items():
                progress(f"round {turn} of {rounds}: {requests} requests")
                speeds = _race(arms, _batches(ids, requests), texts, most, clock)
                _note(result.loads.setdefault(requests, {}), speeds, bool(turn))
    return result


class _AlwaysWrong(Drafter):
    """Guesses the same token over and over, one that no text has twice in a row."""

    def attach(self, target: TargetInfo) -> None:
        self._token = target.vocab_size - 1

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, limit in zip(builder.roots.tolist(), builder.limits, strict=True):
            builder.guess(root, [self._token] * limit.max_depth)


def _race(
    arms: Mapping[str, Engine],
    batches: Sequence[Sequence[list[int]]],
    texts: HeldTexts,
    tokens: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Decode the batches one after the other, all arms in turn: tokens a second of each."""
    seconds, emitted = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    order = list(arms)
    for prompts in batches:
        for name in order:
            for prompt in prompts:
                arms[name].add(prompt, texts.params(prompt, tokens))
            arms[name].step()  # reads the prompts
        while running := [name for name in order if arms[name].has_work]:
            for name in running:
                began = clock()
                report = arms[name].step()
                seconds[name] += clock() - began
                emitted[name] += report.emitted
            order = [*order[1:], order[0]]
    return {name: emitted[name] / seconds[name] for name in arms if seconds[name]}


def _note(all_speeds: Speeds, speeds: Mapping[str, float], counts: bool) -> None:
    for name, speed in speeds.items() if counts else ():
        all_speeds.setdefault(name, []).append(speed)


def _by_class(prompts: Sequence[Prompt], per_class: int, most: int) -> dict[str, list[Prompt]]:
    """The prompts of each class: as many as are asked for, or as `most` requests at once need."""
    needed = max(per_class, -(-most // len(CLASSES)))
    chosen = {
        name: [prompt for prompt in prompts if prompt.category == category][:needed]
        for name, category in CLASSES.items()
    }
    for name, some in chosen.items():
        if len(some) < per_class:
            raise ConfigError(
                f"bench schedulers: expected {per_class} prompts of category {CLASSES[name]!r}, got "
                f"{len(some)}; lower --limit-per-class or add some"
            )
    return chosen


def _mixed(ids: Mapping[str, Sequence[list[int]]], count: int) -> list[list[int]]:
    """As many prompts of all classes in turn; the first ones again if there are too few."""
    mixed = [prompt for some in zip_longest(*ids.values()) for prompt in some if prompt]
    return list(islice(chain.from_iterable([mixed] * count), count))


def _batches(ids: Mapping[str, Sequence[list[int]]], requests: int) -> list[list[list[int]]]:
    """Prompts to decode so many at once, one batch after the other, until each class had its turn."""
    batches = -(-len(ids) // requests)
    mixed = _mixed(ids, batches * requests)
    return [mixed[i * requests : (i + 1) * requests] for i in range(batches)]


def _encode(pipeline: Pipeline, prompt: Prompt) -> list[int]:
    return pipeline.encode([{"role": "user", "content": prompt.turns[0]}])[-_LONGEST_PROMPT:]


def _fixed(depth: int) -> str:
    return f"K={depth}"


def _fixed_scheduler(depth: int) -> str:
    return f"fixed(max_nodes={depth}, max_depth={depth}, max_width=1)"


def _ratios(speeds: Speeds, ours: str, theirs: str) -> list[float]:
    return [a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True)]


def _ratio(speeds: Speeds, ours: str, theirs: str) -> float:
    return statistics.median(_ratios(speeds, ours, theirs))


def _medians(speeds: Speeds) -> dict[str, float]:
    return {name: statistics.median(rounds) for name, rounds in speeds.items()}


def _table(first: str, rows: Mapping[str, Speeds], last: str, ratios: Sequence[float]) -> str:
    """Speeds against plain decoding in Markdown, and one more column."""
    arms = list(dict.fromkeys(chain.from_iterable(rows.values())))
    lines = [
        f"| {' | '.join([first, *arms, last])} |",
        f"|---|{'---:|' * (len(arms) + 1)}",
    ]
    for (name, speeds), ratio in zip(rows.items(), ratios, strict=True):
        cells = [f"{_ratio(speeds, arm, _PLAIN):.2f}x" for arm in arms]
        lines.append(f"| {' | '.join([name, *cells, f'{ratio:.3f}'])} |")
    return "\n".join(lines)


def plot_schedulers(bench: SchedulersBench, path: Path) -> None:
    """Draw speeds against plain decoding, by class and by load, as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure("bench schedulers", 11, 4)
    left, right = figure.subplots(1, 2)
    _draw(left, bench.classes)
    _draw(right, {f"{requests} requests": speeds for requests, speeds in bench.loads.items()})
    left.set(ylabel="speed against plain decoding", title="one request at a time")
    right.set(title="several at once")
    figure.savefig(path, format="png", dpi=150)


def _draw(axes: Any, groups: Mapping[str, Speeds]) -> None:
    arms = list(dict.fromkeys(chain.from_iterable(groups.values())))
    for place, arm in enumerate(arms):
        heights = [_ratio(speeds, arm, _PLAIN) for speeds in groups.values()]
        offsets = [group + 0.8 * place / len(arms) for group in range(len(groups))]
        axes.bar(offsets, heights, 0.8 / len(arms), align="edge", label=arm)
    axes.set_xticks([group + 0.4 for group in range(len(groups))], list(groups))
    axes.legend(fontsize="x-small")
