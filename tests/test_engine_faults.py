"""Faults that users of other engines met, and the kind of each, ruled out for the whole engine."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specfw.builtins import NoDrafter
from specfw.contracts import Drafter, Outcome, RequestView, TargetInfo, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft
from specfw.decoding.probabilities import NodeLaws
from specfw.decoding.random import KeyedSource, RandomSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.engine.requests import Request
from specfw.errors import CapacityError, ConfigError
from specfw.testing import TableLM, output_law, target_law, total_variation
from specfw.types import SamplingParams
from tests.engine_kit import (
    OracleDrafter,
    TwinDrafter,
    make_engine,
    outputs,
    prompt_of,
    reference,
    run,
    runner_of,
)
from tests.tiny_models import CONTEXT, EOS, VOCAB_SIZE, WINDOW, build, tiny

VERIFIERS = [CoupledVerifier, RejectionVerifier]


def greedy(new: int, **settings: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, ignore_eos=True, **settings)


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    return [output.token_ids for output in outputs(engine, prompts, params)]


# Greedy identity


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_B05_greedy_text_is_that_of_a_cacheless_loop(architecture: str, k: int) -> None:
    """Positions not advanced rightly after a partly accepted draft, or after a prompt of one token."""
    prompts = [prompt_of(length) for length in (1, 2, 30)]
    texts = [reference(architecture, tuple(prompt), 80) for prompt in prompts]
    for verifier in VERIFIERS:
        engine = make_engine(
            architecture, OracleDrafter(texts, 0.6, k), verifier, draft=(k, k, 1), prefill_chunk=7
        )
        results = outputs(engine, prompts, greedy(80))
        assert [
            prompt + result.token_ids for prompt, result in zip(prompts, results, strict=True)
        ] == texts
        histogram = sum(
            (Counter(result.speculation.accepted_histogram) for result in results), Counter()
        )
        assert set(range(min(k, 5) + 1)) <= set(histogram)  # accepted counts of all kinds occurred


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_B05_positions_are_the_true_indices(architecture: str) -> None:
    """The right text by luck: positions that are wrong where they matter little."""
    prompt = prompt_of(11)
    text = reference(architecture, tuple(prompt), 60)
    engine = make_engine(
        architecture, OracleDrafter([text], 0.6, 5), draft=(5, 5, 1), prefill_chunk=4
    )
    request = engine.add(prompt, greedy(60))
    passes = []

    def watch(module: Any, arguments: Any, inputs: dict[str, Any]) -> None:
        assert request.sequence is not None
        passes.append(
            (
                request.sequence.n_kv,
                list(request.tokens),
                inputs["input_ids"][0],
                inputs["position_ids"][0],
            )
        )

    hook = engine.runner.model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        run(engine)
    finally:
        hook.remove()
    for n_kv, committed, ids, positions in passes:
        assert positions.tolist() == list(range(n_kv, n_kv + len(ids)))  # the draft is a chain
        known = committed[n_kv : n_kv + len(ids)]
        assert ids[: len(known)].tolist() == known
    assert len(passes) > 12


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3"])
def test_B07_drafts_across_the_edge_of_the_window(architecture: str) -> None:
    """Masks and rollback that are wrong once the sequence outgrows the window in the middle of a draft."""
    prompts = [prompt_of(length) for length in (3, WINDOW - 1, WINDOW, WINDOW + 1, 20)]
    texts = [reference(architecture, tuple(prompt), 40) for prompt in prompts]
    for branches in (1, 3):
        engine = make_engine(
            architecture, OracleDrafter(texts, 0.7, 5, branches), draft=(12, 5, 4), prefill_chunk=8
        )
        results = tokens_of(engine, prompts, greedy(40))
        assert [prompt + result for prompt, result in zip(prompts, results, strict=True)] == texts


# Sampled exactness


class ThirdRanked(Drafter):
    """Proposes at every position the target's third-ranked token, which the filters forbid."""

    def attach(self, target: TargetInfo) -> None:
        self._model = target.model

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, request in zip(builder.roots, requests, strict=True):
            text = list(request.tokens)
            for _ in range(3):
                text.append(int(np.argsort(-self._model.law(text), kind="stable")[2]))
            builder.guess(int(root), text[len(request.tokens) :])


