"""Prompt lookup keeps the contract and the target's law."""

from __future__ import annotations

from specfw_plugin_ngram import NgramDrafter

from specfw.contracts import Drafter
from specfw.testing.conformance import DrafterConformance


class TestNgramConformance(DrafterConformance):
    def make(self) -> Drafter:
        return NgramDrafter()
