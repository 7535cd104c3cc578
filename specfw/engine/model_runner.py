"""Running an unmodified transformers model over packed tokens and the paged KV pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.engine import guards
from specfw.engine.attention import ATTENTION, KVStore, StepContext, _current
from specfw.engine.batching import PackedBatch, Segment, pack
from specfw.engine.prepack import PackedLinears

__all__ = ["ModelRunner", "Rows"]


@dataclass(slots=True)
class Rows:
    """What a pass returned."""

    logits: Tensor  # [R, V], the scored nodes of all segments in order
    hidden: dict[int, Tensor] = field(default_factory=dict)  # asked-for layer -> [T, H]
    first_token: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[S], packed row of each segment's first token."""
    roots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """[B], logits row of each decoding request's root; those of its draft follow, then its extra rows."""


class ModelRunner:
    """Attaches to a causal language model without changing it.

    The model's attention function is switched for the time of each pass only, so the model stays
    usable by others between passes.
    """

    def __init__(self, model: Any, prepack: bool | None = None, check: bool = True) -> None:
        """Attach, and check that the packed forward is exact for this model.

        Args:
            model: a transformers causal LM in eval mode.
            prepack: reorder linear weights for fast small products; None does where it pays
                (bfloat16 on CPUs).
            check: run the numeric probe.

        Raises:
            UnsupportedModelError: the packed forward cannot run this model exactly.
        """
        guards.check_config(model)
        self.model = model.eval()
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.max_length = guards.longest_sequence(model)
        self._configs = guards.attention_configs(model)
        self._keeps_logits = bool(model._supports_logits_to_keep())
        self._linears = PackedLinears.of(model, prepack)
        head = model.get_output_embeddings()
        # A packed weight has another shape than its layer.
        self.vocab_size = int(getattr(head, "out_features", None) or head.weight.shape[0])
        self.model_seconds = 0.0
        """Wall time of the last pass inside the model."""
        self.bytes_per_token = 0
        """KV bytes of one token over all layers; known after the probe."""
        self.checked = check
        """Whether the numeric probe was run."""
        self.probe_error = guards.probe(self) if check else float("nan")

    @property
    def min_rows(self) -> int:
        """Rows that a pass is padded to."""
        return self._linears.min_rows

    def new_store(self, num_slots: int) -> KVStore:
        """An empty KV store for this model."""
        return KVStore(num_slots)

    @torch.inference_mode()
    def run(
        self,
        store: KVStore,
        segments: Sequence[Segment],
        device_tokens: tuple[NDArray[np.int64], Tensor] | None = None,
        hidden: Sequence[int] = (),
    ) -> Rows:
        """One pass over `segments`, which reads and writes `store`.

        Args:
            store: the KV of all sequences.
            segments: at least one.
            device_tokens: see `pack`.
            hidden: layers whose hidden states are wanted.
        """
        batch = self.pack(segments, device_tokens)
        extra: dict[str, Any] = {}
        if hidden:
            extra["output_hidden_states"] = list(hidden)
        output = self.call(self.model, self._configs, StepContext(batch, store), **extra)
        return Rows(
            logits=self.scored_logits(output, batch),
            hidden={layer: output.hidden_states[layer][0] for layer in hidden},
            first_token=batch.first_token,
        )

    def pack(
        self, segments: Sequence[Segment], device_tokens: tuple[NDArray[np.int64], Tensor] | None
    ) -> PackedBatch:
        """The inputs of a pass over `segments`, with as many rows as the linear layers want at least."""
        return pack(segments, self.device, device_tokens, min_tokens=self.min_rows)

    def call(self, model: Any, configs: Sequence[Any], step: StepContext, **inputs: Any) -> Any:
        """One forward of the model, or of a view of its layers, over a packed batch.

        Args:
            model: takes what the runner's own model takes.
            configs: where its modules read their attention function from.
            step: the batch and the KV.
            inputs: further arguments.
        """
        if self._keeps_logits:
            inputs["logits_to_keep"] = step.batch.scored
        began = time.perf_counter()
        with _attached(configs, step), self._linears.active():
            output = model(
                input_ids=step.batch.input_ids,
                position_ids=step.batch.position_ids,
                use_cache=False,
                specfw_step=step,
                **inputs,
            )
        self.model_seconds = time.perf_counter() - began
        return output

    def scored_logits(self, output: Any, batch: PackedBatch) -> Tensor:
        """The logits of a batch's scored rows, [R, V], whether or not the model computed only these."""
        logits: Tensor = output.logits[0]
        return logits if self._keeps_logits else logits.index_select(0, batch.scored)

    @torch.inference_mode()
    def stock_logits(self, tokens: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """The model's own forward over one sequence, without cache: [len(tokens), V]."""
        ids = torch.tensor([[int(token) for token in tokens]], device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits


@contextmanager
def _attached(configs: Sequence[Any], step: StepContext) -> Iterator[None]:
    """Within, modules that read these configs attend over the step's KV."""
    before = [config._attn_implementation_internal for config in configs]
    token = _current.set(step)
    for config in configs:
        config._attn_implementation_internal = ATTENTION
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation
        _current.reset(token)
