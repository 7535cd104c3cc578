"""The face of specfw in Python: a config becomes a `Pipeline`, which generates and streams."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specfw.config import PipelineConfig, load_config
from specfw.contracts import LoadedTarget, TargetInfo
from specfw.errors import CapacityError, ConfigError
from specfw.plugins import PluginManager
from specfw.types import Output, Piece, SamplingParams

if TYPE_CHECKING:
    from specfw.engine.engine import Engine, StepReport
    from specfw.engine.model_runner import ModelRunner
    from specfw.engine.requests import Request

__all__ = ["Pipeline", "Prompt"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages with `role` and `content`."""


class Pipeline:
    """A target with its drafter, verifier and schedulers, ready to decode.

    Several threads or tasks may use one pipeline at once; their requests share every step.
    """

    def __init__(self, config: PipelineConfig, plugins: Iterable[object] = ()) -> None:
        """Load the target and wire everything; see `from_config`."""
        self.config = config
        self.plugins = PluginManager(plugins, strict=config.engine.strict_plugins)
        bound = config.bind(self.plugins)
        self.target: LoadedTarget = bound.target.build().load()
        self.engine = _build_engine(config, self.target, bound)
        self._lock = threading.RLock()

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | PipelineConfig | str | os.PathLike[str], plugins: Iterable[object] = ()
    ) -> Pipeline:
        """Build a pipeline from a mapping, a `PipelineConfig` or a config file.

        Args:
            config: see `PipelineConfig` for the keys.
            plugins: plugin modules or objects besides the installed ones.

        Raises:
            ConfigError: a setting is wrong.
            UnsupportedModelError: the target cannot be decoded exactly.
        """
        if isinstance(config, (str, os.PathLike)):
            config = load_config(config)
        return cls(config if isinstance(config, PipelineConfig) else PipelineConfig(**config), plugins)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **settings: Any,
    ) -> list[Output]:
        """Decode all prompts together and return one output each, in order.

        Args:
            prompts: one prompt or several; a prompt is text, token ids or chat messages.
            params: the settings of all requests or of each; the config's `sampling` if left out.
            progress: show a progress bar; None does for eight prompts or more on a terminal.
            **settings: fields of `SamplingParams` that replace those of `params`.

        Raises:
            ConfigError: a prompt or setting is wrong.
            CapacityError: a prompt does not fit.
        """
        with self._submitted(prompts, params, settings) as requests, _progress(progress, len(requests)) as advance:
            done = 0
            while unfinished := [r for r in requests if r.output is None]:
                advance(len(requests) - len(unfinished) - done)
                done = len(requests) - len(unfinished)
                self._step()
            advance(len(requests) - done)
            return [request.output for request in requests if request.output is not None]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Decode and hand over text as it comes; the last piece of each request carries its output.

        Leaving the iterator early cancels what is unfinished. Arguments are those of `generate`;
        `Piece.index` tells prompts apart.
        """
        with self._submitted(prompts, params, settings, streams=True) as requests:
            while True:
                finished = all(request.output is not None for request in requests)
                for request in requests:
                    while request.pieces:
                        yield request.pieces.popleft()
                if finished:
                    return
                self._step()

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> list[Output]:
        """`generate` for asyncio: steps run in a worker thread."""
        with self._submitted(prompts, params, settings) as requests:
            while any(request.output is None for request in requests):
                await asyncio.to_thread(self._step)
            return [request.output for request in requests if request.output is not None]

    async def astream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio."""
        with self._submitted(prompts, params, settings, streams=True) as requests:
            while True:
                finished = all(request.output is not None for request in requests)
                for request in requests:
                    while request.pieces:
                        yield request.pieces.popleft()
                if finished:
                    return
                await asyncio.to_thread(self._step)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; chat messages go through the tokenizer's template.

        Raises:
            ConfigError: there is no tokenizer or template for this kind of prompt.
        """
        if isinstance(prompt, str):
            return [int(token) for token in self._need_tokenizer("text")(prompt)["input_ids"]]
        if len(prompt) and isinstance(prompt[0], Mapping):
            tokenizer = self._need_tokenizer("chat messages")
            if getattr(tokenizer, "chat_template", None) is None:
                raise ConfigError("prompt: expected a tokenizer with a chat template, got one without; pass text")
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
            return [int(token) for token in ids]
        if not all(isinstance(token, int) for token in prompt):
            raise ConfigError(f"prompt: expected text, token ids or chat messages, got {type(prompt[0]).__name__} items")
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def close(self) -> None:
        """Cancel what runs and release the drafter."""
        with self._lock:
            for request in [*self.engine.planner.running, *self.engine.planner.waiting]:
                self.engine.cancel(request)
            self.engine.drafter.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextmanager
    def _submitted(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        settings: Mapping[str, Any],
        streams: bool = False,
    ) -> Iterator[list[Request]]:
        """Queue requests; on leaving, whatever is unfinished is cancelled."""
        each = _as_prompts(prompts)
        several = [params] * len(each) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(several) != len(each):
            raise ConfigError(f"generate: expected one params for each of {len(each)} prompts, got {len(several)}")
        requests: list[Request] = []
        try:
            with self._lock:
                for index, (prompt, own) in enumerate(zip(each, several, strict=True)):
                    sampling = _merge(own or self.config.sampling, settings)
                    requests.append(self.engine.add(self.encode(prompt), sampling, index=index, streams=streams))
            yield requests
        finally:
            with self._lock:
                for request in requests:
                    self.engine.cancel(request)

    def _step(self) -> None:
        with self._lock:
            if self.engine.has_work:
                self._tell(self.engine.step())

    def _tell(self, report: StepReport) -> None:
        self.plugins.hook.specfw_step(report=report)
        for output in report.finished:
            self.plugins.hook.specfw_request_finished(output=output)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(f"prompt: expected token ids, for target {self.target.name!r} has no tokenizer, got {what}")
        return self.tokenizer


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _merge(params: SamplingParams, settings: Mapping[str, Any]) -> SamplingParams:
    """`params` with some fields replaced, checked anew."""
    return SamplingParams(**{**params.model_dump(), **settings}) if settings else params


@contextmanager
def _progress(wanted: bool | None, total: int) -> Iterator[Any]:
    """A progress bar over requests: yields a function that is told how many more are done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if wanted is False or (wanted is None and (total < 8 or not console.is_terminal)):
        yield lambda count: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("decoding", total=total)
        yield lambda count: bar.advance(task, count)


