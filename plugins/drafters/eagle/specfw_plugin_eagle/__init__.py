"""The drafter `eagle`: EAGLE, EAGLE-2 and EAGLE-3 heads, which draft from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from specfw.components import Component, Options
from specfw.contracts import API_VERSION, Drafter
from specfw.hookspecs import hookimpl

# torch is imported where a drafter is built, so that finding the plugin stays quick.

__all__ = ["EagleOptions"]

specfw_api = API_VERSION

_ABOUT_CHECKPOINTS = {"layers", "layer_ids", "norm_before_residual", "rope_theta"}


class EagleOptions(Options):
    """Which head drafts, how much, and what its checkpoint leaves open."""

    path: str
    """The folder of a published head, or `untrained`: a random one, for tests and for measuring its cost."""
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

    @model_validator(mode="after")
    def _untrained_has_no_gaps(self) -> EagleOptions:
        given = sorted(self.model_fields_set & _ABOUT_CHECKPOINTS, reverse=True)
        if self.path == "untrained" and given:
            raise ValueError(f"an untrained head has no use for {', '.join(given)}; leave them out")
        return self


def _build(options: EagleOptions) -> Drafter:
    from specfw_plugin_eagle.checkpoints import Choices, read_checkpoint
    from specfw_plugin_eagle.drafter import EagleDrafter

    choices = Choices(
        layers=options.layers,
        layer_ids=options.layer_ids,
        norm_before_residual=options.norm_before_residual,
        rope_theta=options.rope_theta,
    )
    checkpoint = None if options.path == "untrained" else read_checkpoint(options.path, choices)
    return EagleDrafter(
        checkpoint,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        width=options.width,
        mode=options.mode,
    )


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "eagle": Component(
            _build,
            EagleOptions,
            "A head of one layer that continues the target's hidden states (EAGLE-1, -2 and -3).",
            example={"path": "untrained", "width": 2},
        )
    }
