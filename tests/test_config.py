"""One config schema for Python, files and the command line: what it accepts, refuses and prints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from specfw.components import Component, Options
from specfw.config import EngineConfig, PipelineConfig, apply_overrides, load_config
from specfw.contracts import API_VERSION, Drafter, LoadedTarget, TargetLoader
from specfw.errors import ConfigError, UnknownComponentError
from specfw.hookspecs import hookimpl
from specfw.plugins import FILTER_VARIABLE, PluginManager
from specfw.references import Reference, parse_reference
from specfw.types import SamplingParams


class Draft(Drafter):
    def __init__(self, options: Any = None) -> None:
        self.options = options

    def propose(self, requests: Any, builder: Any) -> None: ...


class Loader(TargetLoader):
    def __init__(self, options: Any = None) -> None:
        self.options = options

    def load(self) -> LoadedTarget:
        raise ConfigError("nothing to load")


class LookupOptions(Options):
    k: Annotated[int, Field(ge=1)] = 4
    max_nodes: Annotated[int, Field(ge=1)] = 7
    options: str = "plain"


@hookimpl
def _drafters() -> dict[str, Component[Any]]:
    return {"lookup": Component(Draft, LookupOptions), "two-part": Component(Draft, LookupOptions)}


@hookimpl
def _targets() -> dict[str, Component[Any]]:
    return {"bare": Component(Loader)}


PLUGIN = SimpleNamespace(
    __name__="test", specfw_api=API_VERSION, specfw_drafters=_drafters, specfw_targets=_targets
)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    monkeypatch.setenv(FILTER_VARIABLE, "")
    return PluginManager([PLUGIN], strict=True)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        PipelineConfig(**{"target": "demo", **settings})
    return str(error.value)


@pytest.mark.parametrize(
    "drafter",
    [
        "lookup(k=5, max_nodes=3)",
        "test:lookup( k = 5, max_nodes=3 )",
        {"name": "lookup", "k": 5, "max_nodes": 3},
        {"name": "test:lookup", "max_nodes": 3, "k": 5},
    ],
)
def test_every_form_of_a_component_means_the_same(manager: PluginManager, drafter: Any) -> None:
    """A setting must not depend on how it was written."""
    resolved = PipelineConfig(target="demo", drafter=drafter).resolved(manager)
    assert {**resolved["drafter"], "name": "lookup"} == {
        "name": "lookup",
        "k": 5,
        "max_nodes": 3,
        "options": "plain",
    }


def test_an_option_may_be_called_options(manager: PluginManager) -> None:
    """Component mappings are flat, so no option name but `name` is taken."""
    config = PipelineConfig(target="demo", drafter={"name": "lookup", "options": "mine"})
    assert config.bind(manager).drafter.build().options.options == "mine"


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
OPTION_NAMES = st.from_regex(r"o_[a-z]{1,6}", fullmatch=True)


@given(options=st.dictionaries(OPTION_NAMES, LITERALS, max_size=4))
def test_expressions_and_mappings_agree(options: dict[str, Any]) -> None:
    """Whatever text a literal holds, brackets and quotes too, the expression must read it back."""
    inner = "plug-in:two-part(" + ", ".join(f"{k}={v!r}" for k, v in options.items()) + ")"
    expected = {"name": "plug-in:two-part", **options}
    assert parse_reference("drafter", inner) == Reference("plug-in:two-part", options)
    outer = parse_reference("drafter", f"compose(first={inner}, all=[{inner}])")
    assert outer == Reference("compose", {"first": expected, "all": [expected]})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lookup(5)", "by name only"),
        ("lookup(**{'k': 5})", "by name only"),
        ("lookup(k=5, k=6)", "'k' twice"),
        ("lookup(k=five)", "not a literal"),
        ("lookup(k=__import__('os').getpid())", "name(option=value"),
        ("lookup(k=5)(k=6)", "name(option=value"),
        ("lookup(k=5).close()", "name(option=value"),
        ("lookup(k=5", "name(option=value"),
        ("look up", "expected a name"),
        ("", "expected a name"),
    ],
)
def test_expressions_hold_nothing_but_options(text: str, why: str) -> None:
    """An expression is data: it must neither run code nor be guessed at."""
    with pytest.raises(ConfigError) as error:
        parse_reference("drafter", text)
    assert why in str(error.value)


@pytest.mark.parametrize("value", [None, 5, ["lookup"], {"k": 5}, {"name": 5}, {"name": "a(k=1)"}])
def test_what_is_no_reference_is_refused(value: Any) -> None:
    """The error must name the key and show what came."""
    message = refusal(drafter=value)
    assert message.startswith("drafter")
    assert "name" in message


def test_a_ready_object_is_used_and_shown(manager: PluginManager) -> None:
    """A user's own drafter needs no plugin."""
    mine = Draft()
    config = PipelineConfig(target="demo", drafter=mine)
    assert config.bind(manager).drafter.build() is mine
    assert config.resolved(manager)["drafter"] == {"name": "<Draft>"}


