"""The conformance kit: exact laws by enumeration, and the checks that every component must pass.

Names are imported when first used, so that the pytest plugin in here costs other projects nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specfw.lazy import lazy_names

if TYPE_CHECKING:
    from specfw.testing.cases import Case
    from specfw.testing.certification import Certificate, certify
    from specfw.testing.drafters import (
        CuriousDrafter,
        MixtureDrafter,
        ScriptedDrafter,
        TableDrafter,
    )
    from specfw.testing.enumeration import EnumSource, enumerate_runs
    from specfw.testing.laws import output_law, target_law, total_variation
    from specfw.testing.table_model import TableLM, TableTokenizer

__all__ = [
    "Case",
    "Certificate",
    "CuriousDrafter",
    "EnumSource",
    "MixtureDrafter",
    "ScriptedDrafter",
    "TableDrafter",
    "TableLM",
    "TableTokenizer",
    "certify",
    "enumerate_runs",
    "output_law",
    "target_law",
    "total_variation",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Case": "specfw.testing.cases",
        "Certificate": "specfw.testing.certification",
        "CuriousDrafter": "specfw.testing.drafters",
        "EnumSource": "specfw.testing.enumeration",
        "MixtureDrafter": "specfw.testing.drafters",
        "ScriptedDrafter": "specfw.testing.drafters",
        "TableDrafter": "specfw.testing.drafters",
        "TableLM": "specfw.testing.table_model",
        "TableTokenizer": "specfw.testing.table_model",
        "certify": "specfw.testing.certification",
        "enumerate_runs": "specfw.testing.enumeration",
        "output_law": "specfw.testing.laws",
        "target_law": "specfw.testing.laws",
        "total_variation": "specfw.testing.laws",
    },
)
