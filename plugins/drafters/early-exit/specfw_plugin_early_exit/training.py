"""Training an exit adapter: behind an early layer, the target's own norm and head are to say what they say at the end."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from specfw.contracts import TargetInfo, Trained, Trainer
from specfw.errors import ConfigError
from specfw.fingerprint import fingerprint
from specfw.training import (
    Batch,
    TrainingRun,
    check_laws,
    final_norm,
    read_batches,
    room_for_weights,
    target_logits,
    train_weights,
    trainable,
    whole_file,
)
from specfw_plugin_early_exit import AdapterTrainerOptions
from specfw_plugin_early_exit.adapter import ExitAdapter

__all__ = ["AdapterTrainer", "exit_loss"]


class AdapterTrainer(Trainer):
    """Makes `adapter.safetensors`."""

    def __init__(self, options: AdapterTrainerOptions | None = None) -> None:
        self._options = options or AdapterTrainerOptions()

    def attach(self, target: TargetInfo) -> None:
        """Choose the layer.

        Raises:
            ConfigError: the target has no such layer, or its logits do not follow from its last hidden state.
        """
        who = "trainer early-exit"
        check_laws(target, who)
        self._norm = final_norm(target, who)
        sizes = target.model.config.get_text_config(decoder=True)
        self._width, self._last = int(sizes.hidden_size), int(sizes.num_hidden_layers)
        self._layer = self._options.layer or max(1, self._last // 3)
        if self._layer >= self._last:
            raise ConfigError(
                f"{who}: expected a layer from 1 to {self._last - 1} of the {self._last} of target {target.name!r}, "
                f"got {self._layer}; leave earlier"
            )
        self._vocab_size = target.vocab_size

    def room(self, tokens: int) -> tuple[int, int]:
        return room_for_weights(
            tokens,
            states=2 * self._width,
            weights=2 * self._options.rank * self._width,
            laws=self._options.places * self._vocab_size,
            options=self._options,
        )

    def train(self, run: TrainingRun) -> Trained:
        options, target = self._options, run.target
        batches = read_batches(run, [self._layer, self._last], options)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(run.seed)
            adapter = ExitAdapter(self._layer, self._width, options.rank, fingerprint(target))
        parameters = trainable(dict(adapter.named_parameters()), target.device)

        def loss(step: int) -> tuple[Tensor, dict[str, float]]:
            chosen = torch.Generator().manual_seed(run.seed * 1_000_003 + step)
            return exit_loss(
                adapter, parameters, self._norm, target, batches.draw(step), self._last,
                options.places, chosen,
            )  # fmt: skip

        averaged, progress = train_weights(run, "early-exit", options, parameters, loss)
        adapter.load_state_dict({name: value.cpu() for name, value in averaged.items()})
        path = run.folder / "adapter.safetensors"
        with whole_file(path) as aside:
            adapter.to(target.dtype).save(aside)
        reference = {"name": "early-exit", "layer": self._layer, "adapter": str(path)}
        return Trained(reference, progress.facts())


def exit_loss(
    adapter: ExitAdapter,
    parameters: Mapping[str, Tensor],
    norm: torch.nn.Module,
    target: TargetInfo,
    batch: Batch,
    last: int,
    places: int,
    chosen: torch.Generator,
) -> tuple[Tensor, dict[str, float]]:
    """The mean divergence of the exit's laws from the target's.

    Args:
        adapter: gives the form.
        parameters: what it computes with, float32 by name.
        norm: the target's norm after its last layer.
        target: whose laws.
        batch: texts with the states of the exit layer and of the `last` one.
        last: index of the last hidden state.
        places: how many places are compared, at most.
        chosen: chooses them.

    Returns:
        The loss, and `hit`: how often the best token was the target's.
    """
    asked = batch.some_asked(places, chosen)
    early, late = (
        batch.states[layer].flatten(0, 1)[asked].to(target.device)
        for layer in (adapter.layer, last)
    )
    with torch.no_grad():
        law = target_logits(target, late).float().softmax(-1)
    weights = {name: value.to(early.dtype) for name, value in parameters.items()}
    adapted = torch.func.functional_call(adapter, weights, (early,))
    guesses = target_logits(target, norm(adapted)).float().log_softmax(-1)
    best = batch.best.flatten()[asked].to(target.device)
    hit = float((guesses.detach().argmax(-1) == best).float().mean())
    return F.kl_div(guesses, law, reduction="batchmean"), {"hit": hit}
