"""specfw: pluggable speculative decoding that never changes the target model's law.

Names are imported when first used, so that `import specfw` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specfw.version import __version__

if TYPE_CHECKING:
    from specfw.config import PipelineConfig as PipelineConfig
    from specfw.pipeline import Pipeline as Pipeline
    from specfw.types import Output as Output
    from specfw.types import Piece as Piece
    from specfw.types import SamplingParams as SamplingParams
    from specfw.types import SpeculationParams as SpeculationParams

_HOME = {
    "Output": "specfw.types",
    "Piece": "specfw.types",
    "Pipeline": "specfw.pipeline",
    "PipelineConfig": "specfw.config",
    "SamplingParams": "specfw.types",
    "SpeculationParams": "specfw.types",
}

__all__ = [
    "Output",
    "Piece",
    "Pipeline",
    "PipelineConfig",
    "SamplingParams",
    "SpeculationParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specfw' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
