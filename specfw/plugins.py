"""The plugin manager: finds, checks, isolates and names plugins, once, at start.

Loading order: built-ins, entry points of the group `specfw` by (distribution, name), then passed
objects by name. A plugin that fails any check is left out whole and reported; the others load.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from packaging.utils import canonicalize_name
from pydantic import ValidationError

from specfw import hookspecs
from specfw.components import CONTRACTS, Bound, Component, Kind, Options
from specfw.contracts import API_VERSION
from specfw.discovery import Candidate, check_requirements, installed_plugins
from specfw.errors import ConfigError, PluginError, UnknownComponentError
from specfw.references import Reference, is_component_name, parse_reference
from specfw.types import explain_validation_error
from specfw.version import __version__

if TYPE_CHECKING:
    import typer

__all__ = ["FILTER_VARIABLE", "BrokenPlugin", "Component", "Plugin", "PluginManager", "Stage"]

FILTER_VARIABLE = "SPECFW_PLUGINS"
"""Environment variable: the installed plugins to load, by comma; empty is none, unset is all."""

Stage = Literal["duplicate", "requirements", "import", "api", "hooks", "components", "commands"]

_HOOKS: Mapping[Kind, str] = {kind: f"specfw_{kind}s" for kind in CONTRACTS}
_ASKED_ALONE = frozenset({*_HOOKS.values(), "specfw_commands"})
_DISTRIBUTION_PREFIX = "specfw-plugin-"

_logger = logging.getLogger("specfw")


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that was left out, where it failed and why."""

    name: str
    version: str
    stage: Stage
    error: BaseException
    distribution: str = ""

    @property
    def reason(self) -> str:
        """The error as one line, with its type where that says more than the message."""
        told = isinstance(self.error, PluginError | pluggy.PluginValidationError)
        text = " ".join(str(self.error).split())
        return text if told else f"{type(self.error).__name__}: {text}"

    def answers_to(self, name: str) -> bool:
        """Whether `name` is this plugin's or, by the naming of distributions, its component's."""
        short = self.distribution.removeprefix(_DISTRIBUTION_PREFIX)
        return name == self.name or canonicalize_name(name) in {self.distribution, short}

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}".strip() or "passed in"
        return f"plugin {self.name!r} ({origin}) is left out, for its {self.stage} check failed: {self.reason}"


@dataclass(frozen=True)
class Plugin:
    """A plugin that passed every check, and what it offers."""

    candidate: Candidate
    module: object
    relay: pluggy.PluginManager
    """Holds this plugin alone, to ask it what it offers without the others."""
    components: Mapping[Kind, Mapping[str, Component[Any]]]

    @property
    def owner(self) -> str:
        """The name that sets this plugin apart from every other."""
        return self.candidate.distribution or self.candidate.name


