"""Tiny random float32 models of seven architectures, and a tokenizer for them; made once per session.

A cached model is shared by all tests: read it, never change it. `build` makes one to change.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

__all__ = [
    "ARCHITECTURES",
    "CONTEXT",
    "EOS",
    "VOCAB_SIZE",
    "WINDOW",
    "build",
    "tiny",
    "tiny_tokenizer",
]

ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox")
VOCAB_SIZE = 64
CONTEXT = 256
WINDOW = 6
"""Of all layers of mistral, and of every other layer of gemma2 and gemma3; the token itself counts."""
PAD, BOS, EOS = 0, 1, 2

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def _config(architecture: str, **changes: Any) -> PreTrainedConfig:
    common = {**_COMMON, **changes}
    if architecture == "gpt2":
        return GPT2Config(**common)  # which maps the common names to its own
    if architecture == "gpt_neox":
        return GPTNeoXConfig(**common)
    if architecture == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * common["num_hidden_layers"]
        common.setdefault("layer_types", kinds[: common["num_hidden_layers"]])
    common = {**_GROUPED, **common}
    if architecture in ("gemma2", "gemma3"):
        common = {"query_pre_attn_scalar": 8, **common}
    if architecture in ("mistral", "gemma2", "gemma3"):
        common = {"sliding_window": WINDOW, **common}
    configs = {
        "llama": LlamaConfig,
        "qwen3": Qwen3Config,
        "mistral": MistralConfig,
        "gemma2": Gemma2Config,
        "gemma3": Gemma3TextConfig,
    }
    return configs[architecture](**common)


def build(architecture: str, seed: int = 0, **changes: Any) -> Any:
    """A new tiny model in eval mode; `changes` are config fields, by their common names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            _config(architecture, **changes), dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if (
                    parameter.ndim == 1
                ):  # norms and biases start as ones and zeros, which hide mistakes
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@cache
def tiny(architecture: str, seed: int = 0) -> Any:
    """The session's tiny model of one of `ARCHITECTURES`."""
    return build(architecture, seed)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: <pad>, <s>, </s>, <unk>, then 60 characters (ids 0 to 63)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?:;\n"
    words = {token: index for index, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
