"""The target component `table`: a table model by name, for configs that are certified or tried out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from specfw.components import Options
from specfw.contracts import LoadedTarget, TargetLoader

__all__ = ["TableLoader", "TableOptions"]


class TableOptions(Options):
    """Which table."""

    vocab_size: Annotated[int, Field(ge=2, le=26)] = 3
    """Tokens; token 0 is the end of text."""
    seed: int = 1
    """Names the table: equal options give equal models."""
    kind: Literal["dense", "sparse", "one_hot"] = "dense"
    """Whether every token is possible, some are impossible, or one is sure."""
    sharpness: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    """Standard deviation of the logits."""
    layers: Annotated[int, Field(ge=1)] = 1
    """Decoder layers."""


class TableLoader(TargetLoader):
    """Makes a `TableLM` and its tokenizer."""

    def __init__(self, options: TableOptions) -> None:
        self._options = options

    def load(self) -> LoadedTarget:
        """Make the model; never fails."""
        from specfw.testing.table_model import TableLM, TableTokenizer

        options = self._options
        model = TableLM(
            options.vocab_size,
            options.seed,
            options.kind,
            options.sharpness,
            layers=options.layers,
        )
        return LoadedTarget(
            name=f"table(vocab_size={options.vocab_size}, seed={options.seed})",
            model=model,
            tokenizer=TableTokenizer(options.vocab_size),
        )
