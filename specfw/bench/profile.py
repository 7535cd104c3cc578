"""`specfw profile`: seconds of a target pass by rows, and the draft depths that follow from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specfw.bench.plots import new_figure
from specfw.costs import CostCurve, best_depth, expected_tokens, speedup
from specfw.engine.timing import time_passes
from specfw.runner import ModelRunner

__all__ = ["ACCEPTANCES", "Profile", "plot_profile", "profile_target"]

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""The acceptance rates for which the best depth is told."""
_EXAMPLE = (0.8, 4)
"""An acceptance and a depth, to check the formula by hand: (1 - 0.8^5) / 0.2."""


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
    profile = Profile(name, str(runner.dtype).removeprefix("torch."), context, draft_cost)
    profile.seconds = time_passes(runner, rows, context, repeats, clock, progress)
    return profile


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
