"""What drafting costs and brings: measured seconds by rows, and the formulas for a constant acceptance.

Nothing here reads a clock; seconds come in. Leviathan et al., "Fast inference from transformers via
speculative decoding", arXiv 2211.17192, for the formulas.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import exp
from pathlib import Path
from statistics import fmean, median

import numpy as np

from specfw.contracts import Feedback, TargetInfo
from specfw.errors import ConfigError

__all__ = [
    "CostCurve",
    "Gain",
    "Pace",
    "StepCosts",
    "best_depth",
    "expected_tokens",
    "read_profile",
    "speedup",
]

_RECENT = 32
"""Measurements that count, for each bucket."""
_KNOWN = 3
"""Measurements that tell what a step takes."""
_LEVEL = 9
"""Measurements of which the level is the median."""
_STALE = 128
"""Steps after which the time of steps without drafts is measured anew: by drafts alone, a machine that became
slower is not to be told from drafts that became dearer."""
_EXACT = 16
"""Up to this many rows, each count has a bucket of its own."""
_BUCKETS_PER_DOUBLING = 4


class _Level:
    """The machine's speed of late: the median of what recent passes took against what was expected of them."""

    def __init__(self) -> None:
        self.now = 1.0
        self._recent: deque[float] = deque(maxlen=_LEVEL)

    def follow(self, seconds: float, expected: float) -> None:
        """Take in a pass."""
        if seconds > 0 and expected > 0:
            self._recent.append(seconds / expected)
        if len(self._recent) >= _KNOWN:
            self.now = median(self._recent)


