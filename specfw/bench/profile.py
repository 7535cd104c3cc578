"""`specfw profile`: seconds of a target pass by rows, and the draft depths that follow from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specfw.bench.plots import new_figure
from specfw.costs import CostCurve, best_depth, expected_tokens, speedup
from specfw.errors import ConfigError
from specfw.runner import KVMemory, ModelRunner, Segment

__all__ = ["ACCEPTANCES", "Profile", "plot_profile", "profile_target"]

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""The acceptance rates for which the best depth is told."""
_EXAMPLE = (0.8, 4)
"""An acceptance and a depth, to check the formula by hand: (1 - 0.8^5) / 0.2."""
_BLOCK_SIZE = 16


@dataclass(slots=True)
class Profile:
    """What was measured, and what follows for drafts of a given cost."""

    target: str
    dtype: str
    context: int
    """Tokens before the rows."""
    draft_cost: float
    """Seconds of one draft token, relative to a pass over one row."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By rows, every measurement."""

    @property
    def curve(self) -> CostCurve:
        """The medians as schedulers see them."""
        return CostCurve(self.medians())

    def medians(self) -> dict[int, float]:
        """Seconds by rows."""
        return {rows: statistics.median(several) for rows, several in self.seconds.items()}

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw profile --json`."""
        curve = self.curve
        acceptance, depth = _EXAMPLE
        return {
            "target": self.target,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "context": self.context,
            "draft_cost": self.draft_cost,
            "curve": [
                {"rows": rows, "seconds": seconds} for rows, seconds in self.medians().items()
            ],
            "best": [
                {
                    "acceptance": rate,
                    "depth": (best := best_depth(rate, self.draft_cost, curve)),
                    "tokens": expected_tokens(rate, best),
                    "speedup": speedup(rate, best, self.draft_cost, curve),
                }
                for rate in ACCEPTANCES
            ],
            "expected_tokens": {
                "acceptance": acceptance,
                "depth": depth,
                "tokens": expected_tokens(acceptance, depth),
            },
        }


def profile_target(
    runner: ModelRunner,
    rows: Sequence[int],
    *,
    name: str = "target",
    context: int = 128,
    repeats: int = 5,
    draft_cost: float = 0.05,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Time passes over chains of `rows` tokens behind a context; sizes take turns, after a warm-up.

    Raises:
        ConfigError: context and rows together exceed the model's longest sequence.
    """
    longest = context + max(rows)
    if longest > runner.max_length:
        raise ConfigError(
            f"profile: expected context and rows of at most {runner.max_length} tokens together, which is "
            f"the model's longest sequence, got {longest}; lower one of them"
        )
    profile = Profile(name, str(runner.dtype).removeprefix("torch."), context, draft_cost)
    run = _Passes(runner, context, longest)
    for turn in range(repeats + 1):  # the first warms up
        for count in rows:
            progress(f"round {turn} of {repeats}: {count} rows")
            began = clock()
            run(count)
            if turn:
                profile.seconds.setdefault(count, []).append(clock() - began)
    return profile


class _Passes:
    """Passes over chains behind the same context, each of which leaves no trace."""

    def __init__(self, runner: ModelRunner, context: int, longest: int) -> None:
        self._runner = runner
        self._memory = KVMemory(num_blocks=-(-longest // _BLOCK_SIZE) + 1, block_size=_BLOCK_SIZE)
        self._store = runner.new_store(self._memory.num_slots)
        tokens = (np.arange(context) % runner.vocab_size).tolist()
        self._sequence = self._memory.open(tokens)
        with self._memory.transaction() as transaction:
            transaction.reserve(self._sequence, context)
            self._pass(context)
            transaction.commit(self._sequence, tokens, context)

    def __call__(self, rows: int) -> None:
        with self._memory.transaction() as transaction:
            transaction.reserve(self._sequence, rows)
            self._pass(rows)

    def _pass(self, rows: int) -> None:
        chain = np.arange(rows)
        segment = Segment(self._sequence, chain % self._runner.vocab_size, chain - 1, chain)
        logits = self._runner.run(self._store, [segment]).logits
        float(logits[-1, 0])  # waits for the device


def plot_profile(profile: Profile, path: Path) -> None:
    """Draw the curve as a PNG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figure = new_figure("profile", 6, 4)
    axes = figure.subplots()
    for rows, several in profile.seconds.items():
        axes.plot([rows] * len(several), [1000 * s for s in several], ".", color="0.7")
    points = profile.curve.points()
    axes.plot(list(points), [1000 * seconds for seconds in points.values()], "-o")
    axes.set(
        xlabel="rows", ylabel="milliseconds", title=f"{profile.target}, {profile.dtype}", ylim=0
    )
    figure.savefig(path, format="png", dpi=150)
