"""The target loader `quanto`: int8, int4, int2 or float8 weights through Optimum's quanto."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from shutil import which
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from specfw.components import Component
from specfw.contracts import API_VERSION, Quantization, TargetLoader
from specfw.hookspecs import hookimpl
from specfw.quantizing import QuantizingLoader, QuantizingOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["QuantoLoader", "QuantoOptions"]

specfw_api = API_VERSION

_INT8_INPUTS = 16


class QuantoOptions(QuantizingOptions):
    """Which model to quantise, and how."""

    weights: Literal["int8", "int4", "int2", "float8"] = "int8"
    """What weights become: a scale for each row of int8 and float8, for each 128 weights of int4 and int2."""
    activations: Literal["none", "int8", "float8"] = "none"
    """Only `none` runs: quanto gives all rows of a pass one scale."""


class QuantoLoader(QuantizingLoader):
    """Replaces linear layers with quanto's."""

    name = "quanto"
    packages: ClassVar[Mapping[str, str]] = {"optimum.quanto": "optimum-quanto"}
    options: QuantoOptions

    def quantization(self) -> Quantization:
        return Quantization(
            self.name, f"{self.options.weights} weights", kernel="dequantised before each product"
        )

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if self.options.activations != "none":
            raise self.refusal(
                "activations='none'",
                repr(self.options.activations),
                "quanto calibrates one scale for a whole pass, so that a text would depend on what else"
                " runs; leave it out, or use the target torch-int, which quantises each row by itself",
            )

        if device.type == "cuda" and self.options.weights in ("int4", "int2") and not which("nvcc"):
            raise self.refusal(
                f"the CUDA compiler nvcc, with which quanto builds its {self.options.weights} kernels",
                "no nvcc",
                "install it, or use weights='int8' or the target bitsandbytes",
            )

    def quantize(self, linear: nn.Linear) -> nn.Module:
        from optimum.quanto import qtypes

        self._check_shape(linear)
        if linear.weight.device.type == "cpu":
            _unpack_without_compiler()
        made: Any = _layer_class().from_module(linear, weights=qtypes[f"q{self.options.weights}"])
        made.freeze()
        return made

    def _check_shape(self, linear: nn.Linear) -> None:
        import torch

        weight = linear.weight
        if (
            self.options.weights == "int8"
            and weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and linear.in_features % _INT8_INPUTS
        ):
            raise self.refusal(
                f"layers whose inputs are multiples of {_INT8_INPUTS}, for torch's int8 kernel reads past "
                "the memory of others",
                f"one with {linear.in_features} inputs in bfloat16",
                "set dtype='float32'",
            )


@cache
def _layer_class() -> Any:
    import torch
    from optimum.quanto import QLinear

    class Linear(QLinear):  # type: ignore[misc]
        """Quanto's layer, which cannot run in inference mode."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode(False), torch.no_grad():
                return super().forward(input)

    return Linear


def _unpack_without_compiler() -> None:
    """Let quanto unpack int4 and int2 on the CPU in Python, instead of building an extension for it.

    That build takes a compiler and a minute or more, and gains little: each product unpacks all weights.
    """
    from optimum.quanto.library.extensions import get_extension

    extension: Any = get_extension("quanto_cpp")
    if extension._lib is None:
        extension._lib = SimpleNamespace(unpack=_unpack)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [N, ...] -> [N * 8 / bits, ...]: first the lowest bits of all, then the next ones."""
    import torch

    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(parts)


@hookimpl
def specfw_targets() -> Mapping[str, Component[TargetLoader]]:
    return {
        "quanto": Component(
            QuantoLoader, QuantoOptions, "Another target in int8, int4, int2 or float8, by quanto."
        )
    }