class CostCurve:
    """Seconds as a function of a count, such as the rows of a pass: rising, learned while running.

    Measurements fall into buckets; medians of the recent ones make a curve, which is pooled where it
    would fall (isotonic regression). Between its points it is linear. Below the first it is constant,
    and beyond the last it rises as it does on average, so that what is unknown looks cheap and is tried.

    The machine's speed wanders, and counts that were last measured at another time would look too dear or
    too cheap beside the others. So measurements are kept relative to the level of their time, the median
    of what recent ones took against the curve. Curves of one machine share it.

    A profile says what was not measured yet, as many times dearer as what was measured nearby turned
    out to be: it was taken with one request, and passes over several cost more.
    """

    def __init__(
        self, profile: Mapping[int, float] | None = None, beside: CostCurve | None = None
    ) -> None:
        """Start with seconds by count, each of them a median, that were measured before.

        Args:
            profile: seconds by count.
            beside: another curve of the same machine, whose level counts for this one too; measurements of this
                one do not move it, or what got dearer here would make everything there look dear.
        """
        self._profile = dict(sorted((profile or {}).items()))
        self._level: _Level = beside._level if beside else _Level()
        self._leads = beside is None
        self._buckets: dict[int, deque[tuple[int, float]]] = {}
        self._middles: dict[int, tuple[float, float]] = {}
        """Mean count and median of each bucket, relative to the level."""
        self._changed: set[int] = set()
        self._curve: tuple[list[float], list[float]] = _rising_curve(
            [(float(count), seconds, 1.0) for count, seconds in self._profile.items()]
        )

    def add(self, count: int, seconds: float) -> None:
        """Take in a measurement."""
        if self._leads and self.measurements(count) >= _KNOWN:
            self._level.follow(seconds, self._relative(count))
        bucket = _bucket(count)
        measured = self._buckets.setdefault(bucket, deque(maxlen=_RECENT))
        measured.append((count, seconds / self._level.now))
        self._changed.add(bucket)

    def measurements(self, count: int) -> int:
        """How often a count was measured that is not told apart from this one."""
        return len(self._buckets.get(_bucket(count), ()))

    def measured(self, count: int) -> bool:
        """Whether counts at most a third away were measured often enough for others to be compared with them."""
        near = (
            len(measured)
            for measured in self._buckets.values()
            if 3 * abs(measured[-1][0] - count) <= count
        )
        return sum(near) >= _KNOWN

    def __call__(self, count: float) -> float:
        """Seconds for a count; 0 before any measurement."""
        return self._level.now * self._relative(count)

    def _relative(self, count: float) -> float:
        counts, seconds = self._points()
        if not counts:
            return 0.0
        place = bisect_left(counts, count)
        if place == 0:
            return seconds[0]
        if place == len(counts):
            span = counts[-1] - counts[0]
            slope = (seconds[-1] - seconds[0]) / span if span else 0.0
            return seconds[-1] + slope * (count - counts[-1])
        share = (count - counts[place - 1]) / (counts[place] - counts[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    @property
    def least(self) -> float:
        """The smallest count of which something is known; 0 if there is none."""
        counts, _ = self._points()
        return counts[0] if counts else 0.0

    def points(self) -> dict[float, float]:
        """The curve's own points: count -> seconds."""
        return {count: self._level.now * one for count, one in zip(*self._points(), strict=True)}

    def _points(self) -> tuple[list[float], list[float]]:
        if self._changed:
            for bucket in self._changed:
                counts, seconds = zip(*self._buckets[bucket], strict=True)
                self._middles[bucket] = fmean(counts), median(seconds)
            self._changed.clear()
            measured = self._measured()
            self._curve = _rising_curve([*measured, *self._expected(measured)])
        return self._curve

    def _measured(self) -> list[tuple[float, float, float]]:
        """Count, seconds and weight of each bucket; with a profile, of those that were measured often enough."""
        least = _KNOWN if self._profile else 1
        sizes = {bucket: len(measured) for bucket, measured in self._buckets.items()}
        return [
            (*self._middles[bucket], float(size)) for bucket, size in sizes.items() if size >= least
        ]

    def _expected(
        self, measured: list[tuple[float, float, float]]
    ) -> list[tuple[float, float, float]]:
        """The same of the profile's counts that are not among those."""
        if not measured or not self._profile:
            return [(float(count), seconds, 1.0) for count, seconds in self._profile.items()]
        known = {_bucket(round(count)) for count, _, _ in measured}
        counts, seconds, _ = zip(*sorted(measured), strict=True)
        times = np.divide(
            seconds, np.interp(counts, list(self._profile), list(self._profile.values()))
        )
        return [
            (float(count), before * float(np.interp(count, counts, times)), 1.0)
            for count, before in self._profile.items()
            if _bucket(count) not in known
        ]


def _rising_curve(points: list[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """The closest curve that never falls, from counts, seconds and weights in any order."""
    counts, seconds, weights = (
        (list(one) for one in zip(*sorted(points), strict=True)) if points else ([], [], [])
    )
    return counts, _rising(seconds, weights)


def _bucket(count: int) -> int:
    if count <= _EXACT:
        return count
    return _EXACT + bisect_right(_EDGES, count)


_EDGES = [int(_EXACT * 2 ** (i / _BUCKETS_PER_DOUBLING)) + 1 for i in range(64)]
"""The least count of each bucket beyond the exact ones."""


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """The closest rising sequence: neighbours that fall are pooled to their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, heavy, many = pools.pop()
            total = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / total, total, many + pool[2])
        pools.append(pool)
    return [mean for mean, _, many in pools for _ in range(many)]


class StepCosts:
    """What steps cost: the target pass by its rows, drafting by the most nodes of one request.

    Passes with drafts have a curve of their own. At the same rows they cost more than passes in which each of
    more requests has one: rows of one request attend to each other, and drafts are verified.
    """

    def __init__(self, passes: Mapping[int, float] | None = None) -> None:
        """Start with a profile of the target pass, seconds by rows."""
        self._profile(passes)
        self.drafting = CostCurve()
        self.drafting.add(0, 0.0)
        self._steps = 0
        self._plain_steps: dict[int, int] = {}
        """The last step without drafts, by its rows."""

    def _profile(self, passes: Mapping[int, float] | None) -> None:
        self.plain = CostCurve(passes)
        self.drafted = CostCurve(passes, beside=self.plain)

    def learn_of(self, target: TargetInfo, profile: str | None) -> None:
        """Take in what is known before the first step.

        Args:
            target: may know what its passes take.
            profile: `auto` to ask it, a file with the output of `specfw profile --json`, or None to
                learn while running only.

        Raises:
            ConfigError: the file cannot be read or is something else.
        """
        if profile == "auto":
            self._profile(target.pass_seconds() if target.pass_seconds else None)
        elif profile is not None:
            self._profile(read_profile(profile))

    def measured(self, rows: int) -> bool:
        """Whether steps of so many rows, none of them drafts, were timed often and lately enough to compare with."""
        lately = (
            self._steps - step < _STALE and 3 * abs(count - rows) <= rows
            for count, step in self._plain_steps.items()
        )
        return self.plain.measured(rows) and any(lately)

    def observe(self, feedback: Feedback) -> None:
        """Learn from a step's phases."""
        if not _is_timed(feedback):
            return
        draft = feedback.seconds.get("draft", 0.0)
        most = max(feedback.drafted, default=0)
        curve = self.drafted if most else self.plain
        curve.add(feedback.rows, sum(feedback.seconds.values()) - draft)
        self._steps += 1
        if most:
            self.drafting.add(most, draft)
        else:
            self._plain_steps[feedback.rows] = self._steps

    def extra(self, feedback: Feedback) -> float:
        """What drafting took more in a step, in the time of the step without it."""
        nodes = sum(feedback.drafted)
        rows = feedback.rows - nodes
        plain = self.plain(rows)
        more = self._pass(rows, nodes) - plain
        return (more + feedback.seconds.get("draft", 0.0)) / plain if plain else 0.0

    def __call__(self, rows: int, nodes: int, most_nodes: int) -> float:
        """Seconds of a step.

        Without any measurement, every step costs the same.

        Args:
            rows: of the target pass without drafts.
            nodes: of all drafts.
            most_nodes: of one request, at most.
        """
        return (self._pass(rows, nodes) + self.drafting(most_nodes)) or 1.0

    def _pass(self, rows: int, nodes: int) -> float:
        """Seconds of a target pass; with drafts at least as many as without."""
        plain = self.plain(rows)
        if not nodes:
            return plain
        least = self.drafted.least
        if (
            rows + nodes < least
        ):  # on the way from a pass without drafts to the smallest that is known
            return plain + nodes / (least - rows) * max(0.0, self.drafted(least) - plain)
        return max(plain, self.drafted(rows + nodes))


def _is_timed(feedback: Feedback) -> bool:
    """Whether a step teaches what steps take: one without phases does not, nor one that reads prompts, whose rows
    have other prices."""
    extra = sum(len(rows.tokens) for rows in feedback.extra)
    reads = feedback.rows > len(feedback.requests) + sum(feedback.drafted) + extra
    return bool(feedback.seconds) and feedback.rows > 0 and not reads


class Gain:
    """Tokens a second of steps with drafts, relative to steps without, as they turned out.

    Estimates of acceptance and of costs err, and a scheduler takes what they flatter. Here nothing is estimated:
    what was emitted and what it took are summed, both kinds of steps fading with the requests they served.
    """

    _MEMORY = 256.0
    """Requests served after which a step counts 1/e."""
    _LEAST = 48.0
    """Requests served by steps with drafts before they are judged."""
    _STEPS = 3.0, 32.0
    """Steps with drafts between two without, at first and later; more of them if much is gained."""

    def __init__(self) -> None:
        self._plain, self._drafted = _Served(self._MEMORY / 2), _Served(self._MEMORY)
        self._since_plain = 0

    def observe(self, feedback: Feedback, costs: StepCosts) -> None:
        """Learn from a step; its time counts in that of a step without drafts for as many requests."""
        if not _is_timed(feedback) or not feedback.requests:
            return
        expected = costs.plain(feedback.rows - sum(feedback.drafted))
        drafts = any(feedback.drafted)
        self._since_plain = self._since_plain + 1 if drafts else 0
        if expected:
            emitted = sum(map(len, feedback.emitted))
            seconds = sum(feedback.seconds.values()) / expected
            (self._drafted if drafts else self._plain).add(len(feedback.requests), emitted, seconds)

    @property
    def now(self) -> float | None:
        """The gain; None while too few steps of either kind tell it."""
        if not self._plain.steps or self._drafted.requests < self._LEAST:
            return None
        return self._drafted.rate / self._plain.rate

    @property
    def wants_plain(self) -> bool:
        """Whether a step without drafts is due, to compare with."""
        first, later = self._STEPS
        seldom = max(1.0, 4 * ((self.now or 1.0) - 1))
        return self._since_plain >= seldom * min(later, first * self._plain.steps)


class _Served:
    """Sums over steps of one kind."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self.steps = 0
        self.requests = self._tokens = self._time = 0.0

    def add(self, requests: int, tokens: int, time: float) -> None:
        keeps = exp(-requests / self._memory)
        self.steps += 1
        self.requests = keeps * self.requests + requests
        self._tokens = keeps * self._tokens + tokens
        self._time = keeps * self._time + requests * time

    @property
    def rate(self) -> float:
        """Tokens of a request in the time of a step without drafts."""
        return self._tokens / self._time


class Pace:
    """Tokens that a request gets in the time of a step without drafts, of late; plain decoding gets 1.

    It is the price of time: what a draft takes more is worth taking if it brings more tokens than
    everything brings in that time in the mean.
    """

    def __init__(self, memory: float = 32.0) -> None:
        """Start without evidence; `memory` in steps, after which it counts 1/e."""
        self._keeps = 1 - 1 / memory
        self._tokens = self._time = 0.0

    def observe(self, feedback: Feedback, costs: StepCosts) -> None:
        """Learn from a step."""
        if feedback.requests:
            emitted = sum(map(len, feedback.emitted)) / len(feedback.requests)
            self._tokens = self._keeps * self._tokens + emitted
            self._time = self._keeps * self._time + 1 + costs.extra(feedback)

    @property
    def now(self) -> float:
        """At least 1, for drafting can be left."""
        return max(1.0, self._tokens / self._time) if self._time else 1.0


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens that a step with a chain of `depth` emits in the mean: (1 - a^(K+1)) / (1 - a)."""
    return sum(acceptance**place for place in range(depth + 1))


def speedup(
    acceptance: float,
    depth: int,
    draft_cost: float,
    pass_cost: Callable[[int], float] = lambda rows: 1.0,
) -> float:
    """Tokens a second relative to plain decoding.

    Args:
        acceptance: the chance that a draft token is kept, the same at every depth.
        depth: draft tokens in a chain.
        draft_cost: seconds of one draft token, relative to a pass over one row.
        pass_cost: seconds of a target pass by rows, in any unit.
    """
    relative = pass_cost(depth + 1) / pass_cost(1)
    return expected_tokens(acceptance, depth) / (draft_cost * depth + relative)


def best_depth(
    acceptance: float,
    draft_cost: float,
    pass_cost: Callable[[int], float] = lambda rows: 1.0,
    depths: Iterable[int] = range(33),
) -> int:
    """The depth of the largest `speedup`; the smallest one of equals."""
    return max(
        depths, key=lambda depth: (speedup(acceptance, depth, draft_cost, pass_cost), -depth)
    )


def read_profile(path: str | os.PathLike[str]) -> dict[int, float]:
    """Seconds by rows from what `specfw profile --json` printed.

    Raises:
        ConfigError: the file cannot be read or is something else.
    """
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
        return {int(point["rows"]): float(point["seconds"]) for point in read["curve"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"profile {os.fspath(path)!r}: expected the output of 'specfw profile --json', got "
            f"{type(error).__name__}: {error}; write it anew"
        ) from error
