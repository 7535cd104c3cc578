"""Figures of measurements as PNG files; they need the extra `plot`."""

from __future__ import annotations

from typing import Any

from specfw.errors import ConfigError

__all__ = ["new_figure"]


def new_figure(who: str, width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches.

    Args:
        who: the command that draws, for the message.
        width, height: in inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"{who}: expected matplotlib to be installed to draw a PNG, but it is not; "
            "install specfw[plot]"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")
