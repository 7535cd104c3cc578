"""Training Medusa heads: each learns the target's law of one token further ahead, over the target's own projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from specfw.contracts import TargetInfo, Trained, Trainer
from specfw.errors import ConfigError
from specfw.fingerprint import KEY, fingerprint
from specfw.training import (
    TEXT_TOKENS,
    Batch,
    TrainingRun,
    check_laws,
    frequent_tokens,
    layer_number,
    read_batches,
    room_for_weights,
    target_logits,
    train_weights,
    trainable,
    whole_file,
)
from specfw_plugin_medusa.checkpoints import Checkpoint, Head, load_checkpoint
from specfw_plugin_medusa.drafter import Heads, check_fit
from specfw_plugin_medusa.options import SHIPPED, MedusaTrainerOptions

__all__ = ["MedusaTrainer", "heads_loss"]

_FADING = 0.8
"""What each further head counts, of the one before, as in Medusa's own training."""


class MedusaTrainer(Trainer):
    """Makes `medusa_lm_head.safetensors` in Medusa's own layout, without projections."""

    def __init__(self, options: MedusaTrainerOptions | None = None) -> None:
        self._options = options or MedusaTrainerOptions()

    def attach(self, target: TargetInfo) -> None:
        """Read the heads to start from, if they are named.

        Raises:
            ConfigError: they do not fit, or the target's logits are no projection of its last hidden state.
        """
        check_laws(target, "trainer medusa")
        self._target = target
        self._width = int(target.model.config.get_text_config(decoder=True).hidden_size)
        self._start: Checkpoint | None = None
        if self._options.start is not None:
            self._start = load_checkpoint(SHIPPED.path(self._options.start))
            check_fit(self._start, target)
            if self._start.heads[0].projection is not None:
                raise ConfigError(
                    f"trainer medusa: expected heads without a vocabulary projection of their own in "
                    f"{self._options.start}, got some with one; leave start out to train new ones"
                )

    def room(self, tokens: int) -> tuple[int, int]:
        options = self._options
        return room_for_weights(
            tokens,
            states=self._width,
            weights=options.heads * options.blocks * self._width**2,
            laws=options.texts * TEXT_TOKENS * options.vocab,
            options=options,
        )

    def train(self, run: TrainingRun) -> Trained:
        options, target = self._options, run.target
        last = layer_number(target, -1)
        batches = read_batches(run, [last], options)
        constants = {} if self._start is None else _vocab_of(self._start)
        if self._start is None and options.vocab < target.vocab_size:
            constants = {"token_map": frequent_tokens(batches.shards, target, options.vocab)}
        beginning = self._begin() if self._start is None else _named(self._start.heads)
        parameters = trainable(beginning, target.device)

        def loss(step: int) -> tuple[Tensor, dict[str, float]]:
            return heads_loss(
                _heads(parameters, constants, target), target, batches.draw(step), last
            )

        averaged, progress = train_weights(run, "medusa", options, parameters, loss, constants)
        tensors = {
            name: value.to(target.dtype).cpu().contiguous() for name, value in averaged.items()
        }
        with whole_file(run.folder / "medusa_lm_head.safetensors") as aside:
            save_file({**tensors, **constants}, aside, {KEY: fingerprint(target)})
        return Trained({"name": "medusa", "path": str(run.folder)}, progress.facts())

    def _begin(self) -> dict[str, Tensor]:
        """Heads of zeros, which repeat the target's own prediction."""
        return {
            f"{head}.{block}.linear.{kind}": torch.zeros(
                *([self._width] * (2 if kind == "weight" else 1))
            )
            for head in range(self._options.heads)
            for block in range(self._options.blocks)
            for kind in ("weight", "bias")
        }


def heads_loss(
    heads: Heads, target: TargetInfo, batch: Batch, last: int
) -> tuple[Tensor, dict[str, float]]:
    """The mean divergence of each head's law from the target's law of the token that it predicts.

    Args:
        heads: what learns.
        target: what it learns from.
        batch: texts with their `last` hidden states.
        last: index of the last hidden state, from which the target's law follows.

    Returns:
        The loss, and `hit1`, `hit2` and so on: how often the best token of each head was the target's.
    """
    states = batch.states[last].to(target.device)
    best = batch.best.to(target.device)
    asked = best >= 0
    with torch.no_grad():
        laws = target_logits(target, states[asked], heads.vocab).float().log_softmax(-1)
    number = (asked.flatten().cumsum(0) - 1).view(asked.shape)
    total = states.new_zeros((), dtype=torch.float32)
    hits: dict[str, float] = {}
    for head in range(len(heads)):
        ahead = head + 1  # head 0 at position t says what the target says at position t + 1
        known = asked[:, ahead:]
        guesses = heads.logits(head, states[:, :-ahead][known]).float().log_softmax(-1)
        truth = laws[number[:, ahead:][known]]
        total = total + _FADING**head * F.kl_div(
            guesses, truth, log_target=True, reduction="batchmean"
        )
        found = guesses.detach().argmax(-1)
        found = found if heads.vocab is None else heads.vocab[found]
        hits[f"hit{ahead}"] = float((found == best[:, ahead:][known]).float().mean())
    return total / sum(_FADING**head for head in range(len(heads))), hits


def _heads(
    parameters: Mapping[str, Tensor], constants: Mapping[str, Tensor], target: TargetInfo
) -> Heads:
    count = 1 + max(int(name.split(".")[0]) for name in parameters)
    blocks = 1 + max(int(name.split(".")[1]) for name in parameters)
    made = [
        Head(
            [
                (
                    parameters[f"{head}.{block}.linear.weight"],
                    parameters.get(f"{head}.{block}.linear.bias"),
                )
                for block in range(blocks)
            ],
            None,
        )
        for head in range(count)
    ]
    return Heads(Checkpoint(made, constants.get("token_map")), target)


def _vocab_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {} if checkpoint.vocab is None else {"token_map": checkpoint.vocab}


def _named(heads: Sequence[Head]) -> dict[str, Tensor]:
    """The tensors of heads by their names in Medusa's layout."""
    named: dict[str, Tensor] = {}
    for head, one in enumerate(heads):
        for block, (weight, bias) in enumerate(one.blocks):
            named[f"{head}.{block}.linear.weight"] = weight
            if bias is not None:
                named[f"{head}.{block}.linear.bias"] = bias
    return named
