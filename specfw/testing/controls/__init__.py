"""Negative controls: broken components and a broken framework, which certification must catch.

Each keeps its promise in words and breaks it in law. A control that is not caught is a hole in the kit.
Small deviations count: some differ from the target by less than sampled tests could ever see.
"""

from __future__ import annotations

from specfw.testing.controls.control import Control, Verdict
from specfw.testing.controls.framework import FRAMEWORK
from specfw.testing.controls.statements import STATEMENTS
from specfw.testing.controls.verifiers import VERIFIERS

__all__ = ["CONTROLS", "Control", "Verdict"]

CONTROLS: tuple[Control, ...] = (*STATEMENTS, *VERIFIERS, *FRAMEWORK)
"""All of them, by distinct names."""
