"""Quantised targets in the core: the shared loader, the guards, checkpoints that came quantised, and fault B39."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specfw.bench.shapes import chunked_logits, guarantee_on, shape_dependence
from specfw.contracts import Quantization, TargetLoader
from specfw.engine.model_runner import ModelRunner
from specfw.errors import ConfigError, UnsupportedModelError
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.targets import transformers as target_module
from specfw.targets.transformers import TransformersLoader, TransformersOptions, missing_packages
from specfw.testing.conformance import TargetConformance
from specfw.testing.near_ties import GreedyDifference, greedy_differences
from specfw.weights import quantized_linears, weight_bytes
from tests.engine_kit import prompt_of
from tests.quantized_kit import RoundedLinear, rounded, tiny_target
from tests.tiny_models import build, tiny


class TestRounded(TargetConformance):
    """A third party's first loader passes the kit."""

    def make(self) -> TargetLoader:
        return rounded(bits=4)


class TestTiny(TargetConformance):
    """So does a loader that quantises nothing."""

    def make(self) -> TargetLoader:
        return tiny_target().build()


def test_all_linear_layers_are_replaced_but_the_head() -> None:
    """A layer that is left out would be neither small nor what the loader says it is."""
    for head in (False, True):
        model = rounded(head=head).load().model
        dense = [name for name, m in model.named_modules() if type(m) is nn.Linear]
        assert dense == ([] if head else ["lm_head"])
    runner = ModelRunner(model)
    assert runner.vocab_size == model.config.vocab_size


def test_notes_tell_method_count_and_bytes() -> None:
    """What a user must know: who quantised, how much of the model, and what it takes."""
    loaded = rounded(bits=8).load()
    weights = sum(m.in_features * m.out_features for _, m in quantized_linears(loaded.model))
    total = weight_bytes(loaded.model) / 2**20
    assert loaded.notes[-1] == (
        f"quantised by rounded, 8-bit weights; {weights} weights stay packed, 1.00 bytes each; "
        f"{total:.1f} MiB in all"
    )
    assert loaded.name == "rounded(tiny)"


def test_weight_bytes_count_shared_storage_once() -> None:
    """Tied embeddings are one matrix in memory."""
    tied, apart = (build("llama", tie_word_embeddings=tie) for tie in (True, False))
    assert weight_bytes(apart) - weight_bytes(tied) == 4 * 64 * 32


def test_dtype_and_device_apply_before_quantisation() -> None:
    loaded = rounded(dtype="bfloat16", device="cpu").load()
    assert loaded.model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="target 'rounded': expected a device"):
        rounded(device="nowhere").load()


def test_a_model_that_came_quantised_is_refused_by_another_method() -> None:
    """Quantising twice would be neither one law nor the other."""

    class Other(type(rounded())):  # type: ignore[misc]
        name = "other"

    class Made(TargetLoader):
        def load(self) -> Any:
            return rounded().load()

    made = PluginManager().bind("target", Made())
    with pytest.raises(ConfigError, match=r"not quantised yet, or by other, got 'rounded\(tiny\)'"):
        Other(rounded(target=made).options).load()
    assert rounded(target=made).load().notes == rounded().load().notes


def test_a_missing_package_is_named() -> None:
    loader = rounded()
    loader.packages = {"no_such_package_at_all": "no-such"}  # type: ignore[misc]
    with pytest.raises(
        ConfigError, match=r"expected no-such to be installed.*run: pip install no-such"
    ):
        loader.load()
    assert missing_packages(["json", "no_such.nested"]) == ["no_such.nested"]


class _Coarse(nn.Module):
    """A layer that rounds its input to whole numbers of a few: what amplifies rounding elsewhere."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-9)
        return self.linear((x / scale).round() * scale)


def _coarse(model: Any) -> Any:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            model.set_submodule(name, _Coarse(module))
    return model


def test_the_probe_knows_that_quantised_layers_amplify_rounding() -> None:
    """Guards: a quantised model refused in float32, though its own forward moves as much."""
    model = _coarse(build("llama", num_hidden_layers=12))
    runner = ModelRunner(model)
    assert runner.probe_error < 1.0


def test_the_probe_still_catches_faults_of_quantised_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave must not be so wide that a wrong position passes."""
    model = rounded(bits=4).load().model
    runner = ModelRunner(model)
    forward = model.forward

    def shifted(**kwargs: Any) -> Any:
        if "position_ids" in kwargs:
            kwargs["position_ids"] = kwargs["position_ids"] * 2
        return forward(**kwargs)

    monkeypatch.setattr(model, "forward", shifted)
    with pytest.raises(UnsupportedModelError, match="standard deviations"):
        ModelRunner(model)
    assert runner.probe_error < 1e-4


