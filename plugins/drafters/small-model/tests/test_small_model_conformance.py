"""Draft models keep the contract and the target's law, as chains and as trees."""

from __future__ import annotations

import pytest
from specfw_plugin_small_model import SmallModelDrafter

from specfw.contracts import Drafter, LoadedTarget, TargetInfo, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.rejection import RejectionVerifier
from specfw.testing.certification import certify
from specfw.testing.conformance import DrafterConformance
from specfw.testing.table_model import TableLM, TableTokenizer


def table(vocab_size: int) -> LoadedTarget:
    return LoadedTarget("table", TableLM(vocab_size, seed=5), TableTokenizer(vocab_size))


class OnTables(SmallModelDrafter):
    """With a draft model of the size of whatever table it is attached to."""

    def attach(self, target: TargetInfo) -> None:
        self._loaded = table(target.vocab_size)
        super().attach(target)


def drafter(width: int) -> Drafter:
    return OnTables(table(3), max_nodes=3, max_depth=2, width=width)


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_law_is_the_targets(verifier: type[Verifier]) -> None:
    """Chains; the class below draws trees. A draft model that reads stale KV, or whose law is misstated, changes what is emitted."""
    certificate = certify(lambda: drafter(1), verifier)
    assert certificate.ok, certificate.counterexample
    assert certificate.max_tv <= 1e-9
    assert certificate.drafted
    assert not certificate.faults


class TestSmallModelConformance(DrafterConformance):
    def make(self) -> Drafter:
        return drafter(2)
