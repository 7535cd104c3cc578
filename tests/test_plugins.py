"""Discovery, isolation, naming and order of plugins, on real distributions in temporary folders."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specfw.components import Bound, Component, NestedDrafter, Options
from specfw.contracts import API_VERSION, Drafter
from specfw.errors import ConfigError, ContractError, PluginError, UnknownComponentError
from specfw.hookspecs import hookimpl
from specfw.plugins import FILTER_VARIABLE, PluginManager

HEADER = f"""
from pydantic import Field
from specfw.components import Component, Options
from specfw.contracts import Drafter
from specfw.hookspecs import hookimpl

specfw_api = {API_VERSION}

class Draft(Drafter):
    def __init__(self, options):
        self.options = options
    def propose(self, requests, builder):
        pass
"""


def offering(*names: str) -> str:
    """The source of a plugin that offers drafters."""
    return HEADER + textwrap.dedent(f"""
        class DraftOptions(Options):
            k: int = Field(default=4, ge=1)

        @hookimpl
        def specfw_drafters():
            return {{name: Component(Draft, DraftOptions, "test") for name in {names!r}}}
        """)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is installed here out of the tests."""
    monkeypatch.setenv(FILTER_VARIABLE, "")


class Site:
    """A folder of installed distributions, on `sys.path`, whose plugins alone are let through."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.names: list[str] = []
        root.mkdir()
        monkeypatch.syspath_prepend(str(root))

    def install(
        self,
        name: str,
        source: str,
        *,
        distribution: str | None = None,
        version: str = "1.0",
        requires: tuple[str, ...] = (),
        root: Path | None = None,
        egg: bool = False,
    ) -> None:
        """Lay out a distribution with one entry point `name` and one module."""
        root = root or self.root
        root.mkdir(exist_ok=True)
        distribution = distribution or f"dist-{name}"
        module = f"plug_{name.replace('-', '_')}_{distribution.replace('-', '_')}"
        (root / f"{module}.py").write_text(source)
        stem = distribution.replace("-", "_")
        info = root / (f"{stem}.egg-info" if egg else f"{stem}-{version}.dist-info")
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / ("PKG-INFO" if egg else "METADATA")).write_text("\n".join(lines) + "\n")
        (info / "entry_points.txt").write_text(f"[specfw]\n{name} = {module}\n")
        self.names.append(distribution)
        self.monkeypatch.setenv(FILTER_VARIABLE, ",".join(self.names))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield Site(tmp_path / "site", monkeypatch)
    for module in [name for name in sys.modules if name.startswith("plug_")]:
        del sys.modules[module]


def loaded(manager: PluginManager) -> list[str]:
    return [plugin.candidate.name for plugin in manager.plugins]


BROKEN = {
    "import": ("raise ImportError('no such library')", "import", "no such library"),
    "exit": ("import sys; sys.exit('cannot run here')", "import", "cannot run here"),
    "syntax": ("def (", "import", "SyntaxError"),
    "argument": (
        HEADER + "@hookimpl\ndef specfw_step(report, extra): pass\n",
        "hooks",
        "extra",
    ),
    "unknown-hook": (HEADER + "@hookimpl\ndef specfw_stepp(report): pass\n", "hooks", "stepp"),
    "unmarked": (
        offering("a") + "\ndef specfw_step(report): pass\n",
        "hooks",
        "specfw_step is not marked",
    ),
    "no-hook": (HEADER, "hooks", "implements no hook"),
    "wraps-drafters": (
        HEADER + "@hookimpl(wrapper=True)\ndef specfw_drafters():\n    return (yield)\n",
        "hooks",
        "wraps specfw_drafters",
    ),
    "newer-api": (offering("a") + f"\nspecfw_api = {API_VERSION + 1}\n", "api", "upgrade specfw"),
    "older-api": (offering("a") + "\nspecfw_api = 0\n", "api", "upgrade the plugin"),
    "no-api": (offering("a") + "\ndel specfw_api\n", "api", "specfw_api"),
    "raises": (
        HEADER + "@hookimpl\ndef specfw_drafters():\n    raise RuntimeError('boom')\n",
        "components",
        "boom",
    ),
    "not-a-mapping": (
        HEADER + "@hookimpl\ndef specfw_drafters():\n    return ['a']\n",
        "components",
        "mapping",
    ),
    "not-a-component": (
        HEADER + "@hookimpl\ndef specfw_drafters():\n    return {'a': Draft}\n",
        "components",
        "Component",
    ),
    "bad-name": (offering("a b"), "components", "'a b'"),
    "option-called-name": (
        HEADER
        + "class Bad(Options):\n    name: str = ''\n"
        + "@hookimpl\ndef specfw_drafters():\n    return {'a': Component(Draft, Bad)}\n",
        "components",
        "'name'",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_B41_a_broken_plugin_costs_only_itself(
    site: Site, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    """B41: one plugin that failed to load made the whole program unusable."""
    source, stage, reason = BROKEN[case]
    site.install("good", offering("fine"))
    site.install("bad", source)
    with caplog.at_level(logging.WARNING, logger="specfw"):
        manager = PluginManager()

    assert loaded(manager) == ["specfw", "good"]
    assert manager.create("drafter", "fine", {"k": 2}).options.k == 2
    (warning,) = caplog.messages
    for part in ("'bad'", "dist-bad 1.0", reason):
        assert part in warning
    (broken,) = manager.describe()["broken"]
    assert (broken["name"], broken["distribution"], broken["stage"]) == ("bad", "dist-bad", stage)
    assert reason in broken["error"]

    with pytest.raises(PluginError, match="'bad' cannot be used") as asked:
        manager.component("drafter", "bad")
    assert reason in str(asked.value)
    assert asked.value.__cause__ is manager.broken[0].error
    with pytest.raises(PluginError, match="'bad'"):
        PluginManager(strict=True)


def test_B41_several_broken_plugins_are_each_told_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """B41: entry points were loaded in one call, which the first exception ended."""
    site.install("a-bad", "raise ImportError('first')")
    site.install("good", offering("fine"))
    site.install("z-bad", offering("q") + "\nspecfw_api = 99\n")
    with caplog.at_level(logging.WARNING, logger="specfw"):
        manager = PluginManager()
    assert loaded(manager) == ["specfw", "good"]
    assert [broken.name for broken in manager.broken] == ["a-bad", "z-bad"]
    assert len(caplog.messages) == 2


def test_B41_a_refused_plugin_has_no_hook_left_behind(site: Site) -> None:
    """B41: hooks checked before the wrong one stayed registered."""
    called = (
        "CALLED = []\n@hookimpl\ndef specfw_request_finished(output):\n    CALLED.append(output)\n"
    )
    site.install("half", HEADER + called + "@hookimpl\ndef specfw_step(report, extra): pass\n")
    manager = PluginManager()
    manager.hook.specfw_request_finished(output="done")
    assert sys.modules["plug_half_dist_half"].CALLED == []


@pytest.mark.parametrize(
    ("requirement", "reason"),
    [
        ("specfw>=99", "specfw 0"),
        ("no-such-distribution>=1", "not installed"),
        ("pydantic<1", "pydantic 2"),
    ],
)
def test_B41_requirements_are_checked_before_import(
    site: Site, requirement: str, reason: str
) -> None:
    """B41 (version conflicts): code written for another version ran before it was refused."""
    site.install("needy", offering("a"), requires=(requirement,))
    manager = PluginManager()
    assert manager.broken[0].stage == "requirements"
    assert reason in manager.broken[0].reason
    assert requirement in manager.broken[0].reason
    assert "plug_needy_dist_needy" not in sys.modules


def test_B41_requirements_of_extras_and_other_platforms_do_not_count(site: Site) -> None:
    """B41: a plugin must not be refused for what it does not need here."""
    site.install(
        "lean",
        offering("a"),
        requires=("specfw>=0.1", "absent; extra == 'gpu'", "absent; sys_platform == 'nowhere'"),
    )
    assert loaded(PluginManager()) == ["specfw", "lean"]


def test_B41_unreadable_entry_points_cost_only_their_distribution(site: Site) -> None:
    """B41: metadata that cannot be parsed must not stop discovery."""
    site.install("good", offering("fine"))
    site.install("torn", offering("a"))
    (site.root / "dist_torn-1.0.dist-info" / "entry_points.txt").write_text(
        "[specfw]\nno equals sign\n"
    )
    manager = PluginManager()
    assert loaded(manager) == ["specfw", "good"]
    assert [broken.distribution for broken in manager.broken] == ["dist-torn"]


COMMANDS = HEADER + textwrap.dedent("""
    @hookimpl
    def specfw_commands(app):
        @app.command()
        def hello():
            print("hello from a plugin")
        {ending}
    """)


@pytest.mark.parametrize(
    "bad",
    [
        COMMANDS.format(ending="raise RuntimeError('boom')"),
        COMMANDS.replace("hello", "run").format(ending=""),
    ],
)
def test_B41_a_plugin_with_broken_commands_leaves_the_command_line_working(
    site: Site, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    """B41: one plugin broke even --help; half of its commands must not appear either."""
    site.install("bad", bad)
    site.install("good", COMMANDS.format(ending="").replace("hello", "greet"))
    app = typer.Typer()
    app.command()(_run)
    manager = PluginManager()
    with caplog.at_level(logging.WARNING, logger="specfw"):
        manager.add_commands(app)

    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert "greet" in shown.output
    assert "hello" not in shown.output
    assert "own run" in CliRunner().invoke(app, ["run"]).output
    assert "greet from" in CliRunner().invoke(app, ["greet"]).output
    assert [broken.stage for broken in manager.broken] == ["commands"]
    assert len(caplog.messages) == 1
    assert loaded(manager) == ["specfw", "good"]


def _run() -> None:
    print("own run")


_run.__name__ = "run"


def test_discovery_imports_neither_torch_nor_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listing plugins, those installed here too, must stay quick: heavy imports belong into building."""
    monkeypatch.delenv(FILTER_VARIABLE)
    code = (
        "import sys; from specfw.plugins import PluginManager; PluginManager().describe(); "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_B43_a_distribution_reached_twice_is_loaded_once(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B43: where lib64 links to lib, the second registration of a name aborted the program."""
    site.install("twin", offering("drafting"))
    link = tmp_path / "site64"
    link.symlink_to(site.root)
    for order in ([str(link), str(site.root)], [str(site.root), str(link)]):
        monkeypatch.setattr(sys, "path", [*order, *sys.path])
        manager = PluginManager(strict=True)
        assert loaded(manager) == ["specfw", "twin"]
        assert manager.names("drafter") == ["drafting", "none"]
    assert caplog.messages == []


def test_B43_a_stale_egg_info_loses_to_the_dist_info_beside_it(site: Site) -> None:
    """B43: old metadata beside new must neither count twice nor win."""
    site.install("old", "raise ImportError('gone')", distribution="same", version="9.0", egg=True)
    site.install("new", offering("drafting"), distribution="same", version="2.0")
    manager = PluginManager(strict=True)
    assert loaded(manager) == ["specfw", "new"]
    assert manager.plugins[1].candidate.version == "2.0"


def test_B43_of_two_copies_the_one_that_import_finds_counts(site: Site, tmp_path: Path) -> None:
    """B43: metadata of one copy with the code of another would be checked in vain."""
    site.install("twin", offering("first"), version="1.0")
    behind = tmp_path / "behind"
    site.install("twin", offering("second"), version="2.0", root=behind)
    site.monkeypatch.setattr(sys, "path", [*sys.path, str(behind)])
    manager = PluginManager(strict=True)
    assert manager.plugins[1].candidate.version == "1.0"
    assert manager.names("drafter") == ["first", "none"]


def test_B43_two_owners_of_a_name_are_an_error_that_names_both(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B43: which of two plugins got a name must not depend on the order of paths."""
    one, two = tmp_path / "one", tmp_path / "two"
    site.install("alpha", offering("drafting", "only-alpha"), root=one)
    site.install("beta", offering("drafting"), root=two)
    path = list(sys.path)
    seen = []
    for order in ((one, two), (two, one)):
        site.monkeypatch.setattr(sys, "path", [*map(str, order), *path])
        caplog.clear()
        manager = PluginManager()
        seen.append(manager.describe())
        with pytest.raises(ConfigError) as error:
            manager.create("drafter", "drafting")
        for part in ("dist-alpha", "dist-beta", "dist-alpha:drafting", "dist-beta:drafting"):
            assert part in str(error.value)
            assert part in caplog.text
        for name in ("alpha:drafting", "dist-alpha:drafting"):
            assert type(manager.create("drafter", name)).__module__ == "plug_alpha_dist_alpha"
        assert type(manager.create("drafter", "beta:drafting")).__module__ == "plug_beta_dist_beta"
        assert manager.create("drafter", "only-alpha").options.k == 4
        with pytest.raises(ConfigError, match="dist-beta"):
            PluginManager(strict=True)
    assert seen[0] == seen[1]
    assert seen[0]["conflicts"] == [
        {"kind": "drafter", "name": "drafting", "owners": ["dist-alpha", "dist-beta"]}
    ]


def test_B43_two_plugins_of_one_name_are_told_apart_by_distribution(site: Site) -> None:
    """B43: two distributions may use the same entry point name."""
    site.install("same", offering("drafting"), distribution="dist-one")
    site.install("same", offering("drafting"), distribution="dist-two")
    manager = PluginManager()
    with pytest.raises(ConfigError, match="dist-one:drafting"):
        manager.component("drafter", "same:drafting")
    built = manager.create("drafter", "dist-two:drafting")
    assert type(built).__module__ == "plug_same_dist_two"


def test_B43_a_builtin_is_never_shadowed_silently(site: Site) -> None:
    """B43: a third party's component named like a built-in must not replace it unseen."""
    site.install("sly", offering("none"))
    manager = PluginManager()
    with pytest.raises(ConfigError, match="'specfw:none'"):
        manager.create("drafter", "none")
    assert type(manager.create("drafter", "specfw:none")).__module__ == "specfw.builtins"
    assert type(manager.create("drafter", "sly:none")).__module__ == "plug_sly_dist_sly"


def test_B43_the_same_object_is_loaded_once(site: Site) -> None:
    """B43: a plugin that is installed and also passed in is one plugin."""
    site.install("twin", offering("drafting"))
    first = PluginManager()
    module = first.plugins[1].module
    manager = PluginManager([module, module], strict=True)
    assert loaded(manager) == ["specfw", "twin"]


def observer(name: str, calls: list[str], **mark: bool) -> Any:
    """A plugin that records when its `specfw_step` runs."""

    def specfw_step(report: object) -> str:
        calls.append(name)
        return name

    return SimpleNamespace(
        __name__=name, specfw_api=API_VERSION, specfw_step=hookimpl(**mark)(specfw_step)
    )


def wrapper(name: str, calls: list[str], raises: str = "", **mark: bool) -> Any:
    """A plugin that records entering and leaving around the others' `specfw_step`."""

    def specfw_step(report: object) -> Iterator[None]:
        calls.append(f"+{name}")
        try:
            result = yield
            if raises:
                raise RuntimeError(raises)
            return result
        finally:
            calls.append(f"-{name}")

    return SimpleNamespace(
        __name__=name,
        specfw_api=API_VERSION,
        specfw_step=hookimpl(wrapper=True, **mark)(specfw_step),
    )


def test_B44_marks_decide_the_order_whatever_the_order_of_registration() -> None:
    """B44: a first-marked implementation ran after a last-marked one when wrappers were involved."""
    makers: list[Callable[[list[str]], Any]] = [
        lambda calls: wrapper("first-wrapper", calls, tryfirst=True),
        lambda calls: observer("plain", calls),
        lambda calls: observer("last", calls, trylast=True),
        lambda calls: observer("first", calls, tryfirst=True),
    ]
    for order in itertools.permutations(makers):
        calls: list[str] = []
        manager = PluginManager([make(calls) for make in order], strict=True)
        assert manager.hook.specfw_step(report=None) == ["first", "plain", "last"]
        assert calls == ["+first-wrapper", "first", "plain", "last", "-first-wrapper"]


def test_B44_ties_follow_the_names_in_every_order() -> None:
    """B44: of two with the same mark, the one loaded earlier is nearer the end it asked for."""
    makers: list[Callable[[list[str]], Any]] = [
        lambda calls: observer("a", calls),
        lambda calls: observer("b", calls),
        lambda calls: observer("c", calls, trylast=True),
        lambda calls: observer("d", calls, trylast=True),
        lambda calls: observer("e", calls, tryfirst=True),
        lambda calls: observer("f", calls, tryfirst=True),
    ]
    for order in itertools.islice(itertools.permutations(makers), 0, None, 60):
        calls: list[str] = []
        PluginManager([make(calls) for make in order]).hook.specfw_step(report=None)
        assert "".join(calls) == "efabdc"


def test_B44_an_exception_in_a_wrapper_still_unwinds_the_others() -> None:
    """B44: a wrapper that raises must not leave another one's resources open."""
    for order in itertools.permutations(["outer", "raising", "inner", "plain"]):
        calls: list[str] = []
        plugins = {
            "outer": wrapper("outer", calls, tryfirst=True),
            "raising": wrapper("raising", calls, raises="boom"),
            "inner": wrapper("inner", calls, trylast=True),
            "plain": observer("plain", calls),
        }
        manager = PluginManager([plugins[name] for name in order])
        with pytest.raises(RuntimeError, match="boom"):
            manager.hook.specfw_step(report=None)
        assert calls == ["+outer", "+raising", "+inner", "plain", "-inner", "-raising", "-outer"]


def test_B44_entry_points_run_by_distribution_and_name_whatever_the_file_system_says(
    site: Site, tmp_path: Path
) -> None:
    """B44: ties were broken by the order in which the file system listed metadata."""
    roots = {name: tmp_path / f"root-{name}" for name in ("m", "z", "b")}
    for name, root in roots.items():
        returns = f"@hookimpl\ndef specfw_step(report):\n    return {name!r}\n"
        site.install(name, HEADER + returns, distribution=f"dist-{name}", root=root)
    path = list(sys.path)
    for order in itertools.permutations(roots.values()):
        site.monkeypatch.setattr(sys, "path", [*map(str, order), *path])
        passed = observer("a", [])
        assert PluginManager([passed]).hook.specfw_step(report=None) == ["b", "m", "z", "a"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("one", ["one"]), ("dist-two", ["two"]), (" one , two ", ["one", "two"]), ("", [])],
)
def test_the_filter_lets_through_what_it_lists(
    site: Site, listed: str, expected: list[str]
) -> None:
    """A plugin that the environment leaves out must neither load nor look uninstalled."""
    site.install("one", offering("first"))
    site.install("two", offering("second"))
    site.monkeypatch.setenv(FILTER_VARIABLE, listed)
    manager = PluginManager(strict=True)
    assert loaded(manager) == ["specfw", *expected]
    for left_out in {"one", "two"} - set(expected):
        with pytest.raises(PluginError, match=FILTER_VARIABLE):
            manager.component("drafter", f"{left_out}:first")


def test_an_unset_filter_lets_everything_through(site: Site) -> None:
    """Installing a plugin must be enough to use it."""
    site.install("one", offering("first"))
    site.monkeypatch.delenv(FILTER_VARIABLE)
    assert "one" in loaded(PluginManager())


def test_a_filter_that_lists_an_unknown_plugin_says_so(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt filter must not silently leave everything out."""
    site.install("one", offering("first"))
    site.monkeypatch.setenv(FILTER_VARIABLE, "oen")
    PluginManager()
    assert "'oen'" in caplog.text
    with pytest.raises(PluginError, match="'oen'"):
        PluginManager(strict=True)


def test_an_unknown_component_is_answered_with_close_and_installed_names(site: Site) -> None:
    """A typing error must be answered with the right word."""
    site.install("one", offering("drafting"))
    manager = PluginManager()
    with pytest.raises(UnknownComponentError, match=r"did you mean 'drafting'\?.*drafting, none"):
        manager.component("drafter", "draftign")
    with pytest.raises(UnknownComponentError):
        manager.component("drafter", "other:drafting")
    with pytest.raises(UnknownComponentError):
        manager.component("verifier", "drafting")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"kk": 3}, ["'kk'", "did you mean 'k'", "accepted: k"]),
        ({"k": "many"}, ["k:", "valid integer", "'many'"]),
        ({"k": 0}, ["k:", "greater than or equal to 1", "0"]),
        ({"k": -2}, ["k:", "greater than or equal to 1", "-2"]),
    ],
)
def test_B45_wrong_options_are_refused_with_key_and_accepted_values(
    site: Site, options: dict[str, Any], parts: list[str]
) -> None:
    """B45: a setting that is misspelt or out of range must not be ignored."""
    site.install("one", offering("drafting"))
    with pytest.raises(ConfigError) as error:
        PluginManager().create("drafter", "drafting", options)
    for part in ["drafter 'drafting'", *parts]:
        assert part in str(error.value)


class Echo(Drafter):
    def __init__(self, options: Any) -> None:
        self.options = options

    def propose(self, requests: Any, builder: Any) -> None: ...


class OuterOptions(Options):
    inner: NestedDrafter
    k: int = 1


class InnerOptions(Options):
    k: int = 4


@hookimpl
def _offers() -> dict[str, Component[Any]]:
    return {
        "outer": Component(Echo, OuterOptions),
        "inner": Component(Echo, InnerOptions),
        "wrong": Component(lambda _: object()),
        "failing": Component(lambda _: {}["missing"]),
    }


PLUGIN = SimpleNamespace(__name__="passed", specfw_api=API_VERSION, specfw_drafters=_offers)


@pytest.mark.parametrize(
    "inner", ["inner(k=7)", {"name": "inner", "k": 7}, {"name": "passed:inner", "k": 7}]
)
def test_an_option_can_be_a_component(inner: object) -> None:
    """Components that combine others take them in every form that a config takes."""
    manager = PluginManager([PLUGIN])
    bound = manager.bind("drafter", {"name": "outer", "inner": inner})
    assert bound.settings()["inner"]["k"] == 7
    assert manager.bind("drafter", bound.settings()).settings() == bound.settings()
    nested = bound.build().options.inner
    assert isinstance(nested, Bound)
    assert nested.build().options.k == 7


def test_a_ready_object_is_a_component() -> None:
    """A drafter that the user made is used as it is."""
    ready = Echo(None)
    manager = PluginManager([PLUGIN])
    assert manager.bind("drafter", ready).build() is ready
    outer = manager.create("drafter", "outer", {"inner": ready})
    assert outer.options.inner.build() is ready


def test_a_wrong_component_inside_options_is_named() -> None:
    """The error must tell which of several nested names is wrong."""
    with pytest.raises(ConfigError, match=r"drafter 'outer': inner: .*'innr'.*'inner'"):
        PluginManager([PLUGIN]).bind("drafter", "outer(inner=innr())")


def test_what_is_built_must_be_of_its_kind() -> None:
    """A wrong class must be refused at start, not in the loop."""
    manager = PluginManager([PLUGIN])
    with pytest.raises(ContractError, match=r"contracts\.Drafter"):
        manager.create("drafter", "wrong")
    with pytest.raises(PluginError, match="'failing' could not be built: KeyError") as error:
        manager.create("drafter", "failing")
    assert isinstance(error.value.__cause__, KeyError)


def test_a_class_is_no_plugin() -> None:
    """Methods of a class cannot be called without an instance."""

    class Offering:
        specfw_api = API_VERSION

        @hookimpl
        def specfw_drafters(self) -> dict[str, Component[Any]]:
            return {"mine": Component(Echo)}

    assert PluginManager([Offering]).broken[0].reason.endswith("pass an instance")
    assert PluginManager([Offering()]).names("drafter") == ["mine", "none"]
