"""What a plugin's hook hands over for each name: a `Component`, with the `Options` it is built from.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
)

from specfw.contracts import Drafter, Scheduler, TargetLoader, Trainer, Verifier
from specfw.errors import ContractError, PluginError, SpecfwError

__all__ = [
    "CONTRACTS",
    "REFERENCE_SCHEMA",
    "Bound",
    "Component",
    "Kind",
    "NestedDrafter",
    "NestedTarget",
    "Options",
]

Kind = Literal["drafter", "verifier", "scheduler", "target", "trainer"]

CONTRACTS: Mapping[Kind, type] = {
    "drafter": Drafter,
    "verifier": Verifier,
    "scheduler": Scheduler,
    "target": TargetLoader,
    "trainer": Trainer,
}
"""The base class that what a component of each kind builds must derive from."""

REFERENCE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    ]
}
"""JSON schema of a component reference: a name or expression, or a mapping with a name."""

T_co = TypeVar("T_co", covariant=True)


class Options(BaseModel):
    """The base of every component's options: immutable, and unknown keys are refused.

    A field must not be called `name`: in a config mapping, that key is the component's name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Component(Generic[T_co]):
    """How to build one named component.

    `build` takes an instance of `options` as its only argument; a class whose constructor does so
    will do. It is called once for each pipeline, so heavy imports belong inside it.
    """

    build: Callable[[Any], T_co]
    options: type[Options] = Options
    summary: str = ""
    """One sentence for listings."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Options with which the component can be certified on small models: small limits, quick learning,
    and no time of its own. `specfw certify --all` uses these; a nested target may be `table`."""


@dataclass(frozen=True)
class Bound(Generic[T_co]):
    """A component with options that are already checked, ready to be built."""

    kind: Kind
    name: str
    """As the user wrote it, `component` or `plugin:component`."""
    component: Component[T_co]
    options: BaseModel = field(default_factory=Options)

    def build(self) -> T_co:
        """Build the component.

        Raises:
            PluginError: building failed; the cause is chained.
            ContractError: what was built does not derive from the contract's base class.
        """
        try:
            built = self.component.build(self.options)
        except SpecfwError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.kind} {self.name!r} could not be built: {type(error).__name__}: {error}"
            ) from error
        base = CONTRACTS[self.kind]
        if not isinstance(built, base):
            raise ContractError(
                f"{self.kind} {self.name!r} must build an instance of specfw.contracts.{base.__name__}, "
                f"but built a {type(built).__name__}; derive its class from that base."
            )
        return built

    def with_inner(self, change: Callable[[Bound[Any]], Bound[Any]]) -> Bound[T_co]:
        """This component with what `change` makes of each component in its options, those inside them left to it."""
        changed = {
            name: new
            for name, value in self.options
            if (new := _changed(value, change)) is not value
        }
        return replace(self, options=self.options.model_copy(update=changed))

    def settings(self) -> dict[str, Any]:
        """The mapping that refers to this component, with every option's value in JSON's types."""
        return {"name": self.name, **self.options.model_dump(mode="json")}


def _changed(value: Any, change: Callable[[Bound[Any]], Bound[Any]]) -> Any:
    """An option's value with each component in it changed; the very value if it has none."""
    if isinstance(value, Bound):
        return change(value)
    if not isinstance(value, (tuple, list)):
        return value
    changed = [_changed(one, change) for one in value]
    same = all(new is old for new, old in zip(changed, value, strict=True))
    return value if same else type(value)(changed)


def _bind_nested(kind: Kind, value: object, info: ValidationInfo) -> Bound[Any]:
    if isinstance(value, Bound) and value.kind == kind:
        return value
    bind = (info.context or {}).get("bind")
    if bind is None:
        raise ValueError(
            f"a {kind} inside options can be named only where a plugin manager checks the options; "
            f"here, pass what PluginManager.bind({kind!r}, ...) returns"
        )
    bound: Bound[Any] = bind(kind, value)
    return bound


NestedDrafter = Annotated[
    Bound[Drafter],
    PlainValidator(partial(_bind_nested, "drafter")),
    PlainSerializer(Bound.settings),
    WithJsonSchema(REFERENCE_SCHEMA),
]
"""An option that is itself a drafter: given as any reference, held as a `Bound` to `build()`."""

NestedTarget = Annotated[
    Bound[TargetLoader],
    PlainValidator(partial(_bind_nested, "target")),
    PlainSerializer(Bound.settings),
    WithJsonSchema(REFERENCE_SCHEMA),
]
"""An option that is itself a target loader: given as any reference, held as a `Bound` to `build()`."""
