"""Several engines on one loaded target, so that what is compared shares the model and the moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specfw.contracts import Drafter, Scheduler, Verifier
from specfw.decoding.random import KeyedSource
from specfw.engine.engine import Engine
from specfw.engine.memory import KVMemory
from specfw.pipeline import Pipeline

__all__ = ["engine_beside"]

_BLOCK_SIZE = 16


@contextmanager
def engine_beside(
    pipeline: Pipeline,
    drafter: Drafter,
    verifier: Verifier,
    scheduler: Scheduler,
    requests: int,
    longest: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Engine]:
    """An engine of its own on the pipeline's target, which reads every prompt in one step.

    Args:
        pipeline: has the target.
        drafter, verifier, scheduler: what decodes; the drafter is closed at the end.
        requests: that run at once.
        longest: tokens of one request, prompt and output together.
        clock: gives the time in seconds.
    """
    engine = Engine(
        pipeline.engine.runner,
        KVMemory(requests * (-(-longest // _BLOCK_SIZE) + 1), _BLOCK_SIZE, False),
        pipeline.engine.info,
        drafter,
        verifier,
        [scheduler],
        KeyedSource(),
        max_batch=requests,
        max_step_tokens=2 * requests * longest,
        prefill_chunk=longest,
        clock=clock,
    )
    try:
        yield engine
    finally:
        drafter.close()
