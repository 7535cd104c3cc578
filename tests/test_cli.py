"""The `specfw` command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specfw import Pipeline, PipelineConfig, __version__
from specfw.cli import main
from specfw.cli.main import app
from specfw.plugins import FILTER_VARIABLE
from tests.byte_models import byte_tokenizer, save_tiny_chat

ROOT = Path(__file__).parent.parent
STABLE_KEYS = {"text", "token_ids", "finish_reason", "usage", "speculation"}
USAGE_KEYS = {"prompt_tokens", "completion_tokens"}
SPECULATION_KEYS = {"guarantee", "drafted", "accepted", "acceptance_length", "target_passes"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is installed here out of the tests, and every line as long as it is."""
    monkeypatch.setenv(FILTER_VARIABLE, "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat(tmp_path_factory.mktemp("tiny")))


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Ended]


@pytest.fixture
def specfw(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the console script's function in this process."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["specfw", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main.run()
        out, err = capfd.readouterr()
        return Ended(int(caught.value.code or 0), out, err)

    return run


def process(*arguments: str, code: bool = False, **environment: str) -> Ended:
    """Runs `python -m specfw.cli.main`, or with `code` a piece of Python, in a process of its own."""
    command = (
        [sys.executable, "-c", *arguments]
        if code
        else [sys.executable, "-m", "specfw.cli.main", *arguments]
    )
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def is_refusal(ended: Ended) -> bool:
    """Exit code 2, nothing on stdout, and one sentence without traceback on stderr."""
    lines = ended.err.strip().split("\n")
    return (
        ended.code == 2 and ended.out == "" and len(lines) == 1 and lines[0].startswith("error: ")
    )


# generate


def test_generate_json_has_the_stable_keys_and_nothing_else_on_stdout(
    specfw: Command, checkpoint: str
) -> None:
    """A key that scripts rely on, lost or renamed."""
    ended = specfw(
        "generate", "--target", checkpoint, "--prompt", "abc", "--max-new-tokens", "5", "--json"
    )
    assert (ended.code, ended.err) == (0, "")
    output = ended.json
    assert output.keys() >= STABLE_KEYS
    assert output["usage"].keys() == USAGE_KEYS
    assert output["speculation"].keys() >= SPECULATION_KEYS
    assert len(output["token_ids"]) == output["usage"]["completion_tokens"] <= 5
    assert output["text"] == byte_tokenizer().decode(output["token_ids"], skip_special_tokens=True)
    assert output["finish_reason"] in ("stop", "length")
    assert output["speculation"]["guarantee"] == "same-text"


def test_generate_refuses_a_drafter_that_is_not_held_ready(
    specfw: Command, checkpoint: str
) -> None:
    """A wrong name that means the default."""
    arguments = ["--target", checkpoint, "--set", "drafters.fast=none", "--prompt", "a"]
    wrong = specfw("generate", *arguments, "--draft-with", "fsat")
    assert is_refusal(wrong)
    assert "'fsat'" in wrong.err
    assert "it has: fast" in wrong.err


def test_every_option_of_generate_reaches_the_pipeline(
    specfw: Command, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option that is accepted and dropped."""
    seen: dict[str, Any] = {}
    original = Pipeline.generate

    def generate(self: Pipeline, prompts: Any, **settings: Any) -> Any:
        seen.update(prompts=prompts, settings=settings, config=self.config.resolved(self.plugins))
        return original(self, prompts, **settings)

    monkeypatch.setattr(Pipeline, "generate", generate)
    arguments = (
        "--target", checkpoint, "--drafter", "none", "--verifier", "rejection",
        "--scheduler", "fixed(max_nodes=3)", "--scheduler", "fixed(max_depth=2)",
        "--dtype", "float32", "--set", "engine.max_batch=2",
        "--prompt", "abc", "--prompt", "de", "--raw",
        "--max-new-tokens", "4", "--temperature", "0.7", "--top-k", "9", "--top-p", "0.9", "--min-p", "0.01",
        "--stop", "x", "--stop", "yz", "--logprobs", "1", "--seed", "5", "--json",
        "--set", "drafters.fast=none", "--draft-with", "fast",
    )  # fmt: skip
    outputs = specfw("generate", *arguments).json
    assert [one["seed"] for one in outputs] == [5, 5]
    assert [one["speculation"]["guarantee"] for one in outputs] == ["exact-law"] * 2
    assert all(len(one["logprobs"]) == len(one["token_ids"]) for one in outputs)
    assert seen["prompts"] == ["abc", "de"]
    assert seen["settings"] == {
        "progress": False,
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "stop": ["x", "yz"],
        "logprobs": 1,
        "seed": 5,
    }
    config = seen["config"]
    assert config["sampling"]["speculation"]["drafter"] == "fast"
    assert (config["verifier"]["name"], config["dtype"], config["engine"]["max_batch"]) == (
        "rejection",
        "float32",
        2,
    )
    assert [(one["max_nodes"], one["max_depth"]) for one in config["scheduler"]] == [(3, 7), (7, 2)]


def test_structured_output_is_asked_for_by_text_or_file(
    specfw: Command, checkpoint: str, tmp_path: Path
) -> None:
    """A file's name that is taken for a grammar, or a long grammar that is taken for a name."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    text = json.dumps({"enum": [f"abc{n}" for n in range(999)]})
    schema.write_text(text)
    grammar.write_text('start: "ab" | "cd"')
    common = ("generate", "--target", checkpoint, "--prompt", "abc", "--temperature", "1")
    common = (*common, "--set", "sampling.max_new_tokens=99", "--seed", "3", "--json")
    found = [specfw(*common, "--json-schema", form).json for form in (text, str(schema))]
    assert found[0] == found[1]
    assert json.loads(found[0]["text"]).startswith("abc")
    assert specfw(*common, "--grammar", str(grammar)).json["text"] in ("ab", "cd")
    assert specfw(*common, "--grammar", 'root ::= "x"').json["text"] == "x"
    assert specfw(*common, "--regex", "a{4}").json["text"] == "aaaa"
    assert specfw(*common, "--choice", "left", "--choice", "right").json["text"] in (
        "left",
        "right",
    )
    assert is_refusal(specfw(*common, "--regex", "a", "--choice", "b"))
    assert is_refusal(specfw(*common, "--json-schema", "nowhere.json"))


@pytest.mark.parametrize("how", ["--chat", "--raw", None])
def test_prompts_go_through_the_template_unless_raw(
    specfw: Command, checkpoint: str, how: str | None
) -> None:
    """A chat model that is asked without its template answers badly; a raw prompt must stay as it is."""
    options = [how] if how else []
    ended = specfw(
        "generate",
        "--target",
        checkpoint,
        "--prompt",
        "abc",
        "--max-new-tokens",
        "1",
        "--json",
        *options,
    )
    raw = len(byte_tokenizer()("abc")["input_ids"])
    assert ended.json["usage"]["prompt_tokens"] == (raw if how == "--raw" else raw + 3)


def test_prompts_come_from_files(specfw: Command, checkpoint: str, tmp_path: Path) -> None:
    text, many = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    text.write_text("größer\nals", encoding="utf-8")
    lines = [{"question_id": n, "category": "c", "turns": ["abc" * n, "not this"]} for n in (1, 2)]
    many.write_text("\n".join(map(json.dumps, lines)))
    common = (
        "generate",
        "--target",
        checkpoint,
        "--max-new-tokens",
        "1",
        "--raw",
        "--json",
        "--prompt-file",
    )
    assert specfw(*common, str(text)).json["usage"]["prompt_tokens"] == len("größer\nals".encode())
    outputs = specfw(*common, str(many), "--prompt", "xy").json
    assert [one["usage"]["prompt_tokens"] for one in outputs] == [2, 3, 6]


def test_one_prompt_is_streamed_as_plain_text(specfw: Command, checkpoint: str) -> None:
    """Tabs that became spaces, colours in a pipe, lines wrapped at the terminal's width."""
    common = (
        "generate",
        "--target",
        checkpoint,
        "--prompt",
        "abc",
        "--seed",
        "3",
        "--temperature",
        "1",
    )
    bias = ("--set", "sampling.logit_bias={13: 5.0, 14: 5.0, 207: 5.0}", "--max-new-tokens", "150")
    expected = specfw(*common, *bias, "--json").json["text"]
    shown = specfw(*common, *bias, "--show-accepted")
    assert len(expected) > 100
    assert (shown.code, shown.out) == (0, expected + "\n")


def test_many_prompts_are_printed_in_order(specfw: Command, checkpoint: str) -> None:
    common = (
        "generate",
        "--target",
        checkpoint,
        "--max-new-tokens",
        "3",
        "--prompt",
        "abc",
        "--prompt",
        "de",
    )
    texts = [one["text"] for one in specfw(*common, "--json").json]
    assert specfw(*common).out == "".join(f"{text}\n\n" for text in texts)


def test_a_request_that_fails_is_an_error_but_its_text_is_printed(
    specfw: Command, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 for a text that NaN logits cut off."""
    original = Pipeline.generate

    def generate(self: Pipeline, prompts: Any, **settings: Any) -> Any:
        outputs = original(self, prompts, **settings)
        outputs[0].error = "target: broken"
        return outputs

    monkeypatch.setattr(Pipeline, "generate", generate)
    ended = specfw(
        "generate", "--target", checkpoint, "--prompt", "abc", "--max-new-tokens", "2", "--json"
    )
    assert (ended.code, ended.err) == (2, "error: target: broken\n")
    assert ended.json["error"] == "target: broken"


# Config files and `specfw config`

SETTINGS = {
    "target": {"name": "transformers", "model": "some/model", "dtype": "float32"},
    "scheduler": {"name": "fixed", "max_nodes": 3},
    "sampling": {"max_new_tokens": 4, "stop": ["x"]},
    "engine": {"max_batch": 2},
}
TOML = """
[target]
name = "transformers"
model = "some/model"
dtype = "float32"
[scheduler]
name = "fixed"
max_nodes = 3
[sampling]
max_new_tokens = 4
stop = ["x"]
[engine]
max_batch = 2
"""


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ".toml"])
def test_a_config_file_is_read_in_each_format_and_options_come_on_top(
    specfw: Command, tmp_path: Path, suffix: str
) -> None:
    """Formats that mean different things, or options that lose against the file."""
    file = tmp_path / f"config{suffix}"
    dump = {".toml": lambda settings: TOML, ".json": json.dumps}.get(suffix, yaml.safe_dump)
    file.write_text(dump(SETTINGS))
    read = specfw("config", "-c", str(file)).json
    assert read == PipelineConfig(**SETTINGS).resolved()
    changed = specfw(
        "config", "--config", str(file), "--verifier", "rejection", "--set", "scheduler.max_nodes=5"
    ).json
    assert changed["verifier"] == {"name": "rejection"}
    assert changed["scheduler"][0]["max_nodes"] == 5
    assert changed["sampling"] == read["sampling"]


def test_a_printed_config_can_be_loaded_and_prints_itself_again(
    specfw: Command, tmp_path: Path
) -> None:
    """A default that is printed in a form that is not accepted."""
    printed = specfw(
        "config",
        "--target",
        "demo",
        "--scheduler",
        "fixed(max_width=2)",
        "--set",
        "sampling.seed=1",
    )
    file = tmp_path / "config.json"
    file.write_text(printed.out)
    assert specfw("config", "-c", str(file)).out == printed.out


def test_a_config_file_generates(specfw: Command, checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump(
            {"target": checkpoint, "sampling": {"max_new_tokens": 2, "ignore_eos": True}}
        )
    )
    output = specfw("generate", "-c", str(file), "--prompt", "abc", "--json").json
    assert len(output["token_ids"]) == 2


def test_the_schema_names_every_key(specfw: Command) -> None:
    assert (
        specfw("config", "--schema").json["properties"].keys() == PipelineConfig.model_fields.keys()
    )


# plugins, help, version


def test_plugins_json_has_the_stable_keys(specfw: Command) -> None:
    found = specfw("plugins", "--json").json
    assert found.keys() == {"plugins", "broken", "filtered", "conflicts"}
    [builtin] = found["plugins"]
    assert builtin.keys() == {"name", "distribution", "version", "components"}
    assert (builtin["name"], builtin["version"]) == ("specfw", __version__)
    names = {(one["kind"], one["name"]) for one in builtin["components"]}
    assert names >= {
        ("drafter", "none"),
        ("verifier", "coupled"),
        ("target", "demo"),
        ("scheduler", "fixed"),
    }


def test_plugins_lists_components_for_people(specfw: Command) -> None:
    ended = specfw("plugins")
    assert ended.code == 0
    assert "drafter none" in ended.out


def test_help_and_version() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["--help"])
    assert shown.exit_code == 0
    for name in ("generate", "demo", "plugins", "models", "certify", "config", "bench"):
        assert name in shown.output
    assert runner.invoke(app, ["--version"]).output == f"{__version__}\n"
    assert runner.invoke(app, ["generate", "--help"]).exit_code == 0


# Errors

REFUSALS = {
    "no prompt": (["generate", "--target", "demo"], "expected a prompt, got none; give --prompt"),
    "no target": (["generate", "--prompt", "x"], "'target' is missing"),
    "no such target": (["generate", "--prompt", "x", "--target", "./nowhere"], "no such folder"),
    "no such drafter": (
        ["config", "--drafter", "nonn"],
        "unknown drafter 'nonn'; did you mean 'none'",
    ),
    "unknown option": (["config", "--scheduler", "fixed(max_node=1)"], "did you mean 'max_nodes'"),
    "unknown key": (["config", "--set", "engine.max_batc=1"], "did you mean 'max_batch'"),
    "wrong type": (
        ["config", "--set", "engine.max_batch=few"],
        "max_batch: Input should be a valid integer (got 'few')",
    ),
    "bad override": (["config", "--set", "engine"], "expected key=value"),
    "wrong dtype": (["config", "--dtype", "float8"], "dtype: Input should be"),
    "no such file": (["config", "-c", "nowhere.yaml"], "'nowhere.yaml' cannot be read"),
    "odd file": (["config", "-c", "config.ini"], "expected one of .yaml"),
    "no such prompt file": (
        ["generate", "--target", "demo", "--prompt-file", "nowhere.txt"],
        "cannot read",
    ),
    "contradiction": (
        ["config", "--set", "engine.max_batch=9", "--set", "engine.max_step_tokens=4"],
        "exceeds",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(specfw: Command, case: str) -> None:
    arguments, sentence = REFUSALS[case]
    ended = specfw(*arguments)
    assert is_refusal(ended), ended
    assert sentence in ended.err


MISTAKEN_SETTINGS = {
    "no tokens": (["--max-new-tokens", "0"], "max_new_tokens: "),
    "negative": (["--max-new-tokens", "-4"], "got -4"),
    "temperature": (["--temperature", "-1"], "temperature: "),
    "empty prompt": (["--prompt", ""], "got an empty one; write something"),
    "too long": (["--raw", "--prompt", "x" * 300], "shorter than 256 tokens"),
}


@pytest.mark.parametrize("case", MISTAKEN_SETTINGS)
def test_a_mistaken_setting_of_generate_is_one_sentence(
    specfw: Command, checkpoint: str, case: str
) -> None:
    arguments, sentence = MISTAKEN_SETTINGS[case]
    ended = specfw("generate", "--target", checkpoint, "--prompt", "abc", "--json", *arguments)
    assert is_refusal(ended), ended
    assert sentence in ended.err


def test_a_usage_error_is_exit_code_2(specfw: Command) -> None:
    ended = specfw("generate", "--promt", "x")
    assert ended.code == 2
    assert "--prompt" in ended.err
    assert "Traceback" not in ended.err


# Processes of their own


def test_importing_specfw_imports_no_torch() -> None:
    """Seconds of import before anything is asked for."""
    code = "import specfw, specfw.cli.main, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert process(code, code=True).code == 0


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["config"], ["generate", "--help"]])
def test_what_needs_no_model_imports_no_torch(arguments: list[str]) -> None:
    """A help text that takes as long as a model."""
    code = f"""
        import sys
        sys.argv = ["specfw", *{arguments!r}]
        from specfw.cli.main import run
        try:
            run()
        except SystemExit as end:
            sys.exit(end.code or 100 * ("torch" in sys.modules))
        """
    ended = process(textwrap.dedent(code), code=True)
    assert ended.code == 0, ended.err


def test_a_process_generates_and_refuses(checkpoint: str) -> None:
    ended = process(
        "generate", "--target", checkpoint, "--prompt", "abc", "--max-new-tokens", "2", "--json"
    )
    assert (ended.code, ended.err) == (0, "")
    assert ended.json.keys() >= STABLE_KEYS
    refused = process(
        "generate", "--target", checkpoint, "--prompt", "abc", "--max-new-tokens", "0"
    )
    assert is_refusal(refused), refused


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with two installed distributions: one plugin that works, and one that cannot be imported."""
    good = """
        from specfw.builtins import NoDrafter
        from specfw.components import Component
        from specfw.hookspecs import hookimpl

        specfw_api = 1

        @hookimpl
        def specfw_drafters():
            return {"good": Component(lambda _: NoDrafter())}

        @hookimpl
        def specfw_commands(app):
            @app.command("greet")
            def greet():
                print("hello")
        """
    sources = {"good": textwrap.dedent(good), "bad": "import a_module_that_nobody_has\n"}
    for name, source in sources.items():
        (tmp_path / f"plug_{name}.py").write_text(source)
        info = tmp_path / f"specfw_plugin_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: specfw-plugin-{name}\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(f"[specfw]\n{name} = plug_{name}\n")
    return tmp_path


def test_B41_a_broken_plugin_costs_only_itself(site: Path, checkpoint: str) -> None:
    """llm#1280: one plugin that fails to import made the whole program unusable, even --help."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        FILTER_VARIABLE: "good,bad",
    }

    def run(*arguments: str) -> Ended:
        ended = process(*arguments, **environment)
        warnings = [line for line in ended.err.split("\n") if line.startswith("warning: ")]
        assert len(warnings) == 1
        for part in ("'bad'", "specfw-plugin-bad 1.0", "import", "a_module_that_nobody_has"):
            assert part in warnings[0]
        return Ended(ended.code, ended.out, ended.err.replace(f"{warnings[0]}\n", ""))

    shown = run("--help")
    assert (shown.code, shown.err) == (0, "")
    assert "greet" in shown.out
    assert run("greet").out == "hello\n"
    found = run("plugins", "--json").json
    assert [broken["name"] for broken in found["broken"]] == ["bad"]
    assert "a_module_that_nobody_has" in found["broken"][0]["error"]
    generate = (
        "generate",
        "--target",
        checkpoint,
        "--prompt",
        "abc",
        "--max-new-tokens",
        "2",
        "--json",
    )
    used = run(*generate, "--drafter", "good")
    assert (used.code, used.err) == (0, "")
    assert len(used.json["token_ids"]) == 2
    asked = run(*generate, "--drafter", "bad")
    assert is_refusal(asked), asked
    assert "drafter 'bad' cannot be used" in asked.err
    assert "ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in asked.err
    strict = run(*generate, "--set", "engine.strict_plugins=true")
    assert is_refusal(strict), strict
    assert "a_module_that_nobody_has" in strict.err
