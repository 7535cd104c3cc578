"""The options of the drafter `recycling`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from specfw.components import Options
from specfw.shipped import Shipped

__all__ = ["SHIPPED", "RecyclingOptions"]

SHIPPED = Shipped("specfw_plugin_recycling", "recycling", "table.safetensors")


def _best_first(weights: tuple[float, ...]) -> tuple[float, ...]:
    if list(weights) != sorted(weights, reverse=True):
        raise ValueError("weights must not rise, for the first is the best token's")
    return weights


_Weights = Annotated[
    tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...],
    Field(min_length=1),
    AfterValidator(_best_first),
]
"""Weights by rank, from the best one down."""


class RecyclingOptions(Options):
    """What is remembered, and how the tree is shaped."""

    k: Annotated[int, Field(ge=1)] = 8
    """Successors that are remembered for each context."""
    max_nodes: Annotated[int, Field(ge=1)] = 7
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path; None leaves it to `max_nodes`."""
    pairs: bool = True
    """Whether successors of pairs of tokens are remembered too, and come before those of single ones."""
    pair_weights: _Weights | None = None
    """How likely the successors of a known pair are, the best first; those beyond count as the last. None
    takes what a warm table measured for its own, and 0.6, 0.12, 0.06, 0.03 otherwise."""
    rank_weights: _Weights | None = None
    """The same where only the single token is known; otherwise 0.25, 0.1, 0.08, 0.04, 0.03."""
    across_requests: bool = False
    """Whether what one request teaches serves the others too, and those that come later."""
    max_entries: Annotated[int, Field(ge=1)] = 100_000
    """Contexts that are remembered, by each request or, with `across_requests`, in all; of more, those
    used longest ago are forgotten."""
    file: Path | None = None
    """A warm table (safetensors), as `specfw train recycling` or `WarmTable.save` writes it; read only.
    `demo` is the one that comes with this plugin for the target `demo`."""
    other_target: bool = False
    """Whether a table may be used that was trained for another target."""
