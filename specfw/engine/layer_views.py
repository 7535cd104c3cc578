"""Views of a model that run some of its layers, between its own embedding and its own norm and head.

A view shares every weight with the model and changes nothing about it. It is made of shallow copies of
the modules on the way to the list of decoder layers; each layer in it stands in for one of the model's
and calls that one. So whatever an architecture does before, between and after its layers (positions,
scaled embeddings, norms, capped logits) is its own code.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specfw.engine.attention import KVStore, StepContext
from specfw.engine.batching import PackedBatch
from specfw.engine.guards import attention_configs
from specfw.engine.model_runner import ModelRunner
from specfw.errors import UnsupportedModelError

__all__ = ["LayerView", "count_layers", "find_layers"]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_BOUND_TO_THE_ORIGINAL = ("forward", "_old_forward", "_hf_hook")
"""What accelerate sets on a module: kept on a copy, it would run the module that was copied."""


def count_layers(model: Any) -> int:
    """Decoder layers of a model."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def find_layers(model: Any) -> tuple[str, str]:
    """Where a model has its list of decoder layers: the path of the module that owns it, and its name there.

    Raises:
        UnsupportedModelError: there is no such list, or more than one.
    """
    count = count_layers(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    found = [
        (path, name)
        for path, module in model.named_modules()
        for name, child in module._modules.items()
        if isinstance(child, nn.ModuleList) and len(child) == count and _within(decoder, child)
        if any(hasattr(part, "layer_idx") for part in child[0].modules())
    ]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected one list of {count} decoder layers, of which some can be run "
            f"apart from the others, got {len(found)}; use a drafter without draft layers"
        )
    return found[0]


def _within(parent: nn.Module, module: nn.Module) -> bool:
    return any(part is module for part in parent.modules())


class LayerView:
    """Runs some layers of a model, in order, and notes the hidden states between them.

    States are named by how many of the view's layers lie before them: 0 is what the first layer
    takes, `len(layers)` what the last one returns, and `LAST` is that after the final norm.
    """

    LAST = -1

    def __init__(self, runner: ModelRunner, layers: Sequence[int]) -> None:
        """Make a view of `layers`, indices that rise.

        Raises:
            UnsupportedModelError: the model has no single list of decoder layers.
        """
        self._runner = runner
        self.layers = tuple(layers)
        path, name = find_layers(runner.model)
        self._model: Any = _shallow(runner.model)
        owner: Any = self._model
        for part in path.split(".") if path else ():
            owner._modules[part] = _shallow(owner._modules[part])
            owner = owner._modules[part]
        originals = owner._modules[name]
        owner._modules[name] = nn.ModuleList(
            _stand_in(originals[layer], self._layer(place, originals[layer]))
            for place, layer in enumerate(layers)
        )
        owner.__dict__["forward"] = self._noting_last(owner.forward)
        owner.config = _config_of(owner.config, layers)
        self._configs = attention_configs(self._model)
        padding = getattr(runner.model.config, "pad_token_id", None)
        self._any_token = int(padding == 0)  # some models warn of padding in their input
        self._given: Tensor | None = None
        self._passes_on = False
        self._wanted: Collection[int] = ()
        self._noted: dict[int, Tensor] = {}
        self._sizes = [0] * len(layers)  # of the tuple that each layer returns; 0 for no tuple

    @torch.inference_mode()
    def run(
        self,
        store: KVStore,
        batch: PackedBatch,
        wanted: Collection[int] = (),
        given: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass of the view's layers over a batch.

        Args:
            store: the KV of the whole model.
            batch: its packed rows, T.
            wanted: the names of the states to note.
            given: what the first layer takes in place of the embedded tokens, [T, H].

        Returns:
            The logits of the batch's scored rows, [R, V], and the noted states, [T, H] each.

        Raises:
            UnsupportedModelError: hidden states are not one row a token.
        """
        try:
            self._given, self._wanted = given, wanted
            step = StepContext(batch, store)
            output = self._runner.call(self._model, self._configs, step)
            return self._runner.scored_logits(output, batch), self._noted
        finally:
            self._given, self._wanted, self._noted = None, (), {}

    def logits(self, states: Tensor) -> Tensor:
        """What the model's own norm and head make of hidden states: [M, H] -> [M, V].

        The view must have run before, since that shows what its layers return.
        """
        count = len(states)
        padding = max(0, self._runner.min_rows - count)
        rows = torch.nn.functional.pad(states, (0, 0, 0, padding))
        nowhere = torch.zeros(1, len(rows), dtype=torch.long, device=states.device)
        scored = torch.arange(len(rows), device=states.device)
        batch = PackedBatch(nowhere + self._any_token, nowhere, nowhere[0], scored, [], None)
        try:
            self._passes_on = True
            return self.run(KVStore(0), batch, given=rows)[0][:count]
        finally:
            self._passes_on = False

    def _layer(self, place: int, layer: Callable[..., Any]) -> Callable[..., Any]:
        """What the stand-in at `place` does."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if place == 0:
                args, kwargs = self._enter(args, kwargs)
            if self._passes_on:
                hidden = args[0] if args else kwargs["hidden_states"]
                size = self._sizes[place]
                return (hidden, *[None] * (size - 1)) if size else hidden
            output = layer(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            self._sizes[place] = len(output) if isinstance(output, tuple) else 0
            self._note(place + 1, hidden)
            return output

        return forward

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Put what is given in the place of the embedded tokens."""
        embedded = args[0] if args else kwargs["hidden_states"]
        hidden = embedded if self._given is None else self._given.to(embedded)[None]
        self._note(0, hidden)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def _noting_last(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.LAST in self._wanted:
                self._note(self.LAST, output[0])
            return output

        return noting

    def _note(self, name: int, hidden: Tensor) -> None:
        if name not in self._wanted:
            return
        if hidden.ndim != 3 or hidden.shape[0] != 1:
            raise UnsupportedModelError(
                f"{type(self._model).__name__}: expected hidden states of one row a token, got "
                f"{list(hidden.shape)}; use a drafter without draft layers"
            )
        self._noted[name] = hidden[0]


def _shallow(module: nn.Module) -> nn.Module:
    """A module with the same parts, which may then be replaced."""
    new = copy.copy(module)
    for name in _BOUND_TO_THE_ORIGINAL:
        new.__dict__.pop(name, None)
    new.__dict__["_modules"] = dict(module._modules)
    return new


def _stand_in(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """What looks like `layer`, for code that reads its attributes, but does what `forward` does."""
    new = copy.copy(layer)
    new.__dict__.update({name: OrderedDict() for name in _HOOKS})  # the layer's own will be called
    new.__dict__["forward"] = forward
    return new


def _config_of(config: Any, layers: Sequence[int]) -> Any:
    """The config for these layers: some models look up the kind of a layer by its place in the list."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return config
    new = copy.copy(config)
    object.__setattr__(new, "layer_types", [kinds[layer] for layer in layers])
    return new