class Tree(Drafter):
    """Three children of the root and two below each: guessed by rank, or sampled."""

    def __init__(self, model: TableLM, sampled: bool) -> None:
        self._model, self._sampled = model, sampled

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        parents, texts = builder.roots, [list(request.tokens) for request in requests]
        for width in (3, 2):
            children = self._children(parents, texts, width, builder)
            rows, ranks = np.nonzero(children >= 0)
            if not len(rows):
                return
            parents = children[rows, ranks]
            drawn = builder.tokens_of(parents).tolist()
            texts = [[*texts[row], token] for row, token in zip(rows, drawn, strict=True)]

    def _children(
        self, parents: Any, texts: list[list[int]], width: int, builder: DraftBuilder
    ) -> Any:
        laws = np.array([self._model.law(text) for text in texts])
        if self._sampled:
            return builder.sample(parents, torch.from_numpy(laws).log(), width)
        best = np.argsort(-laws, axis=1, kind="stable")[:, :width]
        handles = [
            [next(iter(builder.guess(int(parent), [int(token)])), -1) for token in tokens]
            for parent, tokens in zip(parents, best, strict=True)
        ]
        return np.array(handles)


def law_of(
    target: TableLM,
    drafter: Callable[[], Drafter],
    verifier: type[Verifier],
    params: SamplingParams,
) -> tuple[dict[Any, float], dict[Any, float]]:
    """The law of what an engine emits after one prompt, enumerated; and the target's."""
    runner, size = ModelRunner(target), target.config.vocab_size
    prompt = [1, 0]

    def build_engine(source: RandomSource) -> tuple[Engine, Sequence[Request]]:
        info = TargetInfo(
            "table", size, runner.max_length, (), None, target, runner.device, runner.dtype
        )
        scheduler = FixedScheduler(max_nodes=9, max_depth=3, max_width=3)
        engine = Engine(runner, KVMemory(24, 2), info, drafter(), verifier(), [scheduler], source)
        return engine, [engine.add(prompt, params.model_copy(update={"seed": 1}))]

    return output_law(build_engine).law, target_law(target, prompt, params.max_new_tokens, params)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}])
def test_B02_the_target_is_scored_with_the_requests_filters(
    verifier: type[Verifier], filters: dict[str, Any]
) -> None:
    """Accepting by the unfiltered law: tokens that the filters forbid, and frequencies of the full softmax."""
    target = TableLM(vocab_size=4, seed=3)
    params = SamplingParams(max_new_tokens=3, temperature=1.0, ignore_eos=True, **filters)
    law, expected = law_of(target, ThirdRanked, verifier, params)
    assert set(law) <= set(expected)
    assert total_variation(law, expected) < 1e-9


class NoNoise(KeyedSource):
    """Every uniform number is as small as it can be."""

    @staticmethod
    def _uniform(key: Tensor) -> Tensor:
        return torch.full_like(key, 2.0**-54, dtype=torch.float64)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_B02_a_coin_of_zero_accepts_nothing_impossible(verifier: type[Verifier]) -> None:
    """Comparing a coin of 0.0 with a probability of 0 the wrong way round."""
    target = TableLM(vocab_size=4, seed=3, kind="sparse")
    runner = ModelRunner(target)
    info = TargetInfo("table", 4, runner.max_length, (), None, target, runner.device, runner.dtype)
    engine = Engine(
        runner, KVMemory(24, 2), info, ThirdRanked(), verifier(), [FixedScheduler()], NoNoise()
    )
    request = engine.add(
        [1, 0], SamplingParams(max_new_tokens=16, temperature=1.0, top_k=2, ignore_eos=True)
    )
    run(engine)
    assert len(request.emitted) == 16
    for place in range(2, len(request.tokens)):
        law = target.law(request.tokens[:place])
        assert law[request.tokens[place]] >= np.sort(law)[-2] > 0 or law[request.tokens[place]] == 1


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("draft_seed", [5, 6])
def test_B04_trees_keep_the_law(verifier: type[Verifier], sampled: bool, draft_seed: int) -> None:
    """Siblings by rank verified as if drawn, or siblings without replacement with the first one's law."""
    target = TableLM(vocab_size=3, seed=5)
    draft = TableLM(vocab_size=3, seed=draft_seed)  # equal to the target, and unrelated
    params = SamplingParams(max_new_tokens=3, temperature=1.0, ignore_eos=True)
    law, expected = law_of(target, lambda: Tree(draft, sampled), verifier, params)
    assert total_variation(law, expected) < 1e-9


