"""Training drafters: texts that the target writes itself, and what every training run shares.

Trainers in plugins import what they need from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specfw.lazy import lazy_names

if TYPE_CHECKING:
    from specfw.training.files import whole_file
    from specfw.training.run import TrainingRun
    from specfw.training.texts import Shard, Texts

__all__ = ["Shard", "Texts", "TrainingRun", "whole_file"]

__getattr__ = lazy_names(
    __name__,
    {
        "Shard": "specfw.training.texts",
        "Texts": "specfw.training.texts",
        "TrainingRun": "specfw.training.run",
        "whole_file": "specfw.training.files",
    },
)