def _build_engine(config: PipelineConfig, target: LoadedTarget, bound: Any) -> Engine:
    from specfw.decoding.random import KeyedSource
    from specfw.engine.engine import Engine
    from specfw.engine.memory import KVMemory
    from specfw.engine.model_runner import ModelRunner

    settings = config.engine
    runner = ModelRunner(target.model, settings.prepack)
    longest = min(runner.max_length, settings.max_length or runner.max_length)
    tokens = settings.kv_tokens or _kv_tokens(runner, settings.max_batch * longest)
    return Engine(
        runner,
        KVMemory(max(1, tokens // settings.block_size), settings.block_size, settings.prefix_cache),
        _describe(target, runner, longest),
        bound.drafter.build(),
        bound.verifier.build(),
        [one.build() for one in bound.scheduler],
        KeyedSource(),
        max_batch=settings.max_batch,
        max_step_tokens=settings.max_step_tokens,
        prefill_chunk=settings.prefill_chunk,
    )


def _describe(target: LoadedTarget, runner: ModelRunner, longest: int) -> TargetInfo:
    return TargetInfo(
        name=target.name,
        vocab_size=runner.vocab_size,
        max_length=longest,
        eos_token_ids=_eos_token_ids(target),
        tokenizer=target.tokenizer,
        model=target.model,
        device=runner.device,
        dtype=runner.dtype,
    )


def _eos_token_ids(target: LoadedTarget) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, else the model config's, else the tokenizer's."""
    for source in (getattr(target.model, "generation_config", None), target.model.config, target.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]))
    return ()


def _kv_tokens(runner: ModelRunner, wanted: int) -> int:
    """KV capacity in tokens: what all requests could use, but at most a share of the free memory."""
    if runner.device.type == "cuda":
        import torch

        budget = int(torch.cuda.mem_get_info(runner.device)[0] * 0.8)
    else:
        budget = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    tokens = min(wanted, budget // max(1, runner.bytes_per_token))
    if tokens < 1:
        raise CapacityError(
            f"engine: expected free memory for at least one token of {runner.bytes_per_token} KV bytes, "
            f"got {budget} bytes; free some, or set engine.kv_tokens"
        )
    return tokens