class PluginManager:
    """Every loaded plugin, every broken one, and the components by name.

    Args:
        plugins: Further plugins, as modules or objects; never filtered.
        strict: Raise at the first broken plugin or doubly owned name, instead of leaving it out
            with a warning.

    Raises:
        PluginError: in strict mode, a plugin is broken.
        ConfigError: in strict mode, two plugins offer the same name.
    """

    def __init__(self, plugins: Iterable[object] = (), *, strict: bool = False) -> None:
        self.strict = strict
        self.plugins: list[Plugin] = []
        self.broken: list[BrokenPlugin] = []
        self.filtered: list[Candidate] = []
        """Installed plugins that the environment variable leaves out."""
        for candidate in [_builtins(), *self._allowed(), *_passed(plugins)]:
            self._load(candidate)
        self._relay = _new_relay()
        # pluggy calls what was registered last first, and the documented order is loading order.
        for plugin in reversed(self.plugins):
            self._relay.register(plugin.module, name=plugin.candidate.label)
        self._report_conflicts()

    @property
    def hook(self) -> Any:
        """The observing hooks of all plugins: `hook.specfw_step(report=...)` and so on."""
        return self._relay.hook

    def names(self, kind: Kind) -> list[str]:
        """The names of all components of a kind, sorted."""
        return sorted({name for plugin in self.plugins for name in plugin.components[kind]})

    def component(self, kind: Kind, name: str) -> Component[Any]:
        """The component called `name`, or of one plugin when called `plugin:component`.

        Raises:
            UnknownComponentError: no loaded plugin offers it.
            ConfigError: two plugins offer it.
            PluginError: the plugin of this name is broken (its error is chained) or filtered out.
        """
        owners = self._owners(kind, name)
        if len(owners) == 1:
            return owners[0].components[kind][_component_part(name)]
        raise _conflict(kind, name, owners) if owners else self._missing(kind, name)

    def bind(self, kind: Kind, reference: object) -> Bound[Any]:
        """Look a component up and check its options, without building it.

        `reference` takes any form that `specfw.references.parse_reference` does; a target may also
        be a local folder or a hub id.

        Raises:
            ConfigError: the reference or an option is wrong.
            UnknownComponentError, PluginError: as `component` raises them.
        """
        if kind == "target" and isinstance(reference, str):
            reference = self.target_reference(reference)
        parsed = parse_reference(kind, reference)
        instance = parsed.instance
        if isinstance(instance, Bound):
            return instance
        if instance is not None:
            return Bound(kind, parsed.name, Component(lambda _: instance))
        component = self.component(kind, parsed.name)
        try:
            options = component.options.model_validate(
                dict(parsed.options), context={"bind": self.bind}
            )
        except ValidationError as error:
            accepted = list(component.options.model_fields) or ["none"]
            raise ConfigError(
                explain_validation_error(f"{kind} {parsed.name!r}", error, accepted)
            ) from None
        return Bound(kind, parsed.name, component, options)

    def target_reference(self, target: Reference | str) -> Reference:
        """Text that names a target component as that component, any other text as a model.

        Raises:
            ConfigError, PluginError: as `component` and `parse_reference` raise them.
        """
        if isinstance(target, Reference):
            return target
        try:
            self.component("target", target.partition("(")[0].strip())
        except UnknownComponentError:
            return Reference("transformers", {"model": target})
        return parse_reference("target", target)

    def create(self, kind: Kind, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Build the component `name` from a mapping of its options.

        Raises:
            ConfigError, UnknownComponentError, PluginError: as `bind` raises them.
            PluginError: building failed; the cause is chained.
            ContractError: what was built is not of this kind.
        """
        return self.bind(kind, Reference(name, options or {})).build()

    def add_commands(self, app: typer.Typer) -> None:
        """Add the commands of every plugin to the command line's application.

        A plugin that fails, or whose command is there already, is left out with a warning.
        """
        from typer import Typer

        for plugin in list(self.plugins):
            commands = Typer()
            try:
                plugin.relay.hook.specfw_commands(app=commands)
                _refuse_taken_commands(app, commands)
            except (Exception, SystemExit) as error:
                self._discard(plugin)
                self._break(plugin.candidate, "commands", error)
            else:
                app.add_typer(commands)

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Everything loaded, broken, filtered out and in conflict, in JSON's types."""
        return {
            "plugins": [_describe_plugin(plugin) for plugin in self.plugins],
            "broken": [
                {
                    "name": broken.name,
                    "distribution": broken.distribution,
                    "version": broken.version,
                    "stage": broken.stage,
                    "error": broken.reason,
                }
                for broken in self.broken
            ],
            "filtered": [
                {"name": left.name, "distribution": left.distribution, "version": left.version}
                for left in self.filtered
            ],
            "conflicts": [
                {"kind": kind, "name": name, "owners": [owner.owner for owner in owners]}
                for kind, name, owners in self._conflicts()
            ],
        }

    def _allowed(self) -> list[Candidate]:
        """The installed plugins that pass the filter; the others are remembered."""
        installed = installed_plugins()
        listed = os.environ.get(FILTER_VARIABLE)
        if listed is None:
            return installed
        names = [name.strip() for name in listed.split(",") if name.strip()]
        for name in names:
            if not any(candidate.answers_to(name) for candidate in installed):
                self._complain(
                    PluginError(
                        f"{FILTER_VARIABLE} lists {name!r}, but no installed plugin has that name; "
                        f"installed are: {_listed(candidate.name for candidate in installed)}."
                    )
                )
        allowed = [c for c in installed if any(c.answers_to(name) for name in names)]
        self.filtered = [candidate for candidate in installed if candidate not in allowed]
        return allowed

    def _load(self, candidate: Candidate) -> None:
        """Take a plugin through every check, and keep it only if it passes all."""
        stage: Stage = "duplicate"
        try:
            self._check_name_is_free(candidate)
            stage = "requirements"
            check_requirements(candidate.requires)
            stage = "import"
            module = candidate.load()
            if any(plugin.module is module for plugin in self.plugins):
                return  # the same plugin under a second name
            stage = "api"
            _check_api(module)
            stage = "hooks"
            relay = _register_alone(module)
            stage = "components"
            components = {kind: _collect(relay, kind) for kind in CONTRACTS}
        except (Exception, SystemExit) as error:
            self._break(candidate, stage, error)
        else:
            self.plugins.append(Plugin(candidate, module, relay, components))

    def _check_name_is_free(self, candidate: Candidate) -> None:
        own = (candidate.distribution, candidate.name)
        for plugin in self.plugins:
            if own == (plugin.candidate.distribution, plugin.candidate.name):
                raise PluginError("another plugin of that name is loaded already; rename one")

    def _break(self, candidate: Candidate, stage: Stage, error: BaseException) -> None:
        broken = BrokenPlugin(
            candidate.name, candidate.version, stage, error, candidate.distribution
        )
        self.broken.append(broken)
        self._complain(PluginError(f"{broken}."), cause=error)

    def _complain(
        self, error: PluginError | ConfigError, cause: BaseException | None = None
    ) -> None:
        if self.strict:
            raise error from cause
        _logger.warning("%s", error)

    def _discard(self, plugin: Plugin) -> None:
        self.plugins.remove(plugin)
        self._relay.unregister(plugin.module)

    def _owners(self, kind: Kind, name: str) -> list[Plugin]:
        plugin_part, component_part = name.rpartition(":")[0], _component_part(name)
        return [
            plugin
            for plugin in self.plugins
            if component_part in plugin.components[kind]
            and (not plugin_part or plugin.candidate.answers_to(plugin_part))
        ]

    def _conflicts(self) -> Iterator[tuple[Kind, str, list[Plugin]]]:
        for kind in CONTRACTS:
            for name in self.names(kind):
                owners = self._owners(kind, name)
                if len(owners) > 1:
                    yield kind, name, owners

    def _report_conflicts(self) -> None:
        for kind, name, owners in self._conflicts():
            self._complain(_conflict(kind, name, owners))

    def _missing(self, kind: Kind, name: str) -> PluginError | UnknownComponentError:
        """Why there is no such component: broken, filtered out or simply unknown."""
        asked = name.rpartition(":")[0] or name
        for broken in self.broken:
            if broken.answers_to(asked):
                error = PluginError(f"{kind} {name!r} cannot be used: {broken}.")
                error.__cause__ = broken.error
                return error
        for left in self.filtered:
            if left.answers_to(asked) or left.answers_to(f"{_DISTRIBUTION_PREFIX}{asked}"):
                return PluginError(
                    f"{kind} {name!r} cannot be used: plugin {left.label} is installed, but "
                    f"{FILTER_VARIABLE} leaves it out; add it there or unset the variable."
                )
        names = self.names(kind)
        close = get_close_matches(_component_part(name), names, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        broken_names = f"; broken plugins: {_listed(b.name for b in self.broken)}" * bool(
            self.broken
        )
        return UnknownComponentError(
            f"unknown {kind} {name!r}{hint} (installed: {_listed(names)}{broken_names})"
        )


def _builtins() -> Candidate:
    return Candidate("specfw", "specfw", __version__, (), lambda: import_module("specfw.builtins"))


def _passed(plugins: Iterable[object]) -> list[Candidate]:
    """Passed objects as candidates, by name, so that the order of passing does not matter."""
    candidates = []
    for plugin in plugins:
        name = getattr(plugin, "__name__", None) or type(plugin).__name__
        candidates.append(Candidate(name, "", "", (), partial(_itself, plugin)))
    return sorted(candidates, key=lambda candidate: candidate.name)


def _itself(plugin: object) -> object:
    return plugin


def _new_relay() -> pluggy.PluginManager:
    relay = pluggy.PluginManager("specfw")
    relay.add_hookspecs(hookspecs)
    return relay


def _check_api(module: object) -> None:
    stated = getattr(module, "specfw_api", None)
    if not isinstance(stated, int) or isinstance(stated, bool):
        raise PluginError(
            f"it must state the plugin API that it was written for, as the integer specfw_api "
            f"(now {API_VERSION}), but states {stated!r}"
        )
    if stated != API_VERSION:
        older = "specfw" if stated > API_VERSION else "the plugin"
        raise PluginError(
            f"it was written for plugin API {stated}, but specfw {__version__} offers "
            f"{API_VERSION}; upgrade {older}"
        )


def _register_alone(module: object) -> pluggy.PluginManager:
    """A relay that holds only this plugin, so that a refused hook is never half registered."""
    if inspect.isclass(module):
        raise PluginError("it is a class, but a plugin is a module or an object; pass an instance")
    relay = _new_relay()
    relay.register(module)
    relay.check_pending()  # a marked function that is no hook
    _refuse_unmarked_hooks(relay, module)
    callers = relay.get_hookcallers(module)
    if not callers:
        raise PluginError(
            "it implements no hook; mark its functions with specfw.hookspecs.hookimpl"
        )
    for caller in callers:
        wraps = any(impl.wrapper or impl.hookwrapper for impl in caller.get_hookimpls())
        if wraps and caller.name in _ASKED_ALONE:
            raise PluginError(f"it wraps {caller.name}, which asks each plugin on its own")
    return relay


def _refuse_unmarked_hooks(relay: pluggy.PluginManager, module: object) -> None:
    for name in dir(module):
        if not name.startswith("specfw_") or relay.parse_hookimpl_opts(module, name):
            continue
        if inspect.isroutine(inspect.getattr_static(module, name)):
            raise PluginError(f"its function {name} is not marked with specfw.hookspecs.hookimpl")


def _collect(relay: pluggy.PluginManager, kind: Kind) -> dict[str, Component[Any]]:
    """What one plugin offers of one kind, checked."""
    hook = _HOOKS[kind]
    collected: dict[str, Component[Any]] = {}
    for offered in getattr(relay.hook, hook)():
        if not isinstance(offered, Mapping):
            raise PluginError(
                f"{hook} must return a mapping of names to Component, not {offered!r}"
            )
        for name, component in offered.items():
            _check_component(hook, name, component)
            collected[name] = component
    return collected


def _check_component(hook: str, name: object, component: object) -> None:
    if not isinstance(name, str) or not is_component_name(name):
        raise PluginError(
            f"{hook} offers the name {name!r}; names are letters, digits, '_', '.' and '-'"
        )
    if not isinstance(component, Component):
        raise PluginError(
            f"{hook} must map {name!r} to a specfw.components.Component, not {component!r}"
        )
    options = component.options
    if not (inspect.isclass(options) and issubclass(options, Options)):
        raise PluginError(f"the options of {name!r} must derive from specfw.components.Options")
    if "name" in options.model_fields:
        raise PluginError(
            f"an option of {name!r} is called 'name', which names components; rename it"
        )


def _refuse_taken_commands(app: typer.Typer, added: typer.Typer) -> None:
    from typer.main import get_group

    taken = get_group(app).commands.keys() & get_group(added).commands.keys()
    if taken:
        raise PluginError(f"the command {min(taken)!r} is there already; rename it")


def _component_part(name: str) -> str:
    return name.rpartition(":")[2]


def _conflict(kind: Kind, name: str, owners: list[Plugin]) -> ConfigError:
    component = _component_part(name)
    full = [f"{owner.owner}:{component}" for owner in owners]
    return ConfigError(
        f"{kind} {name!r} is offered by {len(owners)} plugins, "
        f"{' and '.join(owner.candidate.label for owner in owners)}, so neither is taken; "
        f"write {' or '.join(map(repr, full))}."
    )


def _describe_plugin(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.candidate.name,
        "distribution": plugin.candidate.distribution,
        "version": plugin.candidate.version,
        "components": [
            {"kind": kind, "name": name, "summary": component.summary}
            for kind, components in plugin.components.items()
            for name, component in sorted(components.items())
        ],
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
