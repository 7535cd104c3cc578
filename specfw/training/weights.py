"""What all trainers with weights begin with: batches of texts with hidden states, and weights to train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specfw.training.batches import Batches
from specfw.training.features import Features
from specfw.training.options import WeightsOptions
from specfw.training.run import TrainingRun

__all__ = ["TEXT_TOKENS", "read_batches", "room_for_weights", "trainable"]

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
