"""The one typed schema of a pipeline's settings, for Python, YAML, JSON, TOML and the command line."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from specfw.components import CONTRACTS, REFERENCE_SCHEMA, Bound, Kind
from specfw.contracts import Drafter, Scheduler, TargetLoader, Verifier
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.references import Reference, parse_reference
from specfw.speculative_config import with_speculative_config
from specfw.types import SamplingParams, explain_validation_error

__all__ = [
    "BoundConfig",
    "EngineConfig",
    "PipelineConfig",
    "apply_overrides",
    "load_config",
]

_Count = Annotated[int, Field(ge=1)]


class EngineConfig(BaseModel):
    """How much runs at once, and in what memory."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_batch: _Count = 16
    """Requests that run at once."""
    max_step_tokens: _Count = 512
    """Tokens that one step scores, over all requests."""
    prefill_chunk: _Count = 256
    """Prompt tokens of one request that one step scores."""
    prefill_share: Annotated[float, Field(gt=0.0, le=1.0, strict=False)] = 1.0
    """The part of a step's tokens that prompts may take while other requests decode."""
    patience: _Count = 64
    """How many requests that came later, and have a higher priority, may overtake one that waits."""
    block_size: _Count = 16
    """KV slots of one block."""
    kv_tokens: _Count | None = None
    """KV capacity in tokens, over all requests; None sizes it from the free memory."""
    max_length: _Count | None = None
    """Longest sequence, prompt and output together, in tokens; None is the target's own limit."""
    prefix_cache: bool = True
    """Whether requests share the KV of equal prompt beginnings."""
    prepack: bool | None = None
    """Whether weights are repacked for the CPU; None does so where it helps."""
    strict_plugins: bool = False
    """Whether a broken plugin is an error instead of a warning."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            accepted = list(type(self).model_fields)
            raise ConfigError(explain_validation_error("engine", error, accepted)) from None

    @model_validator(mode="before")
    @classmethod
    def _defaults_fit_the_step(cls, settings: Any) -> Any:
        """A small step lowers the defaults of what must fit into it; explicit settings must agree."""
        step = settings.get("max_step_tokens") if isinstance(settings, Mapping) else None
        if type(step) is not int or step < 1:
            return settings
        fitting = {
            key: min(cls.model_fields[key].default, step) for key in ("max_batch", "prefill_chunk")
        }
        return {**fitting, **settings}

    @model_validator(mode="after")
    def _settings_agree(self) -> EngineConfig:
        for key in ("max_batch", "prefill_chunk"):
            if getattr(self, key) > self.max_step_tokens:
                raise ValueError(
                    f"{key}={getattr(self, key)} exceeds max_step_tokens={self.max_step_tokens}; "
                    "lower the first or raise the second"
                )
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise ValueError(
                f"kv_tokens={self.kv_tokens} is less than block_size={self.block_size}; "
                "raise the first or lower the second"
            )
        return self


@dataclass(frozen=True)
class BoundConfig:
    """A config's components, looked up and with checked options, not yet built."""

    target: Bound[TargetLoader]
    drafter: Bound[Drafter]
    drafters: Mapping[str, Bound[Drafter]]
    verifier: Bound[Verifier]
    scheduler: tuple[Bound[Scheduler], ...]


def _reference_field(default: str, several: bool = False) -> WithJsonSchema:
    one = REFERENCE_SCHEMA
    schema = {"anyOf": [*one["anyOf"], {"type": "array", "items": one, "minItems": 1}]}
    return WithJsonSchema({**(schema if several else one), "default": default})


