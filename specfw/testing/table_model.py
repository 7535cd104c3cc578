"""A causal language model whose law is a hash of what its attention really read.

It runs like any transformers model, packed or not, in float64. A wrong mask, position or tree, a stale
or a foreign key-value row changes which (position, token) pairs are read, and so changes the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["LawKind", "TableConfig", "TableDecoder", "TableLM", "TableTokenizer"]

LawKind = Literal["dense", "sparse", "one_hot"]

_RESOLUTION = 1024
"""Shares of the attention are counted in this fraction of one key, so that one more key shows."""
_ZEROS = 0.4
"""How often a token is impossible in a sparse law."""
_WEIGHTS = 3
"""How many weights a layer above the first may give a token, by what the layer below read there."""


class TableConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """The size of a `TableLM`."""

    model_type = "specfw_table"

    def __init__(
        self,
        vocab_size: int = 3,
        max_position_embeddings: int = 24,
        num_hidden_layers: int = 1,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.num_hidden_layers = num_hidden_layers
        self.hidden_size = vocab_size * max_position_embeddings
        super().__init__(**kwargs)


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention over one whole sequence: [B, H, T, D] -> [B, T, H, Dv]."""
    scores = query @ key.transpose(2, 3) * scaling
    hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


class TableAttention(nn.Module):
    """One head that looks at every visible key alike."""

    def __init__(self, config: TableConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True

    def forward(self, value: Tensor, **kwargs: Any) -> Tensor:
        """The mean of the visible values: [B, T, H] -> [B, T, H]."""
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _eager_attention
        )
        alike = value.new_zeros(*value.shape[:2], 1)[:, None]  # [B, 1, T, 1], queries and keys
        mean: Tensor = attention(self, alike, alike, value[:, None], None, scaling=1.0, **kwargs)[0]
        return mean.reshape(value.shape)


