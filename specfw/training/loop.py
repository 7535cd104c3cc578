"""The training loop: AdamW, an average of the weights, and checkpoints from which a killed run goes on.

The data of a step follow from the seed and the step's number, so a run that went on ends like one that
was never killed, as far as the platform's arithmetic repeats itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specfw.errors import ConfigError
from specfw.training.files import whole_file
from specfw.training.run import TrainingRun

__all__ = ["LoopSettings", "Problem", "Progress", "train_loop"]

_FILE = "checkpoint.safetensors"


@dataclass(frozen=True)
class LoopSettings:
    """How the weights move."""

    rate: float = 1e-3
    """The learning rate after warming up; it falls with the root of the step from `decay_from` on."""
    warmup: int = 50
    decay_from: int = 1000
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    average: float = 0.998
    """What the averaged weights keep in a step; fewer steps average over less."""


@dataclass
class Problem:
    """What is learned."""

    parameters: dict[str, Tensor]
    """Trained in place, float32, by name."""
    loss: Callable[[int], tuple[Tensor, Mapping[str, float]]]
    """The loss of a step and numbers to report, given the step's number."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """What later runs must know besides."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a later run must share to go on."""


@dataclass
class Progress:
    """How far training is, over all calls together."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)
    """The reported numbers, each the mean since the report before, with `step`."""

    def facts(self) -> dict[str, str]:
        """What a model card says of it."""
        last = self.curve[-1] if self.curve else {}
        hits = ", ".join(f"{value:.1%}" for name, value in last.items() if name.startswith("hit"))
        return {
            "training": f"{self.step} steps in {self.seconds / 60:.0f} minutes",
            "agreement with the target in training, by position": hits or "not measured",
        }


def train_loop(
    problem: Problem,
    run: TrainingRun,
    settings: LoopSettings,
    steps: int | None = None,
    every: int = 50,
    save_seconds: float = 60.0,
) -> tuple[dict[str, Tensor], Progress]:
    """Train until `steps` are done or the run's time is up, over all calls together.

    Args:
        problem: what is learned; its parameters and constants become those of an earlier run.
        run: where checkpoints go, and how long it may take.
        settings: how the weights move.
        steps: None for no limit but time.
        every: steps between reports.
        save_seconds: time between checkpoints.

    Returns:
        The averaged weights, and how training went.

    Raises:
        ConfigError: neither steps nor time limit the run, or the checkpoint is another problem's.
    """
    if steps is None and run.seconds is None:
        raise ConfigError("train: expected a number of steps or of minutes, got neither; give one")
    parameters = problem.parameters
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
    )
    averaged = {name: value.detach().clone() for name, value in parameters.items()}
    about = json.dumps({**problem.about, **asdict(settings)}, sort_keys=True, default=str)
    path = run.state / _FILE
    progress = _load(path, problem, optimizer, averaged, about)
    saved = began = time.perf_counter()
    before = progress.seconds
    sums: dict[str, float] = {}
    count = 0

    def over() -> bool:
        late = run.seconds is not None and progress.seconds >= run.seconds
        return late or (steps is not None and progress.step >= steps)

    while not over():
        step = progress.step
        for group in optimizer.param_groups:
            group["lr"] = _rate(settings, step)
        loss, numbers = problem.loss(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip)
        optimizer.step()
        keep = min(settings.average, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in parameters.items():
                averaged[name].lerp_(value, 1 - keep)
        progress.step += 1
        progress.seconds = before + time.perf_counter() - began
        for name, number in {"loss": float(loss.detach()), **numbers}.items():
            sums[name] = sums.get(name, 0.0) + number
        count += 1
        if progress.step % every == 0 or over():
            means = {name: total / count for name, total in sums.items()}
            progress.curve.append({"step": progress.step, **means})
            _report(run, progress, means, steps)
            sums, count = {}, 0
        if over() or time.perf_counter() - saved > save_seconds:
            _save(path, problem, optimizer, averaged, about, progress)
            saved = time.perf_counter()
    return averaged, progress


def _rate(settings: LoopSettings, step: int) -> float:
    warm = min(1.0, (step + 1) / max(1, settings.warmup))
    return float(settings.rate * warm * max(1.0, step / settings.decay_from) ** -0.5)


def _report(
    run: TrainingRun, progress: Progress, means: Mapping[str, float], steps: int | None
) -> None:
    lefts = []
    if run.seconds is not None:
        lefts.append(run.seconds - progress.seconds)
    if steps is not None:
        lefts.append((steps - progress.step) * progress.seconds / progress.step)
    left = max(0.0, min(lefts))
    shown = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    run.tell(
        f"{time.strftime('%H:%M:%S')} step {progress.step}: {shown}; {left / 60:.0f} min left",
        progress.seconds / (progress.seconds + left),
    )


def _save(
    path: Path,
    problem: Problem,
    optimizer: torch.optim.Optimizer,
    averaged: Mapping[str, Tensor],
    about: str,
    progress: Progress,
) -> None:
    tensors = {f"constant.{name}": value for name, value in problem.constants.items()}
    for name, value in problem.parameters.items():
        state = optimizer.state[value]
        tensors[f"weight.{name}"] = value.detach()
        tensors[f"average.{name}"] = averaged[name]
        tensors[f"first.{name}"] = state["exp_avg"]
        tensors[f"second.{name}"] = state["exp_avg_sq"]
    metadata = {"about": about, "progress": json.dumps(asdict(progress))}
    with whole_file(path) as aside:
        save_file({name: value.contiguous() for name, value in tensors.items()}, aside, metadata)


def _load(
    path: Path,
    problem: Problem,
    optimizer: torch.optim.Optimizer,
    averaged: Mapping[str, Tensor],
    about: str,
) -> Progress:
    """Take up an earlier run; a new beginning if there is none."""
    if not path.exists():
        return Progress()
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("about") != about:
                raise ConfigError(
                    f"train: expected {path} to come from the same settings, {about}, got {metadata.get('about')}; "
                    "take them again, or name another folder"
                )
            progress = Progress(**json.loads(metadata["progress"]))
            for name in problem.constants:
                problem.constants[name] = file.get_tensor(f"constant.{name}")
            with torch.no_grad():
                for name, value in problem.parameters.items():
                    value.copy_(file.get_tensor(f"weight.{name}"))
                    averaged[name].copy_(file.get_tensor(f"average.{name}"))
                    optimizer.state[value] = {
                        "step": torch.tensor(float(progress.step)),
                        "exp_avg": file.get_tensor(f"first.{name}").to(value.device),
                        "exp_avg_sq": file.get_tensor(f"second.{name}").to(value.device),
                    }
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"train: expected a checkpoint in {path}, but it cannot be read ({error}); remove it to begin anew"
        ) from error
    return progress