class NearlyEven(TableLM):
    def _own_law(self, key: int) -> Any:
        return np.array([0.51, 0.49])


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("sampled", [False, True])
def test_B04_the_runner_up_keeps_its_share(verifier: type[Verifier], sampled: bool) -> None:
    """The most likely token always being accepted, because the draft proposes it for sure."""
    model = NearlyEven(vocab_size=2)
    params = SamplingParams(max_new_tokens=2, temperature=1.0, ignore_eos=True)
    law, _ = law_of(model, lambda: Tree(model, sampled), verifier, params)
    first = sum(weight for emission, weight in law.items() if emission.tokens[0] == 1)
    assert first == pytest.approx(0.49, abs=1e-12)


# Ends and lengths


class AlwaysEos(OracleDrafter):
    """Proposes the stop token at once, and behind every right token."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for root, request in zip(builder.roots, requests, strict=True):
            builder.guess(int(root), [EOS] * 4)
            right = self.next_of(request.tokens)[:3]
            for count in range(len(right)):
                builder.guess(int(root), [*right[: count + 1], EOS])


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("by_id", [False, True])
def test_B14_minimum_length_holds_inside_a_draft(
    verifier: type[Verifier], temperature: float, by_id: bool
) -> None:
    """The minimum tested once a step, so that a draft crosses it; EOS and stop ids alike."""
    prompts = [prompt_of(5, seed) for seed in range(6)]
    settings = [
        SamplingParams(
            max_new_tokens=12,
            min_new_tokens=minimum,
            temperature=temperature,
            seed=seed,
            logit_bias={EOS: 60.0},  # by far the most likely everywhere
            ignore_eos=by_id,
            stop_token_ids=(EOS,) if by_id else (),
        )
        for seed, minimum in enumerate([6, 0, 6, 1, 2, 6])
    ]
    plain = outputs(make_engine("llama", NoDrafter(), eos=(EOS,)), prompts, settings)
    texts = [prompt + output.token_ids for prompt, output in zip(prompts, plain, strict=True)]
    drafted = outputs(
        make_engine("llama", AlwaysEos(texts), verifier, eos=(EOS,)), prompts, settings
    )
    for one, params, before in zip(drafted, settings, plain, strict=True):
        assert one.token_ids.index(EOS) == len(one.token_ids) - 1 == params.min_new_tokens
        assert one.finish_reason == "stop"
        if temperature == 0 or verifier is CoupledVerifier:
            assert one.token_ids == before.token_ids
    assert any(output.speculation.accepted for output in drafted)


# Seeds, temperatures


def as_ids(
    engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]
) -> list[list[int]]:
    return tokens_of(engine, [prompt for prompt, _ in requests], [params for _, params in requests])


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("k", [1, 5])
def test_B19_a_seed_fixes_the_text_whoever_is_in_the_batch(
    verifier: type[Verifier], k: int
) -> None:
    """Noise drawn for the batch, or by row: text that changes with the company or the order of arrival."""
    prompt = prompt_of(6)

    def engine() -> Engine:
        return make_engine("llama", TwinDrafter(k), verifier, draft=(k, k, 1), max_batch=4)

    def params(seed: int | None, temperature: float = 0.8) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=14, temperature=temperature, seed=seed, ignore_eos=True
        )

    seven, other = (
        as_ids(engine(), [(prompt, params(7))])[0],
        as_ids(engine(), [(prompt, params(99))])[0],
    )
    greedy_text = reference("llama", tuple(prompt), 14)[len(prompt) :]
    for order in ([7, None, 7, 99], [99, 7, None, 7], [None, None, 99, 7]):
        batch = [*((prompt, params(seed)) for seed in order), (prompt, params(3, temperature=0.0))]
        for seed, ids in zip([*order, "greedy"], as_ids(engine(), batch), strict=True):
            if seed is not None:
                assert ids == {7: seven, 99: other, "greedy": greedy_text}[seed]
    assert seven != other
    broken = engine()
    victim, kept = broken.add(prompt, params(99)), broken.add(prompt, params(7))
    for _ in range(3):
        broken.step()
    broken.cancel(victim)
    run(broken)
    assert kept.output is not None
    assert kept.output.token_ids == seven
    assert kept.output.seed == 7


def test_B19_the_coupled_text_does_not_depend_on_the_draft_length() -> None:
    prompt = prompt_of(6)
    params = SamplingParams(max_new_tokens=14, temperature=0.8, seed=7, ignore_eos=True)
    texts = [
        as_ids(make_engine("llama", TwinDrafter(k), draft=(k, k, 1)), [(prompt, params)])
        for k in (1, 3, 5)
    ]
    plain = as_ids(make_engine("llama", NoDrafter()), [(prompt, params)])
    assert all(text == plain for text in texts)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_B19_requests_without_a_seed_differ(verifier: type[Verifier]) -> None:
    """A default seed, or one generator state shared by all."""
    engine = make_engine("llama", TwinDrafter(2), verifier, draft=(2, 2, 1))
    params = SamplingParams(max_new_tokens=8, temperature=2.0, ignore_eos=True)
    results = outputs(engine, [prompt_of(4)] * 30, params)
    assert len({tuple(result.token_ids) for result in results}) == 30
    assert len({result.seed for result in results}) == 30


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("same", [True, False])
def test_B20_temperatures_from_zero_to_one_share_a_batch(
    verifier: type[Verifier], same: bool
) -> None:
    """Division by a temperature of zero, softmax overflow near zero, residuals of zero mass."""
    temperatures = [0.0, 1e-8, 1e-5, 1e-3, 1.0]
    prompt, new = prompt_of(8), 30
    expected = reference("llama", tuple(prompt), new)[len(prompt) :]
    gaps = [
        float(
            -np.diff(
                runner_of("llama").stock_logits([*prompt, *expected[:n]])[-1].topk(2).values.numpy()
            )[0]
        )
        for n in range(new)
    ]
    assert min(gaps) > 1e-3  # so that 1e-5 is greedy too
    batch = [
        (
            prompt,
            SamplingParams(max_new_tokens=new, temperature=temperature, seed=5, ignore_eos=True),
        )
        for temperature in temperatures
    ]

    def engine() -> Engine:
        model = tiny("llama") if same else tiny("llama", seed=1)
        return make_engine("llama", TwinDrafter(3, 2, model), verifier, draft=(6, 3, 2))

    together = engine()
    for prompt_, params in batch:
        together.add(prompt_, params)
    requests = list(together.planner.waiting)
    while together.has_work:
        lengths = {
            request.id: len(request.tokens) for request in requests if request.output is None
        }
        together.step()
        for request in requests:
            if request.id in lengths and request.sequence is not None:
                assert len(request.tokens) > lengths[request.id]  # prompts fit into one chunk
    ids = [request.output.token_ids for request in requests if request.output is not None]
    assert [request.output.error for request in requests if request.output is not None] == [
        None
    ] * 5
    assert ids[:3] == [expected] * 3
    assert ids == [as_ids(engine(), [one])[0] for one in batch]
    assert all(count >= 0 for request in requests for count in request.stats.accepted_histogram)
    if same:
        assert (
            requests[0].stats.acceptance_length > 2.5
        )  # the six nodes make two depths, so three at most
    assert not together.faults


# Logprobs and counts


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("top", [0, 1, 5])
def test_B21_logprobs_are_the_targets_own(
    verifier: type[Verifier], temperature: float, top: int
) -> None:
    """Accepted tokens reported as certain, because only the ordinary path filled their log-probability in."""
    prompt = prompt_of(7)
    params = SamplingParams(
        max_new_tokens=30, temperature=temperature, seed=11, logprobs=top, ignore_eos=True, top_k=20
    )
    plain = prompt + as_ids(make_engine("llama", NoDrafter()), [(prompt, params)])[0]
    (output,) = outputs(
        make_engine("llama", OracleDrafter([plain], 0.6, 4, 2), verifier), [prompt], params
    )
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == output.usage.completion_tokens == 30
    if verifier is CoupledVerifier:
        assert 0 < output.speculation.accepted < output.speculation.drafted
    rows = runner_of("llama").stock_logits([*prompt, *output.token_ids]).log_softmax(-1)
    for token, entry, row in zip(
        output.token_ids, output.logprobs, rows[len(prompt) - 1 :], strict=False
    ):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(top)
        assert [pair[0] for pair in entry.top] == best.indices.tolist()
        assert [pair[1] for pair in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


class Scripted(OracleDrafter):
    """Drafts given numbers of tokens of which given numbers are right, step by step."""

    def __init__(self, text: Sequence[int], script: Sequence[tuple[int, int]]) -> None:
        super().__init__([text])
        self._script = iter(script)

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        drafted, right = next(self._script)
        tokens = self.next_of(requests[0].tokens)[:drafted]
        wrong = [(token + 1) % VOCAB_SIZE for token in tokens[right:]]
        builder.guess(int(builder.roots[0]), [*tokens[:right], *wrong])


def test_B23_counts_are_of_what_was_really_drafted_and_kept() -> None:
    """Acceptance computed from settings, bonus tokens or padding counted as drafts."""
    prompt = prompt_of(5)
    text = reference("llama", tuple(prompt), 30)
    script = [(5, 3), (5, 0), (5, 5), (4, 2), (0, 0), (0, 0)]
    engine = make_engine("llama", Scripted(text, script), draft=(5, 5, 1))
    request = engine.add(prompt, greedy(16))
    reports = run(engine)
    stats = request.stats
    assert request.tokens == text[: len(prompt) + 16]
    assert (stats.drafted, stats.accepted, stats.target_passes, stats.drafted_rounds) == (
        19,
        10,
        6,
        4,
    )
    assert stats.emitted == stats.accepted + stats.target_passes == 16
    assert stats.accepted_histogram == {3: 1, 0: 1, 5: 1, 2: 1}
    assert stats.acceptance_rate == 10 / 19
    assert stats.acceptance_length == 16 / 6
    assert stats.accepted_by_depth == [3, 3, 2, 1, 1]  # of accepted 3, 0, 5, 2
    assert stats.tested_by_depth == [4, 3, 3, 2, 1]  # one more where a token was refused
    assert [report.drafted for report in reports] == [5, 5, 5, 4, 0, 0]
    assert [report.accepted for report in reports] == [3, 0, 5, 2, 0, 0]
    assert [report.emitted for report in reports] == [4, 1, 6, 3, 1, 1]


def test_B23_a_tree_and_a_cut_are_counted_as_they_are() -> None:
    """Nodes behind the end counted as kept; depth taken for the number of nodes."""
    prompt = prompt_of(5)
    text = reference("llama", tuple(prompt), 30)
    stop = text[len(prompt) + 2]
    end = text.index(stop, len(prompt)) - len(prompt) + 1
    params = SamplingParams(max_new_tokens=20, stop_token_ids=(stop,), ignore_eos=True)
    (output,) = outputs(
        make_engine("llama", OracleDrafter([text], 1.0, 6), draft=(7, 6, 3)), [prompt], params
    )
    assert output.token_ids == text[len(prompt) : len(prompt) + end]
    assert output.speculation.emitted == end
    assert output.speculation.accepted == end  # the end was itself a kept draft token
    assert output.speculation.drafted == 6


# Preemption


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_B30_preemption_changes_no_text(verifier: type[Verifier], prefix_cache: bool) -> None:
    """A draft, a drafter's state or streamed text surviving a preemption that freed the KV below it."""
    prompts = [prompt_of(length, seed) for seed, length in enumerate((9, 12, 7))]
    settings = [
        greedy(40),
        SamplingParams(max_new_tokens=40, temperature=0.9, seed=4, ignore_eos=True),
        greedy(40, repetition_penalty=1.3),
    ]
    plain = tokens_of(make_engine("llama", NoDrafter()), prompts, settings)
    texts = [prompt + ids for prompt, ids in zip(prompts, plain, strict=True)]

    def go(blocks: int) -> tuple[list[Request], int, OracleDrafter]:
        drafter = OracleDrafter(texts, 0.7, 4)
        engine = make_engine(
            "llama", drafter, verifier, blocks=blocks, prefix_cache=prefix_cache, draft=(4, 4, 1)
        )
        requests = [engine.add(*pair, streams=True) for pair in zip(prompts, settings, strict=True)]
        return requests, sum(report.preempted for report in run(engine)), drafter

    requests, preempted, drafter = go(blocks=17)  # 3 requests of about 12 blocks each
    assert preempted >= 3
    assert max(Counter(drafter.begun).values()) >= 3  # the same request was preempted twice
    assert not drafter.held
    for place, (request, ids) in enumerate(zip(requests, plain, strict=True)):
        assert request.output is not None
        assert [
            token for piece in request.pieces for token in piece.token_ids
        ] == request.output.token_ids
        if verifier is CoupledVerifier or place != 1:
            assert request.output.token_ids == ids


