"""The scheduler `confidence`: a draft stops where the drafter's own law says that it is guessing.

The bound on acceptance by entropy is that of Agrawal et al., "AdaEDL: Early draft stopping for speculative
decoding of large language models via an entropy-based lower bound on token acceptance probability",
arXiv 2410.18351. To stop by what all drafted tokens together make likely is the rule of Huang et al.,
"SpecDec++: Boosting speculative decoding via adaptive candidate lengths", arXiv 2405.19715, here with the
drafter's own probabilities. The threshold is not set by hand but follows a stated share of accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from specfw.components import Component, Options
from specfw.contracts import API_VERSION, DraftLimits, Feedback, Scheduler, SchedulerView
from specfw.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

__all__ = ["ConfidenceOptions", "ConfidenceScheduler", "specfw_api", "specfw_schedulers"]

specfw_api = API_VERSION

_PATIENCE = 64
"""Stopped steps in a row after which the threshold sinks as if a token were accepted in each."""


class ConfidenceOptions(Options):
    """What is looked at, and which share of the drafted tokens shall be accepted."""

    measure: Literal["entropy", "top", "last", "path"] = "entropy"
    """Before a draw, `entropy`: 1 - sqrt(scale * entropy of q), or `top`: q's largest probability. After a
    kept token, `last`: its probability, or `path`: the product of those of all tokens on the way to it."""
    target: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """The share of tested draft tokens that shall be accepted."""
    threshold: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3
    """Least confidence at which a token is drawn, to begin with."""
    highest: Annotated[float, Field(gt=0.0, le=1.0)] = 0.95
    """The threshold stays at or below this."""
    rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    """How far one token moves the threshold; 0 keeps it."""
    scale: Annotated[float, Field(gt=0.0)] = 0.2
    """How much acceptance an entropy, in nats, may cost."""


class ConfidenceScheduler(Scheduler):
    """Looks at each law before its draw, or at what was drawn before it, and moves the threshold by what
    became of tested tokens. What was drawn stays in the draft.

    A token that is accepted lowers the threshold by rate * (1 - target), one that is refused raises it by
    rate * target, so it rests where the share of accepted ones is the target. While all is stopped, step
    after step, nothing is learned; then the threshold sinks, the faster the longer it lasts.
    """

    def __init__(self, options: ConfidenceOptions | None = None) -> None:
        self._options = options or ConfidenceOptions()
        self.threshold = self._options.threshold
        """Least confidence at which a token is drawn now."""
        self._stopped = False
        self._idle = 0

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        return list(view.caps)

    def before_draw(self, q: torch.Tensor) -> torch.Tensor | None:
        return self._judge(self.confidence(q)) if self._looks_ahead else None

    def after_kept(self, chances: torch.Tensor) -> torch.Tensor | None:
        if self._looks_ahead:
            return None
        if self._options.measure == "path":
            return self._judge(chances.prod(-1))
        return self._judge(chances[:, -1])

    @property
    def _looks_ahead(self) -> bool:
        return self._options.measure in ("entropy", "top")

    def _judge(self, confidence: torch.Tensor) -> torch.Tensor:
        sure = confidence >= self.threshold
        self._stopped = self._stopped or not bool(sure.all())
        return sure

    def confidence(self, q: torch.Tensor) -> torch.Tensor:
        """How sure laws are, from 0 or less to 1: [M, V] -> [M]."""
        import torch

        if self._options.measure == "top":
            return q.amax(-1)
        entropy = -torch.special.xlogy(q, q).sum(-1)
        return 1 - (self._options.scale * entropy.clamp_min(0)).sqrt()

    def observe(self, feedback: Feedback) -> None:
        tested = sum(feedback.tested)
        kept = sum(len(k) for t, k in zip(feedback.tested, feedback.kept, strict=False) if t)
        target, rate = self._options.target, self._options.rate
        if tested:
            self._idle = 0
            self._move(rate * (target * tested - kept))
        elif self._stopped:
            self._idle = min(self._idle + 1, _PATIENCE)
            self._move(-rate * (1 - target) * self._idle / _PATIENCE)
        self._stopped = False

    def _move(self, distance: float) -> None:
        self.threshold = min(max(self.threshold + distance, 0.0), self._options.highest)


@hookimpl
def specfw_schedulers() -> dict[str, Component[Scheduler]]:
    return {
        "confidence": Component(
            ConfidenceScheduler,
            ConfidenceOptions,
            "Stops a draft where the drafter is unsure; the threshold follows a share of accepted tokens.",
            example={"measure": "top", "threshold": 0.35, "rate": 0.3},
        )
    }
