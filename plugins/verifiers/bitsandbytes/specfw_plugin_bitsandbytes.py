"""The target loader `bitsandbytes`: 8-bit and 4-bit weights, on CPU and CUDA."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from specfw.components import Component
from specfw.contracts import API_VERSION, Quantization, TargetLoader
from specfw.hookspecs import hookimpl
from specfw.quantizing import QuantizingLoader, QuantizingOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["BitsAndBytesLoader", "BitsAndBytesOptions"]

specfw_api = API_VERSION

_BLOCK, _TILE = 64, 32
_OF_8_BITS = {"threshold"}
_OF_4_BITS = {"quant_type", "double_quant", "compute_dtype"}


class BitsAndBytesOptions(QuantizingOptions):
    """Which model to quantise, and how."""

    bits: Literal[4, 8] = 4
    """8: int8 weights and activations, each row with a scale of its own; 4: blocks of 64 weights."""
    quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 4-bit code."""
    double_quant: bool = False
    """Whether the scales of 4-bit blocks are quantised too."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What 4-bit products are made in; `auto` is the model's dtype."""
    threshold: Annotated[float, Field(ge=0.0)] = 0.0
    """With 8 bits: activations from here on are multiplied in 16 bits, for all rows of a pass as soon as
    one has them, so that texts then depend on what else runs; 6.0 is LLM.int8, 0 treats all alike."""


class BitsAndBytesLoader(QuantizingLoader):
    """Replaces linear layers with those of bitsandbytes."""

    name = "bitsandbytes"
    packages: ClassVar[Mapping[str, str]] = {"bitsandbytes": "bitsandbytes"}
    options: BitsAndBytesOptions

    def quantization(self) -> Quantization:
        options = self.options
        if options.bits == 8:
            rule = f", outliers from {options.threshold:g} in 16 bits" if options.threshold else ""
            return Quantization(
                self.name,
                f"int8 weights and activations{rule}",
                batch_invariant=not options.threshold,
                kernel="an int8 product of quantised activations",
            )
        double = ", double quantisation" if options.double_quant else ""
        return Quantization(
            self.name,
            f"{options.quant_type}{double}",
            kernel="dequantised in each product",
        )

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        options = self.options
        foreign = sorted(
            options.model_fields_set & (_OF_4_BITS if options.bits == 8 else _OF_8_BITS)
        )
        if foreign:
            raise self.refusal(
                f"options of {options.bits} bits",
                " and ".join(foreign),
                f"leave {'it' if len(foreign) == 1 else 'them'} out, or set bits={12 - options.bits}",
            )
        if device.type not in ("cpu", "cuda"):
            raise self.refusal("a model on cpu or cuda", device.type, "set device to one of these")

    def quantize(self, linear: nn.Linear) -> nn.Module:
        # It warns at each product of a dtype that it converts, and at import of kernels that it lacks.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        return self._in_8_bits(linear) if self.options.bits == 8 else self._in_4_bits(linear)

    def _in_8_bits(self, linear: nn.Linear) -> nn.Module:
        from bitsandbytes.nn import Int8Params, Linear8bitLt

        made: Any = Linear8bitLt(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            has_fp16_weights=False,
            threshold=self.options.threshold,
            device="meta",
        )
        # They are quantised on the way from the CPU to where they belong.
        weight = Int8Params(linear.weight.detach().cpu(), requires_grad=False)
        made.weight, made.bias = weight.to(linear.weight.device), linear.bias
        return made

    def _in_4_bits(self, linear: nn.Linear) -> nn.Module:
        import torch
        from bitsandbytes.nn import Linear4bit, Params4bit

        options, device = self.options, linear.weight.device
        compute = (
            linear.weight.dtype
            if options.compute_dtype == "auto"
            else getattr(torch, options.compute_dtype)
        )
        made: Any = Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=compute,
            quant_type=options.quant_type,
            compress_statistics=options.double_quant,
            device="meta",
        )
        weight = Params4bit(
            linear.weight.detach(),
            requires_grad=False,
            quant_type=options.quant_type,
            compress_statistics=options.double_quant,
            module=made,
        )
        made.weight, made.bias = weight.to(device), linear.bias
        if compute != torch.bfloat16 or linear.in_features % _BLOCK or linear.out_features % _TILE:
            # The kernel for CPUs with bfloat16 computes in nothing else, and fails on other shapes.
            made.support_avx512bf16_for_cpu = False
        return made


@hookimpl
def specfw_targets() -> Mapping[str, Component[TargetLoader]]:
    return {
        "bitsandbytes": Component(
            BitsAndBytesLoader,
            BitsAndBytesOptions,
            "Another target in 8 or 4 bits, by bitsandbytes.",
        )
    }