# The prefix cache


def check_published_rows(engine: Engine, architecture: str) -> int:
    """Every findable block holds the KV that its tokens have after their own prefix; how many blocks."""
    index, model = engine.memory._index, tiny(architecture)
    texts: dict[int, list[int]] = {0: []}  # by serial
    for block, node in sorted(index._nodes.items(), key=lambda item: item[1].serial):
        texts[node.serial] = [*texts[node.parent], *node.tokens]
        text = texts[node.serial]
        with torch.inference_mode():
            cache = model(input_ids=torch.tensor([text])).past_key_values
        size = engine.memory.block_size
        for layer, (keys, values) in engine.store.layers.items():
            for ours, stock in (
                (keys, cache.layers[layer].keys),
                (values, cache.layers[layer].values),
            ):
                rows = ours[block * size : (block + 1) * size]
                torch.testing.assert_close(
                    rows, stock[0, :, -size:].transpose(0, 1), rtol=0, atol=4e-5
                )
    return len(texts) - 1


def test_B31_only_committed_and_written_blocks_are_findable() -> None:
    """Blocks published before their KV was written, or with rejected tokens in them."""
    prompt = prompt_of(13)
    texts = [reference("llama", tuple(prompt), 40)]
    params = greedy(10)
    expected = texts[0][13:23]
    engine = make_engine("llama", OracleDrafter(texts, 0.5, 5), draft=(5, 5, 1), prefill_chunk=6)
    assert tokens_of(engine, [prompt, prompt], params) == [
        expected,
        expected,
    ]  # admitted in the same step
    assert check_published_rows(engine, "llama") >= 5
    hits = engine.memory.hit_tokens
    longer = prompt + expected[:7]  # ends inside a block that a draft was rejected in
    assert tokens_of(engine, [longer], params) == [texts[0][20:30]]
    assert engine.memory.hit_tokens - hits == 16
    for _ in range(25):
        assert tokens_of(engine, [prompt, longer], params) == [expected, texts[0][20:30]]
    check_published_rows(engine, "llama")
    off = make_engine(
        "llama", OracleDrafter(texts, 0.5, 5), prefix_cache=False, draft=(5, 5, 1), prefill_chunk=6
    )
    assert tokens_of(off, [prompt, longer], params) == [expected, texts[0][20:30]]
    assert off.memory.hit_tokens == 0


