"""`Pipeline` from its user's side: prompts in, text out, streams, threads, tasks, hooks, and every bad input."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specfw import Output, Piece, Pipeline, PipelineConfig, SamplingParams, SpeculationParams
from specfw.contracts import API_VERSION, LoadedTarget, TargetLoader
from specfw.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    SpecfwError,
    UnknownComponentError,
)
from specfw.hookspecs import hookimpl
from tests.byte_models import (
    CONTEXT,
    EOS,
    VOCAB_SIZE,
    Oracle,
    Scripted,
    byte_tokenizer,
    ids_of,
    save_tiny_chat,
)

PROMPTS = ["abc", "The quick brown fox", "größer als 好"]
CHAT = [{"role": "user", "content": "hello"}]
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def build(checkpoint: Path) -> Iterator[Callable[..., Pipeline]]:
    """Makes pipelines on the tiny model, and closes them."""
    made: list[Pipeline] = []

    def make(plugins: tuple[object, ...] = (), **settings: Any) -> Pipeline:
        settings = {"target": str(checkpoint), "dtype": "float32", **settings}
        made.append(Pipeline.from_config(settings, plugins))
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Pipeline]:
    """A pipeline without speculation; every test leaves it as it was."""
    with Pipeline.from_config({"target": str(checkpoint), "dtype": "float32"}) as pipeline:
        yield pipeline


def generate_one(pipeline: Pipeline, *arguments: Any, **settings: Any) -> Output:
    [output] = pipeline.generate(*arguments, **settings)
    return output


def is_empty(pipeline: Pipeline) -> bool:
    """Whether no request is left in the engine, and no memory of one."""
    return not pipeline.engine.has_work and pipeline.engine.memory.used == 0


def oracle_for(
    pipeline: Pipeline, params: SamplingParams, wrong_every: int = 3
) -> tuple[Oracle, list[Output]]:
    """An oracle of what `pipeline` says to `PROMPTS`, and what that is."""
    outputs = pipeline.generate(PROMPTS, params)
    told = {tuple(pipeline.encode(p)): o.token_ids for p, o in zip(PROMPTS, outputs, strict=True)}
    return Oracle(told, wrong_every), outputs


class Watcher:
    """A plugin that notes what it is told."""

    specfw_api = API_VERSION

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.outputs: list[Output] = []

    @hookimpl
    def specfw_step(self, report: Any) -> None:
        self.steps.append(report)

    @hookimpl
    def specfw_request_finished(self, output: Output) -> None:
        self.outputs.append(output)


# Drafters


def test_requests_choose_among_the_drafters_held_ready(checkpoint: Path, plain: Pipeline) -> None:
    """A name that has no effect, a drafter that is built late or never closed."""
    oracle, expected = oracle_for(plain, SAMPLED, wrong_every=0)
    never = Oracle({})
    config = {
        "target": str(checkpoint),
        "dtype": "float32",
        "drafter": never,
        "drafters": {"oracle": oracle, "lookup": "ngram"},
    }
    wishes = [SpeculationParams(drafter=name) for name in ("oracle", None, "lookup")]
    params = [SAMPLED.model_copy(update={"speculation": wish}) for wish in wishes]
    with Pipeline.from_config(config) as pipeline:
        outputs = pipeline.generate(PROMPTS[:3], params)
        with pytest.raises(ConfigError, match=r"held ready \(oracle, lookup\), got 'x'"):
            pipeline.generate("a", speculation=SpeculationParams(drafter="x"))
        assert is_empty(pipeline)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected[:3]]
    assert outputs[0].speculation.acceptance_rate == 1.0
    assert outputs[1].speculation.drafted == 0
    assert oracle.closed
    assert never.closed
    assert not oracle.running


# Prompts, params and outputs


def test_text_ids_and_chat_are_the_same_prompt_when_they_encode_alike(plain: Pipeline) -> None:
    """A prompt kind that lost or gained tokens on the way would answer another question."""
    tokenizer = byte_tokenizer()
    text = "<|user|>hello</s><|assistant|>"
    ids = tokenizer(text)["input_ids"]
    assert plain.encode(CHAT) == plain.encode(text) == plain.encode(ids) == ids
    texts = {
        generate_one(plain, prompt, max_new_tokens=8, seed=1, temperature=1.0).text
        for prompt in (CHAT, text, ids)
    }
    assert len(texts) == 1


def test_a_batch_answers_in_order_and_as_each_prompt_alone(plain: Pipeline) -> None:
    """Batch-mates that leaked into each other, or outputs in order of finishing."""
    params = [SAMPLED.model_copy(update={"max_new_tokens": n, "seed": n}) for n in (20, 3, 9)]
    together = plain.generate(PROMPTS, params)
    alone = [generate_one(plain, prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.seed for output in together] == [20, 3, 9]
    assert [len(output.token_ids) for output in together] == [20, 3, 9]


def test_kinds_of_prompts_mix_in_one_batch(plain: Pipeline) -> None:
    """The kind of the first prompt was taken for the kind of all."""
    mixed = plain.generate(["abc", plain.encode("abc"), CHAT], max_new_tokens=6)
    assert mixed[0].token_ids == mixed[1].token_ids
    assert mixed[2].usage.prompt_tokens == len(plain.encode(CHAT))


def test_no_prompts_are_no_outputs(plain: Pipeline) -> None:
    assert plain.generate([]) == []
    assert list(plain.stream([])) == []


def test_settings_by_name_replace_those_of_params_and_these_those_of_the_config(
    build: Callable[..., Pipeline],
) -> None:
    """A default that could not be overridden, or an override that dropped its neighbours."""
    pipeline = build(
        sampling={"max_new_tokens": 5, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    )
    default = generate_one(pipeline, "abc")
    assert (len(default.token_ids), default.seed) == (5, 3)
    longer = generate_one(pipeline, "abc", max_new_tokens=9)
    assert (len(longer.token_ids), longer.seed) == (9, 3)
    assert longer.token_ids[:5] == default.token_ids
    own = generate_one(pipeline, "abc", SAMPLED, max_new_tokens=4)
    assert (len(own.token_ids), own.seed) == (4, 7)
    some = pipeline.generate(["abc", "abc"], [None, SAMPLED])
    assert [output.seed for output in some] == [3, 7]


def test_the_output_tells_what_happened(plain: Pipeline) -> None:
    """Fields that contradict each other."""
    output = generate_one(plain, "abc", SAMPLED, logprobs=2)
    assert output.finish_reason == "length"
    assert output.usage.prompt_tokens == 3
    assert output.usage.completion_tokens == len(output.token_ids) == 24
    assert output.text == byte_tokenizer().decode(output.token_ids, skip_special_tokens=True)
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == output.token_ids
    assert all(len(one.top) == 2 and one.logprob <= one.top[0][1] <= 0 for one in output.logprobs)
    assert output.speculation.target_passes == output.speculation.emitted == 24
    assert (output.error, output.stop_reason, output.seed) == (None, None, 7)
    assert output.speculation.guarantee == "same-text"


def test_a_seed_is_drawn_and_told_so_that_a_text_can_be_had_again(plain: Pipeline) -> None:
    first = generate_one(plain, "abc", max_new_tokens=12, temperature=1.0)
    again = generate_one(plain, "abc", max_new_tokens=12, temperature=1.0, seed=first.seed)
    assert again.token_ids == first.token_ids


def test_a_text_ends_with_the_context(plain: Pipeline) -> None:
    """A sequence that outgrew the positions the model has."""
    output = generate_one(
        plain, list(range(5, 5 + CONTEXT - 4)), max_new_tokens=50, ignore_eos=True
    )
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


# Speculation never shows in the text


@pytest.mark.parametrize("wrong_every", [0, 2, 5])
def test_any_drafter_gives_the_text_of_none(
    build: Callable[..., Pipeline], plain: Pipeline, wrong_every: int
) -> None:
    """A draft that changed the text."""
    oracle, expected = oracle_for(plain, SAMPLED, wrong_every)
    outputs = build(drafter=oracle).generate(PROMPTS, SAMPLED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output in outputs:
        stats = output.speculation
        assert 0 < stats.accepted <= stats.drafted
        assert stats.accepted == stats.drafted or wrong_every
        assert stats.target_passes < stats.emitted == 24


def test_speculation_is_switched_and_limited_per_request(
    build: Callable[..., Pipeline], plain: Pipeline
) -> None:
    """A limit that was ignored, or that one request set for all."""
    oracle, expected = oracle_for(plain, SAMPLED, wrong_every=0)
    limits = [
        SpeculationParams(enabled=False),
        SpeculationParams(max_nodes=2),
        SpeculationParams(max_depth=3),
    ]
    params = [SAMPLED.model_copy(update={"speculation": one}) for one in limits]
    outputs = build(drafter=oracle).generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    off, two, three = (output.speculation for output in outputs)
    assert (off.drafted, off.target_passes) == (0, 24)
    assert set(two.accepted_histogram) <= {0, 1, 2}
    assert two.target_passes == 8  # 24 tokens, three a pass
    assert set(three.accepted_histogram) <= {0, 1, 2, 3}
    assert three.target_passes == 6


def test_a_drafter_that_fails_costs_its_draft_only(
    build: Callable[..., Pipeline], plain: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin's error that ended a request."""
    oracle, expected = oracle_for(plain, SAMPLED)

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of ideas")

    oracle.propose = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        outputs = build(drafter=oracle).generate(PROMPTS, SAMPLED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    warnings = [
        record.getMessage() for record in caplog.records if "out of ideas" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "Oracle" in warnings[0]


# Streams


def drain(pieces: Iterator[Piece]) -> dict[int, list[Piece]]:
    by_index: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return by_index


@pytest.mark.parametrize("told", [False, True])
def test_streamed_pieces_are_the_output(
    build: Callable[..., Pipeline], plain: Pipeline, told: bool
) -> None:
    """A piece lost, doubled or sent to the wrong prompt."""
    oracle, expected = oracle_for(plain, SAMPLED)
    streams = drain(build(drafter=oracle if told else "none").stream(PROMPTS, SAMPLED))
    for index, output in enumerate(expected):
        *pieces, last = streams[index]
        assert "".join(piece.text for piece in streams[index]) == output.text
        assert [token for piece in streams[index] for token in piece.token_ids] == output.token_ids
        assert last.output is not None
        assert (last.output.text, last.output.token_ids) == (output.text, output.token_ids)
        assert all(piece.output is None for piece in pieces)
        accepted = [flag for piece in streams[index] for flag in piece.accepted]
        assert (len(accepted), sum(accepted)) == (24, last.output.speculation.accepted)
        assert any(accepted) == told


def test_leaving_a_stream_cancels_it_and_frees_its_memory(
    build: Callable[..., Pipeline], plain: Pipeline
) -> None:
    """A request that went on running, or kept KV and drafter state, after its reader had left."""
    oracle, _ = oracle_for(plain, SAMPLED)
    watcher = Watcher()
    pipeline = build((watcher,), drafter=oracle)
    stream = pipeline.stream(PROMPTS, SAMPLED)
    next(stream)
    assert pipeline.engine.memory.used > 0
    assert len(oracle.running) == 3
    stream.close()  # type: ignore[attr-defined]
    assert is_empty(pipeline)
    assert not oracle.running
    assert [output.finish_reason for output in watcher.outputs] == ["cancelled"] * 3
    assert len(generate_one(pipeline, "abc", SAMPLED).token_ids) == 24


def test_a_stream_forgotten_amid_a_step_is_cancelled_after_it(
    build: Callable[..., Pipeline],
) -> None:
    """Collected in the thread that steps, a stream waited for its own step, or tore its memory."""
    held: list[Iterator[Piece]] = []

    class Forgetful(Oracle):
        def propose(self, *arguments: Any) -> None:
            if len(self.running) == 2:
                held.clear()

    watcher = Watcher()
    pipeline = build((watcher,), drafter=Forgetful({}))
    held.append(pipeline.stream("abc", SAMPLED))
    next(held[0])
    assert len(generate_one(pipeline, "xyz", SAMPLED).token_ids) == 24
    assert [output.finish_reason for output in watcher.outputs] == ["cancelled", "length"]
    assert is_empty(pipeline)


def test_two_streams_interleave_on_one_pipeline(plain: Pipeline) -> None:
    """One stream's reader that swallowed or delayed the other's pieces."""
    expected = plain.generate(PROMPTS[:2], SAMPLED)
    streams = [plain.stream(prompt, SAMPLED) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    open_streams = [0, 1]
    while open_streams:
        for which in list(open_streams):
            piece = next(streams[which], None)
            if piece is None:
                open_streams.remove(which)
            else:
                texts[which] += piece.text
    assert texts == [output.text for output in expected]


# Threads and tasks


def test_threads_share_steps_and_get_their_own_texts(
    build: Callable[..., Pipeline], plain: Pipeline
) -> None:
    """Races between threads, and a thread that kept the engine to itself until it was done."""
    prompts = [f"thread {n}" for n in range(4)]
    expected = [output.token_ids for output in plain.generate(prompts, SAMPLED, max_new_tokens=60)]
    watcher = Watcher()
    pipeline = build((watcher,))
    got: dict[int, list[int]] = {}
    together = threading.Barrier(len(prompts))

    def work(n: int) -> None:
        together.wait()
        got[n] = generate_one(pipeline, prompts[n], SAMPLED, max_new_tokens=60).token_ids

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [got[n] for n in range(len(prompts))] == expected
    assert len(watcher.steps) < 2 * 60  # one after the other, they would take 4 * 60
    assert is_empty(pipeline)


def test_a_hook_that_uses_its_own_pipeline_is_told_not_to(build: Callable[..., Pipeline]) -> None:
    """A hook that generates amid a step would wait for itself for ever."""

    class Nosy(Watcher):
        @hookimpl
        def specfw_step(self, report: Any) -> None:
            pipeline.generate("xyz", max_new_tokens=1)

    pipeline = build((Nosy(),))
    with pytest.raises(ContractError, match="from within its own step"):
        pipeline.generate("abc", max_new_tokens=1)
    assert is_empty(pipeline)


def test_agenerate_and_astream_are_generate_and_stream(plain: Pipeline) -> None:
    expected = [output.token_ids for output in plain.generate(PROMPTS, SAMPLED)]

    async def read(prompt: str) -> list[int]:
        return [
            token async for piece in plain.astream(prompt, SAMPLED) for token in piece.token_ids
        ]

    async def both() -> list[list[int]]:
        first, second, third = await asyncio.gather(
            plain.agenerate(PROMPTS[0], SAMPLED), read(PROMPTS[1]), read(PROMPTS[2])
        )
        return [first[0].token_ids, second, third]

    assert asyncio.run(both()) == expected


@pytest.mark.parametrize("how", ["agenerate", "astream"])
def test_a_cancelled_task_frees_its_request_and_spares_the_others(
    build: Callable[..., Pipeline], how: str
) -> None:
    """A server's client that hangs up."""
    watcher = Watcher()
    pipeline = build((watcher,))
    expected = generate_one(pipeline, "xyz", SAMPLED).token_ids
    long = SAMPLED.model_copy(update={"max_new_tokens": 200})

    async def use() -> None:
        if how == "agenerate":
            await pipeline.agenerate("abc", long)
        else:
            async for _ in pipeline.astream("abc", long):
                pass

    async def hang_up() -> list[int]:
        other = asyncio.create_task(pipeline.agenerate("xyz", SAMPLED))
        task = asyncio.create_task(use())
        while not pipeline.engine.planner.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [output] = await other
        return output.token_ids

    assert asyncio.run(hang_up()) == expected
    assert is_empty(pipeline)
    assert [output.finish_reason for output in watcher.outputs] == ["length", "cancelled", "length"]


# Progress, configuration, closing


@pytest.mark.parametrize("wanted", [None, False, True])
def test_progress_shows_on_request_only(
    plain: Pipeline, capfd: pytest.CaptureFixture[str], wanted: bool | None
) -> None:
    """A bar in a log file, or text on stdout."""
    plain.generate(["abc"] * 9, max_new_tokens=2, progress=wanted)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert ("decoding" in shown.err) == bool(wanted)


def test_every_way_to_give_a_config_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"target": str(checkpoint), "dtype": "float32", "sampling": {"max_new_tokens": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ways: list[Any] = [
        settings,
        PipelineConfig(**settings),
        tmp_path / "config.json",
        str(tmp_path / "config.json"),
    ]
    texts = set()
    for way in ways:
        with Pipeline.from_config(way) as pipeline:
            texts.add(generate_one(pipeline, "abc").text)
    assert len(texts) == 1


def test_a_closed_pipeline_cancels_what_runs_and_takes_nothing_more(
    build: Callable[..., Pipeline],
) -> None:
    """Work that went on with a drafter whose memory is gone."""
    oracle = Oracle({})
    pipeline = build(drafter=oracle)
    stream = pipeline.stream("abc", SAMPLED)
    next(stream)
    pipeline.close()
    assert oracle.closed
    *_, last = stream
    assert last.output is not None
    assert last.output.finish_reason == "cancelled"
    assert is_empty(pipeline)
    pipeline.close()  # once more does nothing
    with pytest.raises(ConfigError, match=r"closed.*build another"):
        pipeline.generate("abc")


def test_hooks_see_every_step_and_every_request(
    build: Callable[..., Pipeline], plain: Pipeline
) -> None:
    oracle, _ = oracle_for(plain, SAMPLED)
    watcher = Watcher()
    outputs = build((watcher,), drafter=oracle).generate(PROMPTS, SAMPLED)
    assert sorted(map(id, watcher.outputs)) == sorted(map(id, outputs))
    assert sum(step.emitted for step in watcher.steps) == 3 * 24
    assert sum(step.drafted for step in watcher.steps) == sum(
        o.speculation.drafted for o in outputs
    )
    assert sum(step.accepted for step in watcher.steps) == sum(
        o.speculation.accepted for o in outputs
    )


# What fails, and how


def poison(pipeline: Pipeline, position: int) -> None:
    """Make the target's logits for `position` NaN, in texts that begin with "!"."""
    run = pipeline.engine.runner.run
    [mark] = pipeline.encode("!")

    def run_poisoned(store: Any, segments: Any, *rest: Any, **named: Any) -> Any:
        marked = [
            request.sequence
            for request in pipeline.engine.planner.running
            if request.tokens[0] == mark
        ]
        rows = run(store, segments, *rest, **named)
        scored = [(segment, node) for segment in segments for node in segment.scored]
        for row, (segment, node) in enumerate(scored):
            next_position = segment.sequence.n_kv + segment.depths[node] + 1
            if segment.sequence in marked and next_position == position:
                rows.logits[row] = torch.nan
        return rows

    pipeline.engine.runner.run = run_poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize("told", [False, True])
def test_nan_logits_fail_their_request_only(
    build: Callable[..., Pipeline], plain: Pipeline, told: bool
) -> None:
    """One broken row that took the whole batch with it, or was drawn from."""
    prompts = ["!abc", *PROMPTS]
    expected = plain.generate(prompts, SAMPLED)
    oracle = Oracle(
        {tuple(plain.encode(p)): o.token_ids for p, o in zip(prompts, expected, strict=True)}, 4
    )
    watcher = Watcher()
    pipeline = build((watcher,), drafter=oracle if told else "none")
    poison(pipeline, position=10)
    failed, *others = pipeline.generate(prompts, SAMPLED)
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "finite logits at position 10" in failed.error
    assert len(failed.token_ids) <= 6  # positions 4 to 9
    assert failed.token_ids == expected[0].token_ids[: len(failed.token_ids)]
    assert [output.token_ids for output in others] == [output.token_ids for output in expected[1:]]
    assert is_empty(pipeline)
    assert any(output is failed for output in watcher.outputs)


def test_a_refused_prompt_takes_back_the_batch(plain: Pipeline) -> None:
    """Batch-mates of a refused prompt that stayed in the queue and ran in the next call."""
    with pytest.raises(CapacityError):
        plain.generate(["abc", [5] * CONTEXT], max_new_tokens=4)
    assert is_empty(plain)
    assert plain.generate("abc", max_new_tokens=4)[0].usage.completion_tokens == 4


def test_an_error_of_a_scheduler_frees_everything(build: Callable[..., Pipeline]) -> None:
    """Memory that an exception in a step left reserved."""
    pipeline = build()
    scheduler = pipeline.engine.schedulers[0]

    def fail(view: Any) -> Any:
        raise RuntimeError("no plan")

    plan, scheduler.plan = scheduler.plan, fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no plan"):
        pipeline.generate(PROMPTS, SAMPLED)
    assert is_empty(pipeline)
    scheduler.plan = plan  # type: ignore[method-assign]
    assert len(generate_one(pipeline, "abc", SAMPLED).token_ids) == 24


BAD_PROMPTS: dict[str, tuple[Any, type[SpecfwError], str]] = {
    "empty text": ("", ConfigError, r"empty prompt; give some text"),
    "empty ids": ([[]], ConfigError, r"empty prompt; give some text"),
    "one of many empty": (["a", ""], ConfigError, r"empty prompt"),
    "nothing": (None, ConfigError, r"expected text, token ids or chat messages, got .*NoneType"),
    "a number": (5, ConfigError, r"got .*int; pass ids as a list"),
    "bytes": (b"abc", ConfigError, r"got .*bytes"),
    "one message": (
        {"role": "user", "content": "x"},
        ConfigError,
        r"got .*dict.*a message within a list",
    ),
    "a tensor": (torch.tensor([5, 6]), ConfigError, r"got .*Tensor; pass ids as a list"),
    "text among ids": ([5, "a"], ConfigError, r"a list with a str in it"),
    "no content": (
        [{"role": "user"}],
        ConfigError,
        r"'role' and 'content', got \{'role': 'user'\}",
    ),
    "unknown role": (
        [{"role": "god", "content": "x"}],
        ConfigError,
        r"template.*no role god.*change",
    ),
    "id too large": ([VOCAB_SIZE], ConfigError, rf"from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
    "negative id": ([-1], ConfigError, rf"from 0 to {VOCAB_SIZE - 1}, got -1"),
    "too long": (
        [5] * CONTEXT,
        CapacityError,
        rf"shorter than {CONTEXT} tokens.*the context.*got {CONTEXT}; shorten",
    ),
}
BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"max_new_tokens": 0}, r"max_new_tokens: .*greater than or equal to 1.*got 0"),
    "negative tokens": ({"max_new_tokens": -3}, r"max_new_tokens: .*got -3"),
    "unknown": ({"max_tokens": 3}, r"unknown option 'max_tokens'; did you mean 'max_new_tokens'"),
    "wrong type": ({"temperature": "hot"}, r"temperature: .*number.*got 'hot'"),
    "contradiction": (
        {"min_new_tokens": 9, "max_new_tokens": 3},
        r"min_new_tokens=9 exceeds max_new_tokens=3; lower",
    ),
    "empty stop": ({"stop": [""]}, r"stop string must not be empty"),
    "foreign stop id": (
        {"stop_token_ids": [VOCAB_SIZE]},
        r"stop_token_ids from 0 to .*got \d+; remove",
    ),
    "foreign bias": ({"logit_bias": {VOCAB_SIZE: 1.0}}, r"logit_bias from 0 to"),
    "nested": (
        {"speculation": {"max_node": 3}},
        r"unknown option 'max_node'; did you mean 'max_nodes'",
    ),
    "params as mapping": (
        {"params": {"temperature": 1}},
        r"expected SamplingParams.*got \{'temperature': 1\}; pass",
    ),
    "too few params": ({"params": []}, r"expected one for each of 1 prompts, got 0"),
}
BAD_CONFIGS: dict[str, tuple[Any, type[SpecfwError], str]] = {
    "no target": ({}, ConfigError, r"'target' is missing; give"),
    "wrong type": (5, ConfigError, r"expected a mapping, a PipelineConfig or the path.*got 5"),
    "unknown key": (
        {"target": "x", "draftr": "none"},
        ConfigError,
        r"unknown option 'draftr'; did you mean 'drafter'",
    ),
    "unknown drafter": (
        {"target": "x", "drafter": "nonn"},
        UnknownComponentError,
        r"drafter 'nonn'.*mean 'none'",
    ),
    "unknown option": (
        {"target": "x", "scheduler": "fixed(max_node=3)"},
        ConfigError,
        r"scheduler 'fixed': unknown option 'max_node'; did you mean 'max_nodes'",
    ),
    "wrong option type": (
        {"target": "x", "scheduler": "fixed(max_nodes='many')"},
        ConfigError,
        r"scheduler 'fixed': max_nodes: .*got 'many'",
    ),
    "contradiction": (
        {"target": "x", "engine": {"max_batch": 64, "max_step_tokens": 8}},
        ConfigError,
        r"max_batch=64 exceeds max_step_tokens=8; lower",
    ),
    "no such folder": ({"target": "./nowhere"}, ConfigError, r"'./nowhere': no such folder; pass"),
    "no such file": ("nowhere.yaml", ConfigError, r"'nowhere.yaml' cannot be read"),
}


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and len(message) < 500 and not message.endswith(("..", ";"))


@pytest.mark.parametrize("case", BAD_PROMPTS)
@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_bad_prompt_is_refused_in_one_sentence(plain: Pipeline, how: str, case: str) -> None:
    """A traceback from deep inside, or a prompt that was silently taken for another."""
    prompt, kind, sentence = BAD_PROMPTS[case]
    with pytest.raises(kind, match=sentence) as caught:
        list(getattr(plain, how)(prompt, max_new_tokens=1))
    assert is_one_sentence(str(caught.value))
    assert is_empty(plain)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_bad_setting_is_refused_in_one_sentence(plain: Pipeline, case: str) -> None:
    settings, sentence = BAD_SETTINGS[case]
    with pytest.raises(ConfigError, match=sentence) as caught:
        plain.generate("abc", **settings)
    assert is_one_sentence(str(caught.value))
    assert is_empty(plain)


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_bad_config_is_refused_in_one_sentence(case: str) -> None:
    config, kind, sentence = BAD_CONFIGS[case]
    with pytest.raises(kind, match=sentence) as caught:
        Pipeline.from_config(config)
    assert is_one_sentence(str(caught.value))


def test_a_target_without_a_tokenizer_speaks_ids_only(checkpoint: Path) -> None:
    """Text for a target that has no tokenizer."""

    class Mute(TargetLoader):
        def load(self) -> LoadedTarget:
            return LoadedTarget(
                "mute", Pipeline.from_config({"target": str(checkpoint)}).target.model
            )

    with Pipeline.from_config({"target": Mute()}) as pipeline:
        for prompt in ("abc", CHAT):
            with pytest.raises(ConfigError, match=r"token ids, for target 'mute' has no tokenizer"):
                pipeline.generate(prompt)
        output = generate_one(pipeline, [5, 6], max_new_tokens=3, ignore_eos=True)
        assert (output.text, len(output.token_ids)) == ("", 3)


def test_a_tokenizer_without_a_template_takes_no_chat(
    plain: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"chat template.*none; pass text"):
        plain.generate(CHAT)


def test_no_kv_memory_for_even_one_request(build: Callable[..., Pipeline]) -> None:
    """A request that waits for ever for memory that does not exist."""
    pipeline = build(engine={"kv_tokens": 32, "block_size": 16})
    with pytest.raises(
        CapacityError, match=r"shorter than 32 tokens.*KV memory holds, got 40; .*engine\.kv_tokens"
    ):
        pipeline.generate([[5] * 40])
    output = generate_one(pipeline, [5] * 20, max_new_tokens=50, ignore_eos=True)
    assert (len(output.token_ids), output.finish_reason) == (12, "length")


def test_requests_that_do_not_fit_together_take_turns(
    build: Callable[..., Pipeline], plain: Pipeline
) -> None:
    """A full memory that changed texts or stopped the queue."""
    oracle, expected = oracle_for(plain, SAMPLED)
    pipeline = build(drafter=oracle, engine={"kv_tokens": 64, "block_size": 8})
    outputs = pipeline.generate(PROMPTS, SAMPLED)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert is_empty(pipeline)


def test_a_draft_model_of_another_vocabulary_is_refused_where_it_must_be_the_same(
    build: Callable[..., Pipeline], tmp_path: Path
) -> None:
    """Draft ids that mean other words to the target."""
    pytest.importorskip("specfw_plugin_small_model")
    other = save_tiny_chat(tmp_path / "other")
    settings = json.loads((other / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"(?s)small-model.*token") as caught:
        build(
            drafter={
                "name": "small-model",
                "model": {"name": "transformers", "model": str(other)},
                "tokenizer": "same",
            }
        )
    assert is_one_sentence(str(caught.value))


# Ends inside an accepted block: public faults B15 and B16

PROMPT = [5, 6, 7]


def block_run(
    script: list[int], stream: bool = False, **settings: Any
) -> tuple[Output, list[Piece]]:
    """A text of which the oracle drafts the whole, so that one step accepts it in one block."""
    config = {
        "target": Scripted(len(PROMPT), script),
        "drafter": Oracle({tuple(PROMPT): script}),
        "scheduler": f"fixed(max_nodes={len(script)}, max_depth={len(script)}, max_width=1)",
    }
    params = SamplingParams(**{"max_new_tokens": 16, **settings})
    with Pipeline.from_config(config) as pipeline:
        if not stream:
            output = generate_one(pipeline, PROMPT, params)
            pieces: list[Piece] = []
        else:
            pieces = list(pipeline.stream(PROMPT, params))
            assert pieces[-1].output is not None
            output = pieces[-1].output
        assert is_empty(pipeline)
    assert output.speculation.target_passes == 1
    assert output.usage.completion_tokens == len(output.token_ids)
    return output, pieces


def test_B15_a_stop_token_inside_a_block_beats_the_cap_behind_it() -> None:
    """sglang#31599: a block that crosses max tokens hid the stop inside it."""
    [stop] = ids_of("STOP")
    output, _ = block_run(
        [*ids_of(*"ab"), stop, *ids_of(*"cde")], max_new_tokens=5, stop_token_ids=[stop]
    )
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        [*ids_of(*"ab"), stop],
        "stop",
        stop,
    )


def test_B15_a_stop_string_over_two_tokens_inside_a_block_beats_the_cap() -> None:
    """The window in which a stop string was looked for covered the block's last tokens only."""
    output, _ = block_run(ids_of("a", "oneST", "O", "Php", *"cde"), max_new_tokens=6, stop=["STOP"])
    assert (output.text, len(output.token_ids), output.finish_reason) == ("aone", 4, "stop")
    assert output.stop_reason == "STOP"


@pytest.mark.parametrize(("place", "reason", "text"), [(5, "stop", "abcd"), (6, "length", "abcde")])
@pytest.mark.parametrize("by", ["id", "string"])
def test_B15_a_stop_at_the_cap_is_a_stop_and_behind_it_is_not(
    place: int, reason: str, text: str, by: str
) -> None:
    """STOP as the fifth or sixth token of a block, with a cap of five."""
    stop = {"stop_token_ids": ids_of("STOP")} if by == "id" else {"stop": ["STOP"]}
    script = [*ids_of(*"abcde"[: place - 1]), *ids_of("STOP"), *ids_of(*"xyz")]
    output, _ = block_run(script, max_new_tokens=5, **stop)
    assert (len(output.token_ids), output.finish_reason) == (5, reason)
    shown = text + "STOP" * (by == "id" and reason == "stop")  # an ordinary token keeps its text
    assert output.text == shown


def test_B15_a_stop_string_at_the_start_of_a_long_block_is_found() -> None:
    output, _ = block_run([*ids_of("STOP"), *ids_of(*"abcdefghijk")], stop=["STOP"])
    assert (output.text, len(output.token_ids), output.finish_reason) == ("", 1, "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include_stop", [False, True])
def test_B16_a_stop_phrase_inside_a_block_cuts_text_ids_and_logprobs_alike(
    include_stop: bool, stream: bool
) -> None:
    """vllm#47616: the text was cut, but later ids and logprobs of the block stayed; or text was withdrawn.

    The phrase begins within "oneST" and ends within a token whose last byte begins 好.
    """
    ending = byte_tokenizer().get_vocab()["P" + _first_byte_of("好")]
    script = [*ids_of("é", "oneST", "O"), ending, *ids_of("好")[1:], *ids_of(*"bcd")]
    output, pieces = block_run(script, stream, logprobs=2, stop=["STOP"], include_stop=include_stop)
    kept = len(ids_of("é")) + 3
    assert output.token_ids == script[:kept]
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == output.token_ids
    assert output.usage.completion_tokens == kept
    decoded = byte_tokenizer().decode(output.token_ids)
    assert decoded.startswith("éoneSTOP")
    assert output.text == decoded[: decoded.index("STOP") + 4 * include_stop]
    if stream:
        assert "".join(piece.text for piece in pieces) == output.text
        assert [token for piece in pieces for token in piece.token_ids] == output.token_ids


def _first_byte_of(character: str) -> str:
    """The token of the first byte of a character."""
    return str(byte_tokenizer().convert_ids_to_tokens(ids_of(character)[0]))


@pytest.mark.parametrize("max_nodes", [0, 1, 2, 3, 5])
def test_B16_nothing_streamed_is_withdrawn_however_blocks_fall(max_nodes: int) -> None:
    """A possible stop string that was shown before the next block completed it."""
    script = ids_of("好", "oneST", "O", "x", "é", "oneST", "O", "Php", *"bcd")
    config = {"target": Scripted(len(PROMPT), script), "drafter": Oracle({tuple(PROMPT): script})}
    params = SamplingParams(
        max_new_tokens=16,
        stop=("STOP",),
        logprobs=2,
        speculation=SpeculationParams(max_nodes=max_nodes),
    )
    with Pipeline.from_config(config) as pipeline:
        shown, output = "", None
        for piece in pipeline.stream(PROMPT, params):
            shown += piece.text
            assert "好oneSTOxéone".startswith(shown)
            output = piece.output
    assert output is not None
    assert shown == output.text == "好oneSTOxéone"
    assert output.logprobs is not None
    assert len(output.token_ids) == len(output.logprobs) == output.usage.completion_tokens
    assert output.token_ids == script[: len(output.token_ids)]
    assert script[len(output.token_ids) :] == ids_of(*"bcd")


def test_an_eos_inside_a_block_ends_it_without_text() -> None:
    output, _ = block_run([*ids_of(*"ab"), EOS, *ids_of(*"cde")])
    assert (output.text, output.token_ids[-1], output.finish_reason, output.stop_reason) == (
        "ab",
        EOS,
        "stop",
        EOS,
    )
