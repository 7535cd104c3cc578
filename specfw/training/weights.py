"""What all trainers with weights share: batches of texts with hidden states, weights to train, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from specfw.training.batches import Batches
from specfw.training.features import Features
from specfw.training.loop import LoopSettings, Problem, Progress, train_loop
from specfw.training.options import WeightsOptions
from specfw.training.run import TrainingRun

__all__ = ["TEXT_TOKENS", "read_batches", "room_for_weights", "train_weights", "trainable"]

TEXT_TOKENS = 512
"""Tokens of each text that are learned from, from its beginning."""
_NUMBERS_PER_WEIGHT = 8
"""Float32 numbers in memory for each weight: gradients, two moments, the average, and checkpoints."""


def read_batches(run: TrainingRun, layers: Sequence[int], options: WeightsOptions) -> Batches:
    """The run's texts with the hidden states of some layers.

    Raises:
        ConfigError: there are no texts.
    """
    folder = run.texts.folder / "features"
    features = Features(run.target, layers, folder, options.feature_bytes, run.target.dtype)
    return Batches(run.texts, features, run.seed, options.texts, TEXT_TOKENS, run.tell)


def trainable(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of `tensors` in float32 that take gradients, by the same names."""
    return {
        name: value.detach().to(device, torch.float32, copy=True).requires_grad_()
        for name, value in tensors.items()
    }


def train_weights(
    run: TrainingRun,
    trainer: str,
    options: WeightsOptions,
    parameters: dict[str, Tensor],
    loss: Callable[[int], tuple[Tensor, Mapping[str, float]]],
    constants: dict[str, Tensor] | None = None,
    **about: object,
) -> tuple[dict[str, Tensor], Progress]:
    """Train as a trainer's options say; a later run goes on with the same ones, more `steps` apart.

    Args:
        run: where checkpoints go, and how long it may take.
        trainer: its name.
        options: rate and steps; a run with others is another run.
        parameters: trained in place, float32, by name.
        loss: of a step, by the step's number, with numbers to report.
        constants: what later runs must know besides; a run that goes on takes up those of the first.
        about: what else a later run must share.

    Returns:
        The averaged weights, and how training went.
    """
    settings = {"trainer": trainer, **options.model_dump(mode="json", exclude={"steps"}), **about}
    problem = Problem(parameters, loss, {} if constants is None else constants, settings)
    return train_loop(problem, run, LoopSettings(rate=options.rate), options.steps)


def room_for_weights(
    tokens: int, states: int, weights: int, laws: int, options: WeightsOptions
) -> tuple[int, int]:
    """Bytes of disk and of memory that a run takes at most.

    Args:
        tokens: of all answers.
        states: numbers in the hidden states of a token.
        weights: numbers that are trained.
        laws: numbers in all laws of a batch.
        options: how much disk hidden states may take.
    """
    kept = int(1.3 * tokens) * states * 2
    trained = weights * 4 * _NUMBERS_PER_WEIGHT
    return min(kept, options.feature_bytes) + trained, trained + 6 * laws * 4
