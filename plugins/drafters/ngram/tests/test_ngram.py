"""The drafter `ngram`: what it drafts, that it holds nothing over, and that it changes no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from specfw_plugin_ngram import NgramDrafter, NgramOptions
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, DraftLimits, Feedback, TargetInfo, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.plugins import PluginManager
from specfw.testing.drafting import ROOMY, Text, draft
from specfw.types import Output, SamplingParams, SpeculationParams

VOCAB = 64


def paths(drafted: Draft) -> list[list[int]]:
    """The tokens on the way to each leaf, in draw order."""
    inner = set(drafted.parent[0].tolist())
    leaves = [node for node in range(1, int(drafted.sizes[0])) if node not in inner]
    return [[int(drafted.token[0, i]) for i in drafted.path(0, leaf)] for leaf in leaves]


def drafted_paths(
    tokens: Sequence[int], limits: DraftLimits = ROOMY, **options: Any
) -> list[list[int]]:
    """What a new drafter drafts after `tokens`, however short what it finds."""
    options = {"depth_per_token": 60, **options}
    drafter, request = NgramDrafter(NgramOptions(**options)), Text(tokens)
    drafter.begin(request)
    return paths(draft(drafter, request, limits))


def test_drafts_what_followed_the_same_suffix() -> None:
    assert drafted_paths([1, 2, 3, 4, 5, 6, 1, 2, 3], max_nodes=3) == [[4, 5, 6]]


def test_tokens_ahead_of_the_text_are_looked_up_and_not_remembered() -> None:
    """Fault: a path that was only guessed is indexed, and later drafted from as if it were text."""
    text = [1, 2, 3, 4, 5, 9, 1]
    drafter, request = NgramDrafter(NgramOptions(depth_per_token=9, max_nodes=3)), Text(text)
    drafter.begin(request)
    before = paths(draft(drafter, request))
    assert before == [[2, 3, 4]]
    assert NgramDrafter.reads_ahead
    assert paths(draft(drafter, Text([*text, 2, 3]))) == [[4, 5, 9]]
    assert paths(draft(drafter, Text([*text, 7, 9, 1, 7]))) == []
    assert paths(draft(drafter, Text([*text, 8, 9]))) == [[1, 8, 9]]  # which repeats what is ahead
    assert paths(draft(drafter, request)) == before
    assert drafter._indexes[0]._places == _indexed(text)


def _indexed(text: Sequence[int]) -> Any:
    fresh = NgramDrafter(NgramOptions(depth_per_token=9, max_nodes=3))
    fresh.begin(Text(text))
    return fresh._indexes[0]._places


def test_nothing_is_drafted_after_words_that_are_new() -> None:
    assert drafted_paths([1, 2, 3, 4]) == []
    assert drafted_paths([7]) == []


def test_the_longer_suffix_comes_before_the_more_recent_place() -> None:
    """Fault: the last occurrence of the last token wins over a longer match further back."""
    tokens = [1, 2, 3, 10, 11, 9, 3, 20, 21, 1, 2, 3]
    assert drafted_paths(tokens, max_nodes=4, continuations=1) == [[10, 11, 9, 3]]
    assert drafted_paths(tokens, max_nodes=4, continuations=2) == [[10, 11, 9], [20]]


def test_of_equally_long_matches_the_most_recent_comes_first() -> None:
    tokens = [1, 2, 10, 5, 1, 2, 11, 6, 1, 2, 10, 7, 1, 2, 12, 8, 1, 2]
    assert [path[0] for path in drafted_paths(tokens, max_nodes=20, continuations=3)] == [
        12,
        10,
        11,
    ]


def test_a_suffix_below_the_minimum_is_not_looked_up() -> None:
    tokens = [1, 2, 3, 9, 8, 3]
    assert drafted_paths(tokens, min_ngram=1)
    assert drafted_paths(tokens, min_ngram=2) == []


def test_a_copy_that_reaches_the_end_repeats_itself() -> None:
    """Fault: in text with a short period only one period is drafted."""
    assert drafted_paths([5, 1, 2, 1, 2], max_nodes=6) == [[1, 2, 1, 2, 1, 2]]


def test_the_likeliest_continuation_gets_most_nodes_and_the_first_ones() -> None:
    """Fault: an accepted likeliest path needs its KV moved, for its nodes are not 1, 2, 3 ..."""
    tokens = [1, *range(20, 40), 1, *range(40, 60), 1]
    first, second = drafted_paths(tokens, max_nodes=7)
    assert (first, second) == ([40, 41, 42, 43, 44], [20, 21])
    drafter, request = NgramDrafter(NgramOptions(depth_per_token=60)), Text(tokens)
    drafter.begin(request)
    assert draft(drafter, request).path(0, 5) == [1, 2, 3, 4, 5]


def test_nodes_that_depth_denies_the_first_continuation_go_to_the_next() -> None:
    tokens = [1, *range(20, 40), 1, *range(40, 60), 1]
    assert drafted_paths(tokens, max_nodes=6, max_depth=3) == [[40, 41, 42], [20, 21, 22]]


def test_a_short_find_makes_a_short_draft() -> None:
    """Fault: one common word is enough to fill the draft with tokens that are then rejected."""
    tokens = [5, 1, 2, *range(20, 40), 1, 2]
    assert drafted_paths([*tokens, 60, 2], max_nodes=9, continuations=1, depth_per_token=2) == [
        [60, 2]
    ]
    assert drafted_paths(tokens, max_nodes=9, depth_per_token=2) == [[20, 21, 22, 23]]
    assert drafted_paths(tokens, max_nodes=9, depth_per_token=3) == [[20, 21, 22, 23, 24, 25]]


def test_without_room_for_siblings_there_is_one_chain() -> None:
    tokens = [1, *range(20, 40), 1, *range(40, 60), 1]
    assert drafted_paths(tokens, DraftLimits(4, 9, 1)) == [[40, 41, 42, 43]]


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(
    tokens=texts,
    limits=st.builds(DraftLimits, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)),
    max_nodes=st.integers(1, 8),
    max_depth=st.none() | st.integers(1, 5),
    continuations=st.integers(1, 4),
)
def test_every_limit_holds(
    tokens: list[int],
    limits: DraftLimits,
    max_nodes: int,
    max_depth: int | None,
    continuations: int,
) -> None:
    """Fault: nodes beyond the request's share of the step, or a drafter's option that does nothing."""
    found = drafted_paths(
        tokens, limits, max_nodes=max_nodes, max_depth=max_depth, continuations=continuations
    )
    assert sum(map(len, found)) <= min(limits.max_nodes, max_nodes)
    assert max(map(len, found), default=0) <= min(limits.max_depth, max_depth or max_nodes)
    assert len(found) <= min(limits.max_width, continuations)
    assert len({path[0] for path in found}) == len(found)


@given(tokens=texts, min_ngram=st.integers(1, 2), continuations=st.integers(1, 3))
def test_first_tokens_equal_those_of_a_search(
    tokens: list[int], min_ngram: int, continuations: int
) -> None:
    """Fault: the index forgets a place, or finds one that is not there."""
    expected: list[int] = []
    for length in range(4, min_ngram - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:] and tokens[place] not in expected:
                expected.append(tokens[place])
    found = drafted_paths(tokens, min_ngram=min_ngram, continuations=continuations, max_nodes=60)
    assert [path[0] for path in found] == expected[:continuations]


@given(tokens=texts, cuts=st.lists(st.integers(1, 6), max_size=20))
def test_state_after_observing_equals_a_fresh_start(tokens: list[int], cuts: list[int]) -> None:
    """Fault: tokens are indexed twice or left out where a text grows in pieces."""
    grown = Text(tokens[:1])
    drafter = NgramDrafter()
    drafter.begin(grown)
    for cut in [*cuts, len(tokens)]:
        grown.tokens = tokens[: len(grown.tokens) + cut]
        drafter.observe(Feedback([grown], [[]], [[]], [0]))
        fresh, again = NgramDrafter(), Text(grown.tokens)
        fresh.begin(again)
        assert paths(draft(drafter, grown)) == paths(draft(fresh, again))


class CountedReads(list[int]):
    """Counts the tokens that are read."""

    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_a_step_does_not_read_the_text_again() -> None:
    """Fault: every step searches the whole prompt, so a long one makes drafting slow."""
    reads = []
    for length in (200, 4000):
        tokens = CountedReads(np.random.default_rng(0).integers(0, 8, length).tolist())
        drafter, request = NgramDrafter(), Text(tokens)
        drafter.begin(request)
        before = tokens.reads
        tokens.append(3)
        draft(drafter, request)
        reads.append(tokens.reads - before)
    assert max(reads) < 60


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"min_ngram=5 exceeds max_ngram=4"):
        NgramOptions(min_ngram=5)


def test_the_plugin_is_found_by_name() -> None:
    built = PluginManager().bind("drafter", "ngram(max_ngram=3, continuations=1)").build()
    assert isinstance(built, NgramDrafter)


def tiny(kind: str) -> Any:
    """A random model of two layers in float32."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    config: Any = (
        GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=256)
        if kind == "gpt2"
        else LlamaConfig(
            **common,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return ModelRunner(tiny(request.param))


def engine_of(
    runner: ModelRunner, drafter: Drafter, verifier: Verifier | None = None, blocks: int = 60
) -> Engine:
    info = TargetInfo(
        "tiny", VOCAB, runner.max_length, (2,), None, runner.model, runner.device, runner.dtype
    )
    return Engine(
        runner,
        KVMemory(blocks, 4),
        info,
        drafter,
        verifier or CoupledVerifier(),
        [FixedScheduler()],
        KeyedSource(),
        max_batch=3,
        prefill_chunk=5,
    )


def run(engine: Engine) -> None:
    for _ in range(1000):
        if not engine.has_work:
            break
        engine.step()
        engine.memory.check()
    assert not engine.has_work
    assert engine.memory.used == 0


def texts_of(engine: Engine, params: SamplingParams) -> list[Output]:
    """Five ragged requests, of which three run at a time."""
    rng = np.random.default_rng(1)
    requests = [
        engine.add(rng.integers(3, 9, size).tolist(), params.model_copy(update={"seed": size}))
        for size in (3, 9, 20, 1, 14)
    ]
    run(engine)
    assert not engine.faults
    return [request.output for request in requests if request.output is not None]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("blocks", [60, 18], ids=["roomy", "preempting"])
def test_the_text_is_that_of_plain_decoding(
    runner: ModelRunner, temperature: float, blocks: int
) -> None:
    """Fault: drafts change the text, alone or where requests join, leave and are preempted."""
    params = SamplingParams(max_new_tokens=40, temperature=temperature, repetition_penalty=1.05)
    plain = texts_of(engine_of(runner, NoDrafter()), params)
    engine = engine_of(runner, NgramDrafter(), blocks=blocks)
    preempted: list[int] = []
    engine.observers.append(lambda report: preempted.append(report.preempted))
    drafted = texts_of(engine, params)
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
    assert sum(output.speculation.drafted for output in drafted) > 0
    assert (sum(preempted) > 0) == (blocks == 18)


def test_repetition_is_accepted(runner: ModelRunner) -> None:
    """Fault: drafts are right in form and useless in fact. A small greedy model soon repeats itself."""
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    for verifier in (CoupledVerifier(), RejectionVerifier()):
        outputs = texts_of(engine_of(runner, NgramDrafter(), verifier), params)
        passes = sum(output.speculation.target_passes for output in outputs)
        assert passes < 0.6 * sum(len(output.token_ids) for output in outputs)


class Recorded(NgramDrafter):
    """Notes each step's draft size and what was kept, by request, and the most state ever held."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[int, list[tuple[int, int]]] = {}

    def observe(self, feedback: Feedback) -> None:
        super().observe(feedback)
        for request, drafted, kept in zip(
            feedback.requests, feedback.drafted, feedback.kept, strict=True
        ):
            self.rounds.setdefault(request.id, []).append((drafted, len(kept)))


def test_B11_nothing_of_an_earlier_request_is_drafted(runner: ModelRunner) -> None:
    """Fault: an n-gram table that outlives its request, or a watermark that a shorter prompt never
    passes (ggml-org/llama.cpp#27852)."""
    rng = np.random.default_rng(2)
    pattern = rng.integers(30, 60, 12).tolist()
    first = [*pattern * 6, *rng.integers(3, 30, 20).tolist()]
    second = [*rng.integers(3, 30, 10).tolist(), *pattern[:4]]
    params = SamplingParams(max_new_tokens=30, temperature=0.9, seed=5, ignore_eos=True)

    def play(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, int]], list[int]]:
        drafter = Recorded()
        engine = engine_of(runner, drafter)
        for prompt in prompts:
            request = engine.add(prompt, params)
            run(engine)
            assert drafter._indexes == {}
        assert request.output is not None
        return drafter.rounds[request.id], request.output.token_ids

    assert play([first, second]) == play([second])
    assert draft_after(second) == []  # the pattern's start occurs in the first request only


