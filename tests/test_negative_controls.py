"""Broken components and a broken framework, which certification must catch; and sound ones, which must pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specfw.testing.cases import SETTINGS
from specfw.testing.controls import CONTROLS, Control
from specfw.testing.controls.control import small_cases
from specfw.testing.controls.framework import draft_noise_by_position
from specfw.testing.controls.statements import Siblings, Stating
from specfw.testing.controls.verifiers import Block, chain, tree


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_control_is_caught(control: Control) -> None:
    """A control that passes is a hole in the kit."""
    verdict = control.verdict()
    assert verdict.caught, verdict
    assert verdict.case is not None


@pytest.mark.parametrize(
    "sound",
    [
        Control("honest statements", Stating),
        Control("honest ends", Stating, cases=small_cases(SETTINGS["end of text"])),
        Control("honest siblings", Siblings),
        Control("block", chain, Block),
        Control("tree", tree),
        Control(
            "one token at a time, nothing is read ahead", chain, broken=draft_noise_by_position
        ),
    ],
    ids=lambda control: control.name,
)
def test_what_controls_are_made_from_is_exact(sound: Control) -> None:
    """The controls must fail for what they get wrong, not for going past the builder."""
    certificate = sound.certify()
    assert certificate.ok, str(certificate)
    assert certificate.drafted
    assert not certificate.faults
    assert not sound.verdict().caught


def test_lost_drafts_prove_nothing() -> None:
    """A control that is refused before it drafts would count as caught for another's fault."""

    class Raises(Stating):
        def draft(self, root: int, tokens: list[int], depth: int) -> None:
            raise ArithmeticError("on purpose")

    broken = next(control for control in CONTROLS if control.name == "bonus from the wrong row")
    assert not replace(broken, drafter=Raises).verdict().caught


def test_names_are_distinct() -> None:
    """A certificate lists controls by name."""
    assert len({control.name for control in CONTROLS}) == len(CONTROLS)
