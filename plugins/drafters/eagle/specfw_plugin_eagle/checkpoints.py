"""Reading published heads: one form for all layouts, with what their configs leave open decided here."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specfw.errors import ConfigError
from specfw.fingerprint import KEY, read_metadata

__all__ = ["Checkpoint", "Choices", "Family", "HeadConfig", "Weights", "read_checkpoint"]

Family = Literal["eagle", "eagle3"]

_ROPE_THETA = 10000.0
"""The base that the reference code takes when a config states none, whatever the target's is."""
_RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^transformer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
)
_IGNORED = re.compile(r"^verifier_(norm|lm_head)\.|\.rotary_emb\.inv_freq$")
"""Tensors that only training needs, or that follow from the config."""
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Choices:
    """What the user decides where checkpoints are silent or read in two ways; None leaves it to them."""

    layers: tuple[int, ...] | None = None
    layer_ids: Literal["auto", "before", "after"] = "auto"
    norm_before_residual: bool | None = None
    rope_theta: float | None = None


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a head; what the weights themselves show is read off them."""

    family: Family
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    """Decoder layers."""
    vocab_size: int
    """Of the target that the head was trained for."""
    eps: float = 1e-6
    activation: str = "silu"
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": _ROPE_THETA})
    """As `rope_parameters` of transformers has it."""
    max_positions: int = 2048
    norm_before_residual: bool = False
    norm_output: bool = False
    """Whether the head is fed its output after the final norm."""
    feature_layers: tuple[int, ...] | None = None
    """Indices into the target's `hidden_states`; None for the family's own."""


class Weights:
    """The tensors of a head by their common names, each of which must be taken once."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self._tensors = dict(tensors)
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            ConfigError: there is no such tensor.
        """
        return tuple(self._find(name).shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of the stated shape.

        Raises:
            ConfigError: there is no such tensor, or its shape is another.
        """
        tensor = self._find(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"drafter eagle: expected tensor {name} of {self.name} to be {list(shape)}, as its config and "
                f"the target say, but it is {list(tensor.shape)}; use a head that was trained for this target"
            )
        self._taken.add(name)
        return tensor

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """The same, or None if there is no such tensor.

        Raises:
            ConfigError: its shape is another.
        """
        return self.take(name, *shape) if name in self else None

    def check_all_taken(self) -> None:
        """Refuse tensors whose meaning is unknown.

        Raises:
            ConfigError: some were not taken.
        """
        if unknown := sorted(self._tensors.keys() - self._taken):
            raise ConfigError(
                f"drafter eagle: {self.name} holds tensors that no known head has: {', '.join(unknown[:5])}; "
                "use an EAGLE-1, EAGLE-2 or EAGLE-3 head"
            )

    def _find(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ConfigError(
                f"drafter eagle: expected {self.name} to hold the tensor {name}, but it does not; "
                "use a complete checkpoint"
            )
        return self._tensors[name]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A head as it was published, not yet fitted to a target."""

    name: str
    config: HeadConfig
    tensors: Mapping[str, Tensor]
    """By common names: `layers.N.`, `fc.`, `norm.`, `lm_head.`, `embed_tokens.`, `d2t`, `t2d`."""
    fingerprint: str | None = None
    """Of the target that it was trained for, if it says so."""

    @property
    def weights(self) -> Weights:
        """The tensors, none of them taken yet."""
        return Weights(self.name, self.tensors)


def read_checkpoint(path: str | Path, choices: Choices | None = None) -> Checkpoint:
    """Read an EAGLE, EAGLE-3 or speculators checkpoint from its folder.

    Raises:
        ConfigError: files or tensors are missing, contradict each other, or hold code.
    """
    folder = Path(path)
    raw = _read_config(folder)
    tensors = _read_tensors(folder)
    return Checkpoint(
        str(folder),
        _config_of(folder, raw, tensors, choices or Choices()),
        tensors,
        read_metadata(folder / "model.safetensors").get(KEY),
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"drafter eagle: expected a readable config.json in {folder}, got {type(error).__name__}; "
            "give the folder of a downloaded head"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"drafter eagle: expected config.json of {folder} to be an object, got {type(raw).__name__}; "
            "give the folder of a downloaded head"
        )
    return raw


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.exists():
            loaded = load_file(safe)
        elif pickled.exists():
            loaded = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise ConfigError(
                f"drafter eagle: expected model.safetensors or pytorch_model.bin in {folder}, got neither; "
                "download the head's weights"
            )
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"drafter eagle: expected {pickled} to hold tensors only, but it holds code or other objects, which are "
            "never run; convert the head to safetensors where you trust it"
        ) from error
    except (OSError, RuntimeError, EOFError, SafetensorError) as error:
        raise ConfigError(
            f"drafter eagle: the weights in {folder} cannot be read ({type(error).__name__}: {error}); "
            "download the head again"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise ConfigError(
            f"drafter eagle: expected the weights in {folder} to be tensors by name, got something else; "
            "save the head's state dict"
        )
    named = {_common_name(name): tensor for name, tensor in loaded.items()}
    return {name: tensor for name, tensor in named.items() if not _IGNORED.search(name)}


def _common_name(name: str) -> str:
    for pattern, common in _RENAMED:
        name = pattern.sub(common, name)
    return name


def _config_of(
    folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], choices: Choices
) -> HeadConfig:
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise ConfigError(
            f"drafter eagle: expected a head of type eagle or eagle3 in {folder}, got {kind!r}; "
            "use a drafter for that type"
        )
    layer = {**raw, **(raw.get("transformer_layer_config") or {})}
    weights = Weights(str(folder), tensors)
    heads = int(_need(folder, layer, "num_attention_heads"))
    query = weights.shape("layers.0.self_attn.q_proj.weight")[0]
    head_dim = int(layer.get("head_dim") or query // heads)
    theirs = weights.shape("layers.0.self_attn.k_proj.weight")[0]
    if heads * head_dim != query or theirs % head_dim or heads % max(1, theirs // head_dim):
        raise ConfigError(
            f"drafter eagle: expected the attention of {folder} to fit its config of {heads} heads, each {head_dim} "
            f"wide, but its query has {query} rows and its key {theirs}; use the config.json that belongs to the weights"
        )
    return HeadConfig(
        family="eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle",
        hidden_size=int(_need(folder, layer, "hidden_size")),
        heads=heads,
        kv_heads=theirs // head_dim,
        head_dim=head_dim,
        layers=_count_layers(tensors),
        vocab_size=int(_need(folder, layer, "vocab_size")),
        eps=float(layer.get("rms_norm_eps", 1e-6)),
        activation=str(layer.get("hidden_act", "silu")),
        rope=_rope(layer, choices),
        max_positions=int(layer.get("max_position_embeddings", 2048)),
        norm_before_residual=_first(
            choices.norm_before_residual, raw.get("norm_before_residual"), False
        ),
        norm_output=bool(raw.get("norm_output", False)),
        feature_layers=_feature_layers(raw, choices),
    )


def _need(folder: Path, config: Mapping[str, Any], key: str) -> Any:
    if not isinstance(config.get(key), int):
        raise ConfigError(
            f"drafter eagle: expected config.json of {folder} to state {key} as an integer, got "
            f"{config.get(key)!r}; use the config.json that belongs to the weights"
        )
    return config[key]


def _first(*values: bool | None) -> bool:
    return bool(next(value for value in values if value is not None))


def _count_layers(tensors: Mapping[str, Tensor]) -> int:
    """Layers that there are: a config may have been copied from the target with its number of layers."""
    return len({match[1] for name in tensors if (match := _LAYER.match(name))})


def _rope(layer: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    rope = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    stated = rope.get("rope_theta") or layer.get("rope_theta") or _ROPE_THETA
    return {**rope, "rope_theta": float(choices.rope_theta or stated)}


def _feature_layers(raw: Mapping[str, Any], choices: Choices) -> tuple[int, ...] | None:
    """The stated layers; of trainers, speculators counts states, the others count layers and mean their outputs."""
    if choices.layers is not None:
        return choices.layers
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or nested
    if not ids:
        return None
    counts_states = "speculators_model_type" in raw
    after = choices.layer_ids == "after" or (choices.layer_ids == "auto" and not counts_states)
    return tuple(int(id) + after for id in ids)
