"""The drafter `small-model`: a smaller causal language model, with the target's tokenizer or another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from specfw.components import Component, NestedTarget, Options
from specfw.contracts import API_VERSION, Drafter, Trainer
from specfw.hookspecs import hookimpl
from specfw.training import WeightsOptions

if TYPE_CHECKING:
    from specfw_plugin_small_model.drafter import SmallModelDrafter

# torch is imported where a drafter is built, so that finding the plugin stays quick.

__all__ = ["KV_TOKENS", "DraftModelTrainerOptions", "SmallModelDrafter", "SmallModelOptions"]

specfw_api = API_VERSION

KV_TOKENS = 16384
"""Room for the keys and values of this many tokens, over all requests, unless set otherwise."""


class SmallModelOptions(Options):
    """Which model drafts, and how much."""

    model: NestedTarget
    """The draft model: any target component, such as `demo(layers=4)`, or a mapping."""
    max_nodes: Annotated[int, Field(ge=1)] = 4
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=1)] | None = None
    """Draft nodes on one path, each a pass of the draft model; None leaves it to `max_nodes`."""
    width: Annotated[int, Field(ge=1)] = 1
    """Siblings to draw below each node: 1 makes chains, more makes trees."""
    tokenizer: Literal["auto", "same", "shared", "retokenize"] = "auto"
    """How the two vocabularies meet: the same one; drawing only tokens that both have; or guessing the
    target's tokens for the text that the draft model writes. `auto` is the first of them that fits."""
    kv_tokens: Annotated[int, Field(ge=1)] = KV_TOKENS
    """KV capacity of the draft model in tokens, over all requests."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """What the draft model's weights become once loaded; `auto` leaves them as they are."""
    other_target: bool = False
    """Whether a draft model may be used that `specfw train` made for another target."""


class DraftModelTrainerOptions(WeightsOptions):
    """How a draft model is trained."""

    layers: Annotated[int, Field(ge=1)] | None = None
    """First layers of the target that it begins as; None takes about a quarter of them."""
    train_embeddings: bool = False
    """Whether embeddings and vocabulary projection are trained too; otherwise they stay the target's."""
    texts: Annotated[int, Field(ge=1)] = 4
    """Texts in a batch."""
    rate: Annotated[float, Field(gt=0.0)] = 5e-4
    """The learning rate."""
    places: Annotated[int, Field(ge=1)] = 512
    """Places of a batch at which laws are compared, at most."""


def _build(options: SmallModelOptions) -> Drafter:
    import torch

    from specfw_plugin_small_model.drafter import SmallModelDrafter

    loaded = options.model.build().load()
    if options.dtype != "auto":
        loaded.model.to(getattr(torch, options.dtype))
    return SmallModelDrafter(
        loaded,
        max_nodes=options.max_nodes,
        max_depth=options.max_depth,
        width=options.width,
        tokenizer=options.tokenizer,
        kv_tokens=options.kv_tokens,
        other_target=options.other_target,
    )


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {
        "small-model": Component(
            _build,
            SmallModelOptions,
            "A smaller causal language model, with the target's tokenizer or another one.",
            example={"model": "table", "width": 2},
        )
    }


def _build_trainer(options: DraftModelTrainerOptions) -> Trainer:
    from specfw_plugin_small_model.training import DraftModelTrainer

    return DraftModelTrainer(options)


@hookimpl
def specfw_trainers() -> Mapping[str, Component[Trainer]]:
    return {
        "small-model": Component(
            _build_trainer,
            DraftModelTrainerOptions,
            "A draft model, from the target's first layers.",
        )
    }


def __getattr__(name: str) -> Any:
    if name == "SmallModelDrafter":
        from specfw_plugin_small_model.drafter import SmallModelDrafter

        return SmallModelDrafter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
