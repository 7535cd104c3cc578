"""The trainer `eagle`: rollouts are what drafting does, training helps, and files are the published layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specfw_plugin_eagle.beginning import make_beginning
from specfw_plugin_eagle.checkpoints import Checkpoint, read_checkpoint
from specfw_plugin_eagle.drafter import EagleDrafter
from specfw_plugin_eagle.head import Head
from specfw_plugin_eagle.options import EagleTrainerOptions
from specfw_plugin_eagle.training import EagleTrainer, rollout_loss
from specfw_plugin_eagle.writing import write_checkpoint
from torch.nn import functional as F

from specfw.contracts import TargetInfo, Trained
from specfw.errors import ConfigError
from specfw.testing.training import (
    VOCAB,
    batch_of,
    clock_of_minutes,
    kill_at,
    texts_of,
    tiny_target,
)
from specfw.training import Batch, Texts, TrainingRun, target_logits
from specfw.training.run import Tell, quiet

LAYERS, LAST = (1, 2, 3), 4


def target(**changes: Any) -> TargetInfo:
    return tiny_target(LAST, **changes)


def batch(ids: torch.Tensor) -> Batch:
    return batch_of(target(), ids, (*LAYERS, LAST))


def head_of(vocab: Sequence[int] = range(VOCAB), seed: int = 1) -> Checkpoint:
    return make_beginning(target(), LAYERS, torch.tensor(list(vocab)), None, seed)


def test_a_rollout_is_what_drafting_does() -> None:
    """Fault: training sees other rows, positions or pasts than drafting, and learns another task."""
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(5))
    given, steps = batch(ids), 3
    vocab = torch.tensor([2, 5, 6, 7, 8, 9, 20, 30])
    head = Head(head_of(vocab.tolist()), target())
    size = ids.shape[1] - steps
    features = head.fuse([given.states[layer][0] for layer in LAYERS])
    expected, hits = torch.zeros(()), []
    for step in range(steps):
        losses, right = [], []
        for place in range(size):
            if given.best[0, place + 1 + step] < 0:
                continue
            logits = _draft(head, ids[0], features, place, step)
            law = target_logits(target(), given.states[LAST][0, place + 1 + step], vocab)
            losses.append(F.kl_div(logits.log_softmax(-1), law.softmax(-1), reduction="sum"))
            right.append(bool(vocab[logits.argmax()] == given.best[0, place + 1 + step]))
        expected = expected + 0.8**step * torch.stack(losses).mean()
        hits.append(sum(right) / len(right))
    loss, found = rollout_loss(head, target(), given, LAST, steps)
    assert torch.allclose(loss, expected / sum(0.8**step for step in range(steps)), atol=1e-5)
    assert [found[f"hit{step + 1}"] for step in range(steps)] == pytest.approx(hits)
    for kind in ("tv", "both"):
        other, _ = rollout_loss(head, target(), given, LAST, steps, kind)
        assert not torch.allclose(other, loss)


def _draft(
    head: Head, ids: torch.Tensor, features: torch.Tensor, place: int, steps: int
) -> torch.Tensor:
    """Read committed rows up to `place`, then draft `steps` rows, whose tokens are those of the text."""
    rows = torch.arange(place + 1)
    mask = (rows <= rows[:, None])[None]
    out, past = head.run(
        ids[None, 1 : place + 2], features[None, : place + 1], rows[None], head.no_past(1), mask
    )
    last = out[:, -1:]
    for step in range(1, steps + 1):
        everything = torch.ones(1, 1, place + 1 + step, dtype=torch.bool)
        position = torch.tensor([[place + step]])
        last, past = head.run(ids[None, None, place + 1 + step], last, position, past, everything)
    return head.logits(last)[0, 0]


def train(folder: Path, texts: Texts, tell: Tell = quiet, **options: Any) -> Trained:
    trainer = EagleTrainer(EagleTrainerOptions(vocab=20, texts=4, rate=3e-3, **options))
    trainer.attach(target())
    return trainer.train(TrainingRun(target(), texts, folder, tell=tell))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(read_checkpoint(folder).tensors)


def test_training_beats_its_start_and_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: nothing is learned; or a run that was killed ends elsewhere than one that was not."""
    texts = texts_of(target(), tmp_path / "texts")
    lengths = {"steps": 200, "rollout_after": 100}
    facts = train(tmp_path / "through", texts, **lengths).facts
    first = EagleTrainer(EagleTrainerOptions(vocab=20))
    first.attach(target())
    assert "200 steps" in facts["training"]
    monkeypatch.setattr("specfw.training.loop.time.perf_counter", clock_of_minutes())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", texts, kill_at(100), **lengths)
    train(tmp_path / "killed", texts, **lengths)
    through, resumed = weights(tmp_path / "through"), weights(tmp_path / "killed")
    for name, value in through.items():
        assert torch.equal(value, resumed[name]), name
    ids = torch.from_numpy(texts.load(0).tokens.astype(np.int64)).view(24, -1)[:8]
    made = read_checkpoint(tmp_path / "through")
    vocab = Head(made, target()).vocab
    assert vocab is not None
    before = Head(head_of(vocab.tolist(), seed=0), target())
    trained, _ = rollout_loss(Head(made, target()), target(), batch(ids), LAST, 2)
    untrained, _ = rollout_loss(before, target(), batch(ids), LAST, 2)
    assert trained < 0.6 * untrained


