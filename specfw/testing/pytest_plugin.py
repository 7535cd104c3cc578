"""Fixtures for plugins' tests; loading this changes nothing else and imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from specfw.testing.certification import Certificate
    from specfw.testing.table_model import TableLM

__all__ = ["specfw_certify", "specfw_table_model"]


@pytest.fixture
def specfw_certify() -> Callable[..., Certificate]:
    """`specfw.testing.certification`: is this combination exact?"""
    from specfw.testing.certification import certify

    return certify


@pytest.fixture
def specfw_table_model() -> Callable[..., TableLM]:
    """`specfw.testing.TableLM`: a target whose law shows every wrong mask, position or KV row."""
    from specfw.testing.table_model import TableLM

    return TableLM
