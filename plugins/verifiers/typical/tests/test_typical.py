"""Typical acceptance: refused unless asked for, flagged lossy, and lossy indeed."""

from __future__ import annotations

import pytest
from specfw_plugin_typical import TypicalOptions, TypicalVerifier

from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.testing.certification import Case, certify
from specfw.testing.drafters import ScriptedDrafter
from specfw.types import SamplingParams


def test_must_be_allowed() -> None:
    """Somebody who names the verifier without the flag must not lose the law unawares."""
    with pytest.raises(ConfigError, match="allow_lossy"):
        PluginManager().create("verifier", "typical")


def test_is_flagged_and_measured() -> None:
    """A lossy verifier must say so, and the kit must see how far the law moves."""
    cases = [Case(SamplingParams(temperature=1.0, ignore_eos=True), horizon=3)]
    certificate = certify(
        lambda: ScriptedDrafter(seed=1, guesses=1.0),
        lambda: TypicalVerifier(TypicalOptions(allow_lossy=True, epsilon=0.01)),
        cases=cases,
    )
    assert certificate.guarantee == "lossy"
    assert certificate.max_tv > 0.01
    assert certificate.ok


def test_strict_thresholds_keep_less() -> None:
    """Changing an option must change what is kept."""
    cases = [
        Case(SamplingParams(temperature=1.0, ignore_eos=True), horizon=3, seed=seed)
        for seed in range(3)
    ]

    def moved(epsilon: float, delta: float) -> float:
        options = TypicalOptions(allow_lossy=True, epsilon=epsilon, delta=delta)
        return certify(
            lambda: ScriptedDrafter(seed=1, guesses=1.0),
            lambda: TypicalVerifier(options),
            cases=cases,
        ).max_tv

    loose, by_epsilon, by_delta = moved(0.01, 0.01), moved(0.6, 1.0), moved(0.6, 0.01)
    assert loose != by_epsilon
    assert by_delta != by_epsilon
