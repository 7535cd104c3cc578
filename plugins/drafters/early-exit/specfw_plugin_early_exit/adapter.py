"""Exit adapters: what training may add to an early exit, and the file that it is kept in."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.fingerprint import KEY, check_fingerprint

__all__ = ["ExitAdapter"]

_LAYER = "exit_layer"
"""Its key in the file's metadata."""
_TENSORS = ("down.weight", "up.weight")
_SMALLEST_SQUARE = 1e-6


class ExitAdapter(nn.Module):
    """A low-rank residual on the hidden states of one exit layer.

    h + r * up(silu(down(h / r))) with r the root mean square of h, so that the scale of h, which
    differs much from layer to layer, is neither to be learned nor changed. New ones change nothing.
    """

    def __init__(
        self, layer: int, hidden_size: int, rank: int, fingerprint: str | None = None
    ) -> None:
        """Make one that is not yet trained.

        Args:
            layer: layers of the target before the exit.
            hidden_size: width of the target's hidden states.
            rank: width of the middle.
            fingerprint: the target's (`specfw.fingerprint`).
        """
        super().__init__()
        self.layer, self.fingerprint = layer, fingerprint
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        """What the target's norm and head are to read: [..., H] -> [..., H]."""
        square = states.float().square().mean(-1, keepdim=True)
        scale = square.clamp_min(_SMALLEST_SQUARE).sqrt().to(states.dtype)
        residual: Tensor = self.up(nn.functional.silu(self.down(states / scale)))
        return states + scale * residual

    def check_fit(self, target: TargetInfo, layer: int, other_target: bool = False) -> None:
        """Refuse an exit layer or a target that the adapter was not trained for.

        Args:
            target: the target that it is going to draft for.
            layer: the exit layer that it is going to be used behind.
            other_target: whether another target of the same width will do.

        Raises:
            ConfigError: one of them is another.
        """
        if self.layer != layer:
            raise ConfigError(
                f"drafter early-exit: expected an adapter for layer {layer}, got one for layer {self.layer}; "
                f"use another, or leave after layer {self.layer}"
            )
        width = int(target.model.config.get_text_config(decoder=True).hidden_size)
        if self.up.out_features != width:
            raise ConfigError(
                f"drafter early-exit: expected an adapter for hidden states of width {width}, which target "
                f"{target.name!r} has, got one for {self.up.out_features}; use one that was trained for this target"
            )
        if not other_target:
            check_fingerprint(
                self.fingerprint,
                target,
                "drafter early-exit: the weights of the adapter",
                "train one for this target, or set other_target=true to use this all the same",
            )

    def save(self, path: str | Path) -> None:
        """Write the weights, the layer and the target's fingerprint to a safetensors file."""
        metadata = {_LAYER: str(self.layer)}
        if self.fingerprint is not None:
            metadata[KEY] = self.fingerprint
        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()},
            path,
            metadata,
        )

    @classmethod
    def load(cls, path: str | Path) -> ExitAdapter:
        """Read an adapter from its file; its weights keep their dtype.

        Raises:
            ConfigError: the file is missing, unreadable, incomplete or holds something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"drafter early-exit: expected a readable safetensors file at {path}, got "
                f"{type(error).__name__}: {error}; give the path of a trained exit adapter"
            ) from error
        if not metadata.get(_LAYER, "").isdecimal():
            raise ConfigError(
                f"drafter early-exit: expected the metadata of {path} to state {_LAYER}, got "
                f"{metadata or 'none'}; give a file that ExitAdapter.save wrote"
            )
        if tensors.keys() != set(_TENSORS):
            raise ConfigError(
                f"drafter early-exit: expected {path} to hold the tensors {', '.join(_TENSORS)}, got "
                f"{', '.join(sorted(tensors)) or 'none'}; give a complete adapter"
            )
        down, up = (tensors[name] for name in _TENSORS)
        mirrored = down.ndim == 2 and up.shape == down.T.shape
        if not (mirrored and down.is_floating_point() and up.is_floating_point()):
            raise ConfigError(
                f"drafter early-exit: expected floating-point down.weight [rank, H] and up.weight [H, rank] in {path}, "
                f"got {down.dtype} {list(down.shape)} and {up.dtype} {list(up.shape)}; give a complete adapter"
            )
        with torch.device("meta"):
            adapter = cls(int(metadata[_LAYER]), down.shape[1], len(down), metadata.get(KEY))
        adapter.load_state_dict(tensors, assign=True)
        return adapter.requires_grad_(False)
