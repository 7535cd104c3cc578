"""What tests of quantised targets share: a small dense model as a target, and loaders that quantise it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from specfw.components import Bound, Component, Options
from specfw.contracts import LoadedTarget, Quantization, TargetLoader
from specfw.quantizing import QuantizingLoader, QuantizingOptions
from tests.tiny_models import build, tiny_tokenizer

__all__ = ["RoundedLoader", "rounded", "tiny_target"]


class TinyOptions(Options):
    """Which tiny model."""

    architecture: str = "llama"
    dtype: str = "float32"
    hidden_size: int = 32


class TinyLoader(TargetLoader):
    """Makes one of the tiny models, anew each time."""

    def __init__(self, options: TinyOptions) -> None:
        self._options = options

    def load(self) -> LoadedTarget:
        options = self._options
        model = build(
            options.architecture, hidden_size=options.hidden_size, head_dim=options.hidden_size // 4
        )
        model = model.to(getattr(torch, options.dtype)).requires_grad_(False)
        return LoadedTarget("tiny", model, tiny_tokenizer())


def tiny_target(**options: Any) -> Bound[TargetLoader]:
    """A tiny model as the `target` of a quantising loader."""
    return Bound("target", "tiny", Component(TinyLoader, TinyOptions), TinyOptions(**options))


class RoundedOptions(QuantizingOptions):
    """How coarse."""

    bits: int = 8


class RoundedLinear(nn.Module):
    """A linear layer with integer weights, each row of the product by itself."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax() / (2 ** (bits - 1) - 1)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale
        return (x.unsqueeze(-2) * weight).sum(-1)


class RoundedLoader(QuantizingLoader):
    """The simplest quantiser: what a third party might begin with."""

    name = "rounded"
    options: RoundedOptions

    def quantization(self) -> Quantization:
        return Quantization(self.name, f"{self.options.bits}-bit weights", batch_invariant=True)

    def quantize(self, linear: nn.Linear) -> nn.Module:
        return RoundedLinear(linear, self.options.bits)


def rounded(**options: Any) -> RoundedLoader:
    """The loader, on a tiny model."""
    options.setdefault("target", tiny_target())
    return RoundedLoader(RoundedOptions(**options))
