"""`specfw bench engine`: plain decoding of this engine against transformers on the demo model.

All contenders run in turn within one process, several rounds, and medians of ratios count, because
absolute times on a shared machine mean little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specfw.bench.prompts import load_prompts
from specfw.engine.engine import StepReport
from specfw.pipeline import Pipeline

__all__ = ["EngineBench", "bench_engine"]

PHASES = ("plan", "draft", "forward", "verify", "commit", "observe")


@dataclass(slots=True)
class EngineBench:
    """Tokens a second by contender and batch, and what follows from them."""

    max_new_tokens: int
    speed: dict[str, list[float]] = field(default_factory=dict)
    """Tokens a second of every round: batch1_specfw, batch1_generate, batch16_specfw, batch16_generate_batch."""
    overhead: list[float] = field(default_factory=list)
    """Share of each decode step at batch 1 outside the model's forward."""

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw bench engine --json`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "threads": torch.get_num_threads(),
            "tokens_per_second": {
                name: statistics.median(rounds) for name, rounds in self.speed.items()
            },
            "ratio": {
                "batch1_vs_generate": self._ratio("batch1_specfw", "batch1_generate"),
                "batch16_vs_generate_batch": self._ratio(
                    "batch16_specfw", "batch16_generate_batch"
                ),
            },
            "overhead_share": {"batch1": statistics.median(self.overhead)},
        }

    def _ratio(self, ours: str, theirs: str) -> float:
        pairs = zip(self.speed[ours], self.speed[theirs], strict=True)
        return statistics.median(a / b for a, b in pairs)


def bench_engine(
    max_new_tokens: int = 64,
    rounds: int = 5,
    prompts_file: Path | None = None,
    dtype: str = "bfloat16",
    progress: Callable[[str], None] = lambda text: None,
) -> EngineBench:
    """Time plain greedy decoding at batch 1 and 16, this engine and transformers in turn."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    result = EngineBench(max_new_tokens)
    with Pipeline.from_config(
        {"target": "demo", "dtype": dtype, "engine": {"prefix_cache": False}}
    ) as pipeline:
        model: Any = pipeline.target.model
        prompts = [
            pipeline.encode([{"role": "user", "content": prompt.turns[0]}])[-200:]
            for prompt in load_prompts(prompts_file)
        ]
        prompts = (prompts * 16)[:: max(1, len(prompts) // 16)][:16]
        pad = pipeline.engine.info.eos_token_ids[0]
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=model.config.vocab_size,
            pad_token_id=pad,
        )
        pages = ContinuousBatchingConfig(
            page_size=64, num_blocks=16 * (200 + max_new_tokens) // 64 + 16
        )

        def ours(batch: Sequence[list[int]]) -> int:
            outputs = pipeline.generate(
                list(batch), max_new_tokens=max_new_tokens, ignore_eos=True, progress=False
            )
            return sum(len(output.token_ids) for output in outputs)

        def generate(batch: Sequence[list[int]]) -> int:
            ids = torch.tensor([batch[0]])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
            return int(out.shape[1] - ids.shape[1])

        def generate_batch(batch: Sequence[list[int]]) -> int:
            out = model.generate_batch(
                list(batch),
                generation_config=settings,
                continuous_batching_config=pages,
                progress_bar=False,
            )
            return sum(len(one.generated_tokens) for one in out.values())

        contenders: dict[str, tuple[Callable[[Sequence[list[int]]], int], int]] = {
            "batch1_specfw": (ours, 1),
            "batch1_generate": (generate, 1),
            "batch16_specfw": (ours, 16),
            "batch16_generate_batch": (generate_batch, 16),
        }
        for turn in range(rounds + 1):  # the first warms up
            for name, (run, batch) in contenders.items():
                progress(f"round {turn} of {rounds}: {name}")
                start = turn % len(prompts) if batch == 1 else 0
                began = time.perf_counter()
                emitted = run(prompts[start : start + batch])
                speed = emitted / (time.perf_counter() - began)
                if turn:
                    result.speed.setdefault(name, []).append(speed)
        result.overhead = _overhead(pipeline, prompts[0], max_new_tokens)
    return result


def _overhead(pipeline: Pipeline, prompt: list[int], tokens: int) -> list[float]:
    """Share of each decode step's wall time outside the model's forward."""
    shares: list[float] = []

    def note(report: StepReport) -> None:
        total = sum(report.seconds[phase] for phase in PHASES)
        if report.rows == 1:
            shares.append(1 - report.seconds["model"] / total)

    pipeline.engine.observers.append(note)
    pipeline.generate(prompt, max_new_tokens=tokens, ignore_eos=True)
    pipeline.engine.observers.remove(note)
    return shares
