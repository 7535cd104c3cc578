"""README and docs say what is so: blocks run, commands parse, configs are valid, links and references hold."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pluggy
import pytest
from typer.main import get_group

from specfw import Pipeline, PipelineConfig, errors, hookspecs
from specfw.bench.engine import EngineBench
from specfw.cli import certify
from specfw.cli.main import app
from specfw.cli.options import output_mapping
from specfw.config import apply_overrides, load_config
from specfw.engine.survey import surveyed_models
from specfw.plugins import FILTER_VARIABLE, PluginManager
from specfw.targets import demo
from specfw.testing import Certificate
from specfw.types import Guarantee
from tests.byte_models import save_tiny_chat

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def file(self) -> str | None:
        """The file that the block stands for, if its fence names one."""
        return next((m.removeprefix("file=") for m in self.marks if m.startswith("file=")), None)


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block, in order."""
    found: list[Block] = []
    opened: tuple[int, list[str]] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```") and opened is None:
            opened, lines = (number, line.removeprefix("```").split()), []
        elif line.startswith("```") and opened is not None:
            start, (language, *marks) = opened
            found.append(Block(page, start, language, tuple(marks), "\n".join(lines) + "\n"))
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"{page}: the block at line {opened} is not closed"
    return found


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint that stands in for the demo model."""
    return save_tiny_chat(tmp_path_factory.mktemp("demo"), num_hidden_layers=4)


@pytest.fixture
def reader(tiny_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of somebody who follows a page, with a tiny demo model."""
    monkeypatch.setattr(demo, "demo_folder", lambda: tiny_demo)
    monkeypatch.delenv(FILTER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if (origin := getattr(sys.modules[name], "__file__", None)) and tmp_path in Path(
            origin
        ).parents:
            del sys.modules[name]


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks that stand for files, and install the distribution if the page makes one."""
    for block in blocks_of(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    if (folder / "pyproject.toml").exists():
        install(folder)


def install(project: Path) -> None:
    """Lay out the metadata that an editable install of a project would."""
    about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = project / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir()
    requires = [f"Requires-Dist: {requirement}" for requirement in about["dependencies"]]
    header = ["Metadata-Version: 2.1", f"Name: {about['name']}", f"Version: {about['version']}"]
    (info / "METADATA").write_text("\n".join([*header, *requires]) + "\n")
    lines = ["[specfw]", *(f"{k} = {v}" for k, v in about["entry-points"]["specfw"].items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@each_page
def test_python_blocks_run(page: Path, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against examples that no longer run; the blocks of a page are one program."""
    write_files(page, reader)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.language == "python" and block.file is None and "no-run" not in block.marks:
            source = "\n" * block.line + block.text
            exec(compile(source, str(page), "exec", dont_inherit=True), namespace)


@each_page
def test_test_files_in_pages_pass(page: Path, reader: Path) -> None:
    """Guards against a plugin in a page that fails the conformance kit."""
    tests = [block.file for block in blocks_of(page) if (block.file or "").startswith("test_")]
    if not tests:
        return
    write_files(page, reader)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join([str(reader), str(ROOT)])
    result = subprocess.run(
        command,
        cwd=reader,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@each_page
def test_config_blocks_are_valid(page: Path, reader: Path) -> None:
    """Guards against configs in pages that name keys, components or options that are not there."""
    write_files(page, reader)
    manager = PluginManager()
    for block in blocks_of(page):
        if block.language in ("yaml", "json", "toml") and block.file != "pyproject.toml":
            path = reader / f"block.{block.language}"
            path.write_text(block.text, encoding="utf-8")
            PipelineConfig(**load_config(path)).bind(manager)


@each_page
def test_commands_in_pages_parse(page: Path, reader: Path) -> None:
    """Guards against command lines with options, config keys or components that are not there."""
    write_files(page, reader)
    targets = re.findall(
        r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for block in blocks_of(page):
        for line in block.text.splitlines() if block.language == "console" else []:
            words = shlex.split(line.removeprefix("$ "), comments=True)
            words = [word for word in words if not word.startswith("SPECFW_")]
            if words[0] == "specfw":
                check_command(words[1:])
            elif words[0] == "make":
                assert words[1] in targets, f"{page}: no such make target: {line}"


def check_command(arguments: list[str]) -> None:
    """Parse arguments and look up what they name, without running anything."""
    command: Any = get_group(app)
    context = command.make_context("specfw", list(arguments), resilient_parsing=True)
    while hasattr(command, "commands"):
        name, command, arguments = command.resolve_command(context, arguments)
        nested = hasattr(command, "commands")
        context = command.make_context(
            name, list(arguments), parent=context, resilient_parsing=nested
        )
    given = {key: value for key, value in context.params.items() if value}
    manager = PluginManager()
    settings = load_config(given["config"]) if "config" in given else {}
    settings |= {
        key: given[key] for key in ("target", "drafter", "verifier", "scheduler") if key in given
    }
    settings = apply_overrides({"target": "demo", **settings}, given.get("overrides", ()), manager)
    PipelineConfig(**settings).bind(manager)


def generator() -> ModuleType:
    """The module `docs/generate_reference.py`."""
    path = ROOT / "docs" / "generate_reference.py"
    spec = importlib.util.spec_from_file_location("generate_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["hooks.md", "contracts.md", "config.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    """Guards against reference pages that lag behind docstrings and signatures."""
    expected = generator().PAGES[name]()
    assert (REFERENCE / name).read_text(encoding="utf-8") == expected, (
        "run: python docs/generate_reference.py"
    )


def test_every_config_key_has_a_meaning() -> None:
    """Guards against keys that appear in the reference without a word on them."""
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| (.*) \|$", (REFERENCE / "config.md").read_text(), re.MULTILINE
    )
    assert rows
    assert [key for key, meaning in rows if not meaning.strip()] == []


def test_every_hook_is_documented() -> None:
    """Guards against a hook without a section, or a section of a hook that is gone."""
    manager = pluggy.PluginManager("specfw")
    manager.add_hookspecs(hookspecs)
    hooks = {name for name in dir(manager.hook) if name.startswith("specfw_")}
    sections = re.findall(r"^## `(\w+)`$", (REFERENCE / "hooks.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(hooks)


def commands(command: Any, name: str = "specfw") -> Iterator[tuple[str, Any]]:
    """Every command and group with its full name."""
    yield name, command
    for inner, found in getattr(command, "commands", {}).items():
        yield from commands(found, f"{name} {inner}")


def cli_sections() -> dict[str, str]:
    """The sections of the command line's page by heading; the head of the page is called specfw."""
    text = "## specfw\n" + (REFERENCE / "cli.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def table_keys(section: str, header: str) -> list[str]:
    """The first column of the tables with this header, without back ticks."""
    rows = re.findall(rf"^\| {header} \|[^\n]*\n\|[-|]+\n((?:\|.*\n?)+)", section, re.MULTILINE)
    cells = [
        re.split(r" \| ", row.removeprefix("| "))[0] for table in rows for row in table.splitlines()
    ]
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def documented_options(section: str) -> set[str]:
    sections = [section]
    if "(#pipeline-options)" in section:
        sections.append(cli_sections()["Pipeline options"])
    return {text.split()[0] for one in sections for text in table_keys(one, "option")}


COMMANDS = dict(commands(get_group(app)))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_line_page_lists_every_option(name: str) -> None:
    """Guards against options that are missing from the page, and against some that are only there."""
    section = cli_sections().get(name)
    assert section is not None, f"docs/reference/cli.md has no section '## {name}'"
    real = {
        text
        for parameter in COMMANDS[name].params
        if parameter.param_type_name == "option"
        for text in [*parameter.opts, *parameter.secondary_opts]
    }
    assert sorted(documented_options(section) - {"--help"}) == sorted(real - {"--help"})


def test_command_line_page_has_no_command_of_the_past() -> None:
    """Guards against sections of commands that were removed."""
    sections = {name for name in cli_sections() if name.startswith("specfw")}
    assert sections == set(COMMANDS)


def flat_keys(value: Any, prefix: str = "") -> set[str]:
    """Paths of keys, with [] for the elements of a list."""
    if isinstance(value, dict) and value:
        return {
            path
            for key, inner in value.items()
            for path in flat_keys(inner, f"{prefix}.{key}".strip("."))
        }
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {path for inner in value for path in flat_keys(inner, f"{prefix}[]")}
    return {prefix}


def documented_json(command: str) -> set[str]:
    return set(table_keys(cli_sections()[command], "key"))


def test_json_keys_of_generate(reader: Path) -> None:
    """Guards against JSON keys of an output that the page does not name."""
    with Pipeline.from_config({"target": "demo"}) as pipeline:
        [output] = pipeline.generate("the cat", max_new_tokens=2)
    assert flat_keys(output_mapping(output)) == documented_json("specfw generate")


def test_json_keys_of_plugins() -> None:
    """Guards against JSON keys of `specfw plugins` that the page does not name."""
    found = PluginManager().describe()
    documented = documented_json("specfw plugins")
    assert {path.partition("[]")[0] for path in documented} == set(found)
    assert flat_keys({"plugins": found["plugins"]}) == {
        p for p in documented if p.startswith("plugins")
    }


def test_json_keys_of_models() -> None:
    """Guards against JSON keys of `specfw models` that the page does not name."""
    survey = surveyed_models()
    mapping = {"transformers": survey.transformers, "models": [asdict(row) for row in survey.rows]}
    assert flat_keys(mapping) == documented_json("specfw models")


def test_json_keys_of_config() -> None:
    """Guards against sections of a resolved config that the page does not name."""
    resolved = PipelineConfig(target="demo").resolved(PluginManager())
    assert set(resolved) == documented_json("specfw config")
    assert json.loads(json.dumps(resolved)) == resolved


def test_json_keys_of_bench_engine() -> None:
    """Guards against JSON keys of the benchmark that the page does not name."""
    names = ("batch1_specfw", "batch1_generate", "batch16_specfw", "batch16_generate_batch")
    mapping = EngineBench(1, {name: [1.0] for name in names}, [0.5]).mapping()
    assert flat_keys(mapping) == documented_json("specfw bench engine")


def test_json_keys_of_certify() -> None:
    """Guards against JSON keys of `specfw certify` that the page does not name."""
    assert flat_keys(certify._mapping(Certificate("same-text"))) == documented_json(
        "specfw certify"
    )


def test_errors_page_lists_every_error() -> None:
    """Guards against errors without a row, or rows of errors that are gone."""
    page = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(errors.__all__)


GLOSSARY_WORDS = {
    "accepted", "acceptance length", "acceptance rate", "block", "bonus", "compaction", "component",
    "conformance kit", "depth", "draft", "draft model", "drafter", "emitted", "guarantee", "KV slot",
    "node", "p", "parent", "path", "plugin", "point mass", "q", "rank", "recovered", "rollback", "root",
    "scheduler", "site", "step", "target", "verifier",
}  # fmt: skip


def test_glossary_defines_every_word_of_the_project() -> None:
    """Guards against words that code and pages use and the glossary does not define."""
    page = (REFERENCE / "glossary.md").read_text(encoding="utf-8")
    rows = [
        row.split(" | ")[0].removeprefix("| ") for row in page.splitlines() if row.startswith("| ")
    ][1:]
    words = [word for row in rows for word in row.split(", ")]
    assert set(words) >= GLOSSARY_WORDS
    assert len(set(words)) == len(words)
    assert rows == sorted(rows, key=str.lower)
    [meaning] = [row for row in page.splitlines() if row.startswith("| guarantee |")]
    assert set(re.findall(r"`([\w-]+)`", meaning)) == set(get_args(Guarantee))


def test_model_types_in_the_readme_are_as_surveyed() -> None:
    """Guards against a README that promises models which are refused, or the other way round."""
    verdicts = {row.model_type: row.verdict for row in surveyed_models().rows}
    expected = {"runs": "supported", "is refused": "refused"}
    named = [
        (model_type, expected[said])
        for said, examples in re.findall(
            r"^\| (runs|is refused) \|.*\| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
        )
        for model_type in re.findall(r"`(\w+)`", examples)
    ]
    assert len(named) > 10
    assert [(name, verdicts[name]) for name, _ in named] == named


def anchors(page: Path) -> set[str]:
    """What headings of a page can be linked as, the way GitHub makes anchors."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    """Guards against links to pages, sections and files that are not there."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} names no section"


def test_every_page_is_reachable_from_the_readme() -> None:
    """Guards against pages that nobody can find."""
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        open_pages += [
            (page.parent / link).resolve() for link in links if not re.match(r"[a-z]+:", link)
        ]
    assert set(PAGES) <= reached


def test_no_page_shows_work_to_be_done() -> None:
    """Guards against pages that were left unfinished."""
    for page in PAGES:
        assert not re.search(r"TODO|TBD|FIXME|XXX", page.read_text(encoding="utf-8")), page
