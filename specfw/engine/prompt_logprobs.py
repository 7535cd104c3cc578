"""Log-probabilities of prompts: rows of prefill passes that are scored besides those of drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specfw.engine.batching import Segment
from specfw.engine.planning import Work

__all__ = ["score_prompts", "take_prompt_rows"]


def score_prompts(work: Sequence[Work], segments: Sequence[Segment]) -> None:
    """Ask for the logits of the prompt rows that requests want, in front of their other rows."""
    for item, segment in zip(work, segments, strict=True):
        wanted = np.arange(*item.request.unscored_prompt(item.context))
        segment.scored = np.concatenate([wanted, segment.scored])


def take_prompt_rows(
    logits: Tensor, work: Sequence[Work], segments: Sequence[Segment]
) -> NDArray[np.int64]:
    """Hand prompt rows of `logits` [R, V] to their requests; where each segment's other rows begin: [S]."""
    begins, start = [], 0
    for item, segment in zip(work, segments, strict=True):
        first, last = item.request.unscored_prompt(item.context)
        if first < last:
            item.request.add_prompt_logprobs(logits[start : start + last - first])
        begins.append(start + last - first)
        start += len(segment.scored)
    return np.array(begins, np.int64)
