"""The target loader `torch-int`: its layers against exact arithmetic, conformance, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import specfw_plugin_torch_int.layers as layers
import torch
from specfw_plugin_torch_int import TorchIntLoader, TorchIntOptions
from specfw_plugin_torch_int.layers import SCHEMES
from torch import nn

from specfw.contracts import TargetLoader
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.testing.conformance import TargetConformance
from tests.quantized_kit import tiny_target

DTYPES = ("float32", "bfloat16")


def loader(scheme: str, **options: Any) -> TorchIntLoader:
    target = tiny_target(**options.pop("tiny", {}))
    return TorchIntLoader(TorchIntOptions(target=target, scheme=scheme, **options))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_multiply_by_the_rounded_weights(scheme: str, dtype: str, bias: bool) -> None:
    """A layer must be its own rounded weights, exactly but for rounding of the sums."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(getattr(torch, dtype)).requires_grad_(False)
    layer = SCHEMES[scheme](linear)
    weights = layer(torch.eye(64, dtype=linear.weight.dtype)) - (linear.bias if bias else 0)
    assert (
        float((weights.T - linear.weight).abs().max()) < 0.03 * (8 if scheme == "w4a16" else 1) / 3
    )
    x = torch.randn(3, 5, 64).to(linear.weight.dtype)
    expected = nn.functional.linear(x.double(), weights.T.double())
    expected = expected + (linear.bias.double() if bias else 0)
    error = (layer(x).double() - expected).abs().max() / expected.std()
    rounding = {"float32": 1e-5, "bfloat16": 3e-2}[dtype]
    assert float(error) < (0.05 if scheme == "w8a8" else rounding)  # w8a8 rounds x too


@pytest.mark.parametrize("offset", [0, 128])
def test_int_products_are_exact(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that adds products in 16 bits overflows at the largest; it must not be chosen."""
    if offset > layers._offset():
        pytest.skip("unsigned products overflow on this machine, and are not used")
    monkeypatch.setattr(layers, "_offset", lambda: offset)
    linear = nn.Linear(96, 16, bias=False).requires_grad_(False)
    linear.weight[:8], linear.weight[8:] = 1.0, -1.0
    linear.weight[3, ::2] = -1.0
    layer = SCHEMES["w8a8"](linear)
    x = torch.ones(5, 96)
    x[1], x[2, ::2] = -1.0, -1.0
    assert torch.allclose(layer(x), x @ linear.weight.T, atol=1e-4)


def test_where_unsigned_products_overflow_signed_ones_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check of the kernel must be able to fail."""
    product = layers._int_product
    monkeypatch.setattr(layers, "_int_product", lambda *args: product(*args).clamp(-(2**15), 2**15))
    assert layers._offset.__wrapped__() == 0


def test_rows_of_zeros_stay_zero() -> None:
    """A row's scale is its largest element; without any, a division by zero would make NaN."""
    layer = SCHEMES["w8a8"](nn.Linear(32, 16, bias=False).requires_grad_(False))
    assert torch.equal(layer(torch.zeros(1, 2, 32)), torch.zeros(1, 2, 16))


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_shapes_that_would_crash_are_refused(scheme: str) -> None:
    """Guards: torch's bfloat16 kernels read past their memory where inputs are no multiples of 16."""
    with pytest.raises(ConfigError, match=r"multiples of .*; use the scheme w8a8"):
        loader(scheme, tiny={"hidden_size": 40}).load()
    loader("w8a8", tiny={"hidden_size": 40}).load()


def test_the_head_stays_dense_unless_asked_for() -> None:
    """The head decides most about quality, and is only quantised on purpose."""
    assert type(loader("w8a16").load().model.lm_head) is nn.Linear
    model = loader("w8a16", head=True).load().model
    assert type(model.lm_head) is SCHEMES["w8a16"]
    assert model.get_input_embeddings().weight.is_floating_point()


def test_other_devices_are_refused() -> None:
    """A kernel that is not there must be told before, with a way out."""
    with pytest.raises(ConfigError, match=r"on cpu.*got meta; set device='cpu'"):
        loader("w8a8").check(torch.device("meta"), torch.float32)


def test_is_installed() -> None:
    assert PluginManager().bind("target", "torch-int(target='demo', scheme='w8a8')")


class TestW8A8(TargetConformance):
    def make(self) -> TargetLoader:
        return loader("w8a8", dtype="bfloat16")


class TestW8A16(TargetConformance):
    def make(self) -> TargetLoader:
        return loader("w8a16", dtype="bfloat16")


class TestW4A16WithHead(TargetConformance):
    def make(self) -> TargetLoader:
        return loader("w4a16", head=True)


class TestGpt2(TargetConformance):
    """Its linear layers are transposed, and have biases."""

    def make(self) -> TargetLoader:
        return loader("w8a8", tiny={"architecture": "gpt2"})