class PipelineConfig(BaseModel):
    """Everything that a pipeline is built from.

    A component is given as a name (`ngram`, `plugin:ngram`), an expression (`ngram(k=5)`), a
    mapping (`{"name": "ngram", "k": 5}`) or a ready object. A target may also be a local folder or
    a Hugging Face Hub id, which means `{"name": "transformers", "model": ...}`.

    vLLM's dictionary `speculative_config` is understood in place of `drafter`, for its methods
    `ngram`, `draft_model` and `suffix`; it also sets the scheduler, unless one is given.

    Raises:
        ConfigError: a key or value is wrong.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Annotated[InstanceOf[Reference] | str, WithJsonSchema(REFERENCE_SCHEMA)]
    """The target; text that could be a name is told apart from a model when plugins are known."""
    drafter: Annotated[InstanceOf[Reference], _reference_field("none")] = Field(
        default_factory=lambda: Reference("none")
    )
    drafters: Annotated[
        Mapping[str, InstanceOf[Reference]],
        WithJsonSchema({"type": "object", "additionalProperties": REFERENCE_SCHEMA, "default": {}}),
    ] = Field(default_factory=dict)
    """More drafters to hold ready, by names that requests can ask for (`speculation.drafter`)."""
    verifier: Annotated[InstanceOf[Reference], _reference_field("coupled")] = Field(
        default_factory=lambda: Reference("coupled")
    )
    scheduler: Annotated[
        tuple[InstanceOf[Reference], ...], _reference_field("fixed", several=True)
    ] = Field(default_factory=lambda: (Reference("fixed"),))
    """One or more; limits are their minimum, and any of them can stop a draft."""
    sampling: SamplingParams = SamplingParams()
    """What requests ask for unless they say otherwise."""
    engine: EngineConfig = EngineConfig()
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """What the target's weights become; `auto` is the loader's choice."""
    device: str = "auto"
    """Where the target's weights go; `auto` is the loader's choice."""

    def __init__(self, **settings: Any) -> None:
        settings = with_speculative_config(settings)
        if "target" not in settings:
            raise ConfigError(
                "config: 'target' is missing; give a local folder, a Hugging Face Hub id or the "
                "name of a target component, such as 'demo'."
            )
        parsed = {
            key: _PARSERS[key](value) if key in _PARSERS else value
            for key, value in settings.items()
        }
        try:
            super().__init__(**parsed)
        except ValidationError as error:
            accepted = list(type(self).model_fields)
            raise ConfigError(explain_validation_error("config", error, accepted)) from None

    @model_validator(mode="after")
    def _drafter_is_known(self) -> PipelineConfig:
        name = self.sampling.speculation.drafter
        if name is not None and name not in self.drafters:
            raise ValueError(
                f"sampling.speculation.drafter is {name!r}, which 'drafters' does not name (it has: "
                f"{', '.join(self.drafters) or 'none'}); name it there, or leave it out"
            )
        return self

    def bind(self, manager: PluginManager) -> BoundConfig:
        """Look up every component and check its options; nothing is built or loaded.

        Raises:
            ConfigError: an option is wrong, or contradicts `dtype` or `device`.
            UnknownComponentError, PluginError: a component cannot be had.
        """
        return BoundConfig(
            target=manager.bind("target", self._placed_target(manager)),
            drafter=manager.bind("drafter", self.drafter),
            drafters={name: manager.bind("drafter", one) for name, one in self.drafters.items()},
            verifier=manager.bind("verifier", self.verifier),
            scheduler=tuple(manager.bind("scheduler", one) for one in self.scheduler),
        )

    def resolved(self, manager: PluginManager | None = None) -> dict[str, Any]:
        """The whole config in JSON's types, every default filled in; loading it gives it again.

        A ready object is shown by its class's name in angle brackets, and cannot be loaded again.
        """
        bound = self.bind(manager or PluginManager(strict=self.engine.strict_plugins))
        return {
            "target": bound.target.settings(),
            "drafter": bound.drafter.settings(),
            "drafters": {name: one.settings() for name, one in bound.drafters.items()},
            "verifier": bound.verifier.settings(),
            "scheduler": [one.settings() for one in bound.scheduler],
            "sampling": self.sampling.model_dump(mode="json"),
            "engine": self.engine.model_dump(mode="json"),
            "dtype": self.dtype,
            "device": self.device,
        }

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a config file; options of components are checked by their plugins."""
        return cls.model_json_schema()

    def _placed_target(self, manager: PluginManager) -> Reference:
        """The target with `dtype` and `device` handed on to its options."""
        target = manager.target_reference(self.target)
        placement = {"dtype": self.dtype, "device": self.device}
        asked = {key: value for key, value in placement.items() if value != "auto"}
        accepted = _option_names(target, manager) if asked else frozenset()
        for key, value in asked.items():
            if key not in accepted:
                raise ConfigError(
                    f"config: {key}={value!r} has no effect, for target {target.name!r} takes no "
                    f"{key}; leave {key} at 'auto'."
                )
            own = target.options.get(key, "auto")
            if own not in ("auto", value):
                raise ConfigError(
                    f"config: {key}={value!r} contradicts {key}={own!r} in the target's options; "
                    "set one of them."
                )
        return Reference(target.name, {**target.options, **asked}, target.instance)


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a .yaml, .yml, .json or .toml file, for `apply_overrides` and `PipelineConfig`.

    Raises:
        ConfigError: the file cannot be read, is of another kind, is no mapping or repeats a key.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            f"config file {str(path)!r}: expected one of {', '.join(_READERS)}, "
            f"got {path.suffix or 'no suffix'!r}."
        )
    try:
        settings = reader(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config file {str(path)!r} cannot be read: {reason}.") from error
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(
            f"config file {str(path)!r}: expected a mapping of keys, got {settings!r}."
        )
    return settings


def apply_overrides(
    settings: Mapping[str, Any],
    overrides: Sequence[str],
    manager: PluginManager | None = None,
) -> dict[str, Any]:
    """New settings in which each override, such as `drafter.k=5`, is set.

    Values are YAML scalars, or lists and mappings in brackets. A component given as text becomes a
    mapping when one of its options is set; for a target that needs the `manager`, which tells names
    from models. `drafter=ngram` takes effect before `drafter.k=5`, in whichever order they come.

    Raises:
        ConfigError: an override is malformed, names an unknown key or contradicts another.
    """
    result: dict[str, Any] = _plain(settings)
    given: dict[tuple[str, ...], str] = {}
    for path, value, text in sorted(map(_parse_override, overrides), key=lambda one: len(one[0])):
        _Override(path, value, text, given).apply(result, manager)
        given[path] = text
    return result


@dataclass(frozen=True)
class _Override:
    path: tuple[str, ...]
    value: Any
    text: str
    given: Mapping[tuple[str, ...], str]
    """The overrides that are applied already, by path."""

    def apply(self, settings: dict[str, Any], manager: PluginManager | None) -> None:
        section, *rest = self.path
        if not rest:
            self._set(settings, section)
            return
        here = self._open(settings.get(section, _plain(_SECTIONS[section])), section, manager)
        settings[section] = here
        for key in rest[:-1]:
            here = self._descend(here, key)
        self._set(self._mapping(here), rest[-1])

    def _set(self, container: dict[str, Any], key: str) -> None:
        if key in container and container[key] != self.value:
            lengths = range(1, len(self.path) + 1)
            earlier = [self.given[p] for n in lengths if (p := self.path[:n]) in self.given]
            if earlier:
                raise ConfigError(
                    f"override {self.text!r} contradicts {earlier[-1]!r}; give one of them."
                )
        container[key] = self.value

    def _open(self, value: Any, section: str, manager: PluginManager | None) -> Any:
        """The section as something in which a key can be set."""
        if section == "target" and isinstance(value, str):
            if manager is None:
                raise ConfigError(
                    f"override {self.text!r}: the target {value!r} is given as text; write it as a "
                    "mapping with a 'name' to set its options."
                )
            value = manager.target_reference(value)
        return self._promoted(value) if section in _COMPONENTS else value

    def _promoted(self, value: Any) -> Any:
        """A component given as text as a mapping; everything else as it is."""
        if isinstance(value, str):
            value = parse_reference(_COMPONENTS[self.path[0]], value)
        if not isinstance(value, Reference):
            return value
        return {"name": value.name, **value.options}

    def _descend(self, here: Any, key: str) -> Any:
        if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
            here[int(key)] = self._promoted(here[int(key)])
            return here[int(key)]
        inside = self._mapping(here)
        if self.path[0] in _COMPONENTS and key in inside:
            inside[key] = self._promoted(inside[key])
        return inside.setdefault(key, {})

    def _mapping(self, here: Any) -> dict[str, Any]:
        """Where a key is set: `here`, or its only element, so that one scheduler needs no index."""
        if isinstance(here, list) and len(here) == 1:
            here[0] = here = self._promoted(here[0])
        if isinstance(here, list):
            raise self._refusal(
                f"there are {len(here)} elements; put an index from 0 before the key"
            )
        if not isinstance(here, dict):
            raise self._refusal(f"{here!r} has no keys to set")
        return here

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"override {self.text!r}: {why}.")


