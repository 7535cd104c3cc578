"""Drafts without a drafter: where a grammar leaves no choice, what must come is guessed.

A guess that is sure costs a row of the target pass and no law. The drafter goes on below it if it
reads ahead; if not, the run is the whole draft of that step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specfw.contracts import RequestAhead, RequestView
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.probabilities import SamplingBatch

__all__ = ["guess_forced"]


def guess_forced(
    requests: Sequence[RequestView],
    builder: DraftBuilder,
    sampling: SamplingBatch,
    reads_ahead: Sequence[bool],
) -> tuple[list[RequestView], DraftBuilder]:
    """Guess what is forced, within the builder's limits, and say what is left for a drafter.

    Args:
        requests: the builder's, in its order.
        builder: without nodes so far.
        sampling: the settings of these requests.
        reads_ahead: whether each request's drafter continues guesses, [B].

    Returns:
        The requests that drafters may serve, as they would be behind their guesses, and the builder
        to serve them with.
    """
    runs = [
        builder.guess(int(root), sampling.forced(b, min(limit.max_nodes, limit.max_depth)))
        for b, (root, limit) in enumerate(zip(builder.roots, builder.limits, strict=True))
    ]
    if not any(runs):
        return list(requests), builder
    served = [b for b, run in enumerate(runs) if reads_ahead[b] or not run]
    roots = np.array([runs[b][-1] if runs[b] else builder.roots[b] for b in served], np.int64)
    views = [
        RequestAhead.after(requests[b], builder.guessed_path(int(root)) or [])
        for b, root in zip(served, roots, strict=True)
    ]
    return views, builder.limited([builder.limits[b] for b in served], roots)
