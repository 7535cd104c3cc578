"""Whatever a request asks for is exact under speculation: alone, together, on chains and on trees."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from specfw import Pipeline, SamplingParams
from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, LoadedTarget, TargetLoader, Verifier
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.forks import Forks
from specfw.decoding.probabilities import SamplingBatch, SamplingState
from specfw.decoding.rejection import RejectionVerifier
from specfw.decoding.stopping import Stopper
from specfw.decoding.warping import Warping
from specfw.engine.fixed import FixedScheduler
from specfw.engine.requests import Request
from specfw.errors import ConfigError
from specfw.testing import Case, MixtureDrafter, ScriptedDrafter, TableDrafter, certify
from specfw.testing.cases import CHOICES, EOS, table_runner
from specfw.testing.laws import NoToken, target_law
from specfw.testing.table_model import TableTokenizer
from specfw.types import SpeculationParams
from tests.engine_kit import OracleDrafter, make_engine, outputs, prompt_of, reference
from tests.tiny_models import VOCAB_SIZE, tiny, tiny_tokenizer

VERIFIERS = [CoupledVerifier, RejectionVerifier]
VOCAB = 4


def nudge(ids: Tensor, scores: Tensor) -> Tensor:
    """Scores that depend on the whole history, and on its order."""
    places = torch.arange(1, ids.shape[1] + 1)
    favourite = int((ids[0] * places).sum()) % scores.shape[1]
    scores[0, favourite] += 1.5
    return scores


def even_sum(ids: Tensor, scores: None) -> bool:
    return int(ids.sum()) % 5 == 4


ATOMS: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.3},
    "top-h": {"top_h": 0.7},
    "typical": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.2},
    "eta": {"eta_cutoff": 0.4},
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.4},
    "logit bias": {"logit_bias": {1: 0.8, 2: -0.5}},
    "sequence bias": {"sequence_bias": {(2,): 0.4, (1, 3): 1.1, (0, 2, 1): -2.0}},
    "bigrams": {"no_repeat_ngram_size": 2},
    "trigrams": {"no_repeat_ngram_size": 3},
    "bad words": {"bad_words_ids": ((3,), (1, 1), (2, 1, 2))},
    "suppressed": {"suppress_tokens": (1,)},
    "begin suppressed": {"begin_suppress_tokens": (0, 2)},
    "forced end": {"forced_eos_token_id": 0},
    "two forced ends": {"forced_eos_token_id": (0, 2)},
    "hastened end": {"exponential_decay_length_penalty": (0, 1.7), "ignore_eos": False},
    "end": {"ignore_eos": False},
    "minimum": {"min_new_tokens": 2, "ignore_eos": False},
    "grammar": {"choices": CHOICES, "ignore_eos": False},
    "stop token": {"stop_token_ids": (2,)},
    "stop string": {"stop": ("ba", "cd")},
    "processor": {"logits_processors": (nudge,)},
    "criterion": {"stopping_criteria": (even_sum,)},
}
LETTERS = "#$%&abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?:;\n"
"""What the tokens of the tiny models stand for, each of them for a letter."""

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: TableDrafter("near", depth=2),
    "tree": lambda: TableDrafter("unrelated", depth=2, width=2),
    "mixture": lambda: MixtureDrafter("near", depth=1),
    "script": lambda: ScriptedDrafter(seed=2),
}


def assert_exact(
    names: Sequence[str], drafter: str, verifier: Callable[[], Verifier], seed: int
) -> None:
    """The law of what comes out is the target's, by enumeration."""
    chosen: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
    for name in names:
        chosen |= ATOMS[name]
    case = Case(SamplingParams(**chosen), vocab_size=VOCAB, horizon=2, seed=seed)
    prompt, params = case.requests[case.watched]
    text_of = TableTokenizer(VOCAB).decode
    try:
        target_law(table_runner(case).model, prompt, case.horizon, params, (EOS,), text_of)
    except NoToken:
        assume(False)
    schedulers = [lambda: FixedScheduler(3, 2, 2)]
    certificate = certify(DRAFTERS[drafter], verifier, schedulers, cases=[case])
    assert certificate.ok, f"{names}: {certificate}"
    assert not certificate.faults
    assert certificate.drafted


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", ATOMS)
def test_every_setting_alone_is_exact(name: str, verifier: Callable[[], Verifier]) -> None:
    """A rule that is dropped, misplaced or given another node's history once drafts are on."""
    for drafter in ("chain", "tree"):
        assert_exact([name], drafter, verifier, seed=len(name))


