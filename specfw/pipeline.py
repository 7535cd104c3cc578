"""The face of specfw in Python: a config becomes a `Pipeline`, which generates and streams."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specfw.config import PipelineConfig, load_config
from specfw.contracts import LoadedTarget, TargetInfo
from specfw.cost_cache import pass_seconds
from specfw.errors import CapacityError, ConfigError, ContractError
from specfw.plugins import PluginManager
from specfw.types import Output, Piece, SamplingParams

if TYPE_CHECKING:
    from specfw.engine.engine import Engine, StepReport
    from specfw.engine.model_runner import ModelRunner
    from specfw.engine.requests import Request

__all__ = ["Pipeline", "Prompt", "samples_of"]

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
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._abandoned: deque[Request] = deque()
        self._closed = False

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | PipelineConfig | str | os.PathLike[str],
        plugins: Iterable[object] = (),
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
        if isinstance(config, Mapping):
            config = PipelineConfig(**config)
        if not isinstance(config, PipelineConfig):
            raise ConfigError(
                "config: expected a mapping, a PipelineConfig or the path of a config file, "
                f"got {config!r}; pass one of these"
            )
        return cls(config, plugins)

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.target.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool | None = None,
        **settings: Any,
    ) -> list[Output]:
        """Decode all prompts together and return one output each (or `n`), in order.

        Args:
            prompts: one prompt or several; a prompt is text, token ids or chat messages.
            params: the settings of all requests or of each; the config's `sampling` if left out.
            n: samples of each prompt, next to each other; the first is what n=1 gives, and the seeds of
                the others follow from its seed.
            progress: show a progress bar; None does for eight prompts or more on a terminal.
            **settings: fields of `SamplingParams` that replace those of `params`.

        Raises:
            ConfigError: a prompt or setting is wrong.
            CapacityError: a prompt does not fit.
        """
        with (
            self._submitted(prompts, params, settings, n) as requests,
            _progress(progress, len(requests)) as show,
        ):
            while unfinished := _unfinished(requests):
                show(len(requests) - unfinished)
                self._step()
            show(len(requests))
        return _outputs(requests)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **settings: Any,
    ) -> Iterator[Piece]:
        """Decode and hand over text as it comes; the last piece of each request carries its output.

        Leaving the iterator early cancels what is unfinished. Arguments are those of `generate`;
        `Piece.index` tells prompts apart.
        """
        with self._submitted(prompts, params, settings, n, streams=True) as requests:
            while True:
                unfinished = _unfinished(requests)  # counted first, so that no last piece is missed
                yield from _take_pieces(requests)
                if not unfinished:
                    return
                self._step()

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **settings: Any,
    ) -> list[Output]:
        """`generate` for asyncio: steps run in a worker thread."""
        with self._submitted(prompts, params, settings, n) as requests:
            while _unfinished(requests):
                await asyncio.to_thread(self._step)
        return _outputs(requests)

    async def astream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **settings: Any,
    ) -> AsyncIterator[Piece]:
        """`stream` for asyncio."""
        with self._submitted(prompts, params, settings, n, streams=True) as requests:
            while True:
                unfinished = _unfinished(requests)  # counted first, so that no last piece is missed
                for piece in _take_pieces(requests):
                    yield piece
                if not unfinished:
                    return
                await asyncio.to_thread(self._step)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; chat messages go through the tokenizer's template.

        Raises:
            ConfigError: it is none of the kinds of prompts, or there is no tokenizer or template for it.
        """
        if isinstance(prompt, str):
            return [int(token) for token in self._need_tokenizer("text")(prompt)["input_ids"]]
        if not _is_list(prompt):
            raise ConfigError(
                _PROMPT_KINDS.format("prompt", f"an object of type {type(prompt).__name__}")
            )
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self._encode_chat(prompt)
        ids: list[int] = []
        for token in prompt:
            if not isinstance(token, Integral):
                raise ConfigError(
                    _PROMPT_KINDS.format("prompt", f"a list with a {type(token).__name__} in it")
                )
            ids.append(int(token))
        return ids

    def close(self) -> None:
        """Cancel what runs and release the drafter; the pipeline takes no more prompts."""
        with self._engine_to_itself():
            if self._closed:
                return
            self._closed = True
            self._abandoned.extend([*self.engine.planner.running, *self.engine.planner.waiting])
            self._cancel_abandoned()
            self.engine.drafters.close()

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
        n: int,
        streams: bool = False,
    ) -> Iterator[list[Request]]:
        """Queue requests; on leaving, whatever is unfinished is cancelled."""
        each = _as_prompts(prompts)
        sampling = [
            _merge(own, settings) for own in _as_params(params, len(each), self.config.sampling)
        ]
        requests: list[Request] = []
        try:
            with self._engine_to_itself():
                if self._closed:
                    raise ConfigError(
                        "pipeline: expected an open pipeline, got one that was closed; build another"
                    )
                for prompt, own in zip(each, sampling, strict=True):
                    tokens = self.encode(prompt)  # here, for tokenizers are not safe in threads
                    for sample in samples_of(own, n):
                        index = len(requests)
                        requests.append(
                            self.engine.add(tokens, sample, index=index, streams=streams)
                        )
            yield requests
        finally:
            self._abandoned.extend(requests)
            # A forgotten stream may be collected amid this thread's own step, which then cancels.
            if requests and not self._has_engine:
                with self._engine_to_itself():
                    pass

    @property
    def _has_engine(self) -> bool:
        """Whether this thread has the engine, or waits for it."""
        return getattr(self._thread, "has_engine", False)

    @contextmanager
    def _engine_to_itself(self) -> Iterator[None]:
        """Let one thread at a time use the engine; on leaving, abandoned requests are cancelled."""
        if self._has_engine:
            raise ContractError(
                "pipeline: expected no call from within its own step, got one, probably from a hook; "
                "make it from another thread"
            )
        self._thread.has_engine = True
        try:
            with self._lock:
                yield
                self._cancel_abandoned()
        finally:
            self._thread.has_engine = False

    def _cancel_abandoned(self) -> None:
        cancelled = []
        while self._abandoned:
            request = self._abandoned.popleft()
            if request.output is None:
                self.engine.cancel(request)
                cancelled.append(request)
        for output in _outputs(cancelled):
            self.plugins.hook.specfw_request_finished(output=output)

    def _step(self) -> None:
        with self._engine_to_itself():
            if self.engine.has_work:
                self._tell(self.engine.step())

    def _tell(self, report: StepReport) -> None:
        self.plugins.hook.specfw_step(report=report)
        for output in report.finished:
            self.plugins.hook.specfw_request_finished(output=output)

    def _encode_chat(self, messages: Any) -> list[int]:
        tokenizer = self._need_tokenizer("chat messages")
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"prompt: expected a tokenizer with a chat template, but that of target "
                f"{self.target.name!r} has none; pass text"
            )
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise ConfigError(
                    f"prompt: expected chat messages with 'role' and 'content', got {message!r}; "
                    "give both"
                )
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except Exception as error:  # a template is a program of its own
            raise ConfigError(
                f"prompt: the chat template of target {self.target.name!r} refuses these messages "
                f"({error}); change their roles or order"
            ) from error
        return [int(token) for token in ids]

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(
                f"prompt: expected token ids, for target {self.target.name!r} has no tokenizer, "
                f"got {what}; encode it first"
            )
        return self.tokenizer


