"""Options that all trainers with weights share; nothing here imports torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specfw.components import Options

__all__ = ["WeightsOptions"]


class WeightsOptions(Options):
    """How weights are trained that learn from the target's hidden states."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Training steps in all; None leaves it to the time."""
    texts: Annotated[int, Field(ge=1)] = 8
    """Texts in a batch."""
    rate: Annotated[float, Field(gt=0.0)] = 1e-3
    """The learning rate."""
    feature_bytes: Annotated[int, Field(ge=0)] = 16_000_000_000
    """Disk for the target's hidden states; what does not fit is computed again for each batch."""
