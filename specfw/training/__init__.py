"""Training drafters: texts that the target writes itself, and what every training run shares.

Trainers in plugins import what they need from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specfw.lazy import lazy_names

if TYPE_CHECKING:
    from specfw.targets.transformers import quiet_transformers
    from specfw.training.batches import Batch, Batches, frequent_tokens
    from specfw.training.features import (
        Features,
        check_laws,
        final_norm,
        layer_number,
        target_logits,
    )
    from specfw.training.files import whole_file, whole_folder
    from specfw.training.options import WeightsOptions
    from specfw.training.run import TrainingRun
    from specfw.training.texts import Shard, Texts
    from specfw.training.weights import (
        TEXT_TOKENS,
        read_batches,
        room_for_weights,
        train_weights,
        trainable,
    )

__all__ = [
    "TEXT_TOKENS",
    "Batch",
    "Batches",
    "Features",
    "Shard",
    "Texts",
    "TrainingRun",
    "WeightsOptions",
    "check_laws",
    "final_norm",
    "frequent_tokens",
    "layer_number",
    "quiet_transformers",
    "read_batches",
    "room_for_weights",
    "target_logits",
    "train_weights",
    "trainable",
    "whole_file",
    "whole_folder",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Batch": "specfw.training.batches",
        "Batches": "specfw.training.batches",
        "Features": "specfw.training.features",
        "Shard": "specfw.training.texts",
        "Texts": "specfw.training.texts",
        "TEXT_TOKENS": "specfw.training.weights",
        "TrainingRun": "specfw.training.run",
        "WeightsOptions": "specfw.training.options",
        "read_batches": "specfw.training.weights",
        "room_for_weights": "specfw.training.weights",
        "train_weights": "specfw.training.weights",
        "trainable": "specfw.training.weights",
        "frequent_tokens": "specfw.training.batches",
        "check_laws": "specfw.training.features",
        "final_norm": "specfw.training.features",
        "layer_number": "specfw.training.features",
        "quiet_transformers": "specfw.targets.transformers",
        "target_logits": "specfw.training.features",
        "whole_file": "specfw.training.files",
        "whole_folder": "specfw.training.files",
    },
)
