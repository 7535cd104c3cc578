"""Training a draft model: the target's first layers learn to say what all of them say.

Distillation from the target's laws (Hinton et al., 1503.02531) on texts of its own, as DistillSpec (Zhou et al.,
2310.08461) does it for draft models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specfw.contracts import TargetInfo, Trained, Trainer
from specfw.errors import ConfigError
from specfw.fingerprint import KEY, fingerprint
from specfw.training import (
    TEXT_TOKENS,
    Batch,
    TrainingRun,
    check_laws,
    layer_number,
    quiet_transformers,
    read_batches,
    room_for_weights,
    target_logits,
    train_weights,
    trainable,
    whole_folder,
)
from specfw_plugin_small_model import DraftModelTrainerOptions
from specfw_plugin_small_model.truncating import truncated

__all__ = ["DraftModelTrainer", "Student", "distillation_loss"]

_STATES_PER_LAYER = 16
"""Hidden states' worth of numbers that a layer keeps of each token until the gradients are known."""


class DraftModelTrainer(Trainer):
    """Makes an ordinary checkpoint of a smaller model."""

    def __init__(self, options: DraftModelTrainerOptions | None = None) -> None:
        self._options = options or DraftModelTrainerOptions()

    def attach(self, target: TargetInfo) -> None:
        """Truncate the target.

        Raises:
            ConfigError: it has too few layers or cannot be truncated, or its logits do not follow from its last
                hidden state.
        """
        who = "trainer small-model"
        check_laws(target, who)
        total = layer_number(target, -1)
        if total < 2:
            raise ConfigError(
                f"{who}: expected a target of at least 2 layers, but {target.name!r} has {total}; train recycling for it"
            )
        self._layers = self._options.layers or max(1, round(total / 4))
        if self._layers >= total:
            raise ConfigError(
                f"{who}: expected layers from 1 to {total - 1} of the {total} of target {target.name!r}, "
                f"got {self._layers}; keep fewer"
            )
        self._student = Student(truncated(target, self._layers, who))
        self._learned = self._student.learned(self._options.train_embeddings)
        self._vocab_size = target.vocab_size

    def room(self, tokens: int) -> tuple[int, int]:
        options = self._options
        width = self._student.width
        disk, memory = room_for_weights(
            tokens,
            states=width,
            weights=sum(value.numel() for value in self._learned.values()),
            laws=options.places * self._vocab_size,
            options=options,
        )
        passed = options.texts * TEXT_TOKENS * self._layers * _STATES_PER_LAYER * width
        model = sum(value.numel() * value.itemsize for value in self._student.parameters())
        return disk + model, memory + model + 4 * passed

    def train(self, run: TrainingRun) -> Trained:
        options, target, student = self._options, run.target, self._student
        last = layer_number(target, -1)
        batches = read_batches(run, [last], options)
        parameters = trainable(self._learned, target.device)

        def loss(step: int) -> tuple[Tensor, dict[str, float]]:
            chosen = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
            return distillation_loss(
                student, parameters, target, batches.draw(step), last, options.places, chosen
            )

        averaged, progress = train_weights(
            run, "small-model", options, parameters, loss, layers=self._layers
        )
        student.load_state_dict(averaged, strict=False)
        _write(student.model, run)
        facts = {"layers": f"the first {self._layers} of {last}", **progress.facts()}
        return Trained({"name": "small-model", "model": str(run.folder)}, facts)


class Student(nn.Module):
    """A causal language model that gives its logits at some places only."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)

    @property
    def width(self) -> int:
        """Of its hidden states."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    def learned(self, embeddings: bool) -> dict[str, Tensor]:
        """The weights to train by their names in here, with those of embeddings and head or without."""
        return dict(self._learned(embeddings))

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Logits [n, V] after `places`, int64 [n], of all tokens [B, T] in order."""
        states = self.model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        logits: Tensor = self.model.get_output_embeddings()(states.flatten(0, 1)[places])
        return logits

    def _learned(self, embeddings: bool) -> Iterator[tuple[str, Tensor]]:
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        held = {id(value) for end in ends for value in end.parameters()}
        for name, value in self.named_parameters():
            if value.is_floating_point() and (embeddings or id(value) not in held):
                yield name, value


def distillation_loss(
    student: Student,
    parameters: Mapping[str, Tensor],
    target: TargetInfo,
    batch: Batch,
    last: int,
    places: int,
    chosen: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """The mean divergence of the student's laws from the target's.

    Args:
        student: what learns.
        parameters: those of its weights that are trained, float32 by name.
        target: whose laws.
        batch: texts with the target's `last` hidden states.
        last: index of the last hidden state, from which the target's law follows.
        places: how many places are compared, at most.
        chosen: chooses them.

    Returns:
        The loss, and `hit`: how often the best token was the target's.
    """
    asked = batch.some_asked(places, chosen)
    with torch.no_grad():
        late = batch.states[last].flatten(0, 1)[asked].to(target.device)
        law = target_logits(target, late).float().softmax(-1)
    weights = {name: value.to(target.dtype) for name, value in parameters.items()}
    given = (batch.tokens.to(target.device), asked.to(target.device))
    guesses = torch.func.functional_call(student, weights, given).float().log_softmax(-1)
    best = batch.best.flatten()[asked].to(target.device)
    hit = float((guesses.detach().argmax(-1) == best).float().mean())
    return F.kl_div(guesses, law, reduction="batchmean"), {"hit": hit}


def _write(model: Any, run: TrainingRun) -> None:
    """Write the checkpoint, which says in its config what it was trained for."""
    setattr(model.config, KEY, fingerprint(run.target))
    model.config.name_or_path = run.target.name
    with quiet_transformers(), whole_folder(run.folder) as aside:
        model.save_pretrained(aside)
        if run.target.tokenizer is not None:
            run.target.tokenizer.save_pretrained(aside)