@pytest.mark.parametrize("verifier", VERIFIERS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    names=st.lists(st.sampled_from(list(ATOMS)), min_size=2, max_size=3, unique=True),
    drafter=st.sampled_from(list(DRAFTERS)),
    seed=st.integers(0, 99),
)
def test_pairs_and_triples_are_exact(
    verifier: Callable[[], Verifier], names: list[str], drafter: str, seed: int
) -> None:
    """Rules in another order than documented, which shows only where they meet."""
    assert_exact(names, drafter, verifier, seed)


WARPERS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "temperature": ({"temperature": 0.3}, lambda: hf.TemperatureLogitsWarper(0.3)),
    "top-h": ({"top_h": 0.4}, lambda: hf.TopHLogitsWarper(0.4)),
    "top-k": ({"top_k": 7}, lambda: hf.TopKLogitsWarper(7)),
    "top-p": ({"top_p": 0.8}, lambda: hf.TopPLogitsWarper(0.8)),
    "min-p": ({"min_p": 0.1}, lambda: hf.MinPLogitsWarper(0.1)),
    "typical": ({"typical_p": 0.5}, lambda: hf.TypicalLogitsWarper(0.5)),
    "epsilon": ({"epsilon_cutoff": 0.01}, lambda: hf.EpsilonLogitsWarper(0.01)),
    "eta": ({"eta_cutoff": 0.02}, lambda: hf.EtaLogitsWarper(0.02)),
}


@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 12.0])
def test_filters_are_those_of_transformers(name: str, sharpness: float) -> None:
    """A formula of our own for a setting that users know; some tokens are impossible already."""
    chosen, make = WARPERS[name]
    scores = sharpness * torch.randn(40, 300, generator=torch.Generator().manual_seed(1)).double()
    scores[:, ::7] = -torch.inf
    expected = make()(torch.zeros(40, 1, dtype=torch.long), scores).softmax(-1)
    params = SamplingParams(**{"temperature": 1.0, **chosen})
    got = Warping([SamplingParams(), params]).laws(scores, np.ones(40, np.int64))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    cut=st.integers(0, 9),
    size=st.integers(1, 4),
    padding=st.integers(0, 2),
)
def test_histories_are_committed_text_and_path(
    text: list[int], cut: int, size: int, padding: int
) -> None:
    """N-grams and sequences across the border between what is committed and what is drafted."""
    cut = min(max(1, cut), len(text))
    bias = {(1, 2): 1.0, (2, 2, 0): -3.0, (3,): 0.5}
    bad = [[1, 3], [0, 0, 1], [2]]
    params = SamplingParams(no_repeat_ngram_size=size, sequence_bias=bias, bad_words_ids=bad)
    ids = torch.tensor([text])
    expected = torch.zeros(1, 5)
    for processor in (
        hf.SequenceBiasLogitsProcessor(bias),
        hf.NoRepeatNGramLogitsProcessor(size),
        hf.NoBadWordsLogitsProcessor(bad),
    ):
        expected = processor(ids, expected)
    state = SamplingState(params, text[:1], [], [], 5, torch.device("cpu"))
    state.advance(text[1:cut])
    path = torch.tensor([[-1] * padding + text[cut:]], dtype=torch.long)
    depth = torch.tensor([len(text) - cut])
    got = SamplingBatch([state]).scores(torch.zeros(1, 5), np.zeros(1, np.int64), path, depth)
    assert got.tolist() == expected.tolist()


