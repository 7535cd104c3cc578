"""The target loader `quanto`: conformance of each width, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from specfw_plugin_quanto import QuantoLoader, QuantoOptions
from torch import nn

from specfw.contracts import TargetLoader
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.runner import ModelRunner
from specfw.testing.conformance import TargetConformance
from tests.quantized_kit import tiny_target

quanto = pytest.importorskip("optimum.quanto")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
WIDTHS = ("int8", "int4", "int2", "float8")


def loader(**options: Any) -> QuantoLoader:
    target = tiny_target(**options.pop("tiny", {}))
    return QuantoLoader(QuantoOptions(target=target, **options))


class TestInt8(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(dtype="bfloat16")


class TestInt4(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(weights="int4")


class TestFloat8WithHead(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(weights="float8", head=True)


@pytest.mark.parametrize("weights", WIDTHS)
def test_packed_forward_equals_the_stock_one(weights: str) -> None:
    """In float32 nothing but rounding may part them: issue's bound of 1e-4 of the logits' spread."""
    assert ModelRunner(loader(weights=weights).load().model).probe_error < 1e-4


@pytest.mark.parametrize(("weights", "error"), [("int4", 0.3), ("int2", 1.5)])
def test_unpacking_needs_no_compiler(weights: str, error: float) -> None:
    """Packed values must come back in their places; a wrong order would leave noise as large as the weights."""
    linear = nn.Linear(256, 64, bias=False).requires_grad_(False)
    layer = loader(weights=weights).quantize(linear)
    with torch.inference_mode():
        off = layer(torch.eye(256)).T - linear.weight
    assert float(off.std() / linear.weight.std()) < error


def test_shapes_that_would_crash_are_refused() -> None:
    """Guards: torch's bfloat16 int8 kernel reads past the memory of rows that are no multiples of 16."""
    with pytest.raises(ConfigError, match=r"multiples of 16.*got one with 40 inputs"):
        loader(dtype="bfloat16", tiny={"hidden_size": 40}).load()
    loader(dtype="float32", tiny={"hidden_size": 40}).load()


def test_calibrated_activations_are_refused() -> None:
    """One scale for a whole pass would make a text depend on what else runs."""
    with pytest.raises(ConfigError, match=r"activations='none'.*torch-int"):
        loader(activations="int8").load()


def test_a_width_that_it_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights.*int8.*int4.*int2.*float8"):
        PluginManager().bind("target", "quanto(target='demo', weights='int3')")


def test_a_compiler_is_asked_for_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a build that fails at the first product, long after loading."""
    monkeypatch.setattr("specfw_plugin_quanto.which", lambda name: None)
    with pytest.raises(ConfigError, match="nvcc"):
        loader(weights="int4").check(torch.device("cuda"), torch.bfloat16)
