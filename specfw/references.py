"""The ways to refer to a component, and the parser that brings them all to one form.

`ngram`, `plugin:ngram`, `ngram(k=5)`, `{"name": "ngram", "k": 5}` or a ready object. In a drafter's
expression, drafters without an option's name are its option `drafters`: `merge(ngram, suffix(factor=2))`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specfw.components import CONTRACTS, Bound, Kind
from specfw.errors import ConfigError

__all__ = ["Reference", "is_component_name", "parse_reference", "split_references"]

_NAME = r"[A-Za-z0-9][\w.-]*"
_FULL_NAME = re.compile(rf"{_NAME}(?::{_NAME})?")
_QUOTED_OR_CALL = re.compile(
    rf"""(?P<quoted>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?P<name>{_NAME}(?::{_NAME})?)\s*\("""
)

_PIECE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)
"""A quoted text, or one character."""

_POSITIONAL = "drafters"
"""The option that takes a drafter's arguments without a name."""


@dataclass(frozen=True)
class Reference:
    """A component's name and the options given for it, not yet looked up or checked."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    instance: object = None
    """The component itself, where a ready object was given; `name` then only describes it."""


def is_component_name(text: str) -> bool:
    """Whether `text` is a plain component name, without a plugin's name before it."""
    return re.fullmatch(_NAME, text) is not None


def split_references(text: str) -> list[str]:
    """The references in a list by comma; commas in brackets and quotes belong to their reference."""
    parts, depth = [""], 0
    for piece in _PIECE.findall(text):
        depth += (piece in "([{") - (piece in ")]}")
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts if part.strip()]


def parse_reference(kind: Kind, value: object) -> Reference:
    """Bring any way to refer to a component of `kind` to one form.

    Raises:
        ConfigError: `value` is none of the accepted forms.
    """
    match value:
        case Reference():
            return value
        case str():
            return _parse_text(kind, value.strip())
        case Mapping():
            return _parse_mapping(kind, value)
        case Bound() if value.kind == kind:
            return Reference(value.name, instance=value)
    if isinstance(value, CONTRACTS[kind]):
        return Reference(f"<{type(value).__name__}>", instance=value)
    raise ConfigError(
        f"{kind}: expected a name, an expression such as name(option=1), a mapping with the key "
        f"'name', or a {CONTRACTS[kind].__name__} object, got {value!r}."
    )


def _parse_mapping(kind: Kind, value: Mapping[Any, Any]) -> Reference:
    options = dict(value)
    name = options.pop("name", None)
    if not isinstance(name, str) or not _FULL_NAME.fullmatch(name):
        raise ConfigError(
            f"{kind}: a mapping needs the key 'name' with a component's plain name, got "
            f"{name!r}; its other keys are the component's options."
        )
    if odd := [key for key in options if not isinstance(key, str)]:
        raise ConfigError(f"{kind} {name!r}: option names must be text, got {odd[0]!r}.")
    return Reference(name, options)


def _parse_text(kind: Kind, text: str) -> Reference:
    if _FULL_NAME.fullmatch(text):
        return Reference(text)
    opening = _QUOTED_OR_CALL.match(text)
    if opening is None or opening["name"] is None:
        raise ConfigError(
            f"{kind}: expected a name or an expression such as name(option=1), got {text!r}."
        )
    expression = _Expression(kind, text)
    return _parse_mapping(kind, expression.parse())


class _Expression:
    """The parser of one expression. Nothing is evaluated but Python literals."""

    def __init__(self, kind: Kind, text: str) -> None:
        self.kind, self.text = kind, text
        self.names: dict[str, str] = {}
        self.source = text

    def parse(self) -> dict[str, Any]:
        """The expression as a mapping; nested expressions become mappings too."""
        # Component names may hold hyphens and colons, which Python's grammar does not allow.
        self.source = _QUOTED_OR_CALL.sub(self._stand_in, self.text)
        try:
            tree = ast.parse(self.source, mode="eval").body
        except (SyntaxError, ValueError):
            raise self._refusal("it is not of the form name(option=value, ...)") from None
        if not isinstance(tree, ast.Call):
            raise self._refusal("it is not of the form name(option=value, ...)")
        return self._component(tree)

    def _stand_in(self, match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0]
        stand_in = f"_{len(self.names)}"
        self.names[stand_in] = match["name"]
        return f"{stand_in}("

    def _component(self, call: ast.Call) -> dict[str, Any]:
        if not isinstance(call.func, ast.Name):
            raise self._refusal("it is not of the form name(option=value, ...)")
        name = self.names[call.func.id]
        component: dict[str, Any] = {"name": name}
        if call.args:
            component[_POSITIONAL] = [self._argument(name, argument) for argument in call.args]
        if any(keyword.arg is None for keyword in call.keywords):
            raise self._by_name_only(name)
        for keyword in call.keywords:
            option = str(keyword.arg)
            if option in component:
                raise self._refusal(f"{name} is given {option!r} twice")
            component[option] = self._value(option, keyword.value)
        return component

    def _argument(self, name: str, node: ast.expr) -> Any:
        """An argument without an option's name: a drafter's name, quoted or not, or its expression."""
        if self.kind == "drafter":
            match node:
                case ast.Call():
                    return self._component(node)
                case ast.Constant(value=str(text)) if _FULL_NAME.fullmatch(text):
                    return text
                case (
                    ast.Name() | ast.BinOp() | ast.Attribute()
                ):  # a name may hold hyphens and points
                    text = ast.get_source_segment(self.source, node) or ""
                    if _FULL_NAME.fullmatch(text):
                        return text
        raise self._by_name_only(name)

    def _by_name_only(self, name: str) -> ConfigError:
        return self._refusal(
            f"{name} takes options by name only, as in {name}(option=value), "
            f"and besides them nothing but drafters, as in {name}(ngram, suffix())"
            if self.kind == "drafter"
            else f"{name} takes options by name only, as in {name}(option=value)"
        )

    def _value(self, option: str, node: ast.expr) -> Any:
        match node:
            case ast.Call():
                return self._component(node)
            case ast.List() | ast.Tuple():
                return [self._value(option, element) for element in node.elts]
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self._refusal(
                f"the value of {option!r} is not a literal (a number, 'text', True, False, None, "
                "a list or a dict) nor another component's expression"
            ) from None

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{self.kind}: cannot read {self.text!r}: {why}.")
