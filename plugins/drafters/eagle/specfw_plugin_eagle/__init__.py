"""The drafter `eagle`: EAGLE, EAGLE-2 and EAGLE-3 heads, which draft from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Mapping

from specfw.components import Component
from specfw.contracts import API_VERSION, Drafter, Trainer
from specfw.hookspecs import hookimpl
from specfw_plugin_eagle.options import SHIPPED, EagleOptions, EagleTrainerOptions

# torch is imported where a drafter is built, so that finding the plugin stays quick.

__all__ = ["EagleOptions"]

specfw_api = API_VERSION


def _build(options: EagleOptions) -> Drafter:
    from specfw_plugin_eagle.checkpoints import Choices, read_checkpoint
    from specfw_plugin_eagle.drafter import EagleDrafter

    choices = Choices(
        layers=options.layers,
        layer_ids=options.layer_ids,
        norm_before_residual=options.norm_before_residual,
        rope_theta=options.rope_theta,
    )
    untrained = options.path == "untrained"
    checkpoint = None if untrained else read_checkpoint(SHIPPED.path(options.path), choices)
    return EagleDrafter(
        checkpoint,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        width=options.width,
        mode=options.mode,
        other_target=options.other_target,
    )


def _build_trainer(options: EagleTrainerOptions) -> Trainer:
    from specfw_plugin_eagle.training import EagleTrainer

    return EagleTrainer(options)


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


@hookimpl
def specfw_trainers() -> Mapping[str, Component[Trainer]]:
    return {
        "eagle": Component(
            _build_trainer,
            EagleTrainerOptions,
            "An EAGLE-3 head in speculators' layout, from the target's hidden states.",
        )
    }
