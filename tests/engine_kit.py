"""What engine tests share: an engine wired by hand, references without a cache, drafters that know the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from specfw.contracts import Drafter, Feedback, RequestView, TargetInfo, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.random import KeyedSource, RandomSource
from specfw.engine.engine import Engine, StepReport
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.types import Output, SamplingParams
from tests.tiny_models import VOCAB_SIZE, tiny

__all__ = [
    "OracleDrafter",
    "TwinDrafter",
    "make_engine",
    "outputs",
    "prompt_of",
    "reference",
    "run",
    "runner_of",
]

Texts = Sequence[Sequence[int]]


@cache
def runner_of(architecture: str) -> ModelRunner:
    """The session's tiny model, attached."""
    return ModelRunner(tiny(architecture))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids without the special ones."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, length).tolist()


@cache
def reference(architecture: str, prompt: tuple[int, ...], new: int) -> list[int]:
    """Prompt and greedy continuation by the model's own forward: no cache, one token at a time."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(runner_of(architecture).stock_logits(tokens)[-1].argmax()))
    return tokens


class OracleDrafter(Drafter):
    """Knows whole texts, and proposes what comes next in the one that the request is in.

    Each token is right with probability `right`; a wrong one is random. Notes which requests it
    holds something for.
    """

    def __init__(
        self, texts: Texts, right: float = 1.0, depth: int = 8, branches: int = 1, seed: int = 0
    ) -> None:
        self._texts = [list(text) for text in texts]
        self._right, self._depth, self._branches = right, depth, branches
        self._random = np.random.default_rng(seed)
        self.held: dict[int, int] = {}
        self.begun: list[int] = []

    def begin(self, request: RequestView) -> None:
        assert request.id not in self.held
        self.held[request.id] = len(request.tokens)
        self.begun.append(request.id)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, request in zip(builder.roots, requests, strict=True):
            assert request.id in self.held
            for _ in range(self._branches):
                builder.guess(
                    int(root), [self._blur(token) for token in self.next_of(request.tokens)]
                )

    def observe(self, feedback: Feedback) -> None:
        for request in feedback.requests:
            self.held[request.id] = len(request.tokens)

    def end(self, request: RequestView) -> None:
        del self.held[request.id]

    def next_of(self, tokens: Sequence[int]) -> list[int]:
        """The next tokens of the text that begins with `tokens`; none if it is unknown."""
        place = len(tokens)
        known = (text for text in self._texts if text[:place] == list(tokens))
        return next(known, list(tokens))[place : place + self._depth]

    def _blur(self, token: int) -> int:
        return (
            token if self._random.random() < self._right else int(self._random.integers(VOCAB_SIZE))
        )


class TwinDrafter(Drafter):
    """Samples from the logits of a model by its own forward; the target's own unless `model` is given."""

    def __init__(self, depth: int = 3, width: int = 1, model: Any = None) -> None:
        self._depth, self._width, self._model = depth, width, model

    def attach(self, target: TargetInfo) -> None:
        self._model = self._model or target.model

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        parents, texts = builder.roots, [list(request.tokens) for request in requests]
        for _ in range(self._depth):
            handles = builder.sample(parents, self._logits(texts), self._width)
            rows, ranks = np.nonzero(handles >= 0)
            if not len(rows):
                return
            parents = handles[rows, ranks]
            drawn = builder.tokens_of(parents).tolist()
            texts = [[*texts[row], token] for row, token in zip(rows, drawn, strict=True)]

    def _logits(self, texts: Texts) -> torch.Tensor:
        rows: dict[int, torch.Tensor] = {}
        for length in {len(text) for text in texts}:
            places = [place for place, text in enumerate(texts) if len(text) == length]
            ids = torch.tensor([texts[place] for place in places])
            rows |= zip(
                places, self._model(input_ids=ids, use_cache=False).logits[:, -1], strict=True
            )
        return torch.stack([rows[place] for place in range(len(texts))])


def make_engine(
    runner: ModelRunner | str,
    drafter: Drafter,
    verifier: Callable[[], Verifier] = CoupledVerifier,
    *,
    blocks: int = 200,
    block_size: int = 4,
    prefix_cache: bool = True,
    draft: tuple[int, int, int] = (8, 8, 4),
    eos: Sequence[int] = (),
    tokenizer: Any = None,
    random: RandomSource | None = None,
    drafters: Mapping[str, Drafter] | None = None,
    **sizes: int,
) -> Engine:
    """An engine on a runner, or on a tiny model by name; `draft` is nodes, depth and width."""
    if isinstance(runner, str):
        runner = runner_of(runner)
    info = TargetInfo(
        "tiny",
        VOCAB_SIZE,
        runner.max_length,
        tuple(eos),
        tokenizer,
        runner.model,
        runner.device,
        runner.dtype,
    )
    memory = KVMemory(blocks, block_size, prefix_cache)
    schedulers = [FixedScheduler(*draft)]
    return Engine(
        runner,
        memory,
        info,
        drafter,
        verifier(),
        schedulers,
        random or KeyedSource(),
        drafters=drafters,
        **sizes,
    )


def run(engine: Engine, most_steps: int = 5000) -> list[StepReport]:
    """Step until nothing is left to do, and check after every step what must hold between steps."""
    reports: list[StepReport] = []
    while engine.has_work:
        assert len(reports) < most_steps
        reports.append(engine.step())
        engine.memory.check()
        for request in engine.planner.running:
            assert request.sequence is not None
            assert request.sequence.n_kv < len(request.tokens)
            assert max(request.tokens) < VOCAB_SIZE
    assert engine.memory.used == 0
    return reports


def outputs(
    engine: Engine, prompts: Texts, params: SamplingParams | Iterable[SamplingParams]
) -> list[Output]:
    """Run all prompts together, with one setting for all or one each."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    requests = [engine.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    run(engine)
    results = [request.output for request in requests]
    return [result for result in results if result is not None]
