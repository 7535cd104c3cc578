"""`specfw chat`: talk to the target in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specfw.cli.generate import print_stream
from specfw.cli.options import (
    Choices,
    ConfigFile,
    Drafter,
    Dtype,
    Grammar,
    JsonSchema,
    MinP,
    Overrides,
    Regex,
    Schedulers,
    Seed,
    ShowAccepted,
    Target,
    Temperature,
    TopK,
    TopP,
    Verifier,
    given,
    read_config,
    structure,
)
from specfw.errors import ConfigError, SpecfwError
from specfw.types import Output

if TYPE_CHECKING:
    from specfw.pipeline import Pipeline

__all__ = ["NAME", "Chat", "command"]

NAME = "chat"

_HELP = "/reset forgets the conversation, /quit ends it"


def command(
    system: Annotated[str | None, typer.Option(help="What the conversation begins with.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    choice: Choices = None,
    seed: Seed = None,
    show_accepted: ShowAccepted = False,
    target: Target = None,
    drafter: Drafter = None,
    verifier: Verifier = None,
    scheduler: Schedulers = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Talk to the target; answers stream, and each is followed by its speed."""
    from specfw.pipeline import Pipeline

    settings = given(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        **structure(json_schema, regex, grammar, choice),
    )
    read = read_config(
        config,
        overrides,
        default_target="demo",
        target=target,
        drafter=drafter,
        verifier=verifier,
        scheduler=scheduler,
        dtype=dtype,
    )
    with Pipeline.from_config(read) as pipeline:
        Chat(pipeline, system, show_accepted, settings).run()


class Chat:
    """A conversation, which grows by what was said and answered."""

    def __init__(
        self,
        pipeline: Pipeline,
        system: str | None = None,
        show_accepted: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Start one.

        Raises:
            ConfigError: the target's tokenizer has no chat template.
        """
        if getattr(pipeline.tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"chat: expected a tokenizer with a chat template, but that of target "
                f"{pipeline.target.name!r} has none; use specfw generate --raw"
            )
        self._pipeline, self._show_accepted = pipeline, show_accepted
        self._settings = settings or {}
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Read and answer until /quit or the end of the input."""
        self._console.print(_HELP, style="dim")
        while (said := self._read()) is not None and said != "/quit":
            if said == "/reset":
                self.messages = list(self._start)
                self._console.print("forgotten", style="dim")
            elif said.startswith("/"):
                self._console.print(f"no such command: {said}; {_HELP}", style="dim", markup=False)
            elif said:
                self.answer(said)

    def answer(self, said: str) -> None:
        """Stream the answer; one that failed or was interrupted leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": said}]
        began = time.perf_counter()
        try:
            output = print_stream(self._pipeline, asked, self._show_accepted, **self._settings)
        except KeyboardInterrupt:
            print()
            self._console.print("interrupted", style="dim")
            return
        except SpecfwError as error:
            self._console.print(f"error: {error}", style="red", markup=False)
            return
        seconds = time.perf_counter() - began
        if output.error is not None:
            self._console.print(f"error: {output.error}", style="red", markup=False)
            return
        self.messages = [*asked, {"role": "assistant", "content": output.text}]
        self._console.print(_speed(output, seconds), style="dim", markup=False)

    def _read(self) -> str | None:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return None


def _speed(output: Output, seconds: float) -> str:
    tokens = output.usage.completion_tokens
    return (
        f"[{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} tokens/s, "
        f"{output.speculation.acceptance_length:.2f} tokens a target pass]"
    )
