"""What a drafter drafts after some text, without an engine: for tests of drafters on hand-made sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specfw.contracts import Drafter, DraftLimits, RequestView
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import SamplingBatch, SamplingState
from specfw.decoding.random import KeyedSource
from specfw.types import SamplingParams

__all__ = ["ROOMY", "Text", "builder_for", "draft"]

ROOMY = DraftLimits(max_nodes=64, max_depth=64, max_width=64)
"""Limits that a hand-made sequence does not reach."""


@dataclass(eq=False)
class Text(RequestView):
    """A request that only has tokens."""

    tokens: Sequence[int]
    id: int = 0
    prompt_length: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)


def builder_for(
    requests: Sequence[RequestView],
    limits: Sequence[DraftLimits],
    vocab_size: int = 64,
    reach: Sequence[int] | None = None,
) -> DraftBuilder:
    """An empty builder for some requests, with the target's noise; a request's seed is its place."""
    states = [
        SamplingState(one.params, one.tokens, [], [], vocab_size, torch.device("cpu"))
        for one in requests
    ]
    root, start = torch.tensor([[one.tokens[-1], len(one.tokens) - 1] for one in requests]).T
    return DraftBuilder(
        root,
        start,
        torch.arange(len(requests)),
        limits,
        SamplingBatch(states),
        KeyedSource(),
        "target",
        vocab_size,
        reach=reach,
    )


def draft(
    drafter: Drafter, request: RequestView, limits: DraftLimits = ROOMY, vocab_size: int = 64
) -> Draft:
    """What `drafter`, which has begun `request`, drafts for it now.

    Raises:
        ContractError: the tree contradicts itself, or a token is outside the vocabulary.
    """
    builder = builder_for([request], [limits], vocab_size)
    drafter.propose([request], builder)
    result = builder.build()
    result.check()
    return result
