"""Reading heads: every published layout becomes one form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from specfw.errors import ConfigError
from specfw.fingerprint import KEY, read_metadata

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "Head", "load_checkpoint", "refuse"]

_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin",
)
"""What the heads' file may be called, in the order of preference."""


@dataclass(frozen=True, slots=True)
class Head:
    """One head: residual blocks, then a projection on the vocabulary."""

    blocks: Sequence[tuple[Tensor, Tensor | None]]
    """Weight [H, H] and bias [H] of each block."""
    projection: Tensor | None
    """[Vd, H]; None for the target's own."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The heads that a file holds, in the order of the tokens that they predict."""

    heads: Sequence[Head]
    vocab: Tensor | None = None
    """The target's id of each draft id, int64 [Vd], if the draft's vocabulary is reduced."""
    fingerprint: str | None = None
    """Of the target that they were trained for, if the file says so."""


def refuse(what: str) -> NoReturn:
    raise ConfigError(f"drafter medusa: {what}")


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the heads of a checkpoint; how many there are is told by its tensors, not by its config.

    Raises:
        ConfigError: it is missing, unsafe, incomplete, or holds what is no head's.
    """
    files = _find(path)
    tensors = {name: tensor for file in files for name, tensor in _read(file).items()}
    if not tensors:
        refuse(
            f"expected Medusa heads in {path}, got a model without any; name the heads' checkpoint"
        )
    marks = [mark for file in files if (mark := read_metadata(file).get(KEY)) is not None]
    return replace(_Parser(path, tensors).checkpoint(), fingerprint=marks[0] if marks else None)


def _find(path: Path) -> list[Path]:
    """The files that hold the heads."""
    if path.is_dir():
        found = next((path / name for name in _FILES if (path / name).is_file()), None)
        if found is None:
            refuse(f"expected one of {', '.join(_FILES)} in {path}, got none; name another folder")
        path = found
    if not path.is_file():
        refuse(f"expected a checkpoint at {path}, got no such file or folder; correct path")
    return _shards(path) if path.suffix == ".json" else [path]


def _shards(index: Path) -> list[Path]:
    try:
        weights = json.loads(index.read_text("utf-8"))["weight_map"]
        names = sorted({weights[name] for name in _select(weights)})
        return [index.parent / Path(name).name for name in names]  # never outside the folder
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"drafter medusa: expected an index of weights in {index}, but it cannot be read "
            f"({type(error).__name__}: {error}); name another checkpoint"
        ) from error


_PREFIX = re.compile(r"medusa_heads?\.")
_BASE = ("model.", "lm_head.", "transformer.", "base_model.")
"""How the names of the target's own tensors begin, where a file holds both."""


def _select(names: Iterable[str]) -> dict[str, str]:
    """The names that are not the base model's, and what they are without their prefix.

    Without a prefix on any, a file is the heads' own, unless it has a whole model's layers.
    """
    names = list(names)
    prefixed = any(_PREFIX.match(name) for name in names)
    whole = prefixed or any(name.startswith(_BASE) and "layers." in name for name in names)
    return {
        name: _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
        for name in names
        if not (whole and name.startswith(_BASE))
    }


def _read(file: Path) -> dict[str, Tensor]:
    """The heads' tensors of one file, by name without prefix."""
    try:
        return _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    except ConfigError:
        raise
    except Exception as error:  # torch and safetensors raise what their parsers raise
        raise ConfigError(
            f"drafter medusa: expected a checkpoint in {file}, but it cannot be read "
            f"({type(error).__name__}: {error}); name another file"
        ) from error


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        stored_names = list(stored.keys())
        # Of tensors that share memory only one is stored; the metadata says which stands for which.
        aliases = {
            alias: name
            for alias, name in (stored.metadata() or {}).items()
            if name in stored_names and alias not in stored_names
        }
        return {
            short: stored.get_tensor(aliases.get(name, name))
            for name, short in _select([*stored_names, *aliases]).items()
        }


def _read_pickle(file: Path) -> dict[str, Tensor]:
    import pickle

    import torch

    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"drafter medusa: expected nothing but tensors in {file}, got a pickle that is broken or holds "
            "code, which is never run; convert it to safetensors where it is trusted"
        ) from error
    if not isinstance(stored, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in stored.items()
    ):
        refuse(f"expected tensors by name in {file}, got something else; name another file")
    return {short: stored[name] for name, short in _select(stored).items()}


_BLOCK = re.compile(
    r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"
)
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight")


