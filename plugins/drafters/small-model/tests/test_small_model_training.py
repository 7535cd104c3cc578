"""The trainer `small-model`: it begins as the target's first layers, learns, and writes an ordinary checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from specfw_plugin_small_model import DraftModelTrainerOptions
from specfw_plugin_small_model.training import DraftModelTrainer, Student, distillation_loss
from specfw_plugin_small_model.truncating import truncated
from torch import nn
from transformers import AutoModelForCausalLM

from specfw.contracts import LoadedTarget, TargetInfo, TargetLoader
from specfw.errors import ConfigError
from specfw.fingerprint import KEY, fingerprint
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.testing.training import (
    VOCAB,
    batch_of,
    clock_of_minutes,
    kill_at,
    texts_of,
    tiny_target,
)
from specfw.training import Batch, Texts, TrainingRun
from specfw.training.run import Tell, quiet

ALL, KEPT = 4, 2
EVERYWHERE = 10**6


def target(**changes: Any) -> TargetInfo:
    return tiny_target(ALL, **changes)


def train(
    folder: Path, texts: Texts, tell: Tell = quiet, **options: Any
) -> tuple[dict[str, Any], Student]:
    trainer = DraftModelTrainer(DraftModelTrainerOptions(layers=KEPT, rate=3e-3, **options))
    trainer.attach(target())
    trained = trainer.train(TrainingRun(target(), texts, folder, tell=tell))
    return dict(trained.drafter), trainer._student


def random_batch() -> Batch:
    ids = torch.randint(3, VOCAB, (16, 10), generator=torch.Generator().manual_seed(8))
    return batch_of(target(), ids, [ALL])


def apart(model: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    """How far the model's laws are from the target's, and how often its best token is the target's."""
    generator = torch.Generator().manual_seed(0)
    loss, hits = distillation_loss(Student(model), {}, target(), batch, ALL, EVERYWHERE, generator)
    return loss, hits["hit"]


def test_a_draft_model_begins_as_the_first_layers(tmp_path: Path) -> None:
    """Fault: the laws of other places or layers, or another divergence, so that something else is learned."""
    batch, model = random_batch(), target().model
    output = model(batch.tokens, output_hidden_states=True)
    early = model.lm_head(model.model.norm(output.hidden_states[KEPT])).log_softmax(-1)
    asked = batch.best >= 0
    law = output.logits.log_softmax(-1)
    expected = (law.exp() * (law - early)).sum(-1)[asked].mean()
    hits = (early.argmax(-1) == batch.best)[asked].float().mean()
    loss, hit = apart(truncated(target(), KEPT, "x"), batch)
    assert torch.allclose(loss, expected, atol=1e-5)
    assert hit == pytest.approx(float(hits))


def test_training_helps_and_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: nothing is learned; or a run that was killed ends elsewhere than one that was not."""
    texts = texts_of(target(), tmp_path / "texts")
    _, through = train(tmp_path / "through", texts, steps=150)
    monkeypatch.setattr("specfw.training.loop.time.perf_counter", clock_of_minutes())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", texts, kill_at(100), steps=150)
    assert not (tmp_path / "killed" / "config.json").exists()
    _, resumed = train(tmp_path / "killed", texts, steps=150)
    for name, value in through.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    ids = torch.from_numpy(texts.load(0).tokens).long().view(24, -1)
    batch = batch_of(target(), ids, [ALL])
    before, began = apart(truncated(target(), KEPT, "x"), batch)
    after, ended = apart(through.model, batch)
    assert after < 0.6 * before
    assert ended > began


@pytest.mark.parametrize("embeddings", [False, True])
def test_what_is_written_is_what_was_trained(tmp_path: Path, embeddings: bool) -> None:
    """Fault: the checkpoint lacks weights or has others; frozen embeddings move, or learned ones do not."""
    texts = texts_of(target(), tmp_path / "texts")
    _, student = train(tmp_path / "made", texts, steps=3, train_embeddings=embeddings)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert loaded.config.num_hidden_layers == KEPT
    assert getattr(loaded.config, KEY) == fingerprint(target())
    assert loaded.state_dict().keys() == student.model.state_dict().keys()
    theirs = target().model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, student.model.state_dict()[name]), name
        frozen = not embeddings and ("embed_tokens" in name or "lm_head" in name)
        assert torch.equal(value, theirs[name]) == frozen, name


class Tiny(TargetLoader):
    """The tiny target itself."""

    def load(self) -> LoadedTarget:
        return LoadedTarget("tiny", copy.deepcopy(target().model))


def test_it_drafts_and_keeps_the_text(tmp_path: Path) -> None:
    """Fault: the checkpoint is not what the drafter loads, or drafts change the text."""
    reference, _ = train(tmp_path / "made", texts_of(target(), tmp_path / "texts"), steps=100)
    asks = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]
    said: dict[str, list[list[int]]] = {}
    for name, drafter in {"none": "none", "trained": reference}.items():
        with Pipeline.from_config({"target": Tiny(), "drafter": drafter}) as pipeline:
            outputs = [
                pipeline.generate([7, 9], max_new_tokens=20, ignore_eos=True, **ask)[0]
                for ask in asks
            ]
        said[name] = [list(output.token_ids) for output in outputs]
    assert said["trained"] == said["none"]
    assert sum(output.speculation.accepted for output in outputs) > 5


def test_it_is_bound_to_its_target(tmp_path: Path) -> None:
    reference, _ = train(tmp_path / "made", texts_of(target(), tmp_path / "texts"), steps=1)
    other = target(vocab_size=VOCAB + 1)
    name = reference.pop("name")
    manager = PluginManager()
    manager.create("drafter", name, reference).attach(target())
    with pytest.raises(ConfigError, match=r"belong to another target.*other_target=true"):
        manager.create("drafter", name, reference).attach(other)


class Packed(nn.Module):
    """A layer whose weights are not numbers as they stand."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().mul(100).to(torch.int8))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ (self.weight.to(states.dtype) / 100).T  # type: ignore[union-attr,operator]


def test_what_cannot_be_truncated_is_refused() -> None:
    """Fault: hours of training begin at weights or layers that the target does not have."""
    packed, changed = (copy.deepcopy(target().model) for _ in range(2))
    packed.model.layers[0].mlp.up_proj = Packed(packed.model.layers[0].mlp.up_proj)
    with pytest.raises(
        ConfigError, match=r"'tiny' cannot be truncated \(its weights are quantised"
    ):
        DraftModelTrainer().attach(target(model=packed))
    changed.model.layers[0].mlp.act_fn = nn.Tanh()  # which no config says
    with pytest.raises(ConfigError, match="give something else without the others"):
        DraftModelTrainer().attach(target(model=changed))


def test_layers_must_be_fewer() -> None:
    with pytest.raises(ConfigError, match=r"layers from 1 to 3 of the 4 .* got 4; keep fewer"):
        DraftModelTrainer(DraftModelTrainerOptions(layers=4)).attach(target())
    with pytest.raises(ConfigError, match="at least 2 layers, but 'tiny' has 1"):
        DraftModelTrainer().attach(tiny_target(1))
