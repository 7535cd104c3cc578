"""The shape of the code: who may import whom, what importing costs, and what every module says of itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "specfw").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
PLUGIN_CODE = [path for path in PLUGINS if "tests" not in path.parts]

PUBLIC_FACE = (
    "specfw",
    "specfw.acceptance",
    "specfw.combining",
    "specfw.components",
    "specfw.contracts",
    "specfw.costs",
    "specfw.errors",
    "specfw.fingerprint",
    "specfw.hookspecs",
    "specfw.probing",
    "specfw.quantizing",
    "specfw.runner",
    "specfw.shapes",
    "specfw.shipped",
    "specfw.training",
    "specfw.types",
)
"""What plugins may import by name."""

CONTRACT_TYPES = (
    "specfw.decoding.builder",
    "specfw.decoding.draft",
    "specfw.decoding.probabilities",
    "specfw.decoding.random",
)
"""The modules of the types that the contracts name, which implementations take, make or call."""

FORBIDDEN = {
    "specfw.decoding": (
        "transformers",
        "specfw.engine",
        "specfw.pipeline",
        "specfw.cli",
        "specfw.config",
    ),
    "specfw.engine": (
        "specfw.pipeline",
        "specfw.cli",
        "specfw.config",
        "specfw.plugins",
        "specfw.integrations",
    ),
    "specfw.pipeline": ("specfw.cli", "specfw.integrations", "specfw.bench"),
    "specfw.targets": ("specfw.engine", "specfw.pipeline", "specfw.cli", "specfw.config"),
    "specfw.types": (
        "torch",
        "transformers",
        "specfw.contracts",
        "specfw.decoding",
        "specfw.engine",
    ),
    "specfw.errors": ("torch", "transformers", "specfw"),
}
"""Package or module -> what it never imports, not even for the type checker."""


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who is imported"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_dependencies_point_one_way(package: str) -> None:
    """Guards against layers that know what is built on them, which could then not be tested alone."""
    files = [path for path in CORE if within(module_name(path), [package])]
    assert files
    found = [
        (module_name(p), name)
        for p in files
        for name in imports_of(p)
        if within(name, FORBIDDEN[package])
    ]
    assert found == []


@pytest.mark.parametrize("path", PLUGIN_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_import_only_the_public_face(path: Path) -> None:
    """Guards against plugins here that use what a third party's could not rely on."""
    allowed = {*PUBLIC_FACE, *CONTRACT_TYPES}
    used = {
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert sorted(name for name in used - allowed if within(name, ["specfw"])) == []


def test_importing_is_cheap() -> None:
    """Guards against an import of torch on the way to a listing, a config or a plugin."""
    modules = [
        "specfw",
        "specfw.contracts",
        "specfw.components",
        "specfw.hookspecs",
        "specfw.types",
        "specfw.config",
        "specfw.plugins",
        "specfw.builtins",
        *(path.stem for path in PLUGIN_CODE if path.stem.startswith("specfw_plugin_")),
    ]
    folders = sorted(
        {str(path.parent) for path in PLUGIN_CODE}
    )  # a plugin need not be installed here
    program = (
        "import sys\n"
        f"sys.path += {folders!r}\n"
        f"for name in {modules!r}:\n"
        "    __import__(name)\n"
        "    heavy = {'torch', 'transformers', 'llguidance'} & sys.modules.keys()\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} imports {sorted(heavy)}')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", [*CORE, *PLUGINS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    """Guards against modules without a docstring, and public names that `__all__` does not settle."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    assert docstring, f"{path}: a module needs a docstring"
    defines = any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        for node in tree.body
    )
    is_test = path.name.startswith(("test_", "conftest"))
    exported = all_of(tree)
    if defines and not is_test:
        assert exported is not None, f"{path}: public names need an __all__"
    missing = set(exported or ()) - names_of(tree)
    assert not missing or "__getattr__" in names_of(tree), (
        f"{path}: __all__ names {sorted(missing)}"
    )


def all_of(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def names_of(tree: ast.Module) -> set[str]:
    """The names that a module binds at its top level."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names
