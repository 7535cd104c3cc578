"""One broken thing, and the small worlds in which certification must find that it is broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import specfw.engine.engine as engine
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.fixed import FixedScheduler
from specfw.testing.cases import Case, DrafterFactory, VerifierFactory
from specfw.testing.certification import Certificate, certify
from specfw.types import SamplingParams

__all__ = ["PLAIN", "Control", "Verdict", "small_cases"]

PLAIN = SamplingParams(temperature=1.0, ignore_eos=True)
_CAUGHT = 1e-6
"""A thousand times the tolerance of a certification, and far below what samples could show."""


def small_cases(params: SamplingParams = PLAIN, batch: int = 1) -> tuple[Case, ...]:
    """Deep with two tokens, wide with three; every control must show on at least one."""
    return tuple(
        Case(params, vocab_size=size, horizon=horizon, batch=batch, seed=seed)
        for size, horizon, seed in ((2, 3, 0), (3, 2, 5))
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a control was caught, and where."""

    name: str
    caught: bool
    max_tv: float
    """Largest total variation found."""
    case: str | None
    """The smallest case that shows it, as Python."""

    def mapping(self) -> dict[str, Any]:
        """The verdict in JSON's types."""
        return {
            "name": self.name,
            "caught": self.caught,
            "max_tv": self.max_tv,
            "case": self.case,
        }


@dataclass(frozen=True)
class Control:
    """A component or a framework that promises a law and breaks it."""

    name: str
    drafter: DrafterFactory
    verifier: VerifierFactory = RejectionVerifier
    cases: tuple[Case, ...] = small_cases()
    broken: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Breaks the framework while it is entered."""

    def certify(self) -> Certificate:
        """The certificate, which must not hold."""
        from specfw.testing.controls.statements import StatingBuilder

        with patch.object(engine, "DraftBuilder", StatingBuilder), self.broken():
            return certify(
                self.drafter, self.verifier, [lambda: FixedScheduler(4, 3, 3)], cases=self.cases
            )

    def verdict(self) -> Verdict:
        """Certify, and say whether the fault was found by its law; a draft that was lost proves nothing."""
        found = self.certify()
        caught = not found.ok and found.max_tv > _CAUGHT and found.drafted > 0
        case = found.counterexample.case.paste() if found.counterexample else None
        return Verdict(self.name, caught and not found.faults, found.max_tv, case)
