"""Early exits keep the contract and the target's law, as chains, as trees, with skipped layers and in combinations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from specfw_plugin_compose import Extend, Merge
from specfw_plugin_early_exit.drafter import EarlyExitDrafter
from specfw_plugin_ngram import NgramDrafter, NgramOptions

from specfw.contracts import Drafter, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.rejection import RejectionVerifier
from specfw.testing.cases import SETTINGS, Case
from specfw.testing.certification import certify
from specfw.testing.conformance import DrafterConformance
from specfw.testing.drafters import ScriptedDrafter

CASES = [
    Case(SETTINGS["temperature"], vocab_size=2, horizon=3, batch=3, memory="preemption"),
    Case(SETTINGS["temperature"], vocab_size=2, horizon=3, memory="chunked prefill", seed=1),
    Case(SETTINGS["top-p"], vocab_size=3, horizon=3, memory="prefix hit", seed=2),
    Case(SETTINGS["greedy"], "sparse", vocab_size=3, horizon=4, batch=3, seed=3),
]


class Guesser(ScriptedDrafter):
    """Draws and guesses, and lets others go on with it."""

    reads_ahead = True


def with_others() -> Drafter:
    """Draft rows that were run in advance, and rows that were not, in one tree."""
    return Merge([Guesser(moves=2), EarlyExitDrafter(1, max_nodes=2), Guesser(seed=1, moves=1)])


def after_guesses() -> Drafter:
    """The draft layers run below nodes that another drafter guessed."""
    return Extend([NgramDrafter(NgramOptions(max_nodes=1)), EarlyExitDrafter(1, max_nodes=2)])


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (lambda: EarlyExitDrafter(3, skip=[1], width=2), RejectionVerifier),
        (lambda: EarlyExitDrafter(skip=[1]), CoupledVerifier),
        (with_others, RejectionVerifier),
        (with_others, CoupledVerifier),
        (after_guesses, RejectionVerifier),
    ],
    ids=["skipping", "to the end", "with others", "with others, coupled", "after guesses"],
)
def test_law_is_the_targets(drafter: Callable[[], Drafter], verifier: type[Verifier]) -> None:
    """Besides what the kit checks. A row run twice, not at all, at another's slot, or resumed from another's state changes what is emitted."""
    certificate = certify(drafter, verifier, cases=CASES)
    assert certificate.ok, certificate.counterexample
    assert certificate.max_tv <= 1e-9
    assert certificate.drafted
    assert certificate.accepted
    assert not certificate.faults


class TestEarlyExitConformance(DrafterConformance):
    def make(self) -> Drafter:
        return EarlyExitDrafter(1, width=2)