def test_a_scheduler_may_stand_alone_or_in_a_list(manager: PluginManager) -> None:
    """Schedulers compose, and one is the common case."""
    for given_as in (
        "fixed(max_nodes=2)",
        ["fixed(max_nodes=2)"],
        ({"name": "fixed", "max_nodes": 2},),
    ):
        config = PipelineConfig(target="demo", scheduler=given_as)
        (scheduler,) = config.resolved(manager)["scheduler"]
        assert {"name": "fixed", "max_nodes": 2}.items() <= scheduler.items()
    assert "at least one" in refusal(scheduler=[])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("demo", {"name": "demo"}),
        ("demo(layers=3)", {"name": "demo", "layers": 3}),
        ("specfw:demo", {"name": "specfw:demo"}),
        ("owner/model", {"name": "transformers", "model": "owner/model"}),
        ("gpt2", {"name": "transformers", "model": "gpt2"}),
        ("./demo", {"name": "transformers", "model": "./demo"}),
        ("./models (old)/a", {"name": "transformers", "model": "./models (old)/a"}),
        (Path("demo"), {"name": "transformers", "model": "demo"}),
    ],
)
def test_a_target_is_a_component_or_a_model(
    manager: PluginManager, target: Any, expected: dict[str, Any]
) -> None:
    """Text that names no target component is a folder or a Hub id; a path always is."""
    resolved = PipelineConfig(target=target).resolved(manager)["target"]
    assert expected.items() <= resolved.items()


def test_dtype_and_device_reach_the_target(manager: PluginManager) -> None:
    """A setting that the loader never sees would be silently ignored."""
    config = PipelineConfig(target="gpt2", dtype="float32", device="cpu")
    target = config.bind(manager).target.settings()
    assert (target["dtype"], target["device"]) == ("float32", "cpu")

    twice = PipelineConfig(target={"name": "demo", "dtype": "float16"}, dtype="float32")
    with pytest.raises(ConfigError, match=r"dtype='float32' contradicts dtype='float16'"):
        twice.bind(manager)
    for target in ("bare", Loader()):
        with pytest.raises(ConfigError, match=r"dtype='float32' has no effect"):
            PipelineConfig(target=target, dtype="float32").bind(manager)


CHANGES = [
    ("drafter", "lookup"),
    ("drafters", {"fast": "lookup(k=2)", "slow-one": {"name": "two-part", "k": 3}}),
    ("verifier", "rejection"),
    ("scheduler", "fixed(max_depth=2)"),
    ("sampling", {"temperature": 0.5}),
    ("dtype", "float32"),
    ("device", "cpu"),
    *[
        ("engine", {key: value})
        for key, value in {
            "max_batch": 3,
            "max_step_tokens": 300,
            "prefill_chunk": 100,
            "prefill_share": 0.5,
            "patience": 7,
            "block_size": 8,
            "kv_tokens": 4096,
            "max_length": 99,
            "prefix_cache": False,
            "prepack": True,
            "strict_plugins": True,
        }.items()
    ],
]


