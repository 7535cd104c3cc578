"""The hooks that plugins implement; each docstring is its hook's reference.

A plugin is a module (or an object) with the integer `specfw_api` and functions marked with
`hookimpl`. It is found through an entry point of the group `specfw`, or passed to `PluginManager`.

Order of the observing hooks (`specfw_step`, `specfw_request_finished`): plugins run in loading
order, which is built-ins, then entry points by (distribution, name), then passed objects by name.
`tryfirst` runs before and `trylast` after all unmarked ones; of two with the same mark, the one
loaded earlier is nearer the end it asked for. Wrappers run around all others in the same order.
An exception ends the call, after every wrapper that was entered has been unwound.

The other hooks ask each plugin on its own, in loading order, and cannot be wrapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer

    from specfw.components import Component
    from specfw.contracts import Drafter, Scheduler, TargetLoader, Trainer, Verifier
    from specfw.types import Output

__all__ = [
    "hookimpl",
    "hookspec",
    "specfw_commands",
    "specfw_drafters",
    "specfw_request_finished",
    "specfw_schedulers",
    "specfw_step",
    "specfw_targets",
    "specfw_trainers",
    "specfw_verifiers",
]

hookspec = pluggy.HookspecMarker("specfw")
hookimpl = pluggy.HookimplMarker("specfw")
"""Marks a plugin's function as the implementation of the hook of the same name."""


@hookspec
def specfw_drafters() -> Mapping[str, Component[Drafter]]:  # type: ignore[empty-body]
    """The drafters that this plugin offers.

    Returns:
        Name -> `Component` whose `build` returns a `specfw.contracts.Drafter`. Names are letters,
        digits, `_`, `.` and `-`. A name that two plugins offer can be used only as `plugin:name`.

    Called once, while plugins are loaded; drafters are built later, only when a config names them.
    So importing the plugin and answering this hook should import neither torch nor a model.
    """


@hookspec
def specfw_verifiers() -> Mapping[str, Component[Verifier]]:  # type: ignore[empty-body]
    """The verifiers that this plugin offers.

    Returns:
        Name -> `Component` whose `build` returns a `specfw.contracts.Verifier`; names as in
        `specfw_drafters`.

    Called once, while plugins are loaded, not when a verifier is built or used.
    """


@hookspec
def specfw_schedulers() -> Mapping[str, Component[Scheduler]]:  # type: ignore[empty-body]
    """The schedulers that this plugin offers.

    Returns:
        Name -> `Component` whose `build` returns a `specfw.contracts.Scheduler`; names as in
        `specfw_drafters`.

    Called once, while plugins are loaded, not when a scheduler is built or used.
    """


@hookspec
def specfw_targets() -> Mapping[str, Component[TargetLoader]]:  # type: ignore[empty-body]
    """The target loaders that this plugin offers.

    Returns:
        Name -> `Component` whose `build` returns a `specfw.contracts.TargetLoader`; names as in
        `specfw_drafters`. Options called `dtype` and `device` receive the config's settings of
        these names.

    Called once, while plugins are loaded. No model is loaded then, nor when the loader is built:
    that is what its `load` is for.
    """


@hookspec
def specfw_trainers() -> Mapping[str, Component[Trainer]]:  # type: ignore[empty-body]
    """What `specfw train` can make with this plugin.

    Returns:
        Name -> `Component` whose `build` returns a `specfw.contracts.Trainer`; names as in
        `specfw_drafters`, and by custom that of the drafter which reads what is made.

    Called once, while plugins are loaded; trainers are built only by `specfw train`.
    """


@hookspec
def specfw_commands(app: typer.Typer) -> None:
    """Add commands to the `specfw` command line.

    Args:
        app: A fresh Typer application; its commands and groups join `specfw` when the hook returns.
            A command that is there already is refused.

    Called once, when the command line starts; never when specfw is used as a library.
    A plugin that raises here is reported as broken, and none of its commands is added.
    """


@hookspec
def specfw_step(report: Any) -> None:
    """Observe one finished step.

    Args:
        report: The step's `StepReport`. Read only.

    Called after the step's tokens are committed and drafters and schedulers have observed them, in
    the thread that runs the engine, so slow work belongs elsewhere. Not called for a step that
    raised.
    """


@hookspec
def specfw_request_finished(output: Output) -> None:
    """Observe one finished request.

    Args:
        output: What its caller receives, with usage and speculation statistics. Read only.

    Called once for each request that ends, whatever its `finish_reason`; not for a request that
    was refused before it entered, and not when a request is preempted.
    """
