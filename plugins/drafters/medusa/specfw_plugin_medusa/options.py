"""The options of the drafter `medusa` and of its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from specfw.components import Options
from specfw.shipped import Shipped
from specfw.training import WeightsOptions
from specfw_plugin_medusa.trees import NodePath

__all__ = ["SHIPPED", "MedusaOptions", "MedusaTrainerOptions"]

SHIPPED = Shipped("specfw_plugin_medusa", "medusa")

_Weights = tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]


def _parents_first(paths: tuple[NodePath, ...]) -> tuple[NodePath, ...]:
    """The same nodes in the same order, but each parent before its children."""
    listed = set(paths)
    ordered: dict[NodePath, None] = {}
    for path in paths:
        for depth in range(1, len(path) + 1):
            if path[:depth] not in listed:
                raise ValueError(
                    f"the tree has the node {list(path)} but not its parent {list(path[:depth])}"
                )
            ordered[path[:depth]] = None
    return tuple(ordered)


class MedusaOptions(Options):
    """Which heads, and the shape of their tree: of `tree`, `accuracy` and `widths`, one at most."""

    path: Path | None = None
    """The checkpoint's folder, or the heads' file (`.pt`, `.bin` or `.safetensors`); `demo` means those
    that come with this plugin for the target `demo`."""
    untrained: Annotated[int, Field(ge=1)] | None = None
    """In place of `path`: so many heads as they are before training, which repeat the target's own
    prediction; for trials only."""
    mode: Literal["sampled", "point"] = "sampled"
    """`sampled` draws each child from its head's law under the request's settings; `point` takes each
    head's most likely tokens, as they are, whatever the settings."""
    max_nodes: Annotated[int, Field(ge=1)] = 7
    """Draft nodes for each request and step; of a larger tree, the first ones."""
    tree: (
        Annotated[
            tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)], ...],
            Field(min_length=1),
            AfterValidator(_parents_first),
        ]
        | None
    ) = None
    """The nodes as paths of ranks, the most useful first: `[[0], [0, 0], [1]]`."""
    accuracy: Annotated[tuple[_Weights, ...], Field(min_length=1)] | None = None
    """For each head how often its best token, its second and so on were right, as measured; the tree
    of those `max_nodes` nodes that are then kept most often."""
    widths: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None = None
    """For each head how many children a node of its depth gets at most, each rank and each further
    depth counting half of the one before; unless a shape is given, as many as there is room for."""

    other_target: bool = False
    """Whether heads may be used that were trained for another target."""

    @model_validator(mode="after")
    def _one_of_each(self) -> MedusaOptions:
        if (self.path is None) == (self.untrained is None):
            raise ValueError("give either path or untrained")
        if sum(shape is not None for shape in (self.tree, self.accuracy, self.widths)) > 1:
            raise ValueError("give only one of tree, accuracy and widths")
        return self


class MedusaTrainerOptions(WeightsOptions):
    """How heads are trained."""

    heads: Annotated[int, Field(ge=1)] = 4
    """Heads, each for a token further ahead."""
    blocks: Annotated[int, Field(ge=1)] = 1
    """Residual blocks of each head."""
    vocab: Annotated[int, Field(ge=1)] = 8192
    """Tokens that are drafted: those that are most frequent in the texts."""
    start: Path | None = None
    """Published heads to go on from, or `demo`, the shipped ones; they must have no vocabulary projection of their own."""
