"""`specfw bench quantized`: what quantised targets bring, plain and speculatively, and what they cost in quality.

All targets are loaded at once and run in turn on each prompt, so that whatever else the machine does hits
all of them alike; medians of ratios count. Quality is the perplexity of a fixed text: the opening of Jane
Austen's "Pride and Prejudice" (1813, in the public domain).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from specfw.bench.drafters import first_of_each, in_turn
from specfw.bench.plots import new_figure
from specfw.bench.prompts import load_prompts
from specfw.errors import ConfigError, PluginError, UnsupportedModelError
from specfw.pipeline import Pipeline
from specfw.types import Output
from specfw.weights import quantized_linears, weight_bytes

__all__ = ["BASE", "TARGETS", "QuantizedBench", "bench_quantized", "passage_perplexity"]

BASE = "demo"
"""The dense target, in bfloat16, that all others are compared with."""
TARGETS = (
    "torch-int(target='demo', scheme='w8a16')",
    "torch-int(target='demo', scheme='w8a16', head=True)",
    "torch-int(target='demo', scheme='w4a16', head=True)",
    "torch-int(target='demo', scheme='w8a8')",
    "torch-int(target='demo', scheme='w8a8', head=True)",
    "bitsandbytes(target='demo', bits=8)",
    "bitsandbytes(target='demo', bits=4)",
    "quanto(target='demo', weights='int8')",
    "quanto(target='demo', weights='float8')",
    "quanto(target='demo', weights='int4')",
)
"""What is measured unless something else is named."""
_MODES = ("plain", "speculative")


@dataclass(slots=True)
class _Measured:
    """One target over all prompts."""

    loader: str
    setting: str
    bytes: int
    perplexity: float
    seconds: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in _MODES})
    """By mode, seconds of each prompt's tokens, in order."""
    texts: dict[str, list[tuple[int, ...]]] = field(
        default_factory=lambda: {mode: [] for mode in _MODES}
    )
    passes: int = 0
    """Target passes with drafts."""

    def speeds(self, mode: str) -> list[float]:
        """Tokens a second of each prompt."""
        pairs = zip(self.texts[mode], self.seconds[mode], strict=True)
        return [len(text) / seconds for text, seconds in pairs]