def test_B45_every_setting_is_covered_below() -> None:
    """B45: a setting without a test can lose its effect unseen."""
    assert {key for key, _ in CHANGES} == set(PipelineConfig.model_fields) - {"target"}
    engine = {key for name, value in CHANGES if name == "engine" for key in value}
    assert engine == set(EngineConfig.model_fields)


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_B45_every_setting_shows_in_the_resolved_config(
    manager: PluginManager, key: str, value: Any
) -> None:
    """B45: a setting had no effect; the resolved config must show what was really understood."""
    plain = PipelineConfig(target="demo").resolved(manager)
    config = PipelineConfig(target="demo", **{key: value})
    changed = config.resolved(manager)
    assert changed[key] != plain[key]
    for again in (json.loads(json.dumps(changed)), yaml.safe_load(yaml.safe_dump(changed))):
        assert PipelineConfig(**again).resolved(manager) == changed


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"draftr": "lookup"}, ["'draftr'", "did you mean 'drafter'", "accepted: device, drafter"]),
        ({"zzz": 1}, ["'zzz'", "accepted: device, drafter"]),
        ({"engine": {"max_bach": 3}}, ["engine", "'max_bach'", "did you mean 'max_batch'"]),
        ({"engine": {"max_batch": "three"}}, ["engine", "max_batch", "integer", "'three'"]),
        ({"engine": {"max_batch": True}}, ["engine", "max_batch", "integer", "True"]),
        ({"engine": {"max_batch": 0}}, ["engine", "max_batch", "greater than or equal to 1", "0"]),
        ({"engine": {"block_size": -4}}, ["engine", "block_size", "-4"]),
        ({"drafters": "lookup"}, ["drafters: expected a mapping of names", "'lookup'"]),
        ({"drafters": {"a.b": "lookup"}}, ["drafters: expected a mapping of names", "'a.b'"]),
        (
            {"drafters": {"fast": "lookup"}, "sampling": {"speculation": {"drafter": "fsat"}}},
            ["sampling.speculation.drafter is 'fsat'", "it has: fast"],
        ),
        ({"engine": {"prefix_cache": "maybe"}}, ["engine", "prefix_cache", "boolean", "'maybe'"]),
        ({"engine": 7}, ["engine", "dictionary", "7"]),
        ({"sampling": {"temprature": 1}}, ["'temprature'", "did you mean 'temperature'"]),
        ({"sampling": {"temperature": -1}}, ["temperature", "greater than or equal to 0", "-1"]),
        ({"dtype": "fp32"}, ["dtype", "'float32'", "'bfloat16'", "'fp32'"]),
        ({"device": 3}, ["device", "string", "3"]),
    ],
)
def test_B45_bad_settings_are_refused_with_key_and_accepted_values(
    settings: dict[str, Any], parts: list[str]
) -> None:
    """B45: unknown, misspelt, mistyped and out-of-range settings must not pass unseen."""
    message = refusal(**settings)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("engine", "parts"),
    [
        ({"max_batch": 9, "max_step_tokens": 8}, ["max_batch=9", "max_step_tokens=8"]),
        ({"prefill_chunk": 64, "max_step_tokens": 32}, ["prefill_chunk=64", "max_step_tokens=32"]),
        ({"kv_tokens": 8, "block_size": 16}, ["kv_tokens=8", "block_size=16"]),
    ],
)
def test_B45_contradicting_settings_are_refused(engine: dict[str, Any], parts: list[str]) -> None:
    """B45: a later clip hid that one setting made another pointless."""
    message = refusal(engine=engine)
    for part in parts:
        assert part in message


def test_B45_defaults_give_way_to_a_small_step() -> None:
    """B45: only settings that were really given can contradict each other."""
    engine = EngineConfig(max_step_tokens=8)
    assert (engine.max_batch, engine.prefill_chunk) == (8, 8)
    assert (EngineConfig().max_batch, EngineConfig().prefill_chunk) == (16, 256)


@pytest.mark.parametrize("options", [{"kk": 1}, {"k": "x"}, {"k": 0}, {"k": -1}])
def test_B45_bad_options_are_refused_alike_from_python_and_command_line(
    manager: PluginManager, options: dict[str, Any]
) -> None:
    """B45: the same mistake must meet the same refusal on every way in."""
    ((key, value),) = options.items()
    typed = {"target": "demo", "drafter": {"name": "lookup", **options}}
    overridden = apply_overrides(
        {"target": "demo", "drafter": "lookup"}, [f"drafter.{key}={value}"]
    )
    messages = []
    for settings in (typed, overridden):
        with pytest.raises(ConfigError) as error:
            PipelineConfig(**settings).resolved(manager)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "drafter 'lookup'" in messages[0]
    assert key in messages[0]


