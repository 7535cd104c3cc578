"""Hypothesis profiles for all tests: `dev`, `ci` (the same examples every time), `deep` (many).

HYPOTHESIS_PROFILE chooses one; else it is `deep` with --deep, `ci` where CI is set, and `dev` elsewhere.
"""

from __future__ import annotations

import os

# Before anything loads torch: models this small are many times slower when threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.name != "test_generate_parity.py")