def test_files_load_bit_for_bit_and_are_bound_to_their_target(tmp_path: Path) -> None:
    """Fault: names, offsets or dtypes that the published layout does not have."""
    made = head_of([2, 5, 9, 30])
    write_checkpoint(made, target(), tmp_path)
    loaded = read_checkpoint(tmp_path)
    assert loaded.config == made.config
    assert loaded.tensors.keys() == made.tensors.keys()
    for name, value in made.tensors.items():
        expected = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert torch.equal(loaded.tensors[name], expected), name
    assert (loaded.tensors["d2t"] + torch.arange(4)).tolist() == [2, 5, 9, 30]
    EagleDrafter(loaded).attach(target())
    other = target(vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match=r"belong to another target.*other_target=true"):
        EagleDrafter(loaded).attach(other)
    EagleDrafter(loaded, other_target=True).attach(other)


def test_a_published_head_is_trained_on(tmp_path: Path) -> None:
    """Fault: fine-tuning begins anew, or changes the vocabulary or the layers of the head."""
    texts = texts_of(target(), tmp_path / "texts")
    vocab = [2, *range(10, 30)]
    write_checkpoint(head_of(vocab, seed=9), target(), tmp_path / "published", torch.float32)
    train(tmp_path / "made", texts, steps=2, start=tmp_path / "published")
    before, after = weights(tmp_path / "published"), weights(tmp_path / "made")
    assert torch.equal(before["d2t"], after["d2t"])
    assert torch.equal(before["lm_head.weight"].bfloat16(), after["lm_head.weight"])
    moved = (before["fc.weight"] - after["fc.weight"].float()).abs().max()
    assert 0 < moved < 0.1
    train(tmp_path / "whole", texts, steps=2, start=tmp_path / "published", train_output=True)
    assert not torch.equal(weights(tmp_path / "whole")["lm_head.weight"], after["lm_head.weight"])


def test_a_head_of_another_family_is_refused(tmp_path: Path) -> None:
    from specfw_plugin_eagle.untrained import make_untrained

    made = make_untrained(target())
    write = dict(made.tensors)
    (tmp_path / "config.json").write_text(
        f'{{"hidden_size": 16, "num_attention_heads": {made.config.heads}, "vocab_size": {VOCAB}}}'
    )
    torch.save(write, tmp_path / "pytorch_model.bin")
    trainer = EagleTrainer(EagleTrainerOptions(start=tmp_path))
    with pytest.raises(ConfigError, match="is an EAGLE-1 head"):
        trainer.attach(target())