class _Parser:
    """Sorts named tensors into heads.

    Two layouts are known: `{head}.{block}.linear.weight` with the projection behind the last block, as
    Medusa's own; and `blocks.{head}.layers.{block}.weight` with `lm_heads.{head}.weight`, or one
    `lm_head.weight` for all, as converted for vLLM.
    """

    def __init__(self, source: Path, tensors: Mapping[str, Tensor]) -> None:
        self._source = source
        self._blocks: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._projections: dict[int, Tensor] = {}
        self._depths: dict[int, int] = {}  # blocks by head, as the projection's name tells
        self._shared: Tensor | None = None
        self._vocab: Tensor | None = None
        for name, tensor in tensors.items():
            self._sort(name, tensor)

    def checkpoint(self) -> Checkpoint:
        """The heads, checked to be complete and to have fitting shapes."""
        indices = self._blocks.keys() | self._projections.keys()
        heads = max(indices, default=-1) + 1
        if not heads:
            self._refuse_missing("0.0.linear.weight")
        for i in range(heads):
            if i not in indices:
                self._refuse_missing(f"the tensors of head {i} of {heads}")
        self._share_projections(heads)
        made = [self._head(i) for i in range(heads)]
        for i, head in enumerate(made):
            if len(head.blocks) != len(made[0].blocks):
                self._refuse_odd(i, "blocks", len(head.blocks), len(made[0].blocks))
            if (head.projection is None) != (made[0].projection is None):
                self._refuse_missing(
                    f"the vocabulary projection of head {0 if head.projection is not None else i}"
                )
            if head.projection is not None and made[0].projection is not None:
                ours, first = len(head.projection), len(made[0].projection)
                if ours != first:
                    self._refuse_odd(i, "tokens", ours, first)
        return Checkpoint(made, self._vocab)

    def _sort(self, name: str, tensor: Tensor) -> None:
        if name == "token_map":
            self._vocab = self._checked_ids(name, tensor)
            return
        if not tensor.is_floating_point():
            self._refuse_tensor(name, tensor, "floating-point numbers")
        if found := _BLOCK.fullmatch(name):
            head, block, kind = (part for part in found.groups() if part is not None)
            self._checked_block(name, tensor, kind)
            self._blocks.setdefault(int(head), {}).setdefault(int(block), {})[kind] = tensor
        elif found := _PROJECTION.fullmatch(name):
            if tensor.ndim != 2:
                self._refuse_tensor(name, tensor, "shape [vocabulary, hidden size]")
            head = found[1] or found[3]
            if found[1]:
                if int(head) in self._depths:
                    refuse(
                        f"expected one vocabulary projection for head {head} in {self._source}, got several; "
                        "use a complete checkpoint"
                    )
                self._depths[int(head)] = int(found[2])
            self._projections[int(head)] = tensor
        elif name == "lm_head.weight" and tensor.ndim == 2:
            self._shared = tensor
        else:
            refuse(
                f"expected the tensors of Medusa heads in {self._source}, got {name!r}, which is none; "
                "name the heads' own checkpoint"
            )

    def _checked_block(self, name: str, tensor: Tensor, kind: str) -> None:
        if kind == "bias":
            if tensor.ndim != 1:
                self._refuse_tensor(name, tensor, "shape [hidden size]")
        elif tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1]:
            self._refuse_tensor(name, tensor, "shape [hidden size, hidden size]")

    def _checked_ids(self, name: str, tensor: Tensor) -> Tensor:
        ids = tensor.reshape(-1)
        if tensor.is_floating_point() or not len(ids) or len(set(ids.tolist())) != len(ids):
            self._refuse_tensor(name, tensor, "different token ids")
        return ids.long()

    def _share_projections(self, heads: int) -> None:
        """Give every head the one projection that a converted checkpoint may have for all."""
        if self._shared is None and set(self._projections) == {0} and not self._depths:
            self._shared = self._projections[0]
        if self._shared is not None:
            self._projections = dict.fromkeys(range(heads), self._shared) | self._projections

    def _head(self, i: int) -> Head:
        blocks = self._blocks.get(i, {})
        depth = self._depths.get(i, max(blocks, default=-1) + 1)
        if len(blocks) == 1 and 0 in blocks:
            # Heads of several blocks were made of one block repeated, which may be stored once.
            blocks = dict.fromkeys(range(depth), blocks[0])
        if beyond := [block for block in blocks if block >= depth]:
            refuse(
                f"expected the {depth} blocks that the projection of head {i} follows in {self._source}, got "
                f"block {max(beyond)} too; use a complete checkpoint"
            )
        with_bias = any(
            "bias" in block for each in self._blocks.values() for block in each.values()
        )
        made = []
        for block in range(depth):
            parts = blocks.get(block, {})
            for kind in ("weight", "bias") if with_bias else ("weight",):
                if kind not in parts:
                    self._refuse_missing(f"the {kind} of block {block} of head {i}")
            bias = parts.get("bias")
            if bias is not None and len(bias) != len(parts["weight"]):
                self._refuse_odd(i, "biases", len(bias), len(parts["weight"]))
            made.append((parts["weight"], bias))
        return Head(made, self._reduced(self._projections.get(i)))

    def _reduced(self, projection: Tensor | None) -> Tensor | None:
        """The projection on the draft's vocabulary only."""
        if self._vocab is None or projection is None or len(projection) == len(self._vocab):
            return projection
        if int(self._vocab.max()) >= len(projection) or int(self._vocab.min()) < 0:
            refuse(
                f"expected a token_map of ids below the {len(projection)} rows of the vocabulary projection "
                f"in {self._source}, got up to {int(self._vocab.max())}; use a complete checkpoint"
            )
        return projection[self._vocab]

    def _refuse_missing(self, what: str) -> NoReturn:
        refuse(f"expected {what} in {self._source}, got none; use a complete checkpoint")

    def _refuse_odd(self, head: int, what: str, got: int, expected: int) -> NoReturn:
        refuse(
            f"expected {expected} {what} for head {head} in {self._source}, got {got}; "
            "use a complete checkpoint"
        )

    def _refuse_tensor(self, name: str, tensor: Tensor, expected: str) -> NoReturn:
        refuse(
            f"expected {expected} in {name!r} of {self._source}, got {tensor.dtype} "
            f"{list(tensor.shape)}; use a complete checkpoint"
        )
