"""What drafters are told of the target's logits: its best tokens after the rows of a draft."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.contracts import RankedRows
from specfw.decoding.draft import Draft, ExtraRows

__all__ = ["best_tokens", "rank_rows"]


def best_tokens(logits: Tensor, count: int) -> Tensor:
    """The most likely tokens after every row, best first: int64 [R, count].

    A single one is the lowest id on ties, which is the token that greedy decoding takes.
    """
    if not count:
        return torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    if count == 1:
        return logits.argmax(-1, keepdim=True)
    return logits.topk(min(count, logits.shape[-1]), -1).indices


def rank_rows(
    draft: Draft, extra: ExtraRows, b: int, tokens: NDArray[np.int64], best: NDArray[np.int64]
) -> tuple[RankedRows, RankedRows]:
    """What request `b` has after its draft's nodes, and after its extra rows.

    Args:
        draft, extra: what was scored.
        b: the request's row of the draft.
        tokens: the nodes' tokens on the host, padded.
        best: best tokens of the rows from the request's root on, [R, k].
    """
    nodes = int(draft.sizes[b])
    return (
        RankedRows(tokens[:nodes], draft.parent[b, :nodes].astype(np.int64), best[:nodes]),
        RankedRows(
            np.array(extra.tokens, np.int64),
            np.array(extra.parents, np.int64),
            best[nodes : nodes + len(extra)],
        ),
    )
