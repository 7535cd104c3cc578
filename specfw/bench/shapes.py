"""How much a target's logits depend on the shape of a pass: what verification changes besides the speed.

A step without drafts scores one row for each request, a step with drafts several. Kernels sum in another
order then, or are other kernels, so that logits move; the law that is kept is the target's up to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specfw.contracts import Quantization
from specfw.runner import KVMemory, ModelRunner, Segment
from specfw.types import Guarantee
from specfw.weights import quantized_linears

__all__ = ["ShapeDependence", "chunked_logits", "guarantee_on", "shape_dependence"]

_BLOCK_SIZE = 16
_LAYERS = 8
"""Layers that are looked at, the head among them if it is quantised."""


@dataclass(frozen=True, slots=True)
class ShapeDependence:
    """The largest difference between a pass over one row and one over several."""

    rows: int
    """Rows of the larger pass."""
    kernel: float | None
    """Of one quantised layer's outputs, in their standard deviations; None if no layer is quantised."""
    model: float
    """Of the logits after the same tokens, in their standard deviations."""

    def __str__(self) -> str:
        layers = "" if self.kernel is None else f", outputs of single layers by {self.kernel:.2g}"
        return (
            f"between a pass over one row and one over {self.rows}, logits differ by at most "
            f"{self.model:.2g} standard deviations{layers}"
        )


def shape_dependence(runner: ModelRunner, rows: int = 8, context: int = 32) -> ShapeDependence:
    """Measure on tokens of no meaning: `context` of them, then passes of one row and of `rows`."""
    tokens = np.random.default_rng(0).integers(0, runner.vocab_size, context + 4 * rows).tolist()
    several = chunked_logits(runner, tokens, context, rows).double()
    single = chunked_logits(runner, tokens, context, 1).double()
    apart = float((several - single).abs().max() / single.std())
    return ShapeDependence(rows, _kernel_shift(runner, rows), apart)


@torch.inference_mode()
def _kernel_shift(runner: ModelRunner, rows: int) -> float | None:
    layers = [layer for _, layer in quantized_linears(runner.model)]
    if not layers:
        return None
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for layer in (*layers[: _LAYERS - 1], layers[-1]):
        width: Any = layer.in_features
        x = torch.randn(1, rows, width, generator=generator).to(runner.device, runner.dtype)
        together = layer(x).double()
        alone = torch.cat([layer(x[:, row : row + 1]) for row in range(rows)], 1).double()
        worst = max(worst, float((together - alone).abs().max() / together.std()))
    return worst


def chunked_logits(runner: ModelRunner, tokens: Sequence[int], context: int, rows: int) -> Tensor:
    """Logits after each token from `context` on, in passes over `rows` tokens each: [N, V].

    This is what a step with a draft of `rows - 1` right tokens does, without any drafter.
    """
    memory = KVMemory(-(-len(tokens) // _BLOCK_SIZE) + 1, _BLOCK_SIZE, prefix_cache=False)
    store = runner.new_store(memory.num_slots)
    sequence = memory.open(tokens)
    found = []
    with memory.transaction() as transaction:
        transaction.reserve(sequence, len(tokens))
        for start in (0, *range(context, len(tokens), rows)):
            stop = context if start == 0 else min(start + rows, len(tokens))
            chain = np.arange(stop - start)
            segment = Segment(sequence, np.array(tokens[start:stop]), chain - 1, chain)
            logits = runner.run(store, [segment]).logits
            transaction.commit(sequence, tokens, stop)
            if start:
                found.append(logits)
    memory.release(sequence)
    return torch.cat(found)


def guarantee_on(
    guarantee: Guarantee, quantization: Quantization | None, shapes: ShapeDependence
) -> str:
    """What a guarantee means on a target, with what was measured."""
    if guarantee == "lossy":
        return "lossy: the verifier does not keep the target's law"
    of = "the quantised target" if quantization and quantization.packed else "the target"
    if not shapes.model:
        return f"{guarantee} of {of}: {shapes}"
    return f"exact-law of {of}, up to the kernel's own shape dependence: {shapes}"
