"""Linear weights reordered once for oneDNN's small products, and wide products in float32: a CPU-only matter.

A decoding pass multiplies a few rows by every weight. With weights packed ahead oneDNN reads them in its
own order; it does so well from two rows on, so passes of one token are padded to two. Where all layers but
the head are quantised there is no padding, for their kernels are quickest at one row.

Reading a prompt multiplies many rows, which is bound by arithmetic. A CPU without tiles for bfloat16 (AMX)
does less of it a second in bfloat16 than in float32, by more than it takes to widen the weights on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PackedLinears"]

_WIDE = 64
"""Rows from which a product in float32 is quicker, where it is."""


class PackedLinears:
    """Packed copies of a model's dense linear layers, used only inside `active()`."""

    def __init__(
        self, forwards: Sequence[tuple[nn.Module, Callable[[Tensor], Tensor]]], min_rows: int = 1
    ) -> None:
        self._forwards = forwards
        self.min_rows = min_rows

    @classmethod
    def of(cls, model: Any, wanted: bool | None) -> PackedLinears:
        """Pack what can be packed; nothing where it would not pay and `wanted` is not True."""
        if wanted is False or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return cls([])
        linears = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.bfloat16
            and not hasattr(module, "_hf_hook")
        ]
        if not linears or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return cls([])
        only_head = linears == [model.get_output_embeddings()]
        with torch.no_grad():
            forwards = [(module, cls._packed_forward(module)) for module in linears]
        return cls(forwards, min_rows=1 if only_head else 2)

    @staticmethod
    def _packed_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
        weight: Any = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), 8)
        bias = module.bias
        product = torch.ops.mkldnn._linear_pointwise
        widens = not torch.cpu._is_amx_tile_supported()

        def forward(x: Tensor) -> Tensor:
            if widens and x.numel() >= _WIDE * x.shape[-1]:
                wide = None if bias is None else bias.float()
                return nn.functional.linear(x.float(), module.weight.float(), wide).to(x.dtype)
            result: Tensor = product(x, weight, bias, "none", [], "")
            return result

        return forward

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the layers compute with the packed weights."""
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.__dict__["forward"]
