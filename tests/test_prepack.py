"""Repacked and widened products of bfloat16 layers on a CPU: as near to the exact product as bfloat16 lets them be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specfw.engine.prepack import PackedLinears


class Model(nn.Module):
    """Two linear layers, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(96, 160)
        self.head = nn.Linear(160, 300, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 200])
def test_products_are_as_near_as_bfloat16_lets_them_be(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, rows: int
) -> None:
    """Fault: weights lose their order or their bias, or the wide form sums in bfloat16."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    packed = PackedLinears.of(model, None)
    with torch.no_grad():
        for layer in (model.inner, model.head):
            x = torch.randn(1, rows, layer.in_features, dtype=torch.bfloat16)
            bias = None if layer.bias is None else layer.bias.double()
            exact = nn.functional.linear(x.double(), layer.weight.double(), bias)
            with packed.active():
                found = layer(x)
            assert found.dtype == torch.bfloat16
            assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


def test_wide_products_are_in_float32_where_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: the wide form is taken on CPUs with tiles, or for the few rows of a decoding pass."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU packs no bfloat16 weights")
    dtypes: list[torch.dtype] = []
    plain = nn.functional.linear

    def watched(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        dtypes.append(x.dtype)
        return plain(x, *rest)

    monkeypatch.setattr(nn.functional, "linear", watched)
    for tiles, rows, expected in ((False, 64, [torch.float32]), (False, 63, []), (True, 64, [])):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        model = Model().to(torch.bfloat16)
        dtypes.clear()
        with torch.no_grad(), PackedLinears.of(model, None).active():
            model.head(torch.randn(1, rows, 160, dtype=torch.bfloat16))
        assert dtypes == expected
