"""The drafter `early-exit`: some of the target's own layers, then its own norm and head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from specfw.components import Component, Options
from specfw.contracts import API_VERSION, Drafter, Trainer
from specfw.hookspecs import hookimpl
from specfw.shipped import Shipped
from specfw.training import WeightsOptions

# torch is imported where a drafter is built, so that finding the plugin stays quick.

__all__ = ["SHIPPED", "AdapterTrainerOptions", "EarlyExitOptions"]

specfw_api = API_VERSION

SHIPPED = Shipped("specfw_plugin_early_exit", "early-exit", "adapter.safetensors")


class EarlyExitOptions(Options):
    """Which of the target's layers draft, and how much."""

    layer: Annotated[int, Field(ge=1)] | None = None
    """Leave the target after so many layers; with `skip`, none is all of them."""
    skip: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Layers to leave out, counted from 0; the first one cannot be."""
    adapter: Path | None = None
    """A trained exit adapter for `layer`, a `.safetensors` file, or `demo`, the one that comes with this
    plugin for the target `demo`; without, the target's head reads the exit as it is."""
    other_target: bool = False
    """Use an adapter that was trained for another target of the same width, too."""
    max_nodes: Annotated[int, Field(ge=1)] = 4
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path, each a pass through the draft layers; None leaves it to `max_nodes`."""
    width: Annotated[int, Field(ge=1)] = 1
    """Siblings to draw below each node: 1 makes chains, more makes trees."""

    @model_validator(mode="after")
    def _some_layers(self) -> EarlyExitOptions:
        if self.layer is None and not self.skip:
            raise ValueError("give layer, or skip, or both")
        if self.layer is not None and any(layer >= self.layer for layer in self.skip):
            raise ValueError(f"skip only layers below {self.layer}, after which the target is left")
        if self.adapter is not None and (self.layer is None or self.skip):
            raise ValueError("an adapter is for one exit layer, so give layer and skip nothing")
        return self


class AdapterTrainerOptions(WeightsOptions):
    """How an exit adapter is trained."""

    layer: Annotated[int, Field(ge=1)] | None = None
    """Layers of the target before the exit; None takes a third of them."""
    rank: Annotated[int, Field(ge=1)] = 128
    """Width of the adapter's middle."""
    texts: Annotated[int, Field(ge=1)] = 4
    """Texts in a batch."""
    places: Annotated[int, Field(ge=1)] = 256
    """Places of a batch at which laws are compared, at most."""


def _build(options: EarlyExitOptions) -> Drafter:
    from specfw_plugin_early_exit.adapter import ExitAdapter
    from specfw_plugin_early_exit.drafter import EarlyExitDrafter

    adapter = None if options.adapter is None else ExitAdapter.load(SHIPPED.path(options.adapter))
    return EarlyExitDrafter(
        options.layer,
        skip=options.skip,
        adapter=adapter,
        other_target=options.other_target,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        width=options.width,
    )


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "early-exit": Component(
            _build,
            EarlyExitOptions,
            "Some of the target's own layers, which verification does not run again.",
            example={"layer": 1, "width": 2},
        )
    }


def _build_trainer(options: AdapterTrainerOptions) -> Trainer:
    from specfw_plugin_early_exit.training import AdapterTrainer

    return AdapterTrainer(options)


@hookimpl
def specfw_trainers() -> Mapping[str, Component[Trainer]]:
    return {
        "early-exit": Component(
            _build_trainer, AdapterTrainerOptions, "An exit adapter for one early layer."
        )
    }