def test_B45_an_unknown_component_is_answered_with_the_close_one(manager: PluginManager) -> None:
    """B45: a misspelt component must not fall back to a default."""
    with pytest.raises(UnknownComponentError, match="'coupled'"):
        PipelineConfig(target="demo", verifier="copled").bind(manager)


def test_a_config_needs_a_target() -> None:
    """The only setting without a default."""
    with pytest.raises(ConfigError, match="'target' is missing"):
        PipelineConfig(drafter="none")


FILES = {
    "a.yaml": "target: demo\ndrafter: lookup(k=5)\nengine:\n  max_batch: 3\n",
    "a.yml": "target: demo\ndrafter: {name: lookup, k: 5}\nengine: {max_batch: 3}\n",
    "a.json": '{"target": "demo", "drafter": {"name": "lookup", "k": 5}, "engine": {"max_batch": 3}}',
    "a.toml": 'target = "demo"\ndrafter = "lookup(k=5)"\n[engine]\nmax_batch = 3\n',
}


def test_all_file_formats_hold_the_same_schema(manager: PluginManager, tmp_path: Path) -> None:
    """One schema: a config must mean the same in each format."""
    expected = PipelineConfig(
        target="demo",
        drafter="lookup(k=5)",
        engine=EngineConfig(max_batch=3),
        sampling=SamplingParams(),
    ).resolved(manager)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        assert PipelineConfig(**load_config(tmp_path / name)).resolved(manager) == expected


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "target: demo\ntarget: gpt2\n", "'target' is given twice"),
        ("a.yaml", "engine: {max_batch: 1, max_batch: 2}\n", "'max_batch' is given twice"),
        ("a.json", '{"target": "a", "target": "b"}', "'target' is given twice"),
        ("a.toml", 'target = "a"\ntarget = "b"\n', "overwrite"),
        ("a.yaml", "target: [demo\n", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "- demo\n", "expected a mapping"),
        ("a.yaml", "1: demo\n", "expected a mapping"),
        ("a.yaml", "", "expected a mapping"),
        ("a.ini", "", "expected one of .yaml, .yml, .json, .toml"),
    ],
)
def test_B45_bad_files_are_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    """B45: of two contradicting keys in a file, YAML and JSON readers silently take the last."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / name)
    assert why in str(error.value)
    assert name in str(error.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    """A wrong path is the user's mistake, told without a traceback."""
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("settings", "overrides", "expected"),
    [
        ({}, ["drafter=lookup"], {"drafter": "lookup"}),
        ({}, ["drafter=lookup(k=5, max_nodes=3)"], {"drafter": "lookup(k=5, max_nodes=3)"}),
        ({"drafter": "lookup"}, ["drafter.k=5"], {"drafter": {"name": "lookup", "k": 5}}),
        (
            {"drafter": "lookup(k=3, max_nodes=2)"},
            ["drafter.k=5"],
            {"drafter": {"name": "lookup", "k": 5, "max_nodes": 2}},
        ),
        ({}, ["drafter.k=5", "drafter=lookup"], {"drafter": {"name": "lookup", "k": 5}}),
        ({}, ["scheduler.max_nodes=3"], {"scheduler": {"name": "fixed", "max_nodes": 3}}),
        (
            {"scheduler": ["fixed"]},
            ["scheduler.max_nodes=3"],
            {"scheduler": [{"name": "fixed", "max_nodes": 3}]},
        ),
        (
            {"scheduler": ["fixed", "other(a=1)"]},
            ["scheduler.1.a=2"],
            {"scheduler": ["fixed", {"name": "other", "a": 2}]},
        ),
        ({}, ["engine.max_batch=2"], {"engine": {"max_batch": 2}}),
        (
            {},
            ["sampling.speculation.enabled=false"],
            {"sampling": {"speculation": {"enabled": False}}},
        ),
        (
            {"engine": EngineConfig(max_batch=2)},
            ["engine.kv_tokens=null"],
            {"engine": {"max_batch": 2, "kv_tokens": None}},
        ),
        (
            {"drafter": "compose(first=lookup(k=1))"},
            ["drafter.first.k=2"],
            {"drafter": {"name": "compose", "first": {"name": "lookup", "k": 2}}},
        ),
        ({}, ["drafters.fast=lookup"], {"drafters": {"fast": "lookup"}}),
        (
            {"drafters": {"fast": "lookup(k=1)", "slow": "two-part"}},
            ["drafters.fast.max_nodes=2", "drafters.slow=none"],
            {"drafters": {"fast": {"name": "lookup", "k": 1, "max_nodes": 2}, "slow": "none"}},
        ),
        ({}, ["sampling.stop=['a', \"b\"]"], {"sampling": {"stop": ["a", "b"]}}),
        ({}, ["target=odd: name #1"], {"target": "odd: name #1"}),
        ({}, ["device='5'"], {"device": "5"}),
    ],
)
def test_overrides_set_what_they_say(
    settings: dict[str, Any], overrides: list[str], expected: dict[str, Any]
) -> None:
    """Each override sets one key and leaves the rest."""
    before = repr(settings)
    result = apply_overrides(settings, overrides)
    assert result == expected
    assert repr(settings) == before, "the settings given must not change"


