"""The settings of `test_hf.py` inside `generate` on a real model: the same ids as without specfw."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specfw.contracts import LoadedTarget
from specfw.targets.demo import DemoLoader, DemoOptions
from tests.test_hf import DRAFTERS, LENGTHS, SETTINGS, compare, decoder
from tests.tiny_models import EOS, PAD, VOCAB_SIZE

TEXTS = (
    "Before the flood, the old miller counted every sack",
    "Add two and two, then",
    "Good evening, dear",
)
_TOKENS = ("eos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens")
_RUNS_OF_TOKENS = ("bad_words_ids", "sequence_bias")


@cache
def demo() -> LoadedTarget:
    return DemoLoader(DemoOptions(dtype="float32")).load()


def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Ids padded in front, and their mask, int64 [batch, 9] each."""
    ids = torch.full((batch, LENGTHS[0]), PAD)
    for row, (text, length) in enumerate(zip(TEXTS[:batch], LENGTHS, strict=False)):
        ids[row, -length:] = torch.tensor(demo().tokenizer(text)["input_ids"][:length])
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS[:batch]):
        mask[row, : LENGTHS[0] - length] = 0
    return ids, mask


@cache
def vocabulary() -> list[int]:
    """What the tokens of the tiny models become: those that this one writes, so that settings matter."""
    ids, mask = prompts(3)
    settings = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": PAD}
    written = demo().model.generate(ids, attention_mask=mask, **settings)
    tokens = dict.fromkeys([*range(EOS + 1), *written.T.flatten().tolist()])
    return [*tokens, *range(VOCAB_SIZE)][:VOCAB_SIZE]


def translated(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with this model's tokens."""

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {of(run): bias for run, bias in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(of, value))
        return vocabulary()[value]

    return {
        name: of(value) if name in (*_TOKENS, *_RUNS_OF_TOKENS) else value
        for name, value in settings.items()
    }


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_ids_are_those_of_generate(
    setting: str, batch: int, pytestconfig: pytest.Config
) -> None:
    """What only trained weights, a large vocabulary and a real tokenizer show."""
    if not pytestconfig.getoption("--deep"):
        pytest.skip("takes minutes; run with --deep")
    compare(
        demo().model,
        prompts(batch),
        translated(SETTINGS[setting]()) | {"pad_token_id": PAD},
        demo().tokenizer,
        {drafter: decoder("demo", drafter) for drafter in DRAFTERS},
    )