def test_B31_a_request_that_arrives_in_anothers_prefill_reads_no_unwritten_block() -> None:
    """Blocks published when their tokens are known, one prefill chunk before their KV is written."""
    prompt = prompt_of(13)
    text = reference("llama", tuple(prompt), 10)
    engine = make_engine("llama", OracleDrafter([text], 0.5, 5), draft=(5, 5, 1), prefill_chunk=6)
    requests = []
    for _ in range(4):
        requests.append(engine.add(prompt, greedy(10)))
        engine.step()
        check_published_rows(engine, "llama")
    run(engine)
    assert [request.tokens for request in requests] == [text] * 4
    assert engine.memory.hit_tokens > 0


def test_B31_eviction_under_pressure_leaves_only_right_blocks() -> None:
    """A block reused while it is still findable by its old tokens."""
    prompts = [prompt_of(9, seed)[: 9 - seed % 3] for seed in range(12)]
    prompts += [prompt[:6] + prompt_of(4, 50 + seed) for seed, prompt in enumerate(prompts)]
    texts = [reference("llama", tuple(prompt), 12) for prompt in prompts]
    engine = make_engine(
        "llama", OracleDrafter(texts, 0.6, 4, 2), blocks=14, draft=(6, 4, 2), max_batch=3
    )
    for _ in range(3):
        results = tokens_of(engine, prompts, greedy(12))
        assert [prompt + ids for prompt, ids in zip(prompts, results, strict=True)] == texts
        check_published_rows(engine, "llama")
    assert engine.memory.hit_tokens > 0


