"""`specfw eval-drafter`: how many tokens a pass a pipeline keeps, by position and category of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import isnan
from pathlib import Path
from typing import Any

from specfw.bench.drafters import first_of_each
from specfw.bench.prompts import Prompt, load_prompts
from specfw.components import Bound
from specfw.config import PipelineConfig
from specfw.contracts import DraftLimits, Feedback, Scheduler, SchedulerView
from specfw.engine.engine import StepReport
from specfw.pipeline import Pipeline
from specfw.plugins import PluginManager
from specfw.types import SpeculationParams, SpeculationStats

__all__ = ["Confidence", "Evaluation", "Ranks", "evaluate", "with_nodes"]


@dataclass(slots=True)
class Evaluation:
    """Counts over all prompts; what is asked for follows from them."""

    guarantee: str
    statistics: dict[str, list[SpeculationStats]] = field(default_factory=dict)
    """By category, one of each prompt."""
    skipped: int = 0
    """Prompts that do not fit into the context."""
    ranks: Ranks = field(default_factory=lambda: Ranks())
    confidence: Confidence = field(default_factory=lambda: Confidence())
    draft_seconds: float = 0.0
    step_seconds: float = 0.0

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw eval-drafter --json`."""
        every = [one for several in self.statistics.values() for one in several]
        depths = max((len(one.tested_by_depth) for one in every), default=0)
        return {
            "guarantee": self.guarantee,
            "prompts": len(every),
            "skipped": self.skipped,
            "tokens": sum(one.emitted for one in every),
            "acceptance_length": _length(every),
            "by_position": [_position(every, depth) for depth in range(depths)],
            "by_rank": self.ranks.mapping(),
            "by_confidence": self.confidence.mapping(),
            "calibration_error": self.confidence.error(),
            "by_category": {name: _length(several) for name, several in self.statistics.items()},
            "draft_share": self.draft_seconds / self.step_seconds if self.step_seconds else 0.0,
        }