@dataclass(slots=True)
class QuantizedBench:
    """What was measured of each target, the base first, and what could not be loaded."""

    drafter: str
    max_new_tokens: int
    measured: dict[str, _Measured] = field(default_factory=dict)
    """By target, as it was written."""
    refused: dict[str, str] = field(default_factory=dict)
    """Target -> why it could not be loaded."""

    def rows(self) -> list[dict[str, Any]]:
        """One row a target; ratios are to the base without drafts, on the same prompts."""
        return [self._row(target) for target in self.measured]

    def mapping(self) -> dict[str, Any]:
        """The stable keys of `specfw bench quantized --json`."""
        return {
            "base": BASE,
            "drafter": self.drafter,
            "max_new_tokens": self.max_new_tokens,
            "threads": torch.get_num_threads(),
            "rows": self.rows(),
            "refused": [{"target": name, "reason": why} for name, why in self.refused.items()],
        }

    def markdown(self) -> str:
        """The rows as a table in Markdown, and a list of what was refused."""
        lines = [
            "| target | MiB | plain | speculative | tokens a pass | perplexity | as bfloat16 | as plain |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows():
            ratio = row["ratio_vs_bf16_plain"]
            lines.append(
                f"| {row['loader']}: {row['setting']} | {row['bytes'] / 2**20:.0f} | {ratio['plain']:.2f}x | "
                f"{ratio['speculative']:.2f}x | {row['acceptance_length']:.2f} | "
                f"{row['perplexity_ratio']:.3f}x | {row['exact_match']:.0%} | {row['same_text']:.0%} |"
            )
        lines += [f"\nNot measured: `{name}`: {why}" for name, why in self.refused.items()]
        return "\n".join(lines) + "\n"

    def plot(self, path: Path) -> None:
        """Draw speeds, memory, perplexity and acceptance length of each target as a PNG.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        rows = self.rows()
        figure = new_figure("bench quantized", 12, 1.5 + 0.4 * len(rows))
        panels = figure.subplots(1, 4, sharey=True)
        places = range(len(rows))
        for shift, mode in zip((-0.2, 0.2), _MODES, strict=True):
            ratios = [row["ratio_vs_bf16_plain"][mode] for row in rows]
            panels[0].barh([place + shift for place in places], ratios, 0.4, label=mode)
        panels[0].legend()
        panels[1].barh(places, [row["bytes"] / 2**20 for row in rows])
        panels[2].barh(places, [row["perplexity_ratio"] for row in rows])
        panels[3].barh(places, [row["acceptance_length"] for row in rows])
        titles = ("speed", "MiB of weights", "perplexity", "tokens a pass")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
        panels[0].set_yticks(list(places), [f"{row['loader']}: {row['setting']}" for row in rows])
        panels[0].invert_yaxis()
        figure.savefig(path, format="png", dpi=150)

    def _row(self, target: str) -> dict[str, Any]:
        own, base = self.measured[target], self.measured[BASE]
        plain = base.speeds("plain")
        drafted = own.texts["speculative"]
        return {
            "target": target,
            "loader": own.loader,
            "setting": own.setting,
            "bytes": own.bytes,
            "tokens_per_second": {mode: statistics.median(own.speeds(mode)) for mode in _MODES},
            "ratio_vs_bf16_plain": {
                mode: statistics.median(
                    ours / theirs for ours, theirs in zip(own.speeds(mode), plain, strict=True)
                )
                for mode in _MODES
            },
            "acceptance_length": sum(map(len, drafted)) / own.passes,
            "perplexity": own.perplexity,
            "perplexity_ratio": own.perplexity / base.perplexity,
            "exact_match": _equal(own.texts["plain"], base.texts["plain"]),
            "same_text": _equal(drafted, own.texts["plain"]),
        }


def _equal(ours: Sequence[object], theirs: Sequence[object]) -> float:
    """The share of texts that are equal."""
    return statistics.fmean(a == b for a, b in zip(ours, theirs, strict=True))


def bench_quantized(
    targets: Sequence[str] = TARGETS,
    drafter: str = "ngram",
    per_category: int = 1,
    max_new_tokens: int = 64,
    prompts_file: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> QuantizedBench:
    """Decode prompts greedily on each target, with and without drafts, one prompt at a time.

    Args:
        targets: names or expressions, as in a config; a target that is refused is listed with its reason.
        drafter: for the speculative runs.
        per_category: how many prompts of each category, from the first on; their first turns count.
        max_new_tokens: how many for each prompt; the end of text does not stop it.
        prompts_file: prompts in Spec-Bench's format; the project's own if None.
        progress: told what runs now.

    Raises:
        ConfigError: the drafter, the file or a name is wrong.
    """
    result = QuantizedBench(drafter, max_new_tokens)
    chosen = first_of_each(load_prompts(prompts_file), per_category)
    with ExitStack() as stack:
        pipelines: dict[str, Pipeline] = {}
        for target in dict.fromkeys([BASE, *targets]):
            progress(f"loading {target}")
            try:
                pipeline = _load(target, drafter)
            except (ConfigError, PluginError, UnsupportedModelError) as error:
                if target == BASE:
                    raise
                result.refused[target] = str(error)
                continue
            pipelines[target] = stack.enter_context(pipeline)
            result.measured[target] = _describe(target, pipeline)
        for number, prompt in enumerate([chosen[0], *chosen]):  # the first one warms up
            ids = pipelines[BASE].encode([{"role": "user", "content": prompt.turns[0]}])
            for target in in_turn(list(pipelines), number):
                for mode in _MODES:
                    progress(f"prompt {number} of {len(chosen)}: {target}, {mode}")
                    output, seconds = _decode(pipelines[target], ids, max_new_tokens, mode)
                    if number:
                        measured = result.measured[target]
                        measured.seconds[mode].append(seconds)
                        measured.texts[mode].append(tuple(output.token_ids))
                        if mode == "speculative":
                            measured.passes += output.speculation.target_passes
    return result


def _load(target: str, drafter: str) -> Pipeline:
    return Pipeline.from_config(
        {
            "target": target,
            "drafter": drafter,
            "dtype": "bfloat16",
            "engine": {"prefix_cache": False},
        }
    )


def _describe(target: str, pipeline: Pipeline) -> _Measured:
    loaded = pipeline.target
    setting = "bfloat16"
    if loaded.quantization is not None:
        head = loaded.model.get_output_embeddings()
        too = any(layer is head for _, layer in quantized_linears(loaded.model))
        setting = f"{loaded.quantization.setting}{', head too' if too else ''}"
    return _Measured(
        loader=target.partition("(")[0],
        setting=setting,
        bytes=weight_bytes(loaded.model),
        perplexity=passage_perplexity(pipeline),
    )


def _decode(pipeline: Pipeline, ids: list[int], tokens: int, mode: str) -> tuple[Output, float]:
    began = time.perf_counter()
    (output,) = pipeline.generate(
        ids,
        max_new_tokens=tokens,
        temperature=0.0,
        ignore_eos=True,
        speculation={"enabled": mode == "speculative"},
        progress=False,
    )
    return output, time.perf_counter() - began


def passage_perplexity(pipeline: Pipeline) -> float:
    """Of the passage that comes with specfw, by the model's own forward."""
    text = (files("specfw.bench") / "passage.txt").read_text(encoding="utf-8")
    ids = pipeline.encode(text)
    logits = pipeline.engine.runner.stock_logits(ids)[:-1].float()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:], device=logits.device))
    return math.exp(float(losses))