# Leaks, cancelling, errors


class Faulty(OracleDrafter):
    """Fails now and then, also half-way through a draft."""

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        if self._random.random() < 0.02:
            raise RuntimeError("before a draft")
        super().propose(requests, builder)
        if self._random.random() < 0.02:
            raise RuntimeError("after a draft")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_B35_a_thousand_requests_leave_nothing_behind(block_size: int) -> None:
    """Slots reserved for drafts that are not given back, or entries kept for requests that are gone."""
    rng = random.Random(block_size)
    prompts = [tuple(prompt_of(rng.choice([1, 2, 3, 6, 14]), seed)) for seed in range(40)]
    texts = [reference("llama", prompt, 8) for prompt in prompts]
    drafter = Faulty(texts, 0.7, 4, 2)
    blocks = (
        30 // block_size + 2
    )  # for a few of the sixteen that may run, so that some are preempted
    engine = make_engine(
        "llama",
        drafter,
        blocks=blocks,
        block_size=block_size,
        prefix_cache=False,
        draft=(6, 4, 2),
        eos=(EOS,),
    )
    ends: Counter[str] = Counter()
    alive: list[weakref.ref[Request]] = []
    preempted = 0
    waiting = 1000
    while waiting or engine.has_work:
        for _ in range(min(waiting, rng.randrange(12))):
            waiting -= 1
            params = SamplingParams(
                max_new_tokens=rng.randint(1, 8),
                temperature=rng.choice([0.0, 0.0, 1.0]),
                logit_bias={EOS: rng.choice([0.0, 4.0])},
            )
            alive.append(weakref.ref(engine.add(list(rng.choice(prompts)), params)))
        if engine.has_work:
            report = engine.step()
            preempted += report.preempted
            ends.update(output.finish_reason for output in report.finished)
        live = [*engine.planner.running, *engine.planner.waiting]
        if live and rng.random() < 0.15:
            engine.cancel(rng.choice(live))
            ends["cancelled"] += 1
    engine.memory.check()
    assert sum(ends.values()) == 1000
    assert min(ends["stop"], ends["length"], ends["cancelled"]) > 20
    assert preempted
    assert set(engine.faults) == {
        f"raised RuntimeError: {when} a draft" for when in ("before", "after")
    }
    assert engine.memory.used == engine.memory.cached == 0
    assert engine.memory.available == engine.memory.num_blocks
    assert not engine.memory._sequences
    assert not drafter.held
    del live, report
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


