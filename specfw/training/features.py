"""Hidden states of the target at each token of its texts: computed once and kept, or computed as they are needed.

Each layer of each shard is a file of its own, so trainers that read different layers share what they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specfw.contracts import TargetInfo
from specfw.errors import ConfigError
from specfw.training.files import whole_file
from specfw.training.texts import Shard

__all__ = ["Features", "check_laws", "final_norm", "layer_number", "target_logits"]

_ROWS = 2048
"""Tokens of one pass, padding included."""
_TOLERANCE = 0.05


def layer_number(target: TargetInfo, layer: int) -> int:
    """A layer's index into `hidden_states` as one from 0."""
    count = int(target.model.config.get_text_config(decoder=True).num_hidden_layers)
    return layer if layer >= 0 else count + 1 + layer


def target_logits(target: TargetInfo, last: Tensor, vocab: Tensor | None = None) -> Tensor:
    """The target's raw logits of all tokens, or of those in `vocab`, after last hidden states [..., H]."""
    output = target.model.get_output_embeddings()
    bias = getattr(output, "bias", None)
    weight = output.weight if vocab is None else output.weight[vocab]
    bias = bias if bias is None or vocab is None else bias[vocab]
    return torch.nn.functional.linear(last.to(weight.dtype), weight, bias)


@torch.inference_mode()
def check_laws(target: TargetInfo, who: str) -> None:
    """Refuse a target whose logits are not its vocabulary projection of its last hidden state.

    Raises:
        ConfigError: they are scaled, capped or made otherwise.
    """
    ids = torch.arange(1, min(9, target.vocab_size), device=target.device)[None]
    output = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logits, made = output.logits.float(), target_logits(target, output.hidden_states[-1]).float()
    apart = float((logits - made).abs().max() / logits.abs().max().clamp_min(1e-6))
    if not apart < _TOLERANCE:
        raise ConfigError(
            f"{who}: expected a target whose logits are the vocabulary projection of its last hidden state, but "
            f"those of {target.name!r} are changed after it; train recycling for this target"
        )


@torch.inference_mode()
def final_norm(target: TargetInfo, who: str) -> torch.nn.Module:
    """The target's norm after its last layer, whose output is its last hidden state.

    Raises:
        ConfigError: it has none that can be told by what it returns.
    """
    returned: list[tuple[torch.nn.Module, Any]] = []
    decoder = target.model.get_decoder()
    hooks = [
        child.register_forward_hook(lambda module, _, output: returned.append((module, output)))
        for child in decoder.children()
        if not isinstance(child, torch.nn.ModuleList)
    ]
    try:
        ids = torch.zeros(1, 3, dtype=torch.long, device=target.device)
        last = target.model(
            input_ids=ids, use_cache=False, output_hidden_states=True
        ).hidden_states[-1]
    finally:
        for hook in hooks:
            hook.remove()
    for module, output in reversed(returned):
        if isinstance(output, Tensor) and output.shape == last.shape and torch.equal(output, last):
            found: torch.nn.Module = module
            return found
    raise ConfigError(
        f"{who}: expected a target with a norm after its last layer, but {target.name!r} has none that is told by "
        "what it returns; train recycling for this target"
    )


class Features:
    """The hidden states of some layers for the texts of shards."""

    def __init__(
        self,
        target: TargetInfo,
        layers: Sequence[int],
        folder: Path,
        max_bytes: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Choose what is kept.

        Args:
            target: whose states.
            layers: indices into `hidden_states`, from 0.
            folder: where files are kept.
            max_bytes: of all files; what does not fit is computed when it is needed.
            dtype: what is kept and handed out.
        """
        self._target, self._folder, self._dtype = target, folder, dtype
        self.layers = tuple(layers)
        self._left = max_bytes
        self._open: dict[tuple[int, int], Any] = {}

    def keep(self, number: int, shard: Shard) -> bool:
        """Compute the states of a shard unless they are kept already; False if there is no room for them."""
        missing = [layer for layer in self.layers if not self._path(number, layer).exists()]
        width = int(self._target.model.config.get_text_config(decoder=True).hidden_size)
        size = len(shard.tokens) * width * self._dtype.itemsize
        if len(self.layers) * size > self._left:
            return False
        self._left -= len(self.layers) * size
        if missing:
            tokens = [shard.tokens[span] for span in shard.spans()]
            states = self.compute(tokens, missing)
            for layer in missing:
                rows = torch.cat([one[layer] for one in states])
                with whole_file(self._path(number, layer)) as aside:
                    save_file({"states": rows}, aside)
        return True

    def of(
        self, wanted: Sequence[tuple[int, slice]], tokens: Sequence[Any]
    ) -> list[dict[int, Tensor]]:
        """The states of some texts, by layer [n, H] each.

        Args:
            wanted: shard and span of each text.
            tokens: the texts' ids, for those that are not kept.
        """
        kept = [
            all(self._path(number, layer).exists() for layer in self.layers) for number, _ in wanted
        ]
        fresh = iter(
            self.compute(
                [ids for ids, there in zip(tokens, kept, strict=True) if not there], self.layers
            )
        )
        return [
            {layer: self._read(number, layer, span) for layer in self.layers}
            if there
            else next(fresh)
            for (number, span), there in zip(wanted, kept, strict=True)
        ]

    @torch.no_grad()
    def compute(self, texts: Sequence[Any], layers: Sequence[int]) -> list[dict[int, Tensor]]:
        """Run the target over texts, several in a pass."""
        found: dict[int, dict[int, Tensor]] = {}
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        while order:
            count = max(1, _ROWS // len(texts[order[0]]))
            now, order = order[:count], order[count:]
            ids = [torch.from_numpy(texts[i]).long() for i in now]
            padded = pad_sequence(ids, batch_first=True).to(self._target.device)
            extra: Mapping[str, Any] = (
                {"logits_to_keep": 1} if self._target.model._supports_logits_to_keep() else {}
            )
            # Padding comes after the texts, where causal attention does not look.
            states = self._target.model(
                input_ids=padded, use_cache=False, output_hidden_states=True, **extra
            ).hidden_states
            for row, i in enumerate(now):
                found[i] = {
                    layer: states[layer][row, : len(texts[i])].to("cpu", self._dtype)
                    for layer in layers
                }
        return [found[i] for i in range(len(texts))]

    def _read(self, number: int, layer: int, span: slice) -> Tensor:
        if (number, layer) not in self._open:
            file: Any = safe_open(self._path(number, layer), "pt")
            self._open[number, layer] = file.get_slice("states")
        rows: Tensor = self._open[number, layer][span.start : span.stop]
        return rows.to(self._dtype)  # another run may have kept them in another dtype

    def _path(self, number: int, layer: int) -> Path:
        return self._folder / f"layer-{layer}-texts-{number:06}.safetensors"