class TableLayer(nn.Module):
    """Takes the mean of the tokens at all visible positions.

    Above the first layer each token has a weight, which is a hash of what the layer below read there.
    """

    def __init__(self, config: TableConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = TableAttention(config, layer_idx)
        self._first = layer_idx == 0

    def forward(self, hidden_states: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        """[B, T, H] and [B, T] -> [B, T, H]."""
        width = self.attention.config.vocab_size
        place = torch.arange(hidden_states.shape[-1], device=hidden_states.device) // width
        token = (hidden_states > 0) & (place == position_ids[..., None])
        value = token.to(hidden_states.dtype)
        if not self._first:
            keys = _keys(self.attention.config, hidden_states, position_ids)
            value = value * _weight(keys)[..., None]
        mean: Tensor = self.attention(value, **kwargs)
        return mean


class TableDecoder(nn.Module):
    """The layers, one above the other."""

    def __init__(self, config: TableConfig, embed: nn.Embedding) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embed
        self.layers = nn.ModuleList(TableLayer(config, i) for i in range(config.num_hidden_layers))

    def forward(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Hidden states of all layers, [B, T, H] each."""
        hidden = self.embed_tokens(input_ids)
        place = torch.arange(hidden.shape[-1], device=hidden.device) // self.config.vocab_size
        states = [hidden * (place == position_ids[..., None])]
        for layer in self.layers:
            states.append(layer(states[-1], position_ids=position_ids, **kwargs))
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=tuple(states))


@lru_cache(maxsize=64)
def _hash_weights(vocab_size: int, max_positions: int) -> NDArray[np.int64]:
    """What each (position, token) counts in a key, behind what each position does."""
    return np.random.default_rng(vocab_size * 1000 + max_positions).integers(
        -(2**62), 2**62, vocab_size * max_positions + 1
    )


def _last_position(config: Any, mean: Tensor) -> Tensor:
    """The last position that was attended to: [B, R, H] -> int64 [B, R]."""
    place = torch.arange(mean.shape[-1], device=mean.device) // config.vocab_size
    last: Tensor = (place * (mean > 0)).amax(-1)
    return last


def _keys(config: Any, mean: Tensor, position: Tensor) -> Tensor:
    """Hashes of what was attended to from each position: [B, R, H] and [B, R] -> int64 [B, R]."""
    weights = torch.from_numpy(_hash_weights(config.vocab_size, config.max_position_embeddings)).to(
        mean.device
    )
    counts = (mean * (position + 1)[..., None] * _RESOLUTION).round().long()
    keys: Tensor = (counts * weights[1:]).sum(-1) + weights[0] * position
    return keys


def _weight(key: Any) -> Any:
    """A small weight, 1 and up, from keys (a tensor's or a number's highest bits, without the sign)."""
    return 1 + (key >> 40) % _WEIGHTS


class TableLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """Random laws, one for each context, that only exact attention finds again.

    Hidden states are (position, token) vectors, [B, T, max_positions * vocab_size]: one-hot as
    embeddings (layer 0), and after each layer the mean over what it attended to. Each of them has laws
    of its own, so that leaving after an early layer drafts otherwise than the target decides.
    """

    config_class = TableConfig
    _supports_attention_backend = True
    _supports_sdpa = False

    def __init__(
        self,
        vocab_size: int = 3,
        seed: int = 0,
        kind: LawKind = "dense",
        sharpness: float = 1.0,
        mix: tuple[TableLM, float] | None = None,
        avoid: TableLM | None = None,
        max_positions: int = 24,
        layers: int = 1,
    ) -> None:
        """Make a model.

        Args:
            vocab_size: tokens.
            seed: names the table; equal arguments give equal models.
            kind: `dense` laws reach every token, `sparse` ones have zeros, `one_hot` ones are sure.
            sharpness: standard deviation of the logits.
            mix: another model and its weight: the law is the other's with this weight, else its own.
            avoid: another model whose tokens have probability zero here, wherever it leaves others.
            max_positions: longest sequence.
            layers: decoder layers.
        """
        config = TableConfig(vocab_size, max_positions, layers)
        config._attn_implementation = "eager"
        super().__init__(config)
        self.seed, self.kind, self.sharpness = seed, kind, sharpness
        self._mix, self._avoid = mix, avoid
        self._laws: dict[int, NDArray[np.float64]] = {}
        self.embed = nn.Embedding(vocab_size, config.hidden_size, dtype=torch.float64)
        self.embed.weight.data.copy_(torch.eye(vocab_size).repeat(1, max_positions))
        self.head = nn.Linear(config.hidden_size, vocab_size, bias=False, dtype=torch.float64)
        self.head.weight.data.copy_(self.embed.weight)
        self.decoder = TableDecoder(config, self.embed)
        self.requires_grad_(False)
        self.train(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """A head for drafters that borrow one; the laws do not come from it."""
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the rows asked for: float64 [B, R, V].

        Args:
            input_ids: int64 [B, T].
            position_ids: int64 [B, T]; 0 .. T-1 unless given.
            logits_to_keep: rows of T, int64 [R], or how many of the last; 0 is all.
            output_hidden_states: truthy returns all of them.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(
                input_ids
            )
        output = self.decoder(input_ids, position_ids, **kwargs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        read = output.last_hidden_state[:, keep]
        logits = self._logits(read, _last_position(self.config, read))
        hidden = output.hidden_states if output_hidden_states else None
        return CausalLMOutputWithPast(logits=logits, hidden_states=hidden)

    def law(self, prefix: Sequence[int]) -> NDArray[np.float64]:
        """The law of the token after `prefix`, float64 [V], from the tokens themselves."""
        weights = [1] * len(prefix)
        for _ in range(self.config.num_hidden_layers - 1):
            weights = [
                int(_weight(self._key(prefix[:n], weights))) for n in range(1, len(prefix) + 1)
            ]
        return self._law(int(self._key(prefix, weights)))

    def _key(self, prefix: Sequence[int], weights: Sequence[int]) -> np.int64:
        """The hash of a prefix whose tokens have these weights."""
        factors = _hash_weights(self.config.vocab_size, self.config.max_position_embeddings)
        counts = np.zeros(self.config.hidden_size, np.int64)
        for position, token in enumerate(prefix):
            place = position * self.config.vocab_size + token
            counts[place] = _RESOLUTION * weights[position]
        with np.errstate(over="ignore"):
            key: np.int64 = (counts * factors[1:]).sum() + factors[0] * np.int64(len(prefix) - 1)
        return key

    def _logits(self, mean: Tensor, position: Tensor) -> Tensor:
        """Logarithms of the laws of what was attended to, [B, R, H] and [B, R] -> [B, R, V]."""
        keys = _keys(self.config, mean, position)
        laws = np.array([self._law(key) for key in keys.reshape(-1).tolist()])
        rows = torch.from_numpy(laws.reshape(-1, self.config.vocab_size)).to(mean.device)
        return rows.log().view(*keys.shape, self.config.vocab_size)

    def _law(self, key: int) -> NDArray[np.float64]:
        """The table's row for a context, made when it is first asked for."""
        if key not in self._laws:
            law = self._own_law(key)
            if self._avoid is not None and (free := self._avoid._law(key) == 0).any():
                law = np.where(free, law + 1e-3, 0)
            law = law / law.sum()
            if self._mix is not None:
                other, weight = self._mix
                law = weight * other._law(key) + (1 - weight) * law
            self._laws[key] = law
        return self._laws[key]

    def _own_law(self, key: int) -> NDArray[np.float64]:
        random = np.random.default_rng([self.seed, key % 2**64])
        size = self.config.vocab_size
        law: NDArray[np.float64] = np.exp(self.sharpness * random.standard_normal(size))
        sure = int(random.integers(size))
        if self.kind == "one_hot":
            law = np.zeros(size)
            law[sure] = 1.0
        elif self.kind == "sparse":
            zero = random.random(size) < _ZEROS
            zero[sure] = False
            law = np.where(zero, 0.0, law)
        return law


class TableTokenizer:
    """Token i is the letter at place i of the alphabet, or of the letters given."""

    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012  (nobody writes it)
    eos_token_id: int | None = None

    def __init__(self, vocab_size: int, letters: str = "") -> None:
        self.vocab_size = vocab_size
        self._letters = letters or "".join(chr(ord("a") + token) for token in range(vocab_size))

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def backend_tokenizer(self) -> Any:
        """The same as a tokenizer of the library tokenizers, for those who read its bytes."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        spelled = {
            byte_level.pre_tokenize_str(letter)[0][0]: token
            for letter, token in self.get_vocab().items()
        }
        backend = Tokenizer(models.BPE(spelled, []))
        backend.pre_tokenizer = byte_level
        backend.decoder = decoders.ByteLevel()
        return backend

    def get_vocab(self) -> dict[str, int]:
        return {letter: token for token, letter in enumerate(self._letters)}

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        return self._letters[ids] if ids < self.vocab_size else None

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return [self._letters.find(letter) for letter in text]  # -1, which is no token, elsewhere

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(self.convert_ids_to_tokens(token) or "" for token in token_ids)