@pytest.mark.parametrize("when", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_request_can_be_cancelled_at_any_point(when: int, prefix_cache: bool) -> None:
    """Cancelling while queued, in prefill or while decoding: its slots stay, or batch-mates change."""
    prompts = [prompt_of(14, seed) for seed in range(3)]
    texts = [reference("llama", tuple(prompt), 20) for prompt in prompts]
    drafter = OracleDrafter(texts, 0.6, 3)
    engine = make_engine("llama", drafter, prefix_cache=prefix_cache, max_batch=2, prefill_chunk=5)
    requests = [engine.add(prompt, greedy(20), streams=True) for prompt in prompts]
    for _ in range(when):
        engine.step()
    engine.cancel(requests[when % 2])
    engine.cancel(requests[when % 2])  # once more does nothing
    assert requests[when % 2] not in engine.planner.running
    run(engine)
    for place, (request, text) in enumerate(zip(requests, texts, strict=True)):
        assert request.output is not None
        emitted = request.output.token_ids
        assert emitted == text[14 : 14 + len(emitted)]
        assert request.pieces[-1].output is request.output
        assert request.output.finish_reason == ("cancelled" if place == when % 2 else "length")
    assert not drafter.held


def test_nan_logits_fail_only_their_request() -> None:
    """A NaN row taking the batch down, or being sampled from."""
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = torch.nan
    runner = ModelRunner(model, check=False)
    never = {5: -1e4}  # so that the others neither emit nor draft it
    good, bad = [7, 8, 9, 10], [7, 8, 9, 5, 6]
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            max_new_tokens=6, temperature=temperature, seed=1, logit_bias=never, ignore_eos=True
        )
        alone = tokens_of(make_engine(runner, NoDrafter()), [good], params)[0]
        drafter = OracleDrafter([good + alone], 1.0, 3)
        results = outputs(make_engine(runner, drafter, prefill_chunk=3), [good, bad, good], params)
        assert [result.finish_reason for result in results] == ["length", "error", "length"]
        assert results[0].token_ids == results[2].token_ids == alone
        assert results[1].token_ids == []
        assert "position 5" in (results[1].error or "")
        assert "NaN" in (results[1].error or "")
        assert not drafter.held


