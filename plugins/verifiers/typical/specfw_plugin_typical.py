"""The verifier `typical`: Medusa's typical acceptance, which keeps more of a draft than the law allows.

A draft token is kept if the target finds it probable enough, whatever it was drawn from: p(x) above
min(epsilon, delta exp(-H(p))), with H the entropy of the target's law there. Cai et al., "Medusa: simple
LLM inference acceleration framework with multiple decoding heads", arXiv 2401.10774. This changes the law
of the text, so it must be asked for with `allow_lossy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from specfw.components import Component, Options
from specfw.contracts import API_VERSION, Outcome, Verifier
from specfw.errors import ConfigError
from specfw.hookspecs import hookimpl
from specfw.types import Guarantee

if TYPE_CHECKING:
    import torch

    from specfw.decoding.draft import Draft
    from specfw.decoding.probabilities import NodeLaws
    from specfw.decoding.random import RandomSource

__all__ = ["TypicalOptions", "TypicalVerifier", "specfw_api", "specfw_verifiers"]

specfw_api = API_VERSION


class TypicalOptions(Options):
    """How probable is probable enough."""

    allow_lossy: bool = False
    """Must be true: the text's law is not the target's."""
    epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 0.09
    """A token of at least this probability is kept."""
    delta: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """A token of at least this share of exp(-entropy) is kept."""


class TypicalVerifier(Verifier):
    """Keeps the longest path of probable enough draft tokens, and draws the next token from the target's law.

    Raises:
        ConfigError: `allow_lossy` is not true.
    """

    guarantee: ClassVar[Guarantee] = "lossy"
    noise: ClassVar[Literal["target", "draft"]] = "draft"

    def __init__(self, options: TypicalOptions) -> None:
        if not options.allow_lossy:
            raise ConfigError(
                "verifier 'typical': expected allow_lossy=true, for it changes the law of the text, got false; "
                "set it, or use 'coupled', 'rejection' or 'block', which do not"
            )
        self._epsilon, self._delta = options.epsilon, options.delta

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        from specfw.decoding.random import Purpose, Site

        last = self._last_kept(draft, laws)
        site = Site(Purpose.RESIDUAL, draft.seed, draft.start)
        return Outcome(last, random.categorical(laws.rows(last), site))

    def plan(self, draft: Draft, laws: NodeLaws) -> torch.Tensor:
        last = self._last_kept(draft, laws)
        stop = laws.rows(last).new_zeros(draft.token.shape)
        return stop.scatter(1, last[:, None], 1.0)

    def _last_kept(self, draft: Draft, laws: NodeLaws) -> torch.Tensor:
        """The end of each request's longest path of probable enough tokens, without chance: int64 [B]."""
        import torch

        rows = torch.arange(draft.batch, device=draft.start.device)
        parent = torch.from_numpy(draft.parent).to(draft.start)
        kept = torch.zeros_like(draft.token, dtype=torch.bool)
        kept[:, 0] = True
        best = torch.zeros_like(draft.start)
        best_depth = torch.zeros_like(draft.start)
        for node in range(1, draft.token.shape[1]):
            exists, above = parent[:, node] >= 0, parent[:, node].clamp_min(0)
            p = laws.rows(above, exists)
            entropy = -torch.special.xlogy(p, p).sum(-1)
            threshold = (self._delta * torch.exp(-entropy)).clamp_max(self._epsilon)
            probable = p[rows, draft.token[:, node]] >= threshold
            kept[:, node] = probable & kept[rows, above] & exists
            depth, _ = draft.history(torch.full_like(best, node), with_path=False)
            deeper = kept[:, node] & (depth > best_depth)
            best = torch.where(deeper, node, best)
            best_depth = torch.where(deeper, depth, best_depth)
        return best


@hookimpl
def specfw_verifiers() -> Mapping[str, Component[Verifier]]:
    return {
        "typical": Component(
            TypicalVerifier,
            TypicalOptions,
            "Lossy: keeps every draft token that the target finds probable enough.",
            example={"allow_lossy": True},
        )
    }