def test_an_override_opens_a_target_given_as_text(manager: PluginManager) -> None:
    """Only with the plugins known can text be told to be a name or a model."""
    named = apply_overrides({"target": "demo"}, ["target.layers=3"], manager)
    assert named == {"target": {"name": "demo", "layers": 3}}
    model = apply_overrides({"target": "gpt2"}, ["target.revision=main"], manager)
    assert model == {"target": {"name": "transformers", "model": "gpt2", "revision": "main"}}
    with pytest.raises(ConfigError, match="mapping with a 'name'"):
        apply_overrides({"target": "demo"}, ["target.layers=3"])


@pytest.mark.parametrize(
    ("settings", "overrides", "parts"),
    [
        ({}, ["drafter"], ["'drafter'", "key=value"]),
        ({}, ["=3"], ["'=3'", "key=value"]),
        ({}, ["drafter..k=3"], ["key=value"]),
        ({}, ["draftr.k=5"], ["'draftr'", "did you mean 'drafter'", "accepted: device, drafter"]),
        ({}, ["dtype.k=5"], ["'dtype'", "no keys"]),
        (
            {},
            ["engine.max_batch=1", "engine.max_batch=2"],
            ["max_batch=2", "contradicts", "max_batch=1"],
        ),
        ({}, ["drafter=a", "drafter=b"], ["'drafter=b'", "contradicts", "'drafter=a'"]),
        ({}, ["drafter.k=5", "drafter=lookup(k=4)"], ["drafter.k=5", "contradicts", "lookup(k=4)"]),
        ({"scheduler": ["a", "b"]}, ["scheduler.k=1"], ["2 elements", "index"]),
        ({"engine": {"max_batch": 3}}, ["engine.max_batch.x=1"], ["max_batch.x=1", "no keys"]),
        ({"drafter": Draft()}, ["drafter.k=1"], ["Draft object", "no keys"]),
        ({}, ["target.model=x"], ["no keys"]),
        ({}, ["sampling.stop=[a"], ["sampling.stop=[a", "cannot read"]),
    ],
)
def test_B45_bad_overrides_are_refused(
    settings: dict[str, Any], overrides: list[str], parts: list[str]
) -> None:
    """B45: unknown and contradicting keys on the command line must not pass unseen."""
    with pytest.raises(ConfigError) as error:
        apply_overrides(settings, overrides)
    for part in parts:
        assert part in str(error.value)


def test_the_same_override_twice_is_no_contradiction() -> None:
    """Scripts repeat themselves."""
    assert apply_overrides({}, ["engine.max_batch=2", "engine.max_batch=2"]) == {
        "engine": {"max_batch": 2}
    }


def test_the_json_schema_describes_every_key() -> None:
    """Editors check config files against it."""
    schema = PipelineConfig.json_schema()
    assert set(schema["properties"]) == set(PipelineConfig.model_fields)
    assert schema["required"] == ["target"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["drafter"]["default"] == "none"
    assert json.loads(json.dumps(schema)) == schema
