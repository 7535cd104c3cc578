"""Log-probabilities of prompts: rows of prefill passes that are scored besides those of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specfw.engine.batching import Segment
from specfw.engine.model_runner import Rows
from specfw.engine.planning import Work

__all__ = ["score_prompts", "take_prompt_rows"]


def score_prompts(work: Sequence[Work], segments: Sequence[Segment]) -> None:
    """Ask for the logits of the prompt rows that requests want, in front of their other rows."""
    for item, segment in zip(work, segments, strict=True):
        wanted = np.arange(*item.request.unscored_prompt(item.context))
        segment.scored = np.concatenate([wanted, segment.scored])


def take_prompt_rows(rows: Rows, work: Sequence[Work], segments: Sequence[Segment]) -> Rows:
    """Hand prompt rows to their requests, and leave the others."""
    kept, start = [], 0
    for item, segment in zip(work, segments, strict=True):
        first, last = item.request.unscored_prompt(item.context)
        if first < last:
            item.request.add_prompt_logprobs(rows.logits[start : start + last - first])
        kept.append(np.arange(start + last - first, start + len(segment.scored)))
        start += len(segment.scored)
    left = np.concatenate(kept)
    if len(left) == start:
        return rows
    index = torch.from_numpy(left).to(rows.logits.device)
    return replace(rows, logits=rows.logits.index_select(0, index))
