"""The trainer `early-exit`: the adapter brings the exit's law nearer, and drafts where it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from specfw_plugin_early_exit import AdapterTrainerOptions
from specfw_plugin_early_exit.adapter import ExitAdapter
from specfw_plugin_early_exit.training import AdapterTrainer, exit_loss

from specfw.contracts import TargetInfo, Trained
from specfw.errors import ConfigError
from specfw.testing.training import HIDDEN, VOCAB, batch_of, texts_of, tiny_target
from specfw.training import Batch, TrainingRun, final_norm, target_logits

LAYERS, EXIT = 3, 2


def target() -> TargetInfo:
    return tiny_target(LAYERS)


def random_batch() -> Batch:
    ids = torch.randint(3, VOCAB, (16, 10), generator=torch.Generator().manual_seed(3))
    return batch_of(target(), ids, (EXIT, LAYERS))


def train(folder: Path, **options: Any) -> Trained:
    trainer = AdapterTrainer(AdapterTrainerOptions(layer=EXIT, rank=8, rate=0.01, **options))
    trainer.attach(target())
    return trainer.train(TrainingRun(target(), texts_of(target(), folder / "texts"), folder))


def loss_of(adapter: ExitAdapter, places: int = 10**6) -> torch.Tensor:
    parameters = dict(adapter.named_parameters())
    norm, chosen = final_norm(target(), "x"), torch.Generator().manual_seed(0)
    batch = random_batch()
    return exit_loss(adapter, parameters, norm, target(), batch, LAYERS, places, chosen)[0]


def test_a_new_adapter_is_the_plain_exit() -> None:
    """Fault: the law of another place or layer, or one without the target's own norm."""
    batch = random_batch()
    asked = batch.best >= 0
    early = target().model.model.norm(batch.states[EXIT][asked])
    law = target_logits(target(), batch.states[LAYERS][asked]).log_softmax(-1)
    apart = (law.exp() * (law - target_logits(target(), early).log_softmax(-1))).sum(-1).mean()
    assert torch.allclose(loss_of(ExitAdapter(EXIT, HIDDEN, 4)), apart, atol=1e-5)


def test_training_brings_the_exit_nearer_to_the_end(tmp_path: Path) -> None:
    """Fault: nothing is learned, or the file is not what the drafter loads."""
    trained = train(tmp_path, steps=150)
    assert trained.drafter["layer"] == EXIT
    adapter = ExitAdapter.load(trained.drafter["adapter"])
    adapter.check_fit(target(), EXIT)
    assert loss_of(adapter) < 0.7 * loss_of(ExitAdapter(EXIT, HIDDEN, 8))


def test_a_layer_that_is_not_early_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a layer from 1 to 2 of the 3 .* got 3"):
        AdapterTrainer(AdapterTrainerOptions(layer=3)).attach(target())
