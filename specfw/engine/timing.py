"""What a target pass takes, by its rows: timed on this machine, as verification needs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from specfw.engine.batching import Segment
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.errors import ConfigError

__all__ = ["time_passes"]

_BLOCK_SIZE = 16


def time_passes(
    runner: ModelRunner,
    rows: Sequence[int],
    context: int = 128,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[int, list[float]]:
    """Time passes over chains of `rows` tokens behind a context; sizes take turns, after a warm-up.

    Returns:
        Every measurement in seconds, by rows.

    Raises:
        ConfigError: context and rows together exceed the model's longest sequence.
    """
    longest = context + max(rows)
    if longest > runner.max_length:
        raise ConfigError(
            f"profile: expected context and rows of at most {runner.max_length} tokens together, which is "
            f"the model's longest sequence, got {longest}; lower one of them"
        )
    seconds: dict[int, list[float]] = {}
    run = _Passes(runner, context, longest)
    for turn in range(repeats + 1):  # the first warms up
        for count in rows:
            progress(f"round {turn} of {repeats}: {count} rows")
            began = clock()
            run(count)
            if turn:
                seconds.setdefault(count, []).append(clock() - began)
    return seconds


class _Passes:
    """Passes over chains behind the same context, each of which leaves no trace."""

    def __init__(self, runner: ModelRunner, context: int, longest: int) -> None:
        self._runner = runner
        self._memory = KVMemory(num_blocks=-(-longest // _BLOCK_SIZE) + 1, block_size=_BLOCK_SIZE)
        self._store = runner.new_store(self._memory.num_slots)
        tokens = (np.arange(context) % runner.vocab_size).tolist()
        self._sequence = self._memory.open(tokens)
        with self._memory.transaction() as transaction:
            transaction.reserve(self._sequence, context)
            self._pass(context)
            transaction.commit(self._sequence, tokens, context)

    def __call__(self, rows: int) -> None:
        with self._memory.transaction() as transaction:
            transaction.reserve(self._sequence, rows)
            self._pass(rows)

    def _pass(self, rows: int) -> None:
        chain = np.arange(rows)
        segment = Segment(self._sequence, chain % self._runner.vocab_size, chain - 1, chain)
        logits = self._runner.run(self._store, [segment]).logits
        float(logits[-1, 0])  # waits for the device
