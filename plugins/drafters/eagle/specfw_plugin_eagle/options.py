"""The options of the drafter `eagle` and of its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from specfw.components import Options
from specfw.shipped import Shipped
from specfw.training import WeightsOptions

__all__ = ["SHIPPED", "EagleOptions", "EagleTrainerOptions"]

SHIPPED = Shipped("specfw_plugin_eagle", "eagle")

_ABOUT_CHECKPOINTS = {"layers", "layer_ids", "norm_before_residual", "rope_theta"}


class EagleOptions(Options):
    """Which head drafts, how much, and what its checkpoint leaves open."""

    path: str
    """The folder of a published head; `demo`, the one that comes with this plugin for the target `demo`; or
    `untrained`, a random one, for tests and for measuring its cost."""
    max_nodes: Annotated[int, Field(ge=1)] = 4
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path, each a pass of the head; None is `max_nodes`, and 6 at most in mode `point`."""
    width: Annotated[int, Field(ge=1)] = 1
    """Siblings below each node: 1 makes chains, more makes trees; in mode `point` also the nodes read a pass."""
    mode: Literal["sampled", "point"] = "sampled"
    """`sampled` draws from the head's laws; `point` guesses the most confident tree, as EAGLE-2 does."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Indices into `hidden_states` that the head reads; None takes the checkpoint's, or its family's."""
    layer_ids: Literal["auto", "before", "after"] = "auto"
    """Whether a layer id in the checkpoint means the state before that layer or after it."""
    norm_before_residual: bool | None = None
    """Whether the residual is the normed feature; None takes the checkpoint's word, or else no."""
    rope_theta: Annotated[float, Field(gt=0.0)] | None = None
    """Base of the rotary positions; None takes the checkpoint's, or else 10000."""

    other_target: bool = False
    """Whether a head may be used that was trained for another target."""

    @model_validator(mode="after")
    def _untrained_has_no_gaps(self) -> EagleOptions:
        given = sorted(self.model_fields_set & _ABOUT_CHECKPOINTS, reverse=True)
        if self.path == "untrained" and given:
            raise ValueError(f"an untrained head has no use for {', '.join(given)}; leave them out")
        return self


class EagleTrainerOptions(WeightsOptions):
    """How a head is trained."""

    vocab: Annotated[int, Field(ge=1)] = 8192
    """Tokens of the draft vocabulary: those that are most frequent in the texts."""
    rollout: Annotated[int, Field(ge=1)] = 3
    """Steps from each position, each on what the one before gave."""
    rollout_after: Annotated[int, Field(ge=0)] = 1000
    """Training steps before that; until then only the first step from each position is trained, which is cheaper."""
    texts: Annotated[int, Field(ge=1)] = 4
    """Texts in a batch."""
    rate: Annotated[float, Field(gt=0.0)] = 2e-3
    """The learning rate."""
    loss: Literal["kl", "tv", "both"] = "kl"
    """Distance from the target's law: Kullback-Leibler, total variation, or their sum."""
    train_output: bool = False
    """Whether the vocabulary projection is trained too; otherwise it stays the target's, which is cheaper."""
    inner: Annotated[int, Field(ge=1)] | None = None
    """Width of the MLP; None takes the target's."""
    start: Path | None = None
    """A published EAGLE-3 head to go on from, or `demo`, the shipped one, in place of one made of the target's parts."""
