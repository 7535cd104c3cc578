"""`specfw demo`: three prompts on a real model, plain and speculatively, timed and checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specfw.bench.prompts import Prompt, demo_prompts
from specfw.cli.generate import print_stream
from specfw.cli.options import Drafter
from specfw.pipeline import Pipeline
from specfw.types import Output

__all__ = ["NAME", "command"]

NAME = "demo"


@dataclass(frozen=True, slots=True)
class _Run:
    output: Output
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second, the prompt's prefill included."""
        return len(self.output.token_ids) / self.seconds


def command(
    drafter: Drafter = "ngram",
    tokens: Annotated[int, typer.Option(help="Tokens to emit for each prompt.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each kind; the median counts.")] = 3,
) -> None:
    """Decode three prompts of the demo model plain and speculatively, and compare speed and text."""
    console = Console(highlight=False)
    prompts = demo_prompts()
    fresh = {"prefix_cache": False}  # each timed run pays for its own prefill
    plain = Pipeline.from_config({"target": "demo", "engine": fresh})
    speculative = Pipeline.from_config({"target": "demo", "drafter": drafter, "engine": fresh})
    for prompt in prompts:
        console.print(f"\n[bold]{prompt.category}[/bold] (green: tokens that the drafter had right)")
        print_stream(speculative, _chat(prompt), show_accepted=True, max_new_tokens=tokens)
    table = Table("prompt", "plain tok/s", "speculative tok/s", "ratio", "acceptance length", "guarantee", "same text")
    ratios, notes = [], []
    for prompt in prompts:
        pairs = [(_timed(plain, prompt, tokens), _timed(speculative, prompt, tokens)) for _ in range(repeats)]
        ratio = statistics.median(b.speed / a.speed for a, b in pairs)
        ratios.append(ratio)
        before, after = pairs[0][0].output, pairs[0][1].output
        same = before.token_ids == after.token_ids
        if not same:
            notes.append(f"{prompt.category}: {_first_difference(plain, prompt, before, after)}")
        table.add_row(
            prompt.category,
            f"{statistics.median(a.speed for a, _ in pairs):.1f}",
            f"{statistics.median(b.speed for _, b in pairs):.1f}",
            f"{ratio:.2f}",
            f"{after.speculation.acceptance_length:.2f}",
            after.speculation.guarantee,
            "yes" if same else "no",
        )
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    plain.close()
    speculative.close()
    print(f"identical: {'yes' if _identical(prompts, drafter, tokens) else 'no'}")
    print(f"speedup: {statistics.mean(ratios):.2f}")


def _chat(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.turns[0]}]


def _timed(pipeline: Pipeline, prompt: Prompt, tokens: int) -> _Run:
    start = time.perf_counter()
    [output] = pipeline.generate(_chat(prompt), max_new_tokens=tokens)
    return _Run(output, time.perf_counter() - start)


def _first_difference(plain: Pipeline, prompt: Prompt, before: Output, after: Output) -> str:
    """Where two greedy texts part, and how close the target's two best tokens were there."""
    place = next(
        (i for i, (a, b) in enumerate(zip(before.token_ids, after.token_ids, strict=False)) if a != b),
        min(len(before.token_ids), len(after.token_ids)),
    )
    [output] = plain.generate(_chat(prompt), max_new_tokens=place + 1, logprobs=2)
    assert output.logprobs is not None
    (_, best), (_, second) = output.logprobs[place].top
    return (
        f"the texts part at token {place}, where the two best log-probabilities are {best - second:.4f} apart "
        "(in bfloat16, passes over one row and over several round differently)"
    )


def _identical(prompts: Sequence[Prompt], drafter: str | None, tokens: int) -> bool:
    """Whether float32 texts are the same with and without speculation, greedy and sampled."""
    texts = []
    for settings in ({}, {"drafter": drafter}):
        with Pipeline.from_config({"target": "demo", "dtype": "float32", **settings}) as pipeline:
            texts.append(
                [
                    output.token_ids
                    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1})
                    for output in pipeline.generate([_chat(p) for p in prompts], max_new_tokens=tokens, **sampling)
                ]
            )
    return texts[0] == texts[1]
