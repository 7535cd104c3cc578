"""Block and traversal verification keep the target's law."""

from __future__ import annotations

import pytest
from specfw_plugin_block import BlockVerifier

from specfw.testing.certification import certify
from specfw.testing.drafters import MixtureDrafter, ScriptedDrafter, TableDrafter

DRAFTERS = {
    "chain": lambda: TableDrafter("near", depth=2),
    "tree": lambda: TableDrafter("unrelated", depth=2, width=2),
    "scripted": lambda: ScriptedDrafter(seed=3),
    "mixture": MixtureDrafter,
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_law_is_the_targets(name: str) -> None:
    """A wrong residual, weight or order of siblings changes the law."""
    certificate = certify(DRAFTERS[name], BlockVerifier)
    assert certificate.ok, certificate.counterexample
    assert certificate.max_tv <= 1e-9
