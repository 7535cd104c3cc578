"""`specfw demo`: three prompts on a real model, plain and speculatively, timed and checked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from specfw.bench.prompts import Prompt, demo_prompts
from specfw.cli.generate import print_stream
from specfw.cli.options import Drafter
from specfw.pipeline import Pipeline
from specfw.types import Output, SamplingParams

__all__ = ["NAME", "command"]

NAME = "demo"

_DRAFTER = "first(suffix(max_nodes=7), eagle(path='demo', max_nodes=3))"
"""What is fastest here of what comes with the plugins."""


@dataclass(frozen=True, slots=True)
class _Run:
    output: Output
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second, the prompt's prefill included."""
        return len(self.output.token_ids) / self.seconds


def command(
    drafter: Drafter = _DRAFTER,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to emit for each prompt.")] = 128,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each kind; the median counts.")
    ] = 3,
) -> None:
    """Decode three prompts of the demo model plain and speculatively, and compare speed and text."""
    prompts = demo_prompts()
    fresh = {"prefix_cache": False}  # each timed run pays for its own prefill
    with ExitStack() as stack:
        with _busy("loading the demo model"):
            plain, speculative = (
                stack.enter_context(
                    Pipeline.from_config({"target": "demo", "drafter": name, "engine": fresh})
                )
                for name in ("none", drafter)
            )
        _show_texts(speculative, prompts, tokens)
        with _busy("timing plain and speculative decoding in turn"):
            ratio = _compare(plain, speculative, prompts, tokens, repeats)
    with _busy("comparing float32 texts with and without speculation, greedy and sampled"):
        identical = _identical(prompts, drafter, tokens)
    print(f"identical: {'yes' if identical else 'no'}")
    print(f"speedup: {ratio:.2f}")


def _busy(what: str) -> Status:
    """Says on a terminal what takes a while."""
    return Console(stderr=True).status(f"{what} ...")


def _show_texts(pipeline: Pipeline, prompts: Sequence[Prompt], tokens: int) -> None:
    console = Console(highlight=False)
    if console.is_terminal:
        console.print("[green]Green[/green]: from steps in which drafted tokens were kept.")
    for prompt in prompts:
        console.print(f"\n[bold]{prompt.category}[/bold]")
        print_stream(pipeline, _chat(prompt), show_accepted=True, max_new_tokens=tokens)
    print()


def _compare(
    plain: Pipeline, speculative: Pipeline, prompts: Sequence[Prompt], tokens: int, repeats: int
) -> float:
    """Print a table of both, prompt by prompt; the mean ratio of their speeds."""
    ratios, notes = [], []
    table = Table(caption="tokens a second include the prompt's prefill")
    for heading in ("prompt", "plain\ntok/s", "spec.\ntok/s", "ratio", "acceptance\nlength"):
        table.add_column(heading, justify="left" if heading == "prompt" else "right")
    for heading in ("guarantee", "same\ntext"):
        table.add_column(heading)
    for prompt in prompts:
        pairs = [
            (_timed(plain, prompt, tokens), _timed(speculative, prompt, tokens))
            for _ in range(repeats)
        ]
        ratios.append(statistics.median(b.speed / a.speed for a, b in pairs))
        before, after = pairs[0][0].output, pairs[0][1].output
        same = before.token_ids == after.token_ids
        if not same:
            notes.append(f"{prompt.category}: {_first_difference(plain, prompt, before, after)}")
        table.add_row(
            prompt.category,
            f"{statistics.median(a.speed for a, _ in pairs):.1f}",
            f"{statistics.median(b.speed for _, b in pairs):.1f}",
            f"{ratios[-1]:.2f}",
            f"{after.speculation.acceptance_length:.2f}",
            after.speculation.guarantee,
            "yes" if same else "no",
        )
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    return statistics.mean(ratios)


def _chat(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.turns[0]}]


def _timed(pipeline: Pipeline, prompt: Prompt, tokens: int) -> _Run:
    start = time.perf_counter()
    [output] = pipeline.generate(_chat(prompt), max_new_tokens=tokens)
    return _Run(output, time.perf_counter() - start)


def _first_difference(plain: Pipeline, prompt: Prompt, before: Output, after: Output) -> str:
    """Where two greedy texts part, and how close the target's two best tokens were there."""
    place = next(
        (
            i
            for i, (a, b) in enumerate(zip(before.token_ids, after.token_ids, strict=False))
            if a != b
        ),
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
    ways = [
        SamplingParams(max_new_tokens=tokens),
        SamplingParams(max_new_tokens=tokens, temperature=0.8, seed=1),
    ]
    for name in ("none", drafter):
        settings = {"target": "demo", "dtype": "float32", "drafter": name}
        with Pipeline.from_config(settings) as pipeline:
            texts.append(
                [
                    output.token_ids
                    for params in ways
                    for output in pipeline.generate([_chat(p) for p in prompts], params)
                ]
            )
    return texts[0] == texts[1]
