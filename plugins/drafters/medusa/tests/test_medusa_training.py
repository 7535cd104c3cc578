"""The trainer `medusa`: each head learns its own token, and files are Medusa's own layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from specfw_plugin_medusa import MedusaDrafter, MedusaOptions
from specfw_plugin_medusa.checkpoints import Checkpoint, Head, load_checkpoint
from specfw_plugin_medusa.drafter import Heads
from specfw_plugin_medusa.options import MedusaTrainerOptions
from specfw_plugin_medusa.training import MedusaTrainer, heads_loss
from torch.nn import functional as F

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.testing.training import HIDDEN, VOCAB, batch_of, texts_of, tiny_target
from specfw.training import Texts, TrainingRun

LAST = 2


def target(**changes: Any) -> TargetInfo:
    return tiny_target(LAST, **changes)


def train(folder: Path, **options: Any) -> MedusaTrainer:
    trainer = MedusaTrainer(
        MedusaTrainerOptions(**{"heads": 2, "rate": 0.01, "texts": 8, **options})
    )
    trainer.attach(target())
    trainer.train(TrainingRun(target(), texts_of(target(), folder / "texts"), folder))
    return trainer


def test_each_head_is_compared_with_its_own_token() -> None:
    """Fault: heads are off by one, so that all that they draft is refused."""
    ids = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(5))
    batch = batch_of(target(), ids, [LAST])
    states = batch.states[LAST]
    weight = torch.randn(2, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))
    heads = Heads(Checkpoint([Head([(w, None)], None) for w in weight]), target())
    loss, hits = heads_loss(heads, target(), batch, LAST)
    law = target().model(ids).logits.log_softmax(-1)[0]
    expected = torch.zeros(())
    for head in range(2):
        hidden = states[0] + F.silu(states[0] @ weight[head].T)
        guesses = target().model.lm_head(hidden).log_softmax(-1)
        pairs = [(guesses[t], law[t + 1 + head]) for t in range(7) if t + 1 + head < 7]
        kl = torch.stack([(p.exp() * (p - q)).sum() for q, p in pairs]).mean()
        expected = expected + 0.8**head * kl
        right = [bool(q.argmax() == p.argmax()) for q, p in pairs]
        assert hits[f"hit{head + 1}"] == pytest.approx(sum(right) / len(right))
    assert torch.allclose(loss, expected / 1.8, atol=1e-5)


def test_training_helps_and_its_files_load_bit_for_bit(tmp_path: Path) -> None:
    """Fault: nothing is learned, or the drafter reads other heads than were written."""
    train(tmp_path, steps=150, vocab=20)
    stored = load_file(tmp_path / "medusa_lm_head.safetensors")
    loaded = load_checkpoint(tmp_path)
    assert loaded.vocab is not None
    assert torch.equal(loaded.vocab, stored["token_map"])
    for head, one in enumerate(loaded.heads):
        assert one.projection is None
        ((weight, bias),) = one.blocks
        assert torch.equal(weight, stored[f"{head}.0.linear.weight"])
        assert bias is not None
        assert torch.equal(bias, stored[f"{head}.0.linear.bias"])
    ids = torch.from_numpy(Texts(tmp_path / "texts").load(0).tokens.astype(np.int64)).view(24, -1)
    batch = batch_of(target(), ids, [LAST])
    zeros = [(torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN))]
    untrained = Heads(Checkpoint([Head(zeros, None)] * 2, loaded.vocab), target())
    before, _ = heads_loss(untrained, target(), batch, LAST)
    after, _ = heads_loss(Heads(loaded, target()), target(), batch, LAST)
    assert after < 0.7 * before


def test_heads_are_bound_to_their_target(tmp_path: Path) -> None:
    train(tmp_path, steps=1)
    options = MedusaOptions(path=tmp_path)
    MedusaDrafter(options).attach(target())
    with pytest.raises(ConfigError, match=r"belong to another target.*other_target=true"):
        MedusaDrafter(options).attach(target(vocab_size=VOCAB + 1))
    MedusaDrafter(MedusaOptions(path=tmp_path, other_target=True)).attach(
        target(vocab_size=VOCAB + 1)
    )


def test_published_heads_are_trained_on(tmp_path: Path) -> None:
    """Fault: fine-tuning begins anew, or takes heads that it cannot keep whole."""
    published = {f"medusa_head.{i}.0.linear.weight": torch.randn(HIDDEN, HIDDEN) for i in range(3)}
    (tmp_path / "published").mkdir()
    save_file(published, tmp_path / "published" / "model.safetensors")
    train(tmp_path, steps=1, start=tmp_path / "published")
    stored = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert stored.keys() == {f"{i}.0.linear.weight" for i in range(3)}
    apart = (stored["1.0.linear.weight"] - published["medusa_head.1.0.linear.weight"]).abs().max()
    assert 0 < apart < 0.1
    own = {
        "0.0.linear.weight": torch.randn(HIDDEN, HIDDEN),
        "0.1.weight": torch.randn(VOCAB, HIDDEN),
    }
    save_file(own, tmp_path / "published" / "model.safetensors")
    trainer = MedusaTrainer(MedusaTrainerOptions(start=tmp_path / "published"))
    with pytest.raises(ConfigError, match="without a vocabulary projection"):
        trainer.attach(target())