def test_prepacking_leaves_quantised_layers_alone() -> None:
    """And where only the head is packed, passes of one token are not padded."""
    model = rounded(dtype="bfloat16").load().model
    runner = ModelRunner(model, prepack=True)
    packed = [module for module, _ in runner._linears._forwards]
    assert packed in ([], [model.lm_head])
    assert runner._linears.min_rows == 1
    assert not any(isinstance(module, RoundedLinear) for module in packed)


# What passes over several rows change.


def test_chunks_are_what_single_rows_are() -> None:
    """The control without a drafter must itself be right, at the end of the text too."""
    runner, tokens = ModelRunner(tiny("llama")), prompt_of(13)
    expected = runner.stock_logits(tokens)
    for rows in (1, 3, 8):
        assert torch.allclose(chunked_logits(runner, tokens, 5, rows), expected[5:], atol=1e-4)


def test_shape_dependence_is_told_with_the_guarantee() -> None:
    shapes = shape_dependence(ModelRunner(rounded().load().model), rows=4, context=8)
    assert shapes.kernel == 0.0
    assert shapes.model < 1e-4
    quantization = Quantization("rounded", "8-bit weights")
    said = guarantee_on("same-text", quantization, shapes)
    start = "exact-law of the quantised target, up to the kernel's own shape dependence: "
    assert said.startswith(start if shapes.model else "same-text of the quantised target: ")
    assert "between a pass over one row and one over 4" in said
    assert guarantee_on("lossy", quantization, shapes).startswith("lossy")
    assert shape_dependence(ModelRunner(tiny("llama")), rows=2, context=4).kernel is None


B39_ROWS = (2, 4, 8)
B39_TOLERANCE = 1.0
"""Standard deviations of the logits between the two tokens of a difference; bfloat16 and int8 move logits
by less than half of it."""


def _first_differences(model: Any, prompts: int, new: int) -> list[GreedyDifference]:
    runner = ModelRunner(model)
    return [
        found
        for seed in range(prompts)
        for rows in B39_ROWS
        for found in greedy_differences(runner, prompt_of(6, seed), new, rows)
    ]


def test_B39_greedy_texts_are_identical_in_float32() -> None:
    """Fault B39: with a plain target in float32 a drafter changes no token, at K = 1, 3 and 7."""
    assert _first_differences(tiny("llama"), prompts=2, new=40) == []


@pytest.mark.parametrize(
    "target",
    [
        "torch-int:torch-int(scheme='w8a16')",
        "torch-int:torch-int(scheme='w8a8')",
        "bitsandbytes:bitsandbytes(bits=8)",
        "bitsandbytes:bitsandbytes(bits=4)",
        "quanto:quanto(weights='int8')",
        "quanto:quanto(weights='int4')",
    ],
)
def test_B39_quantised_texts_part_at_near_ties_only(
    target: str, record_property: Any, pytestconfig: pytest.Config
) -> None:
    """Fault B39: each first difference has a small gap, and comes without any drafter too, by rows alone."""
    manager = PluginManager()
    owner, _, reference = target.partition(":")
    offered = {
        one["name"] for plugin in manager.describe()["plugins"] for one in plugin["components"]
    }
    if owner not in offered:
        pytest.skip(f"{owner} is not installed")
    bound = manager.bind("target", reference.replace("(", "(target='table', dtype='bfloat16', "))
    options = bound.options.model_copy(update={"target": tiny_target(hidden_size=64)})
    try:
        loaded = bound.component.build(options).load()
    except ConfigError as error:
        if "to be installed" in str(error):
            pytest.skip(str(error))
        raise
    prompts, new = (20, 100) if pytestconfig.getoption("--deep") else (1, 32)
    differences = _first_differences(loaded.model, prompts, new)
    record_property("differences", [str(found) for found in differences])
    _assert_near_ties(differences)


def _assert_near_ties(differences: Sequence[GreedyDifference]) -> None:
    for found in differences:
        assert found.gap <= B39_TOLERANCE, found
        assert found.reproduced, f"an engine fault: {found}"