def draft_after(tokens: Sequence[int]) -> list[list[int]]:
    """What is drafted for `tokens`, by a drafter that has seen another text before."""
    drafter, other, request = NgramDrafter(), Text([*tokens * 3, 1], id=0), Text(tokens, id=1)
    drafter.begin(other)
    drafter.end(other)
    drafter.begin(request)
    return paths(draft(drafter, request))


def test_a_cancelled_request_leaves_nothing(runner: ModelRunner) -> None:
    """Fault: state is dropped where a request finishes and kept where it is cancelled."""
    drafter = NgramDrafter()
    engine = engine_of(runner, drafter)
    request = engine.add([5, 6, 5, 6, 5], SamplingParams(max_new_tokens=50, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert drafter._indexes
    engine.cancel(request)
    assert drafter._indexes == {}


def test_B33_what_is_counted_as_drafted_is_what_was_drafted(runner: ModelRunner) -> None:
    """Fault: acceptance is measured against the nodes asked for, though fewer were found; or a
    request's own limits do nothing (huggingface/transformers#34803)."""
    drafter = Recorded()
    engine = engine_of(runner, drafter)
    wish = SpeculationParams(max_nodes=3, max_depth=2)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, speculation=wish)
    request = engine.add([5, 6, 7, 8], params)
    run(engine)
    rounds = drafter.rounds[request.id]
    stats = request.stats
    assert stats.drafted == sum(drafted for drafted, _ in rounds)
    assert stats.drafted_rounds == sum(drafted > 0 for drafted, _ in rounds) < len(rounds)
    assert stats.accepted == sum(kept for _, kept in rounds) > 0
    assert max(drafted for drafted, _ in rounds) == 3
    assert max(kept for _, kept in rounds) <= 2
