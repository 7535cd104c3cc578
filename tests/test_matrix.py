"""The certificate for all combinations: what it covers, what it says of those that fail, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations, product
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import specfw.testing.combinations as combinations_module
import specfw.testing.matrix as matrix_module
from specfw import PipelineConfig
from specfw.cli.main import app
from specfw.components import Component, Kind
from specfw.contracts import API_VERSION, Drafter, Outcome, RequestView, TargetInfo, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import RandomSource
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl
from specfw.plugins import PluginManager
from specfw.testing.cases import SETTINGS, Case
from specfw.testing.combinations import Combination, make_combinations
from specfw.testing.configured import certify_config
from specfw.testing.controls import CONTROLS, Verdict
from specfw.testing.matrix import Matrix, Row, certify_all, check
from specfw.types import SpeculationParams
from tests.test_docs import cli_sections, table_keys


class Greedy(Verifier):
    """Says that it keeps the law, and keeps every draft."""

    guarantee = "exact-law"
    noise = "draft"

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        plain = CoupledVerifier().verify(draft, laws, random)
        children = draft.children[:, 0, :1] if draft.max_width else plain.node[:, None] * 0
        return Outcome(children[:, 0].clamp_min(0), plain.next_token)


class Refuses(Drafter):
    def attach(self, target: TargetInfo) -> None:
        raise ConfigError("drafter refuses: expected another target, got this one; use another")

    def propose(self, requests: list[RequestView], builder: DraftBuilder) -> None:  # type: ignore[override]
        raise NotImplementedError


class Breaks(Refuses):
    def attach(self, target: TargetInfo) -> None:
        raise ZeroDivisionError("on purpose")


class Bad:
    """A plugin of components that must be found out."""

    specfw_api = API_VERSION

    @hookimpl
    def specfw_drafters(self) -> Mapping[str, Component[Drafter]]:
        return {"refuses": Component(lambda _: Refuses()), "breaks": Component(lambda _: Breaks())}

    @hookimpl
    def specfw_verifiers(self) -> Mapping[str, Component[Verifier]]:
        return {"greedy": Component(lambda _: Greedy())}


LIMITS = SpeculationParams(max_nodes=3, max_depth=2, max_width=2)
WORLD = ("temperature", "plain", "dense")
CASE = Case(SETTINGS["temperature"].model_copy(update={"speculation": LIMITS}))


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager([Bad()])


def combination(drafter: str, verifier: str) -> Combination:
    return Combination({"name": drafter}, {"name": verifier}, ({"name": "fixed"},), CASE, "x")


def test_any_two_meet() -> None:
    """A pair of values that never meets could hide a mistake that only both together make."""
    found = PluginManager()
    made = make_combinations(found)
    rows = [
        (
            one.drafter["name"],
            one.verifier["name"],
            tuple(scheduler["name"] for scheduler in one.schedulers),
            one.setting,
            one.case.memory,
        )
        for one in made
    ]
    for first, second in combinations(range(5), 2):
        met = {(row[first], row[second]) for row in rows}
        assert len(met) == len({row[first] for row in rows}) * len({row[second] for row in rows})
    assert len({str(one) for one in made}) == len(made) >= 300
    assert {row[0] for row in rows} == set(found.names("drafter"))
    assert {name for row in rows for name in row[2]} == set(found.names("scheduler"))


def test_every_drafter_goes_inside_every_combinator() -> None:
    """Two drafters that are each right alone may not be in each other's company."""
    found = PluginManager()
    names = set(found.names("drafter"))
    rows = [
        (one.drafter["name"], place, inner["name"], one.verifier["name"], one.setting)
        for one in make_combinations(found)
        for place, inner in enumerate(one.drafter.get("drafters") or [one.drafter.get("drafter")])
        if inner
    ]
    combinators = {"first", "extend", "merge", "route", "bandit", "cascade"}
    assert {row[0] for row in rows} == combinators
    for combinator in combinators:
        places = range(1 if combinator == "cascade" else 2)
        for wanted in product(
            [combinator], places, names, ("coupled", "rejection"), ("greedy", "temperature")
        ):
            assert wanted in rows


def test_a_row_names_the_drafters_inside() -> None:
    """A table in which all merges are called `merge` does not say what was certified."""
    named: dict[Kind, list[str]] = {
        "drafter": ["suffix"],
        "verifier": ["coupled"],
        "scheduler": ["fixed"],
    }
    rows = make_combinations(PluginManager(), only=named)
    names = {one.names()["drafter"] for one in rows}
    assert {"suffix", "merge(suffix, small-model)", "cascade(ngram, suffix)"} <= names


def test_examples_hold_for_every_component() -> None:
    """A component whose example options are refused is left out of every certificate."""
    found = PluginManager()
    for kind in ("drafter", "verifier", "scheduler"):
        for name in found.names(kind):  # type: ignore[arg-type]
            example = found.component(kind, name).example  # type: ignore[arg-type]
            found.bind(kind, {"name": name, **example}).build()  # type: ignore[arg-type]


def test_one_that_is_kept(manager: PluginManager) -> None:
    """The row of a right combination has numbers and no reason."""
    row = check(combination("ngram", "rejection"), manager)
    mapping = row.mapping()
    assert row.ok
    assert mapping["max_tv"] < 1e-9
    assert mapping["drafted"] > 0
    assert mapping["counterexample"] is None
    assert "reason" not in mapping


