"""`specfw generate`: decode prompts, plain or speculatively."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specfw.bench.prompts import load_prompts
from specfw.cli.options import (
    Choices,
    ConfigFile,
    Drafter,
    DraftWith,
    Dtype,
    Grammar,
    JsonOutput,
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
    output_mapping,
    print_json,
    read_config,
    structure,
)
from specfw.errors import ConfigError, SpecfwError
from specfw.types import Output

if TYPE_CHECKING:
    from specfw.pipeline import Pipeline
    from specfw.pipeline import Prompt as PipelinePrompt

__all__ = ["NAME", "command", "print_stream"]

NAME = "generate"


def command(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="A text file with one prompt, or a .jsonl file with many (`turns`)."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Through the chat template, or as it is; default: chat if there is one.",
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens to emit.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: Grammar = None,
    choice: Choices = None,
    stop: Annotated[list[str] | None, typer.Option(help="A stop string; may be repeated.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities, with this many alternatives.")
    ] = None,
    seed: Seed = None,
    show_accepted: ShowAccepted = False,
    draft_with: DraftWith = None,
    target: Target = None,
    drafter: Drafter = None,
    verifier: Verifier = None,
    scheduler: Schedulers = None,
    dtype: Dtype = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: JsonOutput = False,
) -> None:
    """Decode one or more prompts."""
    from specfw.pipeline import Pipeline

    settings = given(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop,
        logprobs=logprobs,
        seed=seed,
        **structure(json_schema, regex, grammar, choice),
    )
    texts = _prompts(prompt, prompt_file)
    own = [f"sampling.speculation.drafter={draft_with!r}"] if draft_with else []
    read = read_config(
        config,
        [*own, *(overrides or [])],
        target=target,
        drafter=drafter,
        verifier=verifier,
        scheduler=scheduler,
        dtype=dtype,
    )
    with Pipeline.from_config(read) as pipeline:
        prompts = [_as_chat(pipeline, text, chat) for text in texts]
        if len(prompts) == 1 and not as_json:
            _fail_on_error(print_stream(pipeline, prompts[0], show_accepted, **settings))
            return
        outputs = pipeline.generate(prompts, progress=False if as_json else None, **settings)
        if as_json:
            mappings = [output_mapping(output) for output in outputs]
            print_json(mappings[0] if len(mappings) == 1 else mappings)
        else:
            for output in outputs:
                print(output.text, end="\n\n")
        for output in outputs:
            _fail_on_error(output)


def print_stream(
    pipeline: Pipeline, prompt: PipelinePrompt, show_accepted: bool, **settings: Any
) -> Output:
    """Stream one prompt's text to stdout, and return its output."""
    console = Console(highlight=False, soft_wrap=True)
    coloured = show_accepted and console.is_terminal
    output = None
    for piece in pipeline.stream(prompt, **settings):
        if coloured and any(piece.accepted):
            console.print(Text(piece.text, style="green"), end="")
        else:
            print(piece.text, end="", flush=True)  # as it is: a console would replace tabs
        output = piece.output or output
    print()
    if output is None:
        raise SpecfwError("generate: the request ended without an output; report this")
    return output


def _prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    texts = list(prompts or [])
    if file is not None and file.suffix == ".jsonl":
        texts += [prompt.turns[0] for prompt in load_prompts(file)]
    elif file is not None:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt-file: cannot read {str(file)!r}: {error}") from None
    if not texts:
        raise ConfigError(
            "generate: expected a prompt, got none; give --prompt TEXT or --prompt-file FILE"
        )
    return texts


def _as_chat(pipeline: Pipeline, text: str, chat: bool | None) -> PipelinePrompt:
    if not text:
        raise ConfigError(
            "generate: expected a prompt with text, got an empty one; write something"
        )
    if chat is None:
        chat = bool(getattr(pipeline.tokenizer, "chat_template", None))
    return [{"role": "user", "content": text}] if chat else text


def _fail_on_error(output: Output) -> None:
    if output.error is not None:
        raise SpecfwError(output.error)
