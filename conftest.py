"""Hypothesis profiles for all tests: `dev`, `ci` (the same examples every time), `deep` (many).

HYPOTHESIS_PROFILE chooses one; else it is `deep` with --deep, `ci` where CI is set, and `dev` elsewhere.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("dev", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=2000, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="walk many more hypothesis examples")


def pytest_configure(config: pytest.Config) -> None:
    usual = "deep" if config.getoption("--deep") else "ci" if os.environ.get("CI") else "dev"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))
