"""The layers: a linear one with integer weights, for each scheme.

`w8a8` and `w8a16` have a scale for each output, `w4a16` has a scale and a zero for each 32 weights. Integer
products are exact in whatever order they are summed, and the weight-only kernels sum each row by itself, so that
no row's result depends on the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor, nn

__all__ = ["SCHEMES", "W4A16", "W8A8", "W8A16"]

_GROUP = 32
_INNER_TILES = 2
_INPUTS, _OUTPUTS = 16, 16
"""What features must be multiples of: beyond these, bfloat16 kernels read past their memory, or refuse."""


class _IntLinear(nn.Module, ABC):
    """What the layers share: the features of the linear layer in whose place they are, and its bias."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    @classmethod
    def misfit(cls, linear: nn.Linear) -> str:
        """Why the kernel does not take a layer of this shape, or nothing."""
        return ""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], of the input's dtype."""
        rows = x.reshape(-1, self.in_features)
        product = self._product(rows)
        if self.bias is not None:
            product += self.bias
        return product.view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def _product(self, rows: Tensor) -> Tensor:
        """[rows, in_features] -> [rows, out_features], without the bias."""

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class W8A8(_IntLinear):
    """Both sides int8: every row of activations gets a scale of its own in each pass."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        values, scale = _rounded(linear.weight.detach().float(), 127)
        packed = torch.ops.onednn.qlinear_prepack(values.to(torch.int8), None)
        self.register_buffer("weight", packed)
        self.register_buffer("scale", scale.flatten())
        self.register_buffer("zero", torch.zeros(self.out_features, dtype=torch.int32))

    def _product(self, rows: Tensor) -> Tensor:
        exact = rows.float()
        scale = (exact.abs().amax(-1, keepdim=True) / 127).clamp_min_(1e-12)
        values = exact.div(scale).round_()
        product = _int_product(values, self.weight, self.scale, self.zero, _offset())
        return (product * scale).to(rows.dtype)


def _int_product(
    values: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, offset: int
) -> Tensor:
    """Whole numbers from -127 to 127, passed on with an offset, times packed weights with their scales."""
    product = torch.ops.onednn.qlinear_pointwise
    scaled: Tensor = product(
        values.add(offset).to(torch.uint8 if offset else torch.int8),
        *(1.0, offset),  # scale and zero point of the rows; the scale comes later
        *(weight, scale, zero, None),
        *(1.0, 0, torch.float32),  # what comes out is not quantised
        *("none", [], ""),  # and nothing is done with it
    )
    return scaled


@cache
def _offset() -> int:
    """128 where unsigned products are exact, else 0.

    Many CPUs multiply unsigned by signed numbers hundreds of times faster than signed by signed ones, but those
    without instructions for it add pairs of products in 16 bits, which the largest overflow.
    """
    count = 64
    weight = torch.ops.onednn.qlinear_prepack(
        torch.full((count, count), 127, dtype=torch.int8), None
    )
    ones, zeros = torch.ones(count), torch.zeros(count, dtype=torch.int32)
    product = _int_product(torch.full((1, count), 127.0), weight, ones, zeros, 128)
    return 128 if bool((product == count * 127 * 127).all()) else 0


class W8A16(_IntLinear):
    """int8 weights; activations stay as they are."""

    @classmethod
    def misfit(cls, linear: nn.Linear) -> str:
        return _misfit(linear, _INPUTS, 1)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        values, scale = _rounded(linear.weight.detach().float(), 127)
        self.register_buffer("weight", values.to(torch.int8))
        self.register_buffer("scale", scale.flatten().to(linear.weight.dtype))

    def _product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)


class W4A16(_IntLinear):
    """int4 weights in groups; activations stay as they are."""

    @classmethod
    def misfit(cls, linear: nn.Linear) -> str:
        return _misfit(linear, _GROUP, _OUTPUTS)

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        grouped = linear.weight.detach().float().unflatten(-1, (-1, _GROUP))
        least, most = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scale = ((most - least) / 15).clamp_min(1e-12)
        codes = ((grouped - least) / scale).round_().to(torch.int32).flatten(1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, _INNER_TILES)
        self.register_buffer("weight", packed)
        # The kernel takes a code of 8 for the zero of its group: [groups, out_features, scale and zero].
        both = torch.cat([scale, least + 8 * scale], -1).transpose(0, 1)
        self.register_buffer("scale", both.to(linear.weight.dtype).contiguous())

    def _product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, _GROUP, self.scale)


def _misfit(linear: nn.Linear, inputs: int, outputs: int) -> str:
    if linear.in_features % inputs == 0 and linear.out_features % outputs == 0:
        return ""
    return (
        f"one of {linear.in_features} x {linear.out_features} features, which are no multiples of "
        f"{inputs} x {outputs}"
    )


def _rounded(weight: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Whole numbers up to `most`, and the scale of each row: `weight` is about their product."""
    scale = (weight.abs().amax(-1, keepdim=True) / most).clamp_min(1e-12)
    return (weight / scale).round_(), scale


SCHEMES = {"w8a8": W8A8, "w8a16": W8A16, "w4a16": W4A16}
