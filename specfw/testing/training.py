"""For tests of trainers: a tiny target, texts that it wrote, and a run that is killed on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specfw.contracts import TargetInfo
from specfw.training.batches import Batch
from specfw.training.run import Tell
from specfw.training.texts import Shard, Texts

__all__ = ["HIDDEN", "VOCAB", "batch_of", "clock_of_minutes", "kill_at", "texts_of", "tiny_target"]

VOCAB = 40
HIDDEN = 16
_POSITIONS = 64
_EOS = 2


def tiny_target(layers: int, **changes: Any) -> TargetInfo:
    """A random Llama in float32 without a tokenizer, the same one for the same number of layers.

    Args:
        layers: of the model, which is shared, so not to be changed.
        changes: fields of the result.
    """
    fields = {"name": "tiny", "vocab_size": VOCAB, "max_length": _POSITIONS, "eos_token_ids": (_EOS,),
              "tokenizer": None, "model": _model(layers), "device": torch.device("cpu"),
              "dtype": torch.float32, **changes}  # fmt: skip
    return TargetInfo(**fields)


@cache
def _model(layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=_POSITIONS,
        bos_token_id=1, eos_token_id=_EOS, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        return model.eval().requires_grad_(False)


@torch.no_grad()
def texts_of(target: TargetInfo, folder: Path, texts: int = 24, length: int = 14) -> Texts:
    """One shard of texts that the target says greedily, each after two random tokens; it is asked at all but the first."""
    ids = torch.randint(
        3, target.vocab_size, (texts, 2), generator=torch.Generator().manual_seed(3)
    )
    while ids.shape[1] < length:
        ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], 1)
    top = target.model(ids).logits.argmax(-1)
    top[:, -1] = top[:, 0] = -1
    made = Texts(folder)
    shard = Shard(
        ids.flatten().numpy().astype(np.int32),
        np.arange(1, texts + 1) * length,
        top.flatten()[:, None].numpy().astype(np.int32),
        np.zeros(texts, np.float32),
    )
    made.save(0, shard, {})
    return made


@torch.no_grad()
def batch_of(target: TargetInfo, ids: Tensor, layers: Sequence[int]) -> Batch:
    """A batch of texts, int64 [B, T], with the states of some layers; the target is asked at all places but the last."""
    output = target.model(ids, output_hidden_states=True)
    best = output.logits.argmax(-1)
    best[:, -1] = -1
    return Batch(ids, best, {layer: output.hidden_states[layer] for layer in layers})


def kill_at(step: int) -> Tell:
    """For `TrainingRun.tell`: ends the run with KeyboardInterrupt when it reports this step."""

    def tell(text: str, share: float | None = None) -> None:
        if f" step {step}:" in text:
            raise KeyboardInterrupt

    return tell


def clock_of_minutes() -> Callable[[], float]:
    """A clock on which every look is a minute later, so that each step saves a checkpoint."""
    return count(0.0, 61.0).__next__
