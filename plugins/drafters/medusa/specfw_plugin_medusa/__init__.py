"""The drafter `medusa`: trees from Medusa heads, small networks that each predict one further token.

Medusa (Cai et al., 2401.10774): head i reads the target's last hidden state, after the final norm, at
the last position that went through the target, and predicts the token i + 1 places after the newest
one, whatever lies between. So each head's law is the same for all nodes of its depth, and a valid one.
"""

from __future__ import annotations

from collections.abc import Mapping

from specfw.components import Component
from specfw.contracts import API_VERSION, Drafter, Trainer
from specfw.hookspecs import hookimpl
from specfw_plugin_medusa.drafter import MedusaDrafter
from specfw_plugin_medusa.options import MedusaOptions, MedusaTrainerOptions
from specfw_plugin_medusa.trees import MedusaTree, NodePath

__all__ = ["MedusaDrafter", "MedusaOptions", "MedusaTree", "NodePath"]

specfw_api = API_VERSION


def _build_trainer(options: MedusaTrainerOptions) -> Trainer:
    from specfw_plugin_medusa.training import MedusaTrainer

    return MedusaTrainer(options)


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "medusa": Component(
            MedusaDrafter,
            MedusaOptions,
            "Trees from Medusa heads on the target's last hidden state.",
            example={"untrained": 2, "max_nodes": 3},
        )
    }


@hookimpl
def specfw_trainers() -> Mapping[str, Component[Trainer]]:
    return {
        "medusa": Component(
            _build_trainer,
            MedusaTrainerOptions,
            "Medusa heads that share the target's vocabulary projection.",
        )
    }
