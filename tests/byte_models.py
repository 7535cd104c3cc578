"""A byte-level tokenizer with a chat template, models that speak it, and a drafter that often knows the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specfw.contracts import Drafter, LoadedTarget, RequestView, TargetLoader
from specfw.decoding.builder import DraftBuilder
from specfw.testing.table_model import TableLM
from tests.tiny_models import build

__all__ = [
    "BOS",
    "CONTEXT",
    "EOS",
    "VOCAB_SIZE",
    "Oracle",
    "Scripted",
    "byte_tokenizer",
    "ids_of",
    "save_tiny_chat",
]

CONTEXT = 256
BOS, EOS = 0, 1
_SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
_WORDS = ["STOP", "oneST", "Php", "tail"]
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _byte_level(text: str) -> str:
    """How a byte-level vocabulary spells some text."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return spelled


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; a few longer tokens are never encoded to, but can be emitted."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_WORDS, "P" + _byte_level("好")[0]]  # the last one ends within a character
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet, *words])}
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(_SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


VOCAB_SIZE = len(_SPECIAL) + 256 + len(_WORDS) + 1


def ids_of(*tokens: str) -> list[int]:
    """The ids of tokens, spelled as text; one that is no token becomes its bytes."""
    vocabulary = byte_tokenizer().get_vocab()
    ids: list[int] = []
    for token in tokens:
        spelled = token if token in _SPECIAL else _byte_level(token)
        ids += (
            [vocabulary[spelled]]
            if spelled in vocabulary
            else [vocabulary[byte] for byte in spelled]
        )
    return ids


def save_tiny_chat(folder: Path, **changes: Any) -> Path:
    """A tiny random Llama and the byte-level tokenizer, as a checkpoint in `folder`."""
    model = build(
        "llama",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        **changes,
    )
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class _ScriptedLM(TableLM):
    """Says the same tokens whatever it reads: `script[i]` at position i + 1, for `start` positions later."""

    def __init__(self, start: int, script: Sequence[int], max_positions: int) -> None:
        super().__init__(VOCAB_SIZE, max_positions=max_positions)
        self._script = [EOS] * start + list(script)

    def _logits(self, mean: Tensor, position: Tensor) -> Tensor:
        said = [
            self._script[i + 1] if i + 1 < len(self._script) else EOS
            for i in position.reshape(-1).tolist()
        ]
        logits = torch.linspace(-2.0, -1.0, VOCAB_SIZE, dtype=mean.dtype).repeat(len(said), 1)
        logits[torch.arange(len(said)), torch.tensor(said)] = 4.0
        return logits.view(*position.shape, VOCAB_SIZE)


class Scripted(TargetLoader):
    """Loads a target that answers a prompt of `start` tokens with `script`, then with EOS."""

    def __init__(self, start: int, script: Sequence[int], max_positions: int = 32) -> None:
        self._arguments = (start, script, max_positions)

    def load(self) -> LoadedTarget:
        return LoadedTarget("scripted", _ScriptedLM(*self._arguments), byte_tokenizer())


class Oracle(Drafter):
    """Guesses the right continuation of prompts that it was told, with every `wrong_every`-th token wrong."""

    def __init__(self, told: Mapping[tuple[int, ...], Sequence[int]], wrong_every: int = 0) -> None:
        self.told = dict(told)
        self.wrong_every = wrong_every
        self.running: set[int] = set()
        self.drafted: list[int] = []
        """Draft sizes, step by step and request by request."""
        self.closed = False

    def begin(self, request: RequestView) -> None:
        self.running.add(request.id)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root in zip(requests, builder.roots, strict=True):
            prompt = tuple(request.tokens[: request.prompt_length])
            emitted = len(request.tokens) - request.prompt_length
            guesses = [
                (token + 1) % VOCAB_SIZE
                if self.wrong_every and place % self.wrong_every == 0
                else token
                for place, token in enumerate(self.told.get(prompt, ()))
            ]
            self.drafted.append(len(builder.guess(int(root), guesses[emitted:])))

    def end(self, request: RequestView) -> None:
        self.running.discard(request.id)

    def close(self) -> None:
        self.closed = True
