"""Writes the reference pages that the code itself can tell: hooks, contracts and config.

`python docs/generate_reference.py` rewrites them; `tests/test_docs.py` checks that they are up to date.
Hooks and contracts are read from the source, so that signatures look as they were written.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from specfw import builtins
from specfw.components import CONTRACTS
from specfw.config import EngineConfig, PipelineConfig
from specfw.types import SamplingParams, SpeculationParams

__all__ = ["PAGES", "main"]

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"

NOTICE = "<!-- Written by docs/generate_reference.py; edit the docstrings instead. -->"

_Documented = ast.ClassDef | ast.FunctionDef


def hooks_page() -> str:
    """Every hook: its signature and docstring."""
    module = _parse("specfw.hookspecs")
    parts = ["# Hooks", NOTICE, _docstring(module)]
    parts += [
        section
        for node in module.body
        if isinstance(node, ast.FunctionDef) and _is_hookspec(node)
        for section in (f"## `{node.name}`", _code(_signature(node)), _docstring(node))
    ]
    return _page(parts)


_CONTRACT_MODULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "What plugins implement": ("specfw.contracts", ()),
    "What plugins hand over": (
        "specfw.components",
        ("Component", "Options", "NestedDrafter", "NestedTarget"),
    ),
    "What drafters draw with": ("specfw.decoding.builder", ("DraftBuilder",)),
    "How drafters are combined": ("specfw.combining", ("Combined", "Member")),
    "What verifiers walk": ("specfw.decoding.draft", ("Draft", "Kind")),
    "Where verifiers get p": ("specfw.decoding.probabilities", ("NodeLaws",)),
    "What schedulers decide with": (
        "specfw.costs",
        ("StepCosts", "CostCurve"),
    ),
    "How acceptance is estimated": ("specfw.acceptance", ("Acceptance", "AcceptanceByRequest")),
    "Which tree is best": ("specfw.shapes", ("Shape", "best_shapes")),
    "What plugins ship": ("specfw.shipped", ()),
    "When to try again": ("specfw.probing", ("Probe",)),
    "Where chance comes from": ("specfw.decoding.random", ("RandomSource", "Site", "Purpose")),
}
"""Chapter -> module and the names to show; no names means all that the module exports."""


def contracts_page() -> str:
    """Every class that a plugin author derives from, gets or hands over."""
    parts = ["# Contracts", NOTICE, _docstring(_parse("specfw.contracts"))]
    for chapter, (module_name, names) in _CONTRACT_MODULES.items():
        module = _parse(module_name)
        shown = names or _exported(module)
        parts += [f"## {chapter}", f"From `{module_name}`."]
        lines = _source(module_name).splitlines()
        parts += [section for name in shown for section in _object(module, name, lines)]
    return _page(parts)


def config_page() -> str:
    """Every key of a config, its type, default and meaning."""
    parts = [
        "# Config keys",
        NOTICE,
        "One schema serves Python, YAML, JSON, TOML and the command line; "
        "[Configure a pipeline](../how-to/configure.md) shows the forms. Unknown keys are refused.",
        _docstring_of(PipelineConfig),
        _key_table(PipelineConfig),
        "## `engine`",
        _docstring_of(EngineConfig),
        _key_table(EngineConfig),
        "## `sampling`",
        _docstring_of(SamplingParams),
        _key_table(SamplingParams),
        "## `sampling.speculation`",
        _docstring_of(SpeculationParams),
        _key_table(SpeculationParams),
        "# Built-in components",
        "What `specfw` brings itself. A plugin's README names the options of its components.",
    ]
    for kind in CONTRACTS:
        offered = getattr(builtins, f"specfw_{kind}s", dict)
        for name, component in sorted(offered().items()):
            parts += [f"## {kind} `{name}`", component.summary]
            parts.append(_key_table(component.options) or "No options.")
    return _page(parts)


PAGES: Mapping[str, Callable[[], str]] = {
    "hooks.md": hooks_page,
    "contracts.md": contracts_page,
    "config.md": config_page,
}
"""File name in `docs/reference` -> what writes it."""


def main() -> None:
    """Rewrite every page."""
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


def _page(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _source(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def _parse(module: str) -> ast.Module:
    return ast.parse(_source(module))


def _docstring(node: ast.Module | _Documented) -> str:
    return _as_markdown(ast.get_docstring(node) or "")


def _docstring_of(model: type) -> str:
    """Without what it raises, which is the same for every config."""
    return _as_markdown(inspect.cleandoc(model.__doc__ or "").partition("\n\nRaises:")[0])


def _as_markdown(docstring: str) -> str:
    """Google-style sections as bold words with lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if re.fullmatch(r"(Args|Raises|Returns):", line):
            section = line.removesuffix(":")
            lines += [f"**{section}**", ""]
        elif section and line.startswith("    "):
            begins_item = section != "Returns" and not line.startswith("     ")
            indent = "" if section == "Returns" else "  "
            lines.append(f"{'- ' if begins_item else indent}{line.strip()}")
        else:
            section = section if not line.strip() else ""
            lines.append(line)
    return "\n".join(lines).strip()