_HOST_MEMORY_ELSEWHERE = 8 << 30
"""Bytes that are taken for free on hosts that do not say."""

_PROMPT_KINDS = (
    "{}: expected text, token ids or chat messages, got {}; "
    "pass ids as a list of integers, and a message within a list"
)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise ConfigError(
            _PROMPT_KINDS.format("prompts", f"an object of type {type(prompts).__name__}")
        )
    if len(prompts) and isinstance(prompts[0], (Integral, Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams | None] | None,
    count: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """One params for each of `count` prompts."""
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * count
    for own in each:
        if own is not None and not isinstance(own, SamplingParams):
            raise ConfigError(
                f"params: expected SamplingParams, or a list of them, got {own!r}; "
                "pass SamplingParams(...), or single settings by name"
            )
    if len(each) != count:
        raise ConfigError(
            f"params: expected one for each of {count} prompts, got {len(each)}; "
            "pass as many, or one for all"
        )
    return [default if own is None else own for own in each]


def _merge(params: SamplingParams, settings: Mapping[str, Any]) -> SamplingParams:
    """`params` with some fields replaced, checked anew."""
    return SamplingParams(**{**dict(params), **settings}) if settings else params


def samples_of(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The settings of `n` samples of one prompt, whose seeds follow from the first one's.

    Raises:
        ConfigError: n is no positive integer, or all samples would be the same.
    """
    if type(n) is not int or n < 1:
        raise ConfigError(f"n: expected a number of samples from 1, got {n!r}; pass one")
    if n == 1:
        return [params]
    if params.temperature == 0.0:
        raise ConfigError(
            f"n: expected 1 at temperature 0, for {n} samples would be the same; raise the temperature"
        )
    if params.seed is None:
        return [params] * n
    return [
        params,
        *(params.model_copy(update={"seed": _seed(params.seed, i)}) for i in range(1, n)),
    ]


def _seed(seed: int, sample: int) -> int:
    """The seed of another sample than the first."""
    text = f"{seed & (2**63 - 1)} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def _unfinished(requests: Sequence[Request]) -> int:
    return sum(request.output is None for request in requests)


def _outputs(requests: Sequence[Request]) -> list[Output]:
    return [request.output for request in requests if request.output is not None]


def _take_pieces(requests: Sequence[Request]) -> Iterator[Piece]:
    for request in requests:
        while request.pieces:
            yield request.pieces.popleft()


@contextmanager
def _progress(wanted: bool | None, total: int) -> Iterator[Any]:
    """A progress bar over requests: yields a function that is told how many are done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if wanted is False or (wanted is None and (total < 8 or not console.is_terminal)):
        yield lambda count: None
        return
    with Progress(console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("decoding", total=total)
        yield lambda count: bar.update(task, completed=count)


def _build_engine(config: PipelineConfig, target: LoadedTarget, bound: Any) -> Engine:
    from specfw.decoding.random import KeyedSource
    from specfw.engine.engine import Engine
    from specfw.engine.memory import KVMemory
    from specfw.engine.model_runner import ModelRunner

    settings = config.engine
    runner = ModelRunner(target.model, settings.prepack)
    longest = settings.max_length or runner.max_length
    if longest > runner.max_length:
        raise ConfigError(
            f"engine: expected max_length of at most {runner.max_length}, which is what the target "
            f"{target.name!r} can position, got {longest}; lower it or leave it out"
        )
    tokens = settings.kv_tokens or _kv_tokens(runner, settings.max_batch * longest)
    return Engine(
        runner,
        KVMemory(max(1, tokens // settings.block_size), settings.block_size, settings.prefix_cache),
        _describe(target, runner, longest),
        bound.drafter.build(),
        bound.verifier.build(),
        [one.build() for one in bound.scheduler],
        KeyedSource(),
        drafters={name: one.build() for name, one in bound.drafters.items()},
        max_batch=settings.max_batch,
        max_step_tokens=settings.max_step_tokens,
        prefill_chunk=settings.prefill_chunk,
        prefill_share=settings.prefill_share,
        patience=settings.patience,
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
        pass_seconds=pass_seconds(runner, target.name),
    )


def _eos_token_ids(target: LoadedTarget) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, else the model config's, else the tokenizer's."""
    for source in (
        getattr(target.model, "generation_config", None),
        target.model.config,
        target.tokenizer,
    ):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids]))
    return ()


def _kv_tokens(runner: ModelRunner, wanted: int) -> int:
    """KV capacity in tokens: what all requests could use, but at most a share of the free memory."""
    budget = _free_memory(runner)
    tokens = min(wanted, budget // max(1, runner.bytes_per_token))
    if tokens < 1:
        raise CapacityError(
            f"engine: expected free memory for at least one token of {runner.bytes_per_token} KV bytes, "
            f"got {budget} bytes; free some, or set engine.kv_tokens"
        )
    return tokens


def _free_memory(runner: ModelRunner) -> int:
    """Bytes that may be used: most of what a GPU has free, a quarter of what the host has."""
    if runner.device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(runner.device)[0] * 0.8)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024 // 4
    except (OSError, StopIteration):  # not Linux
        return _HOST_MEMORY_ELSEWHERE // 4
