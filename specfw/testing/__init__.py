"""The conformance kit: exact laws by enumeration, and the checks that every component must pass."""

from specfw.testing.cases import Case
from specfw.testing.certify import Certificate, certify
from specfw.testing.drafters import MixtureDrafter, ScriptedDrafter, TableDrafter
from specfw.testing.enumeration import EnumSource, enumerate_runs
from specfw.testing.laws import output_law, target_law, total_variation
from specfw.testing.table_model import TableLM, TableTokenizer

__all__ = [
    "Case",
    "Certificate",
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
