"""Training an EAGLE-3 head: it learns the target's law at the tokens after next, from its own outputs too.

Training-time test (EAGLE-3, Li et al., 2503.01840): from each position the head is run several steps
on, each fed with what the step before gave, as it will be when it drafts. What trains is the very head
that drafts, so there is no second implementation of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from specfw.contracts import TargetInfo, Trained, Trainer
from specfw.errors import ConfigError
from specfw.training import (
    TEXT_TOKENS,
    Batch,
    TrainingRun,
    check_laws,
    frequent_tokens,
    read_batches,
    room_for_weights,
    target_logits,
    train_weights,
    trainable,
)
from specfw_plugin_eagle.beginning import make_beginning
from specfw_plugin_eagle.checkpoints import Checkpoint, read_checkpoint
from specfw_plugin_eagle.head import Head
from specfw_plugin_eagle.options import SHIPPED, EagleTrainerOptions
from specfw_plugin_eagle.writing import write_checkpoint

__all__ = ["EagleTrainer", "rollout_loss"]

_FADING = 0.8
"""What each further step of a rollout counts, of the step before."""


class EagleTrainer(Trainer):
    """Makes a head in speculators' layout."""

    def __init__(self, options: EagleTrainerOptions | None = None) -> None:
        self._options = options or EagleTrainerOptions()

    def attach(self, target: TargetInfo) -> None:
        """Choose the layers that the head reads.

        Raises:
            ConfigError: the target's logits are not a projection of its last hidden state, or the head to start
                from does not fit.
        """
        check_laws(target, "trainer eagle")
        self._target = target
        sizes = target.model.config.get_text_config(decoder=True)
        count = int(sizes.num_hidden_layers)
        self._start: Checkpoint | None = None
        self._layers: tuple[int, ...] = (min(2, count), count // 2, max(0, count - 3))
        if self._options.start is not None:
            self._start = read_checkpoint(SHIPPED.path(self._options.start))
            self._layers = Head(self._start, target).feature_layers
            if self._start.config.family != "eagle3":
                raise ConfigError(
                    f"trainer eagle: expected an EAGLE-3 head to start from, but {self._options.start} is an EAGLE-1 "
                    "head; leave start out to train a new one"
                )
        self._last = count

    def room(self, tokens: int) -> tuple[int, int]:
        sizes = self._target.model.config.get_text_config(decoder=True)
        width = int(sizes.hidden_size)
        return room_for_weights(
            tokens,
            states=(len(self._layers) + 1) * width,
            weights=width * (16 * width + self._options.vocab),
            laws=self._options.texts * TEXT_TOKENS * self._options.vocab,
            options=self._options,
        )

    def train(self, run: TrainingRun) -> Trained:
        options = self._options
        layers = tuple(dict.fromkeys([*self._layers, self._last]))
        batches = read_batches(run, layers, options)
        beginning = self._start or make_beginning(
            run.target,
            self._layers,
            frequent_tokens(batches.shards, run.target, options.vocab),
            options.inner,
            run.seed,
        )
        learner = _Learner(beginning, run.target, options, self._last)
        averaged, progress = train_weights(
            run,
            "eagle",
            options,
            learner.parameters,
            lambda step: learner.loss(
                batches.draw(step), options.rollout if step >= options.rollout_after else 1
            ),
            learner.constants,
        )
        made = learner.checkpoint({**averaged, **learner.constants})
        write_checkpoint(made, run.target, run.folder)
        return Trained({"name": "eagle", "path": str(run.folder)}, progress.facts())


class _Learner:
    """A head whose weights are trained."""

    def __init__(
        self, beginning: Checkpoint, target: TargetInfo, options: EagleTrainerOptions, last: int
    ) -> None:
        self._beginning, self._target, self._options = beginning, target, options
        self._last = last
        frozen = {"embed_tokens.weight"} | (set() if options.train_output else {"lm_head.weight"})
        learned, self.constants = {}, {}
        for name, value in beginning.tensors.items():
            trains = value.is_floating_point() and name not in frozen
            (learned if trains else self.constants)[name] = value
        self.parameters = trainable(learned, target.device)

    def checkpoint(self, tensors: Mapping[str, Tensor]) -> Checkpoint:
        """The head with other weights."""
        return replace(self._beginning, tensors=dict(tensors))

    def loss(self, batch: Batch, steps: int) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch over rollouts of `steps`, and how often the head's best token was the target's."""
        head = Head(self.checkpoint({**self.constants, **self.parameters}), self._target)
        return rollout_loss(head, self._target, batch, self._last, steps, self._options.loss)


def rollout_loss(
    head: Head, target: TargetInfo, batch: Batch, last: int, steps: int, kind: str = "kl"
) -> tuple[Tensor, dict[str, float]]:
    """Run the head `steps` steps on from each position, and compare its laws with the target's.

    Args:
        head: what learns.
        target: what it learns from.
        batch: texts with the states of the head's feature layers and of the `last` one.
        last: index of the last hidden state, from which the target's law follows.
        steps: from each position, each on what the one before gave.
        kind: of distance: `kl`, `tv` or `both`.

    Returns:
        The loss, and `hit1`, `hit2` and so on: how often the best token of each step was the target's.
    """
    tokens = batch.tokens.to(target.device)
    size = tokens.shape[1] - steps
    rows = [batch.states[layer].to(target.device).flatten(0, 1) for layer in head.feature_layers]
    features = head.fuse(rows).unflatten(0, tokens.shape)[:, :size]
    asked = batch.best.to(target.device) >= 0
    laws, entropy = _target_laws(target, batch, last, asked, head.vocab)
    number = (asked.flatten().cumsum(0) - 1).view(asked.shape)
    places = torch.arange(size, device=target.device)
    causal, own = places <= places[:, None], torch.eye(size, dtype=torch.bool, device=target.device)
    past = head.no_past(len(tokens))
    mask = causal
    total = features.new_zeros((), dtype=torch.float32)
    hits: dict[str, float] = {}
    for step in range(steps):
        ahead = slice(1 + step, 1 + step + size)
        positions = (places + step).expand(len(tokens), -1)
        features, past = head.run(
            tokens[:, ahead], features, positions, past, mask.expand(len(tokens), -1, -1)
        )
        mask = torch.cat([mask, own], -1)
        # rows whose target law is known; the head says what follows these tokens
        known = asked[:, ahead]
        guesses, which = head.logits(features[known]).float(), number[:, ahead][known]
        apart = _distance(guesses, laws[which], entropy[which], kind)
        total = total + _FADING**step * apart
        best = guesses.detach().argmax(-1)
        best = best if head.vocab is None else head.vocab[best]
        hits[f"hit{step + 1}"] = float(
            (best == batch.best.to(target.device)[:, ahead][known]).float().mean()
        )
    return total / sum(_FADING**step for step in range(steps)), hits


@torch.no_grad()
def _target_laws(
    target: TargetInfo, batch: Batch, last: int, asked: Tensor, vocab: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The target's law over the draft vocabulary at the asked places, [n, Vd], and its entropy, [n]."""
    states = batch.states[last].to(target.device)[asked]
    logs = target_logits(target, states, vocab).float().log_softmax(-1)
    laws = logs.exp()
    return laws, -torch.linalg.vecdot(laws, logs)


def _distance(guesses: Tensor, law: Tensor, entropy: Tensor, kind: str) -> Tensor:
    """The mean distance of logits from laws [n, Vd]: KL(law, guess), total variation, or their sum."""
    if kind == "tv":
        return (guesses.softmax(-1) - law).abs().sum(-1).mean() / 2
    # The entropy, which has no gradient, makes a divergence of the cross-entropy.
    kl = F.cross_entropy(guesses, law) - entropy.mean()
    return kl if kind == "kl" else kl + _distance(guesses, law, entropy, "tv")