def test_one_that_is_broken_can_be_pasted(manager: PluginManager) -> None:
    """Whoever reads of a broken promise must be able to repeat it."""
    row = check(combination("ngram", "greedy"), manager)
    assert not row.ok
    text = row.mapping()["counterexample"]
    assert "total variation" in text
    config = yaml.safe_load(text)
    assert config["verifier"] == {"name": "greedy"}
    again = certify_config(PipelineConfig(**config), manager)
    assert not again.ok
    matrix = Matrix([check(combination("ngram", "rejection"), manager), row])
    assert not matrix.ok
    assert len(matrix.mapping()["failed"]) == 1
    assert "## Failed" in matrix.markdown()
    assert "broken" in matrix.summary()


def test_refused_and_failed_ones_are_told_apart(manager: PluginManager) -> None:
    """A refusal is an answer; anything else that is raised is a fault."""
    refused = check(combination("refuses", "rejection"), manager)
    failed = check(combination("breaks", "rejection"), manager)
    unknown = check(combination("nobody", "rejection"), manager)
    assert refused.ok
    assert not failed.ok
    assert unknown.refused
    matrix = Matrix([refused, failed])
    assert not matrix.ok
    [row] = matrix.mapping()["refused"]
    assert row["reason"].startswith("drafter refuses: expected another target")
    [row] = matrix.mapping()["failed"]
    assert row["reason"] == "ZeroDivisionError: on purpose"
    assert not Matrix([Row(combination("refuses", "rejection"), refused="no")]).ok


def test_the_command_writes_a_certificate(tmp_path: Path) -> None:
    """Files, keys and exit code are what others build on; the work is shared by two processes."""
    named = ["--drafter", "ngram", "--verifier", "coupled", "--scheduler", "fixed"]
    folder = tmp_path / "new"
    result = CliRunner().invoke(app, ["certify", "--all", *named, "--out", str(folder), "--json"])
    about = json.loads(result.stdout)
    documented = table_keys(cli_sections()["specfw certify"], "key with `--all`")
    assert sorted(about) == sorted(documented)
    assert about["lossy"] == about["failed"] == []
    assert about["combinations"] == len(about["lossless"]) >= 40
    assert {row["drafter"] for row in about["refused"]} == {"cascade(ngram, ngram)"}
    assert json.loads((folder / "certificate.json").read_text()) == about
    table = (folder / "certificate.md").read_text()
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.endswith(" |")]
    assert sum("ngram" in drafter for drafter in rows) == about["combinations"]
    assert about["ok"]
    assert about["max_tv"] < 1e-9
    assert result.exit_code == 0


def test_lossy_ones_are_told_apart(manager: PluginManager) -> None:
    """What a lossy verifier does to the law must not count against the promises of others."""
    lossy = check(
        Combination(
            {"name": "ngram"},
            {"name": "typical", "allow_lossy": True, "epsilon": 0.01},
            ({"name": "fixed"},),
            CASE,
        ),
        manager,
    )
    matrix = Matrix([check(combination("ngram", "rejection"), manager), lossy])
    about = matrix.mapping()
    assert matrix.ok
    assert about["max_tv"] < 1e-9
    assert [row["verifier"] for row in about["lossy"]] == ["typical"]
    assert about["lossy"][0]["max_tv"] > 0.01


def test_texts_get_longer_until_something_is_drafted(manager: PluginManager) -> None:
    """A combination that drafts nothing passes whatever is wrong with it."""
    case = Case(CASE.params, horizon=1)  # of one token, none is left for a draft
    short = Combination({"name": "ngram"}, {"name": "rejection"}, ({"name": "fixed"},), case)
    assert check(short, manager).mapping()["drafted"] == 0
    longer = check(short, manager, longer=3)
    assert longer.mapping()["drafted"] > 0
    assert longer.combination.case.horizon > 1
    never = Combination({"name": "none"}, {"name": "rejection"}, ({"name": "fixed"},), case)
    assert check(never, manager, longer=3).combination.case.horizon == 1
    assert Matrix([longer, check(never, manager)]).drafted == 1


def test_a_control_that_passes_breaks_the_certificate(manager: PluginManager) -> None:
    """A kit with a hole certifies nothing."""
    row = check(combination("ngram", "rejection"), manager)
    found, missed = Verdict("found", True, 0.1, "Case()"), Verdict("missed", False, 0.0, None)
    assert Matrix([row], [found]).ok
    matrix = Matrix([row], [found, missed])
    assert not matrix.ok
    assert [one["caught"] for one in matrix.mapping()["controls"]] == [True, False]
    assert "1 of 2 controls caught" in matrix.summary()
    assert "| missed | **no** |" in matrix.markdown()


def test_controls_run_beside_combinations() -> None:
    """Names of controls go through the same workers as combinations."""
    named = {"drafter": ["none"], "verifier": ["coupled"], "scheduler": ["fixed"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_module, "CONTROLS", CONTROLS[:1])
        patch.setattr(combinations_module, "_cover", lambda components: [(components[0], WORLD)])
        patch.setattr(combinations_module, "_filled", lambda *_: ())
        found = certify_all(processes=1, only=named)  # type: ignore[arg-type]
    assert [control.name for control in found.controls] == [CONTROLS[0].name]
    assert len(found.rows) == 1
    assert found.ok


def test_all_takes_no_config(tmp_path: Path) -> None:
    """A config that is silently ignored would certify something else."""
    result = CliRunner().invoke(app, ["certify", "--all", "--set", "drafter=ngram"])
    assert isinstance(result.exception, ConfigError)
