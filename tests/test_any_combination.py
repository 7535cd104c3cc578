"""Any pipeline keeps what its verifier promises: drawn whole, computed exactly, shrunk to a config.

What fails is printed as a config file for `specfw certify -c`, with the case in which it fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specfw import PipelineConfig
from specfw.components import Component
from specfw.contracts import API_VERSION, Drafter
from specfw.hookspecs import hookimpl
from specfw.plugins import PluginManager
from specfw.testing.cases import SETTINGS, Case
from specfw.testing.combinations import Combination
from specfw.testing.drafters import MixtureDrafter, ScriptedDrafter
from specfw.testing.matrix import check
from specfw.testing.strategies import cases
from specfw.types import SpeculationParams


class TestDrafters:
    """A plugin with drafters that use all that a builder allows."""

    __test__ = False
    specfw_api = API_VERSION

    @hookimpl
    def specfw_drafters(self) -> Mapping[str, Component[Drafter]]:
        return {
            "mixture": Component(lambda _: MixtureDrafter()),
            "scripted": Component(lambda _: ScriptedDrafter(5)),
        }


MANAGER = PluginManager([TestDrafters()])


def one_of_installed(kind: str, *references: dict[str, Any]) -> list[dict[str, Any]]:
    """Those references whose component is installed."""
    names = MANAGER.names(kind)  # type: ignore[arg-type]
    return [reference for reference in references if reference["name"] in names]


SIMPLE = one_of_installed(
    "drafter",
    {"name": "none"},
    {"name": "ngram", "max_nodes": 3, "min_ngram": 1, "continuations": 2},
    {"name": "suffix"},
    {"name": "recycling"},
    {"name": "lookahead", "window": 2, "level": 2, "guesses": 2},
    {"name": "mixture"},
    {"name": "scripted"},
    {"name": "small-model", "model": {"name": "table"}, "max_nodes": 2},
    {"name": "small-model", "model": {"name": "table"}, "max_nodes": 3, "width": 2},
)
READS_AHEAD = [reference for reference in SIMPLE if reference["name"] in ("suffix", "recycling")]
VERIFIERS = one_of_installed(
    "verifier", {"name": "coupled"}, {"name": "rejection"}, {"name": "block"}
)
SCHEDULERS = one_of_installed(
    "scheduler",
    {"name": "fixed", "max_nodes": 3, "max_depth": 2, "max_width": 2},
    {"name": "adaptive-k", "start": 1, "max_nodes": 3, "warmup": 1, "max_width": 2, "memory": 2.0},
    {"name": "adaptive-k", "start": 2, "max_nodes": 3, "warmup": 0, "carry_over": True},
    {"name": "confidence", "measure": "top", "threshold": 0.5, "rate": 0.3},
    {"name": "confidence", "threshold": 0.6, "rate": 0.2},
    {"name": "confidence", "measure": "path", "threshold": 0.4, "rate": 0.2},
    {"name": "goodput", "max_nodes": 3, "max_width": 2, "warmup": 2, "memory": 2.0},
)


@st.composite
def drafters(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """A drafter, or one made of drafters, as a mapping."""
    composers = set(MANAGER.names("drafter")) & {"first", "extend", "merge", "route", "bandit"}
    name = draw(st.sampled_from(["", *sorted(composers)])) if depth else ""
    if not name:
        return draw(st.sampled_from(SIMPLE))
    first = draw(drafters(depth - 1))
    if name == "extend":
        return {"name": name, "drafters": [first, draw(st.sampled_from(READS_AHEAD))]}
    composed = {"name": name, "drafters": [first, draw(drafters(depth - 1))]}
    if name == "route":
        composed["bounds"] = [draw(st.sampled_from([0.5, 1.5]))]
    if name == "bandit":
        composed["measure"] = "passes"  # what is measured in time is not the same in every run
    return composed


def open_cases() -> st.SearchStrategy[Case]:
    """Cases in which every token may come, so that drafts have most to get wrong."""
    size = st.sampled_from([(2, 4), (3, 3)])
    world = st.sampled_from([(1, "plain"), (3, "plain"), (1, "prefix hit"), (1, "chunked prefill")])
    return st.builds(
        lambda size, world, seed: Case(SETTINGS["temperature"], "dense", *size, *world, seed=seed),
        size,
        world,
        st.integers(0, 99),
    )


@st.composite
def combinations(draw: st.DrawFn) -> Combination:
    """A whole pipeline in a small world."""
    case: Case = draw(st.one_of(open_cases(), cases()))
    limits = SpeculationParams(max_nodes=3, max_depth=2, max_width=2)
    params = case.params.model_copy(update={"speculation": limits})
    return Combination(
        draw(drafters()),
        draw(st.sampled_from(VERIFIERS)),
        tuple(draw(st.lists(st.sampled_from(SCHEDULERS), min_size=1, max_size=2, unique_by=repr))),
        Case(params, case.kind, case.vocab_size, case.horizon, case.batch, case.memory, case.seed),
    )


@given(combinations())
def test_any_combination(combination: Combination) -> None:
    """Two components that are each right must not be wrong together."""
    row = check(combination, MANAGER)
    assert row.failed is None, f"{row.failed}\n{combination.paste()}"
    assert row.refused is None, f"{row.refused}\n{combination.paste()}"
    assert row.certificate is not None
    assert row.certificate.max_tv <= 1e-9, f"{row.certificate}\n{combination.paste()}"
    assert not row.certificate.faults, f"{row.certificate.faults}\n{combination.paste()}"


@given(combinations())
def test_what_fails_could_be_pasted(combination: Combination) -> None:
    """A failure that is printed in a form that nothing reads would have to be typed anew."""
    config = PipelineConfig(**yaml.safe_load(combination.paste()))
    config.bind(MANAGER)
    assert config.sampling == combination.case.params
    assert config.verifier.name == combination.verifier["name"]
    assert len(config.scheduler) == len(combination.schedulers)
    assert combination.case.paste() in combination.paste()


def test_what_is_installed_is_drawn() -> None:
    """A list that lost its components to a rename would leave little to draw."""
    assert len(SIMPLE) >= 5
    assert len(VERIFIERS) == 3
    assert len(SCHEDULERS) == 7


@pytest.mark.parametrize("verifier", ["typical"])
def test_a_lossy_one_is_measured(verifier: str) -> None:
    """The test must be able to fail: a verifier that keeps too much is seen from here."""
    combination = Combination(
        {"name": "scripted"},
        {"name": verifier, "allow_lossy": True, "epsilon": 0.01},
        ({"name": "fixed"},),
        Case(horizon=3),
    )
    row = check(combination, MANAGER)
    assert row.certificate is not None
    assert row.certificate.max_tv > 1e-3
    assert row.lossy
