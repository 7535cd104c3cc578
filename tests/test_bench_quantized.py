"""The benchmark of quantised targets, and the doctor: what they report, on tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specfw.bench import quantized as bench
from specfw.bench.plots import new_figure
from specfw.bench.quantized import BASE, QuantizedBench, bench_quantized
from specfw.cli import doctor
from specfw.cli.main import app
from specfw.errors import ConfigError
from specfw.targets import demo
from specfw.testing import Certificate, configured
from tests.byte_models import save_tiny_chat
from tests.test_docs import documented_json, flat_keys

ROUNDED = "torch-int(target='demo', scheme='w8a8')"
MISSING = "no-such-loader(target='demo')"

pytest.importorskip("specfw_plugin_torch_int")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> QuantizedBench:
    """Two prompts on a tiny model, dense and quantised, and a loader that is not installed."""
    folder = tmp_path_factory.mktemp("bench")
    model = save_tiny_chat(folder / "model")
    prompts = folder / "prompts.jsonl"
    lines = [
        {"question_id": n, "category": f"c{n}", "turns": [text]}
        for n, text in enumerate(["abcabcabc", "hello"])
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "demo_folder", lambda: model)
        return bench_quantized([ROUNDED, MISSING], max_new_tokens=8, prompts_file=prompts)


def test_rows_compare_with_the_dense_target(result: QuantizedBench) -> None:
    """The base is compared with itself without drafts, and is the first row."""
    base, rounded = result.rows()
    assert result.mapping()["max_new_tokens"] == 8
    assert (base["loader"], base["setting"]) == (BASE, "bfloat16")
    assert base["ratio_vs_bf16_plain"]["plain"] == 1.0
    assert base["perplexity_ratio"] == 1.0
    assert base["exact_match"] == 1.0
    assert rounded["loader"] == "torch-int"
    assert rounded["setting"] == "int8 weights and activations"
    assert rounded["bytes"] < base["bytes"]
    assert 0.8 < rounded["perplexity_ratio"] < 1.25
    assert all(row["acceptance_length"] >= 1.0 for row in result.rows())


def test_each_prompt_runs_in_both_modes(result: QuantizedBench) -> None:
    """A row over fewer runs than another would compare different work."""
    for measured in result.measured.values():
        for mode in ("plain", "speculative"):
            assert [len(text) for text in measured.texts[mode]] == [8, 8]
            assert all(speed > 0 for speed in measured.speeds(mode))


def test_what_cannot_be_loaded_is_told(result: QuantizedBench) -> None:
    """One loader that is missing must not end the others' run, nor be dropped in silence."""
    assert list(result.refused) == [MISSING]
    assert "no-such-loader" in result.refused[MISSING]
    assert f"Not measured: `{MISSING}`" in result.markdown()


def test_json_and_markdown(result: QuantizedBench) -> None:
    """Every key is documented, every row is in the table."""
    assert flat_keys(result.mapping()) == documented_json("specfw bench quantized")
    table = [line for line in result.markdown().splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(result.rows())
    assert json.loads(json.dumps(result.mapping())) == result.mapping()


def test_plot_needs_matplotlib_or_draws(result: QuantizedBench, tmp_path: Path) -> None:
    """A PNG where matplotlib is there; else one sentence that says what to install."""
    path = tmp_path / "quantized.png"
    try:
        new_figure("x", 1, 1)
    except ConfigError:
        with pytest.raises(ConfigError, match=r"bench quantized.*install specfw\[plot\]"):
            result.plot(path)
    else:
        result.plot(path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_passage_is_the_whole_of_what_is_measured() -> None:
    """A text of a few hundred words, without anything that only some tokenizers know."""
    text = (Path(bench.__file__).parent / "passage.txt").read_text(encoding="utf-8")
    assert len(text.split()) > 300
    assert text.isascii()


def test_doctor_lists_what_is_installed() -> None:
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0
    about = json.loads(found.stdout)
    assert set(about) == documented_json("specfw doctor")
    assert about["packages"]["torch"]
    assert about["plugins"]["specfw"]
    assert about["target"] is None
    assert "not installed" in CliRunner().invoke(app, ["doctor"]).stdout


def test_doctor_measures_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capability report of a loader: cost by rows, and what rows change."""
    model = save_tiny_chat(tmp_path)
    monkeypatch.setattr(demo, "demo_folder", lambda: model)
    arguments = [
        "doctor",
        "--target",
        ROUNDED,
        "--dtype",
        "float32",
        "--rows",
        "3",
        "--repeats",
        "1",
    ]
    found = CliRunner().invoke(app, [*arguments, "--json"])
    assert found.exit_code == 0, found.output
    target = json.loads(found.stdout)["target"]
    page = (Path(doctor.__file__).parents[2] / "docs/reference/cli.md").read_text()
    [table] = re.findall(r"\| key of `target` \|.*?\n\n", page, re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(target)
    assert target["batch_invariant"] is True
    assert target["kernel_shift"] == 0.0
    assert list(target["seconds_by_rows"]) == ["1", "2", "4", "8"]
    assert "of the quantised target" in target["guarantee"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert "rows independent" in shown
    assert "8 rows" in shown


def test_certify_says_what_holds_on_a_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate is about table models; what it means on a real one is measured there."""
    monkeypatch.setattr(demo, "demo_folder", lambda: save_tiny_chat(tmp_path))
    certificate = Certificate("same-text")
    monkeypatch.setattr(configured, "certify_config", lambda *_, **__: certificate)
    found = CliRunner().invoke(app, ["certify", "--target", ROUNDED, "--json"])
    assert found.exit_code == 0, found.output
    assert "of the quantised target" in json.loads(found.stdout)["on_target"]