def test_wrong_requests_are_refused_in_one_sentence() -> None:
    engine = make_engine("llama", NoDrafter(), blocks=10, block_size=4)
    wrong: list[tuple[list[int], dict[str, Any], type[Exception], str]] = [
        ([], {}, ConfigError, "empty prompt"),
        ([3, VOCAB_SIZE], {}, ConfigError, f"got {VOCAB_SIZE}"),
        ([-1], {}, ConfigError, "got -1"),
        ([3], {"stop_token_ids": (VOCAB_SIZE,)}, ConfigError, "stop_token_ids"),
        ([3], {"logit_bias": {VOCAB_SIZE: 1.0}}, ConfigError, "logit_bias"),
        ([3] * 40, {}, CapacityError, "KV memory"),
        ([3], {"stop": "x"}, ConfigError, "tokenizer"),
    ]
    for prompt, settings, kind, words in wrong:
        with pytest.raises(kind, match=words) as caught:
            engine.add(prompt, SamplingParams(**settings))
        assert ";" in str(caught.value)
    with pytest.raises(CapacityError, match="context"):
        make_engine("llama", NoDrafter(), blocks=200).add([3] * CONTEXT, SamplingParams())
    assert not engine.has_work
    assert engine.memory.used == 0


def test_a_request_ends_where_the_context_does() -> None:
    """Positions beyond the context, by a draft or by the last token."""
    prompt = prompt_of(CONTEXT - 4)
    text = reference("gpt2", tuple(prompt), 4)
    (output,) = outputs(
        make_engine("gpt2", OracleDrafter([text + [3] * 9], 1.0, 8)), [prompt], greedy(100)
    )
    assert output.finish_reason == "length"
    assert prompt + output.token_ids == text


def test_chain_verifier_gets_chains() -> None:
    """A verifier that takes chains only must not be handed a tree."""

    class ChainsOnly(CoupledVerifier):
        supports_trees = False
        widest = 0

        def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
            type(self).widest = max(self.widest, draft.max_width)
            return super().verify(draft, laws, random)

    class Forks(Drafter):
        def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
            for root in builder.roots:
                builder.guess(int(root), [1, 2])
                builder.guess(int(root), [3, 4])

    engine = make_engine("llama", Forks(), ChainsOnly)
    engine.add(prompt_of(5), greedy(6))
    run(engine)
    assert ChainsOnly.widest == 1