def evaluate(
    pipeline: Pipeline,
    prompts: Path | None = None,
    *,
    nodes: int | None = None,
    temperature: float = 0.0,
    per_category: int | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Decode prompts one at a time, and count.

    Args:
        pipeline: what is measured.
        prompts: a file in Spec-Bench's format; the project's own prompts if None. First turns count.
        nodes: draft nodes for each step at most; None leaves it to the pipeline.
        temperature: 0 is greedy.
        per_category: prompts of each category, the first ones; None takes all.
        max_new_tokens: for each prompt.
        seed: of all chance.
        progress: told what runs now.

    Raises:
        ConfigError: the file cannot be read.
    """
    chosen: Sequence[Prompt] = load_prompts(prompts)
    if per_category is not None:
        chosen = first_of_each(chosen, per_category)
    result = Evaluation(pipeline.engine.verifier.guarantee)

    def note(report: StepReport) -> None:
        result.draft_seconds += report.seconds["draft"] + report.seconds["observe"]
        result.step_seconds += sum(
            seconds for phase, seconds in report.seconds.items() if phase != "model"
        )

    engine = pipeline.engine
    watch = _Watch(result.ranks, result.confidence)
    engine.schedulers.append(watch)
    engine.observers.append(note)
    try:
        for number, prompt in enumerate(chosen):
            progress(f"prompt {number + 1} of {len(chosen)} ({prompt.category})")
            ids = pipeline.encode(_as_prompt(pipeline, prompt.turns[0]))
            if len(ids) >= engine.max_length:
                result.skipped += 1
                continue
            (output,) = pipeline.generate(
                ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                speculation=SpeculationParams(max_nodes=nodes),
                progress=False,
            )
            result.statistics.setdefault(prompt.category, []).append(output.speculation)
    finally:
        engine.observers.remove(note)
        engine.schedulers.remove(watch)
    return result


@dataclass(slots=True)
class Ranks:
    """How well the order of siblings is calibrated: the first one should be right most often."""

    seen: list[int] = field(default_factory=list)
    """Reached nodes that had a child of each rank, whether or not one before it was kept."""
    kept: list[int] = field(default_factory=list)
    """Those of them whose child of that rank was kept."""

    def add(self, siblings: Sequence[int], kept: Sequence[int]) -> None:
        """Count one draft: the children of each reached node, and the ranks of the kept ones."""
        missing = max(siblings, default=0) - len(self.seen)
        self.seen += [0] * missing
        self.kept += [0] * missing
        for count in siblings:
            for rank in range(count):
                self.seen[rank] += 1
        for rank in kept:
            self.kept[rank] += 1

    def mapping(self) -> list[dict[str, Any]]:
        """The stable keys of `by_rank`."""
        return [
            {"seen": seen, "kept": kept, "rate": kept / seen}
            for seen, kept in zip(self.seen, self.kept, strict=True)
        ]


@dataclass(slots=True)
class Confidence:
    """How well a drafter's probabilities are calibrated: of what it deems 70 % likely, 70 % should be kept.

    Source of the error: expected calibration error (Naeini et al., 2015), over parts of equal width.
    """

    parts: int = 10
    seen: list[int] = field(default_factory=list)
    """Reached nodes by the part of [0, 1] that their chance was in; guesses, which state none, are left out."""
    kept: list[int] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    """The sum of their chances."""

    def __post_init__(self) -> None:
        self.seen, self.kept = [0] * self.parts, [0] * self.parts
        self.total = [0.0] * self.parts

    def add(self, chances: Sequence[Sequence[float]], kept: Sequence[int]) -> None:
        """Count one draft: the chances of the siblings at each reached depth, and the ranks of the kept ones."""
        for siblings, right in zip_longest(chances, kept):
            for rank, chance in enumerate(siblings):
                if not isnan(chance):
                    part = min(int(chance * self.parts), self.parts - 1)
                    self.seen[part] += 1
                    self.kept[part] += rank == right
                    self.total[part] += chance

    def mapping(self) -> list[dict[str, Any]]:
        """The stable keys of `by_confidence`; parts that no node was in are left out."""
        return [
            {
                "from": part / self.parts,
                "to": (part + 1) / self.parts,
                "seen": seen,
                "kept": kept,
                "confidence": total / seen,
                "rate": kept / seen,
            }
            for part, (seen, kept, total) in enumerate(
                zip(self.seen, self.kept, self.total, strict=True)
            )
            if seen
        ]

    def error(self) -> float | None:
        """The mean distance of confidence from rate over all nodes; None if there are none."""
        apart = sum(abs(total - kept) for total, kept in zip(self.total, self.kept, strict=True))
        return apart / sum(self.seen) if any(self.seen) else None


class _Watch(Scheduler):
    """Counts what was drafted and kept, and leaves all limits as they are."""

    def __init__(self, ranks: Ranks, confidence: Confidence) -> None:
        self._ranks, self._confidence = ranks, confidence

    @property
    def stops_drafts(self) -> bool:
        return True  # so that chances are noted; it stops none

    def plan(self, view: SchedulerView) -> Sequence[DraftLimits]:
        return view.caps

    def observe(self, feedback: Feedback) -> None:
        for siblings, kept in zip(feedback.siblings, feedback.ranks, strict=True):
            self._ranks.add(siblings, kept)
        for chances, kept in zip(feedback.chances, feedback.ranks, strict=False):
            self._confidence.add(chances, kept)


def with_nodes(config: PipelineConfig, nodes: int | None) -> PipelineConfig:
    """The config with `max_nodes` set wherever its drafters and schedulers leave it at its default."""
    if nodes is None:
        return config
    bound = config.bind(PluginManager(strict=config.engine.strict_plugins))
    settings: dict[str, Any] = {name: getattr(config, name) for name in config.model_fields_set}
    settings["drafter"] = _widened(bound.drafter, nodes)
    settings["scheduler"] = [_widened(one, nodes) for one in bound.scheduler]
    return PipelineConfig(**settings)


def _widened(component: Bound[Any], nodes: int) -> Bound[Any]:
    """A component, and those in its options, with `max_nodes` where it was not set."""
    filled = component.with_inner(lambda inner: _widened(inner, nodes))
    options = component.options
    if "max_nodes" not in type(options).model_fields or "max_nodes" in options.model_fields_set:
        return filled
    return replace(filled, options=filled.options.model_copy(update={"max_nodes": nodes}))


def _as_prompt(pipeline: Pipeline, text: str) -> Any:
    """A chat where the target has a template, else the text."""
    has_template = getattr(pipeline.tokenizer, "chat_template", None)
    return [{"role": "user", "content": text}] if has_template else text


def _length(several: Sequence[SpeculationStats]) -> float:
    passes = sum(one.target_passes for one in several)
    return sum(one.emitted for one in several) / passes if passes else 0.0


def _position(several: Sequence[SpeculationStats], depth: int) -> Mapping[str, Any]:
    """How often a draft token was tested at this depth, and what part of these was kept."""
    tested, kept = (
        sum(getattr(one, name)[depth] for one in several if len(one.tested_by_depth) > depth)
        for name in ("tested_by_depth", "accepted_by_depth")
    )
    return {"tested": tested, "kept": kept, "rate": kept / tested if tested else 0.0}
