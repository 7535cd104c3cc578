"""`specfw train`: the target writes texts, a trainer learns from them, and a card says what came out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specfw.components import Bound
from specfw.contracts import TargetInfo, Trained, Trainer
from specfw.errors import ConfigError
from specfw.fingerprint import KEY, check_fingerprint
from specfw.pipeline import Pipeline
from specfw.training.files import check_room, exclusive
from specfw.training.openings import opening_of, read_prompts
from specfw.training.recording import RowRecorder
from specfw.training.texts import Shard, Texts
from specfw.training.writing import TextWriter, WritingSettings, write_texts

__all__ = ["Plan", "Tell", "TrainingRun", "quiet", "run_training"]

_BYTES_PER_NUMBER = 4
_TEXT_SLACK = 1.3
"""Tokens of a shard over those that the target wrote: templates and prompts."""
_PER_MINUTE = 20_000
"""Tokens that a fast machine writes in a minute at most, to plan disk by where only time is given."""


class Tell(Protocol):
    """Takes a line on how it goes, and the part that is done if that is known."""

    def __call__(self, text: str, share: float | None = None) -> None: ...


def quiet(text: str, share: float | None = None) -> None:
    """Takes what is told, and tells nobody."""


@dataclass(frozen=True)
class Plan:
    """What `specfw train` was asked for."""

    out: Path
    """The folder of the result."""
    texts: Path | None = None
    """The folder of the texts; `texts` in `out` if None."""
    tokens: int | None = None
    """Tokens that the target writes, in all runs together."""
    minutes: float | None = None
    """Time for writing and training, in all runs together."""
    prompts: Path | None = None
    batch: int = 64
    """Requests that are decoded at once."""
    settings: WritingSettings = field(default_factory=WritingSettings)


@dataclass
class TrainingRun:
    """What a trainer works with."""

    target: TargetInfo
    texts: Texts
    folder: Path
    """Where the result goes."""
    seed: int = 0
    seconds: float | None = None
    """Time for training in all runs together, earlier ones included; None leaves it to the trainer."""
    tell: Tell = quiet

    @property
    def state(self) -> Path:
        """A folder for what a later run goes on from."""
        return self.folder / "state"


def run_training(
    target: object,
    trainer: Bound[Trainer],
    plan: Plan,
    tell: Tell = quiet,
    settings: Mapping[str, Any] | None = None,
) -> Trained:
    """Write texts as far as they are missing, and train.

    Args:
        target: as in a config.
        trainer: what learns.
        plan: how much, and where.
        tell: takes a line on how it goes.
        settings: further keys of the pipeline's config, such as `dtype`.

    Raises:
        ConfigError: the target or a setting does not fit.
        CapacityError: there is too little disk or memory.
    """
    if plan.tokens is None and plan.minutes is None:
        raise ConfigError("train: expected --tokens or --minutes, got neither; give one")
    learner = trainer.build()
    texts = Texts(plan.texts or plan.out / "texts")
    recorder = RowRecorder(plan.settings.top_k)
    # with the prefix cache a shard would be computed otherwise after others than by itself
    engine = {"max_batch": plan.batch, "prefix_cache": False}
    with Pipeline.from_config(
        {"target": target, "drafter": recorder, "engine": engine, **(settings or {})}
    ) as pipeline:
        info = pipeline.engine.info
        learner.attach(info)
        check_fingerprint(
            texts.about().get(KEY),
            info,
            f"train: the texts in {texts.folder}",
            "name another folder",
        )
        share = learner.text_share
        seconds = None if plan.minutes is None else 60.0 * plan.minutes
        _check_room(plan, texts, learner, None if seconds is None else seconds * share)
        opening = opening_of(info.tokenizer, info.model.config)
        if opening.note and plan.prompts is None:
            tell(opening.note)
        prompts = read_prompts(plan.prompts, info.tokenizer) if plan.prompts else ()
        writer = TextWriter(pipeline, recorder, opening, plan.settings, prompts)
        progress = _Progress(plan, texts, learner, tell, seconds and seconds * share)
        wanted = math.inf if plan.tokens is None else plan.tokens
        time_to_write = math.inf if seconds is None else seconds * share
        if texts.written < wanted and texts.seconds < time_to_write:
            for shard in texts:
                learner.watch(shard)
            write_texts(writer, texts, wanted, time_to_write, progress)
        left = None if seconds is None else seconds - _spent(plan, texts, time_to_write)
        run = TrainingRun(info, texts, plan.out, plan.settings.seed, left, tell)
        with exclusive(plan.out):
            return learner.train(run)


def _spent(plan: Plan, texts: Texts, most: float) -> float:
    """Seconds of the run's time that went into its texts; shared ones are free."""
    return min(texts.seconds, most) if plan.texts is None else 0.0


class _Progress:
    """Tells after each shard how far it is and how long the rest will take."""

    def __init__(
        self, plan: Plan, texts: Texts, learner: Trainer, tell: Tell, seconds: float | None
    ) -> None:
        self._plan, self._texts, self._learner, self._tell = plan, texts, learner, tell
        self._seconds = seconds

    def __call__(self, shard: Shard) -> None:
        written, spent = self._texts.written, self._texts.seconds
        lefts = []
        if self._plan.tokens is not None:
            lefts.append((self._plan.tokens - written) * spent / written)
        if self._seconds is not None:
            lefts.append(self._seconds - spent)
        left = max(0.0, min(lefts))
        promise = self._learner.watch(shard)
        self._tell(
            f"{time.strftime('%H:%M:%S')} texts: {written} tokens, {shard.written / shard.seconds:.0f} a second, "
            f"{_duration(left)} left" + (f"; {promise}" if promise else ""),
            spent / (spent + left),
        )


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _check_room(plan: Plan, texts: Texts, learner: Trainer, seconds: float | None) -> None:
    """Estimate disk and memory, and refuse to start without."""
    wanted = plan.tokens if plan.tokens is not None else int((seconds or 0) / 60 * _PER_MINUTE)
    missing = max(0, wanted - texts.written)
    per_token = _BYTES_PER_NUMBER * (1 + plan.settings.top_k) * _TEXT_SLACK
    disk, memory = learner.room(max(wanted, texts.written))
    check_room(plan.out, disk + int(missing * per_token), memory)