def test_B39_an_engine_fault_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an engine that keeps one wrong draft token is found out."""
    from specfw.decoding.coupled import CoupledVerifier

    verify = CoupledVerifier.verify

    def sloppy(self: Any, draft: Any, laws: Any, random: Any) -> Any:
        outcome = verify(self, draft, laws, random)
        outcome.next_token = (outcome.next_token + (draft.max_depth > 0)) % 64
        return outcome

    monkeypatch.setattr(CoupledVerifier, "verify", sloppy)
    found = list(greedy_differences(ModelRunner(tiny("llama")), prompt_of(6), 8, 4))
    assert found
    assert not found[0].reproduced


# Checkpoints that came quantised.


def _checkpoint(folder: Path, **stated: Any) -> Path:
    build("llama").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return folder


@pytest.mark.parametrize(
    ("method", "packages"),
    [
        ("gptq", "optimum gptqmodel"),
        ("awq", "gptqmodel accelerate"),
        ("torchao", "torchao"),
        ("compressed-tensors", "compressed-tensors"),
    ],
)
def test_the_package_that_a_checkpoint_needs_is_named(
    tmp_path: Path, method: str, packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, before anything is read, instead of an error from deep inside."""
    monkeypatch.setattr(target_module, "missing_packages", list)
    folder = _checkpoint(tmp_path, quant_method=method, bits=4)
    with pytest.raises(
        ConfigError, match=f"quantised by {method}, which needs {packages}; run: pip install"
    ):
        TransformersLoader(TransformersOptions(model=str(folder))).load()


def test_a_method_without_a_kernel_here_is_explained(tmp_path: Path) -> None:
    """A method that transformers does not know, or cannot run here, ends in one sentence too."""
    folder = _checkpoint(tmp_path, quant_method="fbgemm_fp8")
    with pytest.raises(
        ConfigError, match=r"requires a GPU.*quantised by fbgemm_fp8.*choose another"
    ):
        TransformersLoader(TransformersOptions(model=str(folder))).load()


def test_a_quantised_copy_of_the_target_drafts_for_it() -> None:
    """The drafter small-model takes any target, a quantised copy of this one too."""
    pytest.importorskip("specfw_plugin_small_model")
    from specfw_plugin_small_model import SmallModelDrafter

    tokens = prompt_of(6)
    texts = []
    for drafter in ("none", SmallModelDrafter(rounded(bits=8).load(), max_nodes=3)):
        with Pipeline.from_config({"target": tiny_target().build(), "drafter": drafter}) as pipe:
            [output] = pipe.generate(tokens, max_new_tokens=24, temperature=0.0, ignore_eos=True)
        texts.append(output.token_ids)
    assert texts[0] == texts[1]
    assert output.speculation.acceptance_length > 2.0


def test_a_setting_is_told_in_words() -> None:
    """Configs of several methods call their bits differently."""
    said = target_module._in_bits
    assert said({"load_in_8bit": True}) == "int8 weights and activations"
    assert said({"bits": 4, "group_size": 128}) == "4-bit weights"
    nested = {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
    assert said(nested) == "Int8WeightOnlyConfig weights"
    assert said({"format": "pack-quantized"}) == "pack-quantized weights"
    assert said({}) == ""


@pytest.mark.parametrize(
    "target",
    [
        "torch-int(target='demo', scheme='w8a16', dtype='{}')",
        "torch-int(target='demo', scheme='w4a16', dtype='{}')",
        "torch-int(target='demo', scheme='w8a8', dtype='{}')",
        "bitsandbytes(target='demo', bits=8, dtype='{}')",
        "bitsandbytes(target='demo', bits=4, dtype='{}')",
        "quanto(target='demo', weights='int8', dtype='{}')",
        "quanto(target='demo', weights='int4', dtype='{}')",
        "quanto(target='demo', weights='float8', dtype='{}')",
    ],
)
def test_on_the_demo_model(
    target: str, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each loader on a real model: packed against stock in float32, then decoding with two drafters."""
    if not pytestconfig.getoption("--deep"):
        pytest.skip("takes minutes; run with --deep")
    manager = PluginManager()
    runner = ModelRunner(manager.bind("target", target.format("float32")).build().load().model)
    if "w8a8" not in target:  # whose rounded activations amplify the last digit
        assert runner.probe_error < 1e-4
    del runner
    drafters = ("none", "ngram", "small-model(model=demo(layers=20), max_nodes=2)")
    config = {"target": target.format("bfloat16")}
    prompt, texts = "one two three one two three", []
    for drafter in drafters:
        with Pipeline.from_config({**config, "drafter": drafter}) as pipe:
            [output] = pipe.generate(prompt, max_new_tokens=12, temperature=0.0)
            texts.append(output.text)
            assert output.finish_reason in ("stop", "length")
            note = pipe.target.notes[-1]
    differences = [
        found
        for rows in B39_ROWS
        for found in greedy_differences(pipe.engine.runner, pipe.encode(prompt), 40, rows)
    ]
    with capsys.disabled():
        print(f"\n{note}\n{texts}\n{differences}")
    assert all(texts)
    _assert_near_ties(differences)
