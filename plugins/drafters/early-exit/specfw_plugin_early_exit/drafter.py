"""The drafter: nothing but which layers, since their weights and their KV are the target's."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from torch import Tensor

from specfw.contracts import Drafter, DraftLimits, RequestView, Requirements, TargetInfo
from specfw.decoding.builder import DraftBuilder
from specfw.errors import ConfigError
from specfw_plugin_early_exit.adapter import ExitAdapter

__all__ = ["EarlyExitDrafter"]


class EarlyExitDrafter(Drafter):
    """Draws from what the target's own norm and head make of an early layer (LayerSkip, 2404.16710).

    With layers skipped it is the self-speculation of Zhang et al. (2309.08168). It has no state: all
    that is known of a text is the KV that verification has left in the target's memory.
    """

    reads_ahead = True

    def __init__(
        self,
        layer: int | None = None,
        *,
        skip: Sequence[int] = (),
        adapter: ExitAdapter | None = None,
        other_target: bool = False,
        max_nodes: int = 4,
        max_depth: int | None = None,
        width: int = 1,
    ) -> None:
        """Set up; the arguments are the options of the same names, with the adapter already loaded."""
        self._layer, self._skip = layer, tuple(skip)
        self._adapter, self._other_target = adapter, other_target
        self._own = DraftLimits(max_nodes, max_nodes if max_depth is None else max_depth, width)
        # Where the target's number of layers counts, this is what it must have at least.
        self._require(max(self._skip, default=0) + 2 if layer is None else layer)

    def attach(self, target: TargetInfo) -> None:
        """Fit to this target.

        Raises:
            ConfigError: it has too few layers, or the adapter was trained for another target or layer.
        """
        count = int(target.model.config.get_text_config(decoder=True).num_hidden_layers)
        self._check_layers(target.name, count)
        self._require(count if self._layer is None else self._layer)
        if self._adapter is not None:
            assert self._layer is not None
            self._adapter.check_fit(target, self._layer, self._other_target)
            self._adapter = deepcopy(self._adapter).to(target.device, target.dtype).eval()

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        own = builder.limited([self._own] * len(requests))
        live = own.roots
        while len(live := live[own.wants_more(live)]):
            logits = own.draft_logits(self._adapted(own.draft_states(live)))
            children = own.sample(live, logits, self._own.max_width)
            live = children[children >= 0]

    def _adapted(self, states: Tensor) -> Tensor:
        if self._adapter is None:
            return states
        adapted: Tensor = self._adapter(states)
        return adapted

    def _require(self, count: int) -> None:
        """Require the first `count` layers but those that are skipped."""
        layers = tuple(layer for layer in range(count) if layer not in self._skip)
        self.requires = Requirements(draft_layers=layers)  # type: ignore[misc]  # each has its own

    def _check_layers(self, name: str, count: int) -> None:
        if self._layer is not None and self._layer >= count:
            raise ConfigError(
                f"drafter early-exit: expected layer from 1 to {count - 1}, for the target {name!r} has "
                f"{count} layers, got {self._layer}; leave earlier"
                if count > 1
                else f"drafter early-exit: expected a target of at least 2 layers, but {name!r} has 1, "
                "which leaves none to leave early; use another drafter"
            )
        if self._skip and max(self._skip) >= count:
            raise ConfigError(
                f"drafter early-exit: expected layers to skip from 1 to {count - 1}, for the target "
                f"{name!r} has {count} layers, got {max(self._skip)}; skip others"
            )
