"""`specfw train`: make a drafter for a target, without a data set."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from specfw.cli.options import Dtype, given

if TYPE_CHECKING:
    from specfw.training.run import Tell

__all__ = ["NAME", "command"]

NAME = "train"


def command(
    context: typer.Context,
    trainer: Annotated[
        str, typer.Argument(help="What to train: a name or an expression, as in 'recycling(k=4)'.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the result; an unfinished one goes on.")],
    target: Annotated[
        str, typer.Option(help="`demo`, a local folder, a hub id, or an expression.")
    ] = "demo",
    minutes: Annotated[
        float | None,
        typer.Option(min=0.0, help="Time for writing texts and training, over all calls."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the target writes, over all calls.")
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="A folder of texts to share; default: OUT/texts.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="User's turns, one a line, or .jsonl; the target goes on after `…`. Default: its own."
        ),
    ] = None,
    turn_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens that the target writes of a user's turn.")
    ] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 64,
    conversations: Annotated[
        int, typer.Option(min=1, help="Texts in each shard, after which a killed run goes on.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="The seed of all chance.")] = 0,
    evaluate: Annotated[
        bool, typer.Option(help="Measure what was trained, for its model card.")
    ] = True,
    dtype: Dtype = None,
) -> None:
    """Let the target write texts, train a drafter on them, and describe it in a model card."""
    from specfw.plugins import PluginManager
    from specfw.training.card import write_card
    from specfw.training.run import Plan, run_training
    from specfw.training.writing import WritingSettings

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    settings = WritingSettings(seed=seed, conversations=conversations, turn_tokens=turn_tokens)
    plan = Plan(out, texts, tokens, minutes, prompts, batch, settings)
    bound = PluginManager().bind("trainer", trainer)
    with _bar(console) as tell:
        trained = run_training(target, bound, plan, tell, given(dtype=dtype))
        write_card(
            target, bound, plan, trained, given(dtype=dtype), evaluate, tell, _as_given(context)
        )
    print(out)


def _as_given(context: typer.Context) -> str:
    """The command line as it was given."""
    words = ["specfw", NAME]
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params[name]
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [*parameter.opts[-1:] * (parameter.param_type_name == "option"), str(value)]
    return shlex.join(words)


@contextmanager
def _bar(console: Console) -> Iterator[Tell]:
    """Lines on how it goes, and on a terminal a bar below them."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def tell(text: str, share: float | None = None) -> None:
            console.print(text, markup=False)
            bar.update(task, description=text.partition(":")[0], completed=share)

        yield tell