def _parse_override(text: str) -> tuple[tuple[str, ...], Any, str]:
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {text!r}: expected key=value, such as drafter.k=5.")
    if path[0] not in PipelineConfig.model_fields:
        accepted = sorted(PipelineConfig.model_fields)
        close = get_close_matches(path[0], accepted, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"override {text!r}: unknown key {path[0]!r}{hint} (accepted: {', '.join(accepted)})."
        )
    if len(path) > 1 and path[0] not in _SECTIONS:
        raise ConfigError(
            f"override {text!r}: {path[0]!r} has no keys inside; write {path[0]}=value."
        )
    return path, _parse_value(text, value.strip()), text


def _parse_value(override: str, text: str) -> Any:
    loader = _StrictLoader(text)
    try:
        if text[:1] in {"[", "{", '"', "'"}:
            return loader.get_single_data()
        # Taken as one scalar, so that 'a: b' or 'x # y' stays the text it looks like.
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return loader.construct_object(yaml.ScalarNode(tag, text))
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"override {override!r}: cannot read the value: {reason}.") from error
    finally:
        loader.dispose()


def _plain(value: Any) -> Any:
    """A copy of the mappings and lists in `value`, sharing whatever else it holds."""
    match value:
        case BaseModel():
            return value.model_dump(exclude_unset=True)
        case Mapping():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
    return value