def _exported(module: ast.Module) -> list[str]:
    """The names in `__all__`, in the order in which the module defines them."""
    exported: list[str] = []
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            exported = ast.literal_eval(node.value)
    order = [name for node in module.body if (name := _name(node)) is not None]
    return sorted(exported, key=order.index)


def _name(node: ast.stmt) -> str | None:
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            return node.name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def _object(module: ast.Module, name: str, lines: list[str]) -> Iterator[str]:
    yield f"### `{name}`"
    place = next(i for i, node in enumerate(module.body) if _name(node) == name)
    node = module.body[place]
    if isinstance(node, ast.ClassDef):
        yield from _class(node, lines)
    else:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield _code(ast.unparse(node))
        yield _text_after(module.body, place)


def _class(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield _code(f"class {node.name}({bases})" if bases else f"class {node.name}")
    yield _docstring(node)
    yield "\n".join(_fields(node, lines))
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and _is_public(method):
            yield f"#### `{node.name}.{method.name}`"
            yield _code(_signature(method))
            yield _docstring(method)


def _fields(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Fields with the comment beside them, which holds their shape, or the string below."""
    for place, field in enumerate(node.body):
        name = _name(field)
        if isinstance(field, ast.AnnAssign | ast.Assign) and name and not name.startswith("_"):
            comment = lines[field.lineno - 1].partition("  # ")[2]
            meaning = " ".join(_text_after(node.body, place).split()) or comment
            yield f"- `{ast.unparse(field)}`" + (f"<br>{meaning}" if meaning else "")


def _text_after(body: list[ast.stmt], place: int) -> str:
    """The string that follows a field, which documents it."""
    after = body[place + 1] if place + 1 < len(body) else None
    match after:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
    return ""


def _is_public(method: ast.FunctionDef) -> bool:
    return not method.name.startswith("_") or method.name == "__and__"


def _is_hookspec(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "hookspec" for decorator in node.decorator_list)


def _signature(node: ast.FunctionDef) -> str:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    shown = {"cached_property": "property"} | {
        m: m for m in ("abstractmethod", "property", "classmethod")
    }
    kept = [f"@{shown[mark]}\n" for mark in marks if mark in shown]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{''.join(kept)}{node.name}({ast.unparse(node.args)}){returns}"


def _key_table(model: type[BaseModel]) -> str:
    """One row a field: key, type, default, meaning."""
    schema = model.model_json_schema()
    properties: dict[str, Any] = schema.get("properties", {})
    if not properties:
        return ""
    meanings = _meanings(model)
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, about in properties.items():
        default = "required" if key in schema.get("required", ()) else _default(about)
        rows.append(f"| `{key}` | {_type(about)} | {default} | {meanings.get(key, '')} |")
    return "\n".join(rows)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The strings below the fields; for a field without one, what `_UNTOLD` says."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(model)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    told = {
        name: " ".join(_text_after(body, place).split()).replace("|", "\\|")
        for place, node in enumerate(body)
        if isinstance(node, ast.AnnAssign) and (name := _name(node))
    }
    return {
        name: re.sub(r"\bNone\b", "null", text or _UNTOLD.get(model.__name__, {}).get(name, ""))
        for name, text in told.items()
    }


def _default(about: Mapping[str, Any]) -> str:
    if "default" not in about:
        return "all defaults" if "$ref" in about else "empty"
    value = about["default"]
    if isinstance(value, dict) and value:
        return "all defaults"
    words = {True: "true", False: "false", None: "null"}
    known = value is None or isinstance(value, bool)
    return f"`{words[value] if known else value}`"


def _type(about: Mapping[str, Any]) -> str:
    """A JSON schema's type in a few words."""
    if "enum" in about:
        return ", ".join(f"`{value}`" for value in about["enum"])
    if "anyOf" in about:
        kinds = [_type(one) for one in about["anyOf"]]
        return " or ".join(kinds).replace("text or mapping", "component")
    if "$ref" in about:
        return "mapping"
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
    kind = {**names, "null": "null", "object": "mapping", "array": "list"}[about["type"]]
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {about[key]:g}" for key, sign in bounds.items() if key in about]
    return " ".join([kind, ", ".join(limits)]).strip()


_UNTOLD: Mapping[str, Mapping[str, str]] = {
    "PipelineConfig": {
        "drafter": "What proposes draft tokens; `none` is ordinary decoding.",
        "verifier": "What accepts them, and which guarantee holds.",
        "engine": "Batch, memory and weights; see below.",
    },
    "SamplingParams": {
        "max_new_tokens": "Most tokens to emit; the context may end a text earlier.",
        "min_new_tokens": "Tokens before which nothing may end the text.",
        "temperature": "Divides the logits; 0 takes the most likely token.",
        "top_k": "Keeps the k most likely tokens.",
        "top_p": "Keeps the smallest set of most likely tokens of at least this mass.",
        "min_p": "Keeps tokens of at least this share of the most likely one's probability.",
        "top_h": "Keeps the most likely tokens with at most this share of the entropy, of 100 at most.",
        "typical_p": "Keeps the tokens whose surprise is nearest the entropy, up to this mass.",
        "epsilon_cutoff": "Keeps tokens of at least this probability.",
        "eta_cutoff": "The same, with a bound that falls with the entropy.",
        "repetition_penalty": "Divides positive and multiplies negative logits of tokens seen, prompt included.",
        "presence_penalty": "Is subtracted from the logit of each token that was generated.",
        "frequency_penalty": "The same, times how often the token was generated.",
        "logit_bias": "Token id -> what is added to its logit.",
        "sequence_bias": "Pairs of token ids and what is added to the last one's logit after the others.",
        "no_repeat_ngram_size": "No n-gram of this size comes twice; 0 allows all.",
        "bad_words_ids": "Sequences of token ids that never come.",
        "suppress_tokens": "Token ids that never come.",
        "begin_suppress_tokens": "Token ids that do not come first.",
        "forced_eos_token_id": "One or more token ids of which one comes last, at `max_new_tokens`.",
        "exponential_decay_length_penalty": "A length, and the factor by which what ends the text "
        "grows more likely with each token beyond it.",
        "json_schema": "The text is JSON that this schema accepts; may be given as JSON text.",
        "regex": "The whole text is matched by this expression.",
        "grammar": "The text follows this grammar, in Lark's or llama.cpp's notation.",
        "choices": "The text is one of these.",
        "seed": "Names all chance of the request; null draws one, which the output reports.",
        "stop": "One string or several that end the text.",
        "stop_token_ids": "Token ids that end the text.",
        "ignore_eos": "Whether the end-of-text token is an ordinary one.",
        "include_stop": "Whether `text` ends with the stop string.",
        "max_time": "Seconds from submission, after which the next token ends the text.",
        "priority": "Higher is let in and served first; `engine.patience` bounds how long others wait.",
        "prompt_logprobs": "The same for the prompt's tokens, the first left out.",
        "logprobs": "Report the target's log-probability of each token, with this many alternatives.",
        "speculation": "The request's own drafter and limits; see below.",
    },
    "SpeculationParams": {
        "enabled": "Whether to draft for this request.",
        "drafter": "One of the pipeline's `drafters`, by its name there; null is its `drafter`.",
        "max_nodes": "Most draft nodes in a step; null leaves it to the pipeline.",
        "max_depth": "Most draft nodes on one path.",
        "max_width": "Most siblings.",
    },
}
"""Meanings of fields whose names nearly say it, so that their classes stay short."""


if __name__ == "__main__":
    main()
