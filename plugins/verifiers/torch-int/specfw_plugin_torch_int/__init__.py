"""The target loader `torch-int`: integer weights on torch's own CPU kernels, which are fast at few rows.

Every scheme is batch-invariant: a row of a layer's output is bitwise the same, whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from specfw.components import Component
from specfw.contracts import API_VERSION, Quantization, TargetLoader
from specfw.hookspecs import hookimpl
from specfw.quantizing import QuantizingLoader, QuantizingOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["TorchIntLoader", "TorchIntOptions"]

specfw_api = API_VERSION

_ADVICE = "use the scheme w8a8, which takes any"
_SETTINGS = {
    "w8a8": ("int8 weights and activations", "an int8 product of quantised activations"),
    "w8a16": ("int8 weights", "multiplied as they are, quick up to 4 rows"),
    "w4a16": ("int4 weights in groups of 32", "multiplied as they are, quick up to 4 rows"),
}


class TorchIntOptions(QuantizingOptions):
    """Which model to quantise, and how."""

    scheme: Literal["w8a16", "w4a16", "w8a8"] = "w8a16"
    """Bits of weights and activations: those with 16 keep activations as they are, and slow down from 4
    rows on; `w8a8` costs about the same from 1 to 16 rows, but amplifies rounding elsewhere."""


class TorchIntLoader(QuantizingLoader):
    """Replaces linear layers with integer ones."""

    name = "torch-int"
    options: TorchIntOptions

    def quantization(self) -> Quantization:
        setting, kernel = _SETTINGS[self.options.scheme]
        return Quantization(self.name, setting, batch_invariant=True, kernel=kernel)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise self.refusal(
                "a model on cpu, where its kernels are",
                device.type,
                "set device='cpu', or use the target bitsandbytes or quanto",
            )

    def quantize(self, linear: nn.Linear) -> nn.Module:
        from specfw_plugin_torch_int.layers import SCHEMES

        layer = SCHEMES[self.options.scheme]
        if why := layer.misfit(linear):
            raise self.refusal(f"linear layers that {self.options.scheme} takes", why, _ADVICE)
        return layer(linear)


@hookimpl
def specfw_targets() -> Mapping[str, Component[TargetLoader]]:
    return {
        "torch-int": Component(
            TorchIntLoader,
            TorchIntOptions,
            "Another target in int8 or int4, on torch's CPU kernels.",
        )
    }