class _StrictLoader(yaml.SafeLoader):
    """Refuses a repeated key, of which YAML's own loader would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise ValueError(f"the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> Any:
    loader = _StrictLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} is given twice")
        result[key] = value
    return result


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".yaml": _load_yaml,
    ".yml": _load_yaml,
    ".json": partial(json.loads, object_pairs_hook=_unrepeated),
    ".toml": tomllib.loads,
}


def _parse_target(value: object) -> Reference | str:
    """Text stays text until plugins are known; a path is always a model."""
    if isinstance(value, os.PathLike):
        return Reference("transformers", {"model": os.fspath(value)})
    if isinstance(value, str) and value.strip():
        return value.strip()
    return parse_reference("target", value)


def _option_names(target: Reference, manager: PluginManager) -> frozenset[str]:
    if isinstance(target.instance, Bound):
        return frozenset(target.instance.component.options.model_fields)
    if target.instance is not None:
        return frozenset()
    return frozenset(manager.component("target", target.name).options.model_fields)


def _parse_schedulers(value: object) -> tuple[Reference, ...]:
    several = value if isinstance(value, list | tuple) else [value]
    if not several:
        raise ConfigError(
            "scheduler: expected at least one, got an empty list; leave it out for 'fixed'."
        )
    return tuple(parse_reference("scheduler", one) for one in several)


def _parse_drafters(value: object) -> dict[str, Reference]:
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and re.fullmatch(r"[\w-]+", name) for name in value
    ):
        raise ConfigError(
            "drafters: expected a mapping of names (letters, digits, '_' and '-') to drafters, such "
            f"as {{'fast': 'ngram'}}, got {value!r}."
        )
    return {name: parse_reference("drafter", one) for name, one in value.items()}


def _parse_section(section: type[BaseModel], value: object) -> object:
    """Built here, so that its error names its own keys."""
    return section(**value) if isinstance(value, Mapping) else value


_PARSERS: Mapping[str, Callable[[Any], object]] = {
    "target": _parse_target,
    "drafter": partial(parse_reference, "drafter"),
    "drafters": _parse_drafters,
    "verifier": partial(parse_reference, "verifier"),
    "scheduler": _parse_schedulers,
    "sampling": partial(_parse_section, SamplingParams),
    "engine": partial(_parse_section, EngineConfig),
}

_COMPONENTS: Mapping[str, Kind] = {
    **{kind: kind for kind in CONTRACTS if kind in PipelineConfig.model_fields},
    "drafters": "drafter",
}
"""Sections that are references to components, or hold them, and of which kind."""
_SECTIONS: Mapping[str, Any] = {
    "target": None,
    "drafter": "none",
    "drafters": {},
    "verifier": "coupled",
    "scheduler": "fixed",
    "sampling": {},
    "engine": {},
}
"""What an absent section is while one of its keys is set."""
