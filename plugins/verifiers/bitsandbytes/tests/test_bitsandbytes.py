"""The target loader `bitsandbytes`: conformance, options, prequantised checkpoints, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from specfw_plugin_bitsandbytes import BitsAndBytesLoader, BitsAndBytesOptions
from torch import nn

from specfw.bench.shapes import shape_dependence
from specfw.contracts import TargetLoader
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.runner import ModelRunner
from specfw.testing.conformance import TargetConformance
from tests.quantized_kit import tiny_target
from tests.tiny_models import build, tiny_tokenizer

pytest.importorskip("bitsandbytes")


def loader(**options: Any) -> BitsAndBytesLoader:
    target = options.pop("target", None) or tiny_target(**options.pop("tiny", {}))
    return BitsAndBytesLoader(BitsAndBytesOptions(target=target, **options))


class Test8Bit(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(bits=8, dtype="bfloat16")


class TestNf4(TargetConformance):
    """With the kernel for CPUs that have bfloat16, where there is one."""

    def make(self) -> TargetLoader:
        return loader(dtype="bfloat16", tiny={"hidden_size": 128})


class TestDoubleFp4(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(quant_type="fp4", double_quant=True)


class TestDoubleNf4InBfloat16(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(double_quant=True, dtype="bfloat16", tiny={"hidden_size": 64})


class TestGpt2(TargetConformance):
    def make(self) -> TargetLoader:
        return loader(tiny={"architecture": "gpt2"})


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4}, {"bits": 4, "head": True}])
def test_packed_forward_equals_the_stock_one(options: dict[str, Any]) -> None:
    """In float32 nothing but rounding may part them: issue's bound of 1e-4 of the logits' spread."""
    assert ModelRunner(loader(**options).load().model).probe_error < 1e-4


def test_float32_is_computed_in_float32() -> None:
    """Guards: on some CPUs the 4-bit kernel computes in bfloat16 whatever the dtype is."""
    linear = build("llama").lm_head.requires_grad_(False)
    layer = loader().quantize(linear).eval()
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        weight = layer(torch.eye(32)).double().T
        error = (layer(x).double() - x.double() @ weight.T).abs().max()
    assert float(error) < 1e-4


def test_the_state_of_a_packed_layer_can_be_loaded() -> None:
    """Scales in the kernel's order would be taken for those of other blocks."""
    from bitsandbytes.nn import Params4bit

    made = [loader(dtype="bfloat16", tiny={"hidden_size": 128}).load().model for _ in range(2)]
    first, second = (model.get_submodule("model.layers.0.mlp.gate_proj") for model in made)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.inference_mode():
        before = first(x)
    saved = {name.removeprefix("weight."): value for name, value in first.state_dict().items()}
    packed = saved.pop("weight")
    second.weight = Params4bit.from_prequantized(packed, saved, device="cpu")
    with torch.inference_mode():
        assert torch.equal(second(x), before)
        assert torch.equal(first(x), before)


def test_outliers_make_rows_depend_on_each_other() -> None:
    """Why LLM.int8's threshold is off unless asked for: one row's outlier changes the other rows."""
    linear = nn.Linear(32, 32, bias=False).requires_grad_(False)
    x = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    x[0, 1, 3] = 50.0
    for threshold, same in ((0.0, True), (6.0, False)):
        made = loader(bits=8, threshold=threshold)
        layer = made.quantize(linear).eval()
        with torch.inference_mode():
            assert torch.equal(layer(x)[:, :1], layer(x[:, :1])) is same
        assert made.quantization().batch_invariant is same


def test_logging_is_tamed(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: one line a product, a thousand in a short text."""
    runner = ModelRunner(loader(bits=8).load().model)
    runner.stock_logits([3, 4, 5])
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"bits": 8, "quant_type": "fp4"},
            "expected options of 8 bits, got quant_type; leave it out",
        ),
        (
            {"threshold": 6.0},
            "expected options of 4 bits, got threshold; leave it out, or set bits=8",
        ),
    ],
)
def test_options_of_the_other_width_are_refused(options: dict[str, Any], complaint: str) -> None:
    """An option that has no effect must not be ignored."""
    with pytest.raises(ConfigError, match=complaint):
        loader(**options).load()


def test_a_width_that_it_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bits.*4 or 8"):
        PluginManager().bind("target", "bitsandbytes(target='demo', bits=3)")


def _prequantised(folder: Path, **settings: Any) -> Path:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build("llama", hidden_size=64, head_dim=16).save_pretrained(folder / "dense")
    tiny_tokenizer().save_pretrained(folder / "packed")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=BitsAndBytesConfig(**settings), device_map="cpu"
    )
    model.save_pretrained(folder / "packed")
    return folder / "packed"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes, nf4"),
        ({"load_in_8bit": True}, "bitsandbytes, int8 weights and activations"),
    ],
)
def test_prequantised_checkpoints_load(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    """Both by the core loader and by this one; what was loaded is told."""
    folder = _prequantised(tmp_path, **settings)
    for name in (str(folder), f"bitsandbytes(target={str(folder)!r})"):
        loaded = PluginManager().bind("target", name).build().load()
        assert said in loaded.notes[-1]
        assert "stay packed" in loaded.notes[-1]
        assert loaded.quantization is not None
        assert loaded.quantization.packed
        runner = ModelRunner(loaded.model)
        assert shape_dependence(runner, rows=3, context=4).model < 1.0
    with pytest.raises(ConfigError, match=r"no other options.*got bits; leave them out"):
        PluginManager().bind(
            "target", f"bitsandbytes(target={str(folder)!r}, bits=8)"
        ).build().load()
