"""The head: a Llama-like decoder of one layer or a few, in plain torch, fitted to a target.

Its input at position t is the embedding of token t + 1 and the feature of position t; its output stands
for the feature of position t + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw_plugin_eagle.checkpoints import Checkpoint, HeadConfig, Weights

__all__ = ["Head", "Past"]

Past = list[Tensor]
"""Keys and values by layer, each [2, B, KVH, S, D]."""

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def take(cls, weights: Weights, name: str, rows: int, columns: int) -> _Linear:
        weight = weights.take(f"{name}.weight", rows, columns)
        return cls(weight, weights.take_if_there(f"{name}.bias", rows))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class _Norm:
    """Root mean square norm, computed in float32 at least; none at all without a weight."""

    weight: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class _Layer:
    """Attention and a gated MLP; the first layer of EAGLE-3 attends with the embeddings beside the feature."""

    def __init__(self, weights: Weights, config: HeadConfig, index: int) -> None:
        self._config = config
        width, name = config.hidden_size, f"layers.{index}"
        self._wide = config.family == "eagle3" and index == 0
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        inputs = 2 * width if self._wide else width
        self._q = _Linear.take(weights, f"{name}.self_attn.q_proj", queries, inputs)
        self._k = _Linear.take(weights, f"{name}.self_attn.k_proj", keys, inputs)
        self._v = _Linear.take(weights, f"{name}.self_attn.v_proj", keys, inputs)
        self._o = _Linear.take(weights, f"{name}.self_attn.o_proj", width, queries)
        inner = weights.shape(f"{name}.mlp.gate_proj.weight")[0]
        self._gate = _Linear.take(weights, f"{name}.mlp.gate_proj", inner, width)
        self._up = _Linear.take(weights, f"{name}.mlp.up_proj", inner, width)
        self._down = _Linear.take(weights, f"{name}.mlp.down_proj", width, inner)
        self._act = _ACTIVATIONS[config.activation]

        def norm(part: str, size: int, needed: bool) -> _Norm:
            take = weights.take if needed else weights.take_if_there
            return _Norm(take(f"{name}.{part}.weight", size), config.eps)

        # The first layer of EAGLE-1 has no norm before its attention.
        self._input_norm = norm("input_layernorm", width, index > 0 or self._wide)
        self._mlp_norm = norm("post_attention_layernorm", width, True)
        self._feature_norm = norm("hidden_norm", width, self._wide) if self._wide else None
        self._q_norm = norm("self_attn.q_norm", config.head_dim, False)
        self._k_norm = norm("self_attn.k_norm", config.head_dim, False)

    def __call__(
        self, embedded: Tensor, x: Tensor, turn: tuple[Tensor, Tensor], past: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run m rows: float [B, m, d] with the rotary `turn`, over `past` [2, B, KVH, S, D].

        Returns:
            The output [B, m, d], and `past` with m rows more.
        """
        if self._feature_norm is not None:
            normed = self._feature_norm(x)
            inputs = torch.cat([self._input_norm(embedded), normed], -1)
            x = normed if self._config.norm_before_residual else x
        else:
            inputs = self._input_norm(x)
        attended, past = self._attend(inputs, turn, past, mask)
        x = x + attended
        normed = self._mlp_norm(x)
        return x + self._down(self._act(self._gate(normed)) * self._up(normed)), past

    def _attend(
        self, x: Tensor, turn: tuple[Tensor, Tensor], past: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        def split(rows: Tensor) -> Tensor:
            return rows.view(*rows.shape[:2], -1, self._config.head_dim).transpose(1, 2)

        query = _rotate(self._q_norm(split(self._q(x))), turn)
        key = _rotate(self._k_norm(split(self._k(x))), turn)
        past = torch.cat([past, torch.stack([key, split(self._v(x))])], -2)
        mixed = F.scaled_dot_product_attention(
            query,
            past[0],
            past[1],
            attn_mask=mask[:, None],
            enable_gqa=self._config.heads != self._config.kv_heads,
        )
        return self._o(mixed.transpose(1, 2).flatten(-2)), past


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + D / 2) of [B, H, m, D] by their positions' angles."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Head:
    """A head on its target's device, in its target's dtype."""

    def __init__(self, checkpoint: Checkpoint, target: TargetInfo) -> None:
        """Fit a head to a target.

        Raises:
            ConfigError: tensors are missing, unknown or of another width than the target needs.
        """
        self.config = config = checkpoint.config
        self._name, self._target = checkpoint.name, target
        self._check_supported()
        weights = Weights(
            checkpoint.name,
            {
                name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
                for name, tensor in checkpoint.tensors.items()
            },
        )
        self._frequencies, self._scaling = _rope_frequencies(config, target.device)
        self._fit_embedding(weights)
        self._fit_features(weights)
        self._layers = [_Layer(weights, config, index) for index in range(config.layers)]
        self._fit_output(weights)
        weights.check_all_taken()

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Features from the target's hidden states, one [n, H] for each of `feature_layers`: [n, d]."""
        states = [state.to(self._target.dtype) for state in states]
        if self.config.family == "eagle":
            return states[0]
        normed = [norm(state) for norm, state in zip(self._state_norms, states, strict=True)]
        return self._fc(self._fused_norm(torch.cat(normed, -1)))

    def run(
        self, tokens: Tensor, features: Tensor, positions: Tensor, past: Past, mask: Tensor
    ) -> tuple[Tensor, Past]:
        """Run m rows of B requests.

        Args:
            tokens: int64 [B, m]; each the token after the feature's position.
            features: float [B, m, d]; from `fuse`, or what this returned for the parents.
            positions: int64 [B, m].
            past: S rows of earlier keys and values.
            mask: bool [B, m, S + m]; what each row may look at, itself included.

        Returns:
            The next features [B, m, d], and `past` with m rows more.
        """
        turn = self._turn(positions)
        embedded = self._embedded_norm(self._embed(tokens).to(self._target.dtype))
        x = features
        if self.config.family == "eagle":
            x = self._fc(torch.cat([embedded, features], -1))
        grown: Past = []
        for layer, rows in zip(self._layers, past, strict=True):
            x, rows = layer(embedded, x, turn, rows, mask)
            grown.append(rows)
        return (self._norm(x) if self.config.norm_output else x), grown

    def logits(self, features: Tensor) -> Tensor:
        """What follows the position that each feature stands for: [..., d] -> [..., Vd]."""
        return self._output(features if self.config.norm_output else self._norm(features))

    def no_past(self, batch: int) -> Past:
        """Keys and values of no rows."""
        config = self.config
        empty = self._frequencies.new_zeros(
            2, batch, config.kv_heads, 0, config.head_dim, dtype=self._target.dtype
        )
        return [empty] * config.layers

    def _check_supported(self) -> None:
        if self.config.activation not in _ACTIVATIONS:
            raise ConfigError(
                f"drafter eagle: expected hidden_act of {self._name} to be one of {', '.join(_ACTIVATIONS)}, "
                f"got {self.config.activation!r}; use a head with one of these"
            )

    def _fit_embedding(self, weights: Weights) -> None:
        """The head's own embedding, or the target's where the checkpoint has none."""
        width, module = self.config.hidden_size, self._target.model.get_input_embeddings()
        if "embed_tokens.weight" in weights:
            table = weights.take("embed_tokens.weight", self.config.vocab_size, width)
            last = len(table) - 1  # a target's padding ids, which have no text, may lie beyond
            self._embed: Callable[[Tensor], Tensor] = lambda ids: F.embedding(
                ids.clamp(max=last), table
            )
        else:
            self._check_width("the embedding", int(module.weight.shape[1]))
            self._embed = module
        self._embedded_norm = _Norm(
            weights.take_if_there("post_embedding_layernorm.weight", width), self.config.eps
        )

    def _fit_features(self, weights: Weights) -> None:
        """Which states of the target make a feature, and how."""
        config, target = self.config, self._target
        sizes = target.model.config.get_text_config(decoder=True)
        states, count = int(sizes.hidden_size), int(sizes.num_hidden_layers)
        if config.family == "eagle":
            self._check_width("the hidden states", states)
            self._fc = _Linear.take(weights, "fc", config.hidden_size, 2 * config.hidden_size)
            layers = config.feature_layers or (count,)
            self._check_layers(layers, 1, count)
            self.feature_layers: tuple[int, ...] = layers
            return
        columns = weights.shape("fc.weight")[-1]
        wanted = len(config.feature_layers or (0, 0, 0))
        self._fc = _Linear.take(weights, "fc", config.hidden_size, wanted * states)
        layers = config.feature_layers or (2, count // 2, count - 3)
        self._check_layers(layers, columns // states, count)
        self.feature_layers = layers
        self._fused_norm = _Norm(
            weights.take_if_there("input_norm.weight", columns), self.config.eps
        )
        self._state_norms = [
            _Norm(weights.take_if_there(f"fc_norm.{i}.weight", states), config.eps)
            for i in range(wanted)
        ]

    def _fit_output(self, weights: Weights) -> None:
        """Final norm, vocabulary projection, and the target's id of each row of it."""
        config = self.config
        width = config.hidden_size
        if config.family == "eagle3":
            norm: Tensor | None = weights.take("norm.weight", width)
        else:
            norm = weights.take_if_there("pre_lm_head_layernorm.weight", width)
        self._norm = _Norm(norm, config.eps)
        rows = config.vocab_size
        if "lm_head.weight" in weights:
            rows = weights.shape("lm_head.weight")[0]
            self._output: Callable[[Tensor], Tensor] = _Linear.take(weights, "lm_head", rows, width)
        else:
            self._output = self._target.model.get_output_embeddings()
            states = self._target.model.config.get_text_config(decoder=True).hidden_size
            self._check_width("the vocabulary projection", int(states))
        self.vocab = self._read_vocab(weights, rows)

    def _read_vocab(self, weights: Weights, rows: int) -> Tensor | None:
        """The target's id of each draft id, int64 [Vd]; None if they are the same."""
        kept = weights.take_if_there("t2d", self.config.vocab_size)
        offsets = weights.take_if_there("d2t", rows)
        if offsets is not None:  # offsets, not ids
            ids = torch.arange(rows, device=offsets.device) + offsets.long()
        elif rows == self.config.vocab_size:
            return None
        elif kept is not None:
            ids = kept.nonzero()[:, 0]
        else:
            return weights.take("d2t", rows)  # which is not there
        limit = self._target.vocab_size
        good = len(ids) == rows and ids.min() >= 0 and ids.max() < limit
        if not good or len(set(ids.tolist())) != rows:
            raise ConfigError(
                f"drafter eagle: expected d2t and t2d of {self._name} to give each of {rows} draft ids a token id of "
                f"its own below {limit}, but they do not; use a head that was trained for this target"
            )
        return ids

    def _check_width(self, what: str, width: int) -> None:
        if width != self.config.hidden_size:
            raise ConfigError(
                f"drafter eagle: {self._name} takes {what} from the target {self._target.name!r} and so expects "
                f"a width of {self.config.hidden_size}, got {width}; use a head that was trained for this target"
            )

    def _check_layers(self, layers: Sequence[int], wanted: int, count: int) -> None:
        if len(layers) != wanted or not all(0 <= layer <= count for layer in layers):
            raise ConfigError(
                f"drafter eagle: expected {wanted} indices from 0 to {count} into the hidden states of the target "
                f"{self._target.name!r} for {self._name}, got {list(layers)}; set the option layers"
            )

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, [B, 1, m, D] each."""
        angles = positions[:, None, :, None].to(self._frequencies.dtype) * self._frequencies
        angles = torch.cat([angles, angles], -1)
        dtype = self._target.dtype
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def _rope_frequencies(config: HeadConfig, device: torch.device) -> tuple[Tensor, float]:
    """Angle of one position for each pair, [D / 2], and the factor of attention that some kinds have."""
    kind = config.rope.get("rope_type", "default")
    if kind == "default":
        powers = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        return 1.0 / config.rope["rope_theta"] ** powers, 1.0
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"drafter eagle: expected rotary positions of type default, linear, llama3 or yarn, got {kind!r}; "
            "use a head with one of these"
        )
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings: Any = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rope),
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](settings, device)
    return frequencies, float(scaling)
