"""The trainer `early-exit`: the adapter brings the exit's law nearer, and drafts where it was trained for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specfw_plugin_early_exit import AdapterTrainerOptions
from specfw_plugin_early_exit.adapter import ExitAdapter
from specfw_plugin_early_exit.training import AdapterTrainer, exit_loss
from transformers import LlamaConfig, LlamaForCausalLM

from specfw.contracts import TargetInfo, Trained
from specfw.errors import ConfigError
from specfw.training import Batch, Shard, Texts, TrainingRun, final_norm, target_logits

VOCAB, LAYERS, EXIT = 40, 3, 2
CPU = torch.device("cpu")


@cache
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def target() -> TargetInfo:
    return TargetInfo("x", VOCAB, 64, (2,), None, model(), CPU, torch.float32)


@torch.no_grad()
def ids_and_batch(count: int = 16, length: int = 10) -> tuple[torch.Tensor, Batch]:
    ids = torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(3))
    output = model()(ids, output_hidden_states=True)
    best = output.logits.argmax(-1)
    best[:, -1] = -1
    return ids, Batch(ids, best, {layer: output.hidden_states[layer] for layer in (EXIT, LAYERS)})


def train(folder: Path, **options: Any) -> Trained:
    ids, batch = ids_and_batch()
    shard = Shard(
        ids.flatten().numpy().astype(np.int32),
        np.arange(1, len(ids) + 1) * ids.shape[1],
        batch.best.flatten()[:, None].numpy().astype(np.int32),
        np.zeros(len(ids), np.float32),
    )
    texts = Texts(folder / "texts")
    texts.save(0, shard, {})
    trainer = AdapterTrainer(AdapterTrainerOptions(layer=EXIT, rank=8, rate=0.01, **options))
    trainer.attach(target())
    return trainer.train(TrainingRun(target(), texts, folder))


def loss_of(adapter: ExitAdapter, places: int = 10**6) -> torch.Tensor:
    parameters = dict(adapter.named_parameters())
    norm, chosen = final_norm(target(), "x"), torch.Generator().manual_seed(0)
    batch = ids_and_batch()[1]
    return exit_loss(adapter, parameters, norm, target(), batch, LAYERS, places, chosen)[0]


def test_a_new_adapter_is_the_plain_exit() -> None:
    """Fault: the law of another place or layer, or one without the target's own norm."""
    _, batch = ids_and_batch()
    asked = batch.best >= 0
    early = model().model.norm(batch.states[EXIT][asked])
    law = target_logits(target(), batch.states[LAYERS][asked]).log_softmax(-1)
    apart = (law.exp() * (law - target_logits(target(), early).log_softmax(-1))).sum(-1).mean()
    assert torch.allclose(loss_of(ExitAdapter(EXIT, 16, 4)), apart, atol=1e-5)


def test_training_brings_the_exit_nearer_to_the_end(tmp_path: Path) -> None:
    """Fault: nothing is learned, or the file is not what the drafter loads."""
    trained = train(tmp_path, steps=150)
    assert trained.drafter["layer"] == EXIT
    adapter = ExitAdapter.load(trained.drafter["adapter"])
    adapter.check_fit(target(), EXIT)
    assert loss_of(adapter) < 0.7 * loss_of(ExitAdapter(EXIT, 16, 8))


def test_a_layer_that_is_not_early_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a layer from 1 to 2 of the 3 .* got 3"):
        AdapterTrainer(AdapterTrainerOptions(layer=3)).attach(target())