class EvenForAWhile:
    """After token 5, only even ids for the next three tokens: an automaton, moved by `advance` only."""

    def __init__(self, left: int = 0, seen: list[int] | None = None) -> None:
        self.left = left
        self.seen: list[int] = seen or []

    def fork(self) -> EvenForAWhile:
        return EvenForAWhile(self.left, list(self.seen))

    def advance(self, token: int) -> None:
        self.left = 3 if token == 5 else max(0, self.left - 1)
        self.seen.append(token)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = torch.arange(scores.shape[1]) % 2 == 1
        scores[:, 5] += 4.0
        return scores.masked_fill(odd, -torch.inf) if self.left else scores


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("branches", [1, 3])
def test_B18_a_stateful_processor_moves_with_committed_tokens_only(
    verifier: Callable[[], Verifier], branches: int
) -> None:
    """A constraint that begins within a draft is not enforced there, or a refused token leaves a trace."""
    prompts = [prompt_of(6, seed) for seed in range(3)]
    shared = EvenForAWhile()
    params = SamplingParams(max_new_tokens=24, logits_processors=(shared,))
    plain = outputs(make_engine("llama", NoDrafter(), verifier), prompts, params)
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(prompts, plain, strict=True)]
    # One branch is right; others hold 5, or odd ids behind it.
    drafter = OracleDrafter(texts, right=0.7, depth=5, branches=branches)
    engine = make_engine("llama", drafter, verifier)
    requests = [engine.add(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    for request, expected in zip(requests, plain, strict=True):
        assert request.output is not None
        assert request.output.token_ids == expected.token_ids
        assert own_processor(request).seen == expected.token_ids
        assert 5 in expected.token_ids
    assert sum(request.stats.accepted for request in requests) > 0
    assert shared.seen == []


def own_processor(request: Request) -> EvenForAWhile:
    history = request.sampling.history
    assert history is not None
    [forks] = history._processors
    assert isinstance(forks, Forks)
    processor = forks.committed.processor
    assert isinstance(processor, EvenForAWhile)
    return processor


class Failing:
    """A processor or criterion that fails, or misbehaves, from some length on."""

    def __init__(self, at: int, how: str) -> None:
        self._at, self._how = at, how

    def __call__(self, ids: Tensor, scores: Tensor | None) -> Any:
        if ids.shape[1] >= self._at:
            if self._how == "raises":
                raise KeyError("lost")
            return torch.zeros(3) if self._how == "shape" else "yes"
        return False if scores is None else scores


@pytest.mark.parametrize(
    ("setting", "how", "sentence"),
    [
        ("logits_processors", "raises", r"logits processor Failing: raised KeyError at position 9"),
        ("logits_processors", "shape", r"scores \[1, 64\] back, got torch.float32 \[3\]"),
        ("logits_processors", "type", r"got 'yes' at position 9"),
        (
            "stopping_criteria",
            "raises",
            r"stopping criterion Failing: .* after token 3, got KeyError",
        ),
        ("stopping_criteria", "shape", r"after token 3, got RuntimeError"),
    ],
)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_failing_function_costs_its_own_request(
    setting: str, how: str, sentence: str, drafts: bool
) -> None:
    """One user's function that takes the whole batch down, or leaves half a text without a word."""
    prompts = [prompt_of(6, seed) for seed in range(3)]
    texts = [reference("llama", tuple(prompt), 8) for prompt in prompts]
    params = SamplingParams(max_new_tokens=8)
    broken = SamplingParams(max_new_tokens=8, **{setting: (Failing(9, how),)})
    engine = make_engine("llama", OracleDrafter(texts, depth=4) if drafts else NoDrafter())
    first, failed, last = outputs(engine, prompts, [params, broken, params])
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "\n" not in failed.error
    assert re.search(sentence, failed.error), failed.error
    assert [first.token_ids, last.token_ids] == [texts[0][6:], texts[2][6:]]
    assert failed.token_ids == texts[1][6:9]


def test_a_processor_that_fails_only_off_the_text_costs_nothing() -> None:
    """A draft can lead where the text never goes; what a function does there is nobody's business."""
    prompt = prompt_of(6)
    text = reference("llama", tuple(prompt), 10)

    def picky(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids[0].tolist() == text[: ids.shape[1]], "off the text"
        return scores

    params = SamplingParams(max_new_tokens=10, logits_processors=(picky,))
    drafter = OracleDrafter([text], right=0.5, depth=4, branches=2)
    [output] = outputs(make_engine("llama", drafter), [prompt], params)
    assert output.error is None
    assert output.token_ids == text[6:]


class TestStopping:
    """Criteria and time, token by token."""

    def stopper(self, clock: Callable[[], float] = lambda: 0.0, **chosen: Any) -> Stopper:
        return Stopper(SamplingParams(**chosen), (), None, [7, 8], clock)

    def test_a_criterion_ends_within_a_block(self) -> None:
        """What follows the end of a block stays, and the reason is lost."""

        def three(ids: Tensor, scores: None) -> bool:
            return ids.shape == (1, 5) and ids[0, :2].tolist() == [7, 8]

        stopper = self.stopper(stopping_criteria=three, max_new_tokens=9)
        assert stopper.extend([1, 2, 3, 4, 5]) == (3, "stop")
        assert stopper.stop_reason == "three"

    def test_a_stop_token_comes_before_a_criterion(self) -> None:
        stopper = self.stopper(stopping_criteria=lambda i, s: True, stop_token_ids=(4,))
        assert stopper.push(4) == "stop"
        assert stopper.stop_reason == 4

    def test_time_runs_out_between_tokens(self) -> None:
        """Time that is looked at once per block, or before the first token."""
        now = iter([0.0, 1.0, 2.0, 3.5, 9.0])
        stopper = self.stopper(lambda: next(now), max_time=3.0)
        assert stopper.extend([1, 2, 3, 4]) == (3, "length")
        assert stopper.stop_reason == "max_time"


class Ready(TargetLoader):
    def load(self) -> LoadedTarget:
        return LoadedTarget("tiny", tiny("llama"), tiny_tokenizer())


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with Pipeline.from_config({"target": Ready(), "drafter": "ngram"}) as made:
        yield made


def test_samples_of_one_prompt_are_independent_and_repeatable(pipeline: Pipeline) -> None:
    """Samples that share their noise, or that change with how many there are."""
    prompts = [prompt_of(5), prompt_of(7, 1)]
    asked = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, "seed": 3}
    one = pipeline.generate(prompts, **asked)
    five = pipeline.generate(prompts, n=5, **asked)
    assert len(five) == 10
    assert [five[0].token_ids, five[5].token_ids] == [output.token_ids for output in one]
    assert len({tuple(output.token_ids) for output in five}) == 10
    assert len({output.seed for output in five[:5]}) == 5
    assert [output.token_ids for output in pipeline.generate(prompts, n=5, **asked)] == [
        output.token_ids for output in five
    ]
    pieces = list(pipeline.stream(prompts, n=2, **asked))
    assert {piece.index for piece in pieces} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match=r"3 samples would be the same; raise"):
        pipeline.generate(prompts, n=3)
    with pytest.raises(ConfigError, match=r"number of samples from 1, got 0"):
        pipeline.generate(prompts, n=0)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_those_of_a_forward_over_the_text(chunk: int, top: int) -> None:
    """Prompt tokens from the prefix cache or another chunk, and accepted tokens, without their numbers."""
    config = {"target": Ready(), "drafter": "ngram", "engine": {"prefill_chunk": chunk}}
    prompt = prompt_of(40)
    asked = {"max_new_tokens": 12, "logprobs": top, "prompt_logprobs": top, "ignore_eos": True}
    with Pipeline.from_config(config) as made:
        made.generate([prompt], max_new_tokens=2)  # fills the prefix cache
        [output, other, again] = made.generate(
            [prompt, prompt_of(9, 4), prompt],
            [SamplingParams(**asked), SamplingParams(max_new_tokens=3), SamplingParams(**asked)],
        )
    assert other.prompt_logprobs is None
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    assert again.prompt_logprobs is not None
    assert len(again.prompt_logprobs) == 39
    text = [*prompt, *output.token_ids]
    with torch.inference_mode():
        rows = tiny("llama")(torch.tensor([text])).logits[0].log_softmax(-1)
    told = [*output.prompt_logprobs, *output.logprobs]
    assert len(told) == len(text) - 1
    for place, one in enumerate(told):
        assert one.token_id == text[place + 1]
        assert one.logprob == pytest.approx(float(rows[place, one.token_id]), abs=1e-4)
        best = rows[place].topk(top)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_prompt_logprobs_survive_a_preemption() -> None:
    """Rows noted twice, or not at all, when a prompt is run again."""
    engine = make_engine("llama", NoDrafter(), blocks=16, prefill_chunk=3, max_batch=4)
    params = SamplingParams(max_new_tokens=12, prompt_logprobs=0, ignore_eos=True)
    found = outputs(engine, [prompt_of(20, seed) for seed in range(4)], params)
    assert [len(output.prompt_logprobs or ()) for output in found] == [19] * 4


STRUCTURES: dict[int, dict[str, Any]] = {
    0: {"regex": "[a-z]{3,9}"},
    1: {"json_schema": {"type": ["boolean", "null"]}},
    2: {"grammar": 'start: "a" start "b" | WORD\nWORD: /c[d-h]*/'},
    4: {"choices": ("red", "green", "grey", "blue")},
    5: {"regex": "(ab|cd)*"},
    6: {"grammar": 'root ::= ("x" | "y" root "z")'},
    11: {"regex": "([A-F][a-f] )*"},
}
"""The grammars of some requests of a batch, over the letters of the tiny models."""


def test_a_mixed_batch_gives_what_each_gives_alone() -> None:
    """Settings, seeds, grammars and speculation that leak from one request to its batch-mates."""
    prompts = [prompt_of(4 + seed, seed) for seed in range(12)]
    base = {"max_new_tokens": 10, "temperature": 0.9}
    own = [
        value
        for value in ATOMS.values()
        if not {"stop", "stop_token_ids", "choices"} & value.keys()
    ]
    off = {"enabled": False}
    each = [
        SamplingParams(
            **{
                **base,
                **own[2 * i],
                **own[2 * i + 1],
                **STRUCTURES.get(i, {}),
                "seed": i,
                "speculation": off if i % 4 == 3 else {},
            }
        )
        for i in range(12)
    ]
    drafter = OracleDrafter([prompt * 4 for prompt in prompts], depth=4, branches=2)
    letters = TableTokenizer(VOCAB_SIZE, LETTERS)
    together = outputs(make_engine("llama", drafter, eos=(2,), tokenizer=letters), prompts, each)
    for prompt, params, output in zip(prompts, each, together, strict=True):
        engine = make_engine("llama", NoDrafter(), eos=(2,), tokenizer=letters)
        off_params = params.model_copy(update={"speculation": SpeculationParams(enabled=False)})
        [alone] = outputs(engine, [prompt], off_params)
        assert alone.token_ids == output.token_ids, params
        assert alone.error is None
    assert sum(together[i].speculation.accepted for i in STRUCTURES) > 0


@pytest.mark.parametrize("temperature", [1e-8, 1e-5])
def test_hardly_any_temperature_is_greedy(temperature: float) -> None:
    """Scores divided by nearly nothing give NaN instead of the most likely token."""
    prompts = [prompt_of(5, seed) for seed in range(3)]
    texts = [reference("llama", tuple(prompt), 10) for prompt in prompts]
    params = [
        SamplingParams(max_new_tokens=10, temperature=t) for t in (temperature, 1.0, temperature)
    ]
    for verifier in VERIFIERS:
        found = outputs(
            make_engine("llama", OracleDrafter(texts, depth=4), verifier), prompts, params
        )
        assert found[0].token_ids == texts[0][5:]
        assert found[2].token_ids == texts[2][5:]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "empty word": ({"bad_words_ids": [[]]}, r"bad_words_ids.0: .*at least 1 item"),
    "negative n-gram": ({"no_repeat_ngram_size": -1}, r"no_repeat_ngram_size: .*got -1"),
    "typical": ({"typical_p": 0.0}, r"typical_p: .*greater than 0"),
    "eta": ({"eta_cutoff": 1.0}, r"eta_cutoff: .*less than 1"),
    "infinite bias": ({"sequence_bias": {(1, 2): float("inf")}}, r"sequence_bias.*finite"),
    "no function": ({"logits_processors": ["x"]}, r"logits_processors.0: .*callable \(got 'x'\)"),
    "no criterion": ({"stopping_criteria": 3}, r"stopping_criteria: .*got 3"),
    "contradiction": (
        {"forced_eos_token_id": 3, "suppress_tokens": [3]},
        r"forced_eos_token_id=\[3\] is suppressed, which leaves no token; take",
    ),
    "many logprobs": ({"prompt_logprobs": 21}, r"prompt_logprobs: .*got 21"),
    "no time": ({"max_time": 0}, r"max_time: .*greater than 0"),
    "foreign word": ({"bad_words_ids": [[3, VOCAB_SIZE]]}, r"bad_words_ids from 0 to 63, got 64"),
    "two grammars": (
        {"regex": "a+", "choices": ["a"]},
        r"regex and choices are given together, .*; set the others to null",
    ),
    "no choice": ({"choices": []}, r"choices: .*at least 1 item"),
    "no JSON": ({"json_schema": "{type}"}, r"json_schema: expected JSON, which this text is not"),
    "foreign tokenizer": ({"regex": "a+"}, r"regex: expected a tokenizer that llguidance can read"),
    "endless": ({"regex": "a+", "ignore_eos": True}, r"regex: expected a token that ends the text"),
    "foreign bias": ({"sequence_bias": {(-1,): 1.0}}, r"sequence_bias from 0 to 63, got -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_settings_are_refused_in_one_sentence(pipeline: Pipeline, case: str) -> None:
    """A setting that is silently ignored, or an error that does not name it."""
    chosen, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence) as caught:
        pipeline.generate([[3, 4]], **chosen)
    assert "\n" not in str(caught.value)
    assert not pipeline.engine.has_work


def test_guidance_is_refused_by_name() -> None:
    """A processor that runs the model itself is silently wrong under speculation."""
    guidance = hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, None)
    with pytest.raises(ConfigError, match=r"UnbatchedClassifier\w+ cannot be exact .*leave it out"):
        SamplingParams(logits_processors=[guidance])
