"""The drafter `recycling`: trees of the tokens that the target itself ranked highest when it was last here.

Token recycling (Luo et al., 2408.08696) with one more token of context: the target's best tokens
after each scored node, refused ones included, are kept for the node's token and for the pair that it
makes with the token before. They come from the passes that are run anyway.
"""

from __future__ import annotations

from collections.abc import Mapping

from specfw.components import Component
from specfw.contracts import API_VERSION, Drafter, Trainer
from specfw.hookspecs import hookimpl
from specfw_plugin_recycling.drafter import RecyclingDrafter
from specfw_plugin_recycling.options import RecyclingOptions
from specfw_plugin_recycling.table import WarmTable
from specfw_plugin_recycling.training import TableTrainer, TableTrainerOptions

__all__ = ["RecyclingDrafter", "RecyclingOptions", "WarmTable"]

specfw_api = API_VERSION


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "recycling": Component(
            RecyclingDrafter,
            RecyclingOptions,
            "Trees of the tokens that the target ranked highest when it was last here.",
        )
    }


@hookimpl
def specfw_trainers() -> Mapping[str, Component[Trainer]]:
    return {
        "recycling": Component(
            TableTrainer,
            TableTrainerOptions,
            "A warm table from the target's own ranking of what could follow.",
        )
    }
