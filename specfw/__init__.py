"""specfw: pluggable speculative decoding that never changes the target model's law.

Names are imported when first used, so that `import specfw` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specfw.lazy import lazy_names
from specfw.version import __version__

if TYPE_CHECKING:
    from specfw.config import PipelineConfig
    from specfw.pipeline import Pipeline
    from specfw.types import Output, Piece, SamplingParams, SpeculationParams

__all__ = [
    "Output",
    "Piece",
    "Pipeline",
    "PipelineConfig",
    "SamplingParams",
    "SpeculationParams",
    "__version__",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Output": "specfw.types",
        "Piece": "specfw.types",
        "Pipeline": "specfw.pipeline",
        "PipelineConfig": "specfw.config",
        "SamplingParams": "specfw.types",
        "SpeculationParams": "specfw.types",
    },
)
