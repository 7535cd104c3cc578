"""specfw inside `generate` of transformers: the same ids, scores and streams as without it.

Random float32 models decide by margins far above rounding, so ids must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import specfw.hf
from specfw.errors import CapacityError, ConfigError, ContractError, SpecfwError
from specfw.integrations.hf_settings import Row, row_settings
from specfw.types import SpeculationParams
from tests.engine_kit import OracleDrafter
from tests.tiny_models import CONTEXT, EOS, PAD, build, tiny, tiny_tokenizer

ARCHITECTURES = ("llama", "gemma3", "gpt2")
DRAFTERS = ("none", "ngram", "oracle")
NEW = 12
LENGTHS = (9, 6, 3)
"""Of the prompts, which are padded in front to the longest."""


class EvenAfter(LogitsProcessor):
    """After a token of the first half, only even ids; as the last token says, so it is a function."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = torch.arange(scores.shape[1]) % 2 == 1
        return scores.masked_fill((input_ids[:, -1:] < scores.shape[1] // 2) & odd, -torch.inf)


class SumOf(StoppingCriteria):
    """Ends a row once its ids add up to a multiple of `divisor`."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.sum(1) % self.divisor == 0


def only_near(prompt: int, ids: Tensor) -> list[int]:
    """Allowed tokens, which depend on the number of the prompt and on its last token."""
    return [(int(ids[-1]) + prompt + step) % 61 + 3 for step in (1, 4, 9, 16)]


MANY_EOS = [EOS, *range(20, 28)]
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "repetition penalty": lambda: {"repetition_penalty": 1.3},
    "repetition reward": lambda: {"repetition_penalty": 0.8},
    "encoder repetition": lambda: {"encoder_repetition_penalty": 1.4},
    "encoder n-grams": lambda: {"encoder_no_repeat_ngram_size": 2},
    "unigrams": lambda: {"no_repeat_ngram_size": 1},
    "bigrams": lambda: {"no_repeat_ngram_size": 2},
    "trigrams": lambda: {"no_repeat_ngram_size": 3},
    "one bad word": lambda: {"bad_words_ids": [[7]]},
    "bad words": lambda: {"bad_words_ids": [[a, b] for a in range(64) for b in (5, 30, 31)]},
    "bad padding": lambda: {"bad_words_ids": [[PAD, t] for t in range(3, 40)]},
    "end as a bad word": lambda: {"bad_words_ids": [[EOS], [9]]},
    "sequence bias": lambda: {"sequence_bias": {(a, b): 2.5 for a in range(64) for b in (8, 40)}},
    "token bias": lambda: {"sequence_bias": {(11,): 4.0, (12, 11): -9.0}},
    "bias and penalty": lambda: {"sequence_bias": {(11,): 4.0}, "repetition_penalty": 1.5},
    "several ends": lambda: {"eos_token_id": MANY_EOS},
    "minimum": lambda: {"eos_token_id": MANY_EOS, "min_new_tokens": 5},
    "total minimum": lambda: {"eos_token_id": MANY_EOS, "min_length": 14},
    "both minima": lambda: {"eos_token_id": MANY_EOS, "min_length": 12, "min_new_tokens": 6},
    "forced end": lambda: {"forced_eos_token_id": EOS},
    "forced ends": lambda: {"forced_eos_token_id": [EOS, 21]},
    "forced end after a penalty": lambda: {"forced_eos_token_id": EOS, "repetition_penalty": 1.2},
    "hastened end": lambda: {"exponential_decay_length_penalty": (3, 1.7)},
    "hastened ends": lambda: {
        "exponential_decay_length_penalty": (2, 1.3),
        "eos_token_id": MANY_EOS,
        "min_new_tokens": 4,
    },
    "suppressed": lambda: {"suppress_tokens": list(range(10, 40))},
    "begin suppressed": lambda: {"begin_suppress_tokens": list(range(30, 64))},
    "begin and always": lambda: {"begin_suppress_tokens": [4, 5], "suppress_tokens": [6, 7, 8]},
    "invalid values": lambda: {"remove_invalid_values": True, "no_repeat_ngram_size": 2},
    "invalid values, then more": lambda: {
        "remove_invalid_values": True,
        "suppress_tokens": [3, 4],
        "repetition_penalty": 1.2,
    },
    "renormalised": lambda: {"renormalize_logits": True, "repetition_penalty": 1.2},
    "max length": lambda: {"max_length": 17, "max_new_tokens": None},
    "one token": lambda: {"max_new_tokens": 1},
    "long enough": lambda: {"max_time": 1e6},
    "prefix function": lambda: {"prefix_allowed_tokens_fn": only_near},
    "processor": lambda: {"logits_processor": LogitsProcessorList([EvenAfter()])},
    "processor and penalty": lambda: {
        "logits_processor": LogitsProcessorList([EvenAfter()]),
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
    },
    "processor and ends": lambda: {
        "logits_processor": LogitsProcessorList([EvenAfter()]),
        "eos_token_id": MANY_EOS,
        "min_new_tokens": 3,
    },
    "warper without sampling": lambda: {
        "logits_processor": LogitsProcessorList([TopKLogitsWarper(3)])
    },
    "watermark": lambda: {
        "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="lefthash")
    },
    "criterion": lambda: {"stopping_criteria": StoppingCriteriaList([SumOf(5)])},
    "two criteria": lambda: {"stopping_criteria": StoppingCriteriaList([SumOf(7), SumOf(11)])},
    "criterion and ends": lambda: {
        "stopping_criteria": StoppingCriteriaList([SumOf(6)]),
        "eos_token_id": MANY_EOS,
    },
    "stop strings": lambda: {"stop_strings": ["q", "re", "Z."]},
    "many stop strings": lambda: {"stop_strings": [*"abcdefgh", "AB"]},
    "everything": lambda: {
        "sequence_bias": {(11,): 1.0},
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [8, 9]],
        "min_new_tokens": 4,
        "eos_token_id": MANY_EOS,
        "exponential_decay_length_penalty": (5, 1.2),
        "suppress_tokens": [12, 13],
        "begin_suppress_tokens": [14, 15],
        "stopping_criteria": StoppingCriteriaList([SumOf(9)]),
    },
}


@cache
def prompts(batch: int) -> tuple[Tensor, Tensor]:
    """Ids padded in front, and their mask, int64 [batch, 9] each; no model ends these at once."""
    ids = torch.randint(
        3, 64, (batch, LENGTHS[0]), generator=torch.Generator().manual_seed(batch + 3)
    )
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS[:batch]):
        mask[row, : LENGTHS[0] - length] = 0
    return ids.masked_fill(mask == 0, PAD), mask


@cache
def decoder(architecture: str, drafter: str) -> tuple[specfw.hf.CustomGenerate, list[list[int]]]:
    """A callable that is kept for all tests of a model, and the texts that its oracle knows."""
    texts: list[list[int]] = []
    oracle = OracleDrafter(texts, right=0.8, depth=5, branches=3)
    oracle._texts = texts
    return specfw.hf.custom_generate(oracle if drafter == "oracle" else drafter), texts


def run(model: Any, batch: int, settings: dict[str, Any], **more: Any) -> Any:
    ids, mask = prompts(batch)
    return model.generate(
        ids,
        attention_mask=mask,
        pad_token_id=PAD,
        **{"max_new_tokens": NEW, "do_sample": False} | settings | more,
    )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_are_those_of_generate(architecture: str, setting: str) -> None:
    """A processor with the wrong history, order or row, a late stop, or padding in the wrong place."""
    for batch in (1, 3):
        ids, mask = prompts(batch)
        compare(
            tiny(architecture),
            (ids, mask),
            SETTINGS[setting]() | {"pad_token_id": PAD},
            tiny_tokenizer(),
            {drafter: decoder(architecture, drafter) for drafter in DRAFTERS},
        )


def compare(
    model: Any,
    prompts: tuple[Tensor, Tensor],
    settings: dict[str, Any],
    tokenizer: Any,
    decoders: dict[str, tuple[specfw.hf.CustomGenerate, list[list[int]]]],
) -> None:
    """Greedy ids with each decoder are those without; the oracle is told them first."""
    ids, mask = prompts
    settings = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False} | settings
    if strings := settings.pop("stop_strings", None):  # `generate` keeps the tokenizer to itself
        criterion = StopStringCriteria(tokenizer, strings)
        settings["stopping_criteria"] = StoppingCriteriaList([criterion])
    expected = model.generate(ids, **settings)
    padding = (mask == 0).sum(1).tolist()
    for drafter, (custom, texts) in decoders.items():
        texts[:] = [row[before:].tolist() for row, before in zip(expected, padding, strict=True)]
        got = model.generate(ids, custom_generate=custom, **settings)
        assert got.tolist() == expected.tolist(), (drafter, len(ids))
        assert got.dtype == expected.dtype
        if drafter == "oracle" and expected.shape[1] > ids.shape[1] + 4:
            assert sum(output.speculation.accepted for output in custom.outputs) > 0


@pytest.mark.parametrize("setting", ["plain", "everything", "renormalised", "prefix function"])
def test_scores_and_logits_are_those_of_generate(setting: str) -> None:
    """A dictionary with other steps, rows or processing than transformers returns."""
    model = tiny("llama")
    custom, _ = decoder("llama", "ngram")
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = run(model, 3, SETTINGS[setting](), **asked)
    got = run(model, 3, SETTINGS[setting](), custom_generate=custom, **asked)
    assert type(got) is type(expected)
    assert torch.equal(got.sequences, expected.sequences)
    for one, other in ((got.scores, expected.scores), (got.logits, expected.logits)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    bare = run(model, 3, {}, custom_generate=custom, return_dict_in_generate=True)
    assert bare.scores is None
    assert bare.logits is None


SAMPLING: dict[str, dict[str, Any]] = {
    "defaults": {},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "filters": {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "typical": {"top_k": 0, "typical_p": 0.6},
    "cutoffs": {"top_k": 0, "epsilon_cutoff": 0.02, "eta_cutoff": 0.05},
    "top-h": {"top_k": 0, "top_h": 0.5},
    "with a processor": {"logits_processor": LogitsProcessorList([EvenAfter()]), "top_p": 0.8},
}


@pytest.mark.parametrize("setting", SAMPLING)
def test_samples_do_not_depend_on_the_drafter(setting: str) -> None:
    """Padding, filters or samples of one prompt that change with what is drafted."""
    model = tiny("llama")
    texts = []
    for drafter in DRAFTERS:
        custom, known = decoder("llama", drafter)
        known[:] = []
        torch.manual_seed(5)
        got = run(
            model,
            3,
            SAMPLING[setting],
            do_sample=True,
            num_return_sequences=2,
            custom_generate=custom,
        )
        texts.append(got.tolist())
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 6
    assert len({tuple(text) for text in texts[0]}) == 6, "samples of one prompt must differ"
    again = run(
        model, 3, SAMPLING[setting], do_sample=True, custom_generate=decoder("llama", "none")[0]
    )
    assert again.tolist() != texts[0][::2]


def test_sampled_tokens_obey_every_filter() -> None:
    """A filter lost on the way: each token must have a finite score under transformers' own list."""
    custom, _ = decoder("llama", "ngram")
    for settings in SAMPLING.values():
        torch.manual_seed(1)
        got = run(
            tiny("llama"),
            3,
            settings,
            do_sample=True,
            custom_generate=custom,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for row, output in enumerate(custom.outputs):
            for step, token in enumerate(output.token_ids):
                assert got.scores[step][row, token].isfinite()


def test_processors_of_transformers_become_settings() -> None:
    """The slow way, a Python call for each node, taken where specfw has the rule itself."""
    config = GenerationConfig(
        do_sample=True,
        sequence_bias={(4,): 1.0, (5, 6): -1.0},
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        bad_words_ids=[[7], [8, 9]],
        min_length=12,
        min_new_tokens=2,
        forced_eos_token_id=EOS,
        exponential_decay_length_penalty=(3, 1.5),
        suppress_tokens=[10],
        begin_suppress_tokens=[11],
        temperature=0.7,
        top_h=0.9,
        top_k=30,
        top_p=0.9,
        min_p=0.05,
        typical_p=0.8,
        epsilon_cutoff=0.01,
        eta_cutoff=0.02,
        renormalize_logits=True,
        max_length=20,
        eos_token_id=EOS,
    )
    model = tiny("llama")
    model._prepare_special_tokens(config, device="cpu")
    processors = model._get_logits_processor(config, input_ids_seq_length=9, device="cpu")
    criteria = model._get_stopping_criteria(config, StoppingCriteriaList())
    row = Row(0, 1, torch.zeros(0, dtype=torch.long), list(range(9)))
    params = row_settings(row, processors, criteria, do_sample=True, seed=3)
    assert params.logits_processors == ()
    assert params.stopping_criteria == ()
    assert params.model_dump(exclude_defaults=True) == {
        "max_new_tokens": 11,
        "min_new_tokens": 3,
        "temperature": 0.7,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_h": 0.9,
        "typical_p": 0.8,
        "epsilon_cutoff": pytest.approx(0.01),
        "eta_cutoff": pytest.approx(0.02),
        "repetition_penalty": 1.2,
        "sequence_bias": (((4,), 1.0), ((5, 6), -1.0)),
        "no_repeat_ngram_size": 3,
        "bad_words_ids": ((7,), (8, 9)),
        "suppress_tokens": (10,),
        "begin_suppress_tokens": (11,),
        "forced_eos_token_id": (EOS,),
        "exponential_decay_length_penalty": (3, 1.5),
        "seed": 3,
        "stop_token_ids": (EOS,),
        "ignore_eos": True,
    }


def test_processors_in_another_order_keep_it() -> None:
    """A warper before the others, or twice, applied once or in specfw's order."""
    row = Row(0, 1, torch.zeros(0, dtype=torch.long), [3, 4])
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=9, top_p=0.9, max_length=9, eos_token_id=EOS
    )
    model = tiny("llama")
    model._prepare_special_tokens(config, device="cpu")
    temperature, top_k, top_p = model._get_logits_processor(config, 2, device="cpu")
    criteria = model._get_stopping_criteria(config, StoppingCriteriaList())

    def settings(*processors: Any) -> tuple[Any, ...]:
        params = row_settings(row, processors, criteria, do_sample=True, seed=0)
        names = [one.__name__ for one in params.logits_processors]
        return names, params.temperature, params.top_k, params.top_p

    assert settings(temperature, top_k, top_p) == ([], 0.5, 9, 0.9)
    assert settings(top_p, temperature, top_k) == (["TopPLogitsWarper"], 0.5, 9, None)
    assert settings(top_k, top_k) == (["TopKLogitsWarper"], 1.0, 9, None)
    assert settings(temperature, EvenAfter()) == (
        ["TemperatureLogitsWarper", "EvenAfter"],
        1.0,
        None,
        None,
    )


class Collector(BaseStreamer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.chunks.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_prompt_and_then_every_token() -> None:
    """A streamer that `generate` drops, that gets tokens after the end, or that never ends."""
    model, (ids, _) = tiny("llama"), prompts(1)
    expected = run(model, 1, {})[0].tolist()
    custom, texts = decoder("llama", "oracle")
    texts[:] = [expected]
    streamer = Collector()
    got = specfw.hf.generate(
        model, ids, max_new_tokens=NEW, do_sample=False, streamer=streamer, using=custom
    )
    assert got[0].tolist() == expected
    assert streamer.ended
    assert streamer.chunks[0] == ids[0].tolist()
    assert list(chain(*streamer.chunks)) == expected
    assert max(map(len, streamer.chunks[1:])) > 1, "accepted tokens come in chunks"
    carried = Collector()
    run(model, 1, {}, custom_generate=specfw.hf.custom_generate(streamer=carried))
    assert list(chain(*carried.chunks)) == expected
    with pytest.raises(ConfigError, match=r"one row to stream, got 3"):
        run(model, 3, {}, custom_generate=specfw.hf.custom_generate(streamer=carried))


def test_text_streamers_work() -> None:
    """A text streamer that does not take chunks of several tokens."""
    model, (ids, _), tokenizer = tiny("llama"), prompts(1), tiny_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    settings = {"max_new_tokens": NEW, "do_sample": False, "drafter": "ngram"}
    thread = Thread(
        target=specfw.hf.generate, args=(model, ids), kwargs={**settings, "streamer": streamer}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(run(model, 1, {})[0, LENGTHS[0] :])


def test_a_criterion_is_tested_after_every_token_of_a_block() -> None:
    """Fault of assisted decoding: a criterion tested once per block, which returned too many tokens."""
    model = tiny("llama")
    full = run(model, 1, {})[0].tolist()
    custom, texts = decoder("llama", "oracle")
    texts[:] = [full]
    for place in range(1, NEW):

        class At(StoppingCriteria):
            def __call__(
                self, input_ids: Tensor, scores: Any, _at: int = place, **_: Any
            ) -> Tensor:
                return torch.tensor([input_ids.shape[1] == LENGTHS[0] + _at])

        got = run(model, 1, {}, stopping_criteria=[At()], custom_generate=custom)
        assert got[0].tolist() == full[: LENGTHS[0] + place]
        assert custom.outputs[0].stop_reason == "At"


def test_stop_strings_work_with_a_drafter() -> None:
    """Fault of assisted decoding: stop strings with an assistant raised, or were found too late."""
    model, (ids, _), tokenizer = tiny("llama"), prompts(1), tiny_tokenizer()
    full = run(model, 1, {})[0].tolist()
    text = tokenizer.decode(full[LENGTHS[0] :])
    stop = text[2:4]
    expected = run(model, 1, {}, stop_strings=stop, tokenizer=tokenizer)
    custom, texts = decoder("llama", "oracle")
    texts[:] = [full]
    settings = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer}
    for given in (
        {"stop_strings": stop},
        {"generation_config": GenerationConfig(stop_strings=[stop], eos_token_id=EOS)},
    ):
        got = specfw.hf.generate(model, ids, using=custom, **settings, **given)
        assert got.tolist() == expected.tolist()
    assert got.shape[1] < LENGTHS[0] + NEW
    with pytest.raises(ConfigError, match=r"stop strings need a tokenizer.*pass tokenizer"):
        specfw.hf.generate(model, ids, stop_strings="x")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "guidance": ({"guidance_scale": 1.7}, r"guidance_scale=1.7 .* text of its own"),
    "SynthID": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)},
        r"SynthIDTextWatermarkLogitsProcessor cannot be exact .* how often it was called",
    ),
    "beams": ({"num_beams": 2}, r"num_beams=2 .* several texts"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens=3 .* `ngram`"),
    "no cache": ({"use_cache": False}, r"use_cache=False .* always keeps"),
    "B10, a quantised KV cache": (
        {"cache_implementation": "quantized"},
        r"cache_implementation='quantized' changes the target's law",
    ),
    "hidden states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        r"no attentions or hidden states",
    ),
    "positions": ({"position_ids": torch.arange(2, 11)[None]}, r"position ids that count from 0"),
    "right padding": (
        {"attention_mask": torch.tensor([[1] * 8 + [0]])},
        r"padding in front .* padding_side",
    ),
    "context": (
        {"max_new_tokens": CONTEXT},
        rf"at most {CONTEXT} tokens.*got {CONTEXT + 9}; lower",
    ),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of some of these too
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused_in_one_sentence(case: str) -> None:
    """Stateful processors that are silently wrong under speculation, and other things dropped silently."""
    settings, sentence = REFUSED[case]
    ids, _ = prompts(1)
    kind = CapacityError if case == "context" else ConfigError
    with pytest.raises(kind, match=sentence) as caught:
        tiny("llama").generate(
            ids,
            custom_generate=specfw.hf.custom_generate(),
            **{"max_new_tokens": 3, "do_sample": False, **settings},
        )
    assert "\n" not in str(caught.value)


def test_other_arguments_are_refused() -> None:
    """A model in training mode, an assistant, and targets that are not the model."""
    model, (ids, _) = build("llama"), prompts(1)
    with pytest.raises(ConfigError, match="no assistant_model"):
        specfw.hf.generate(model, ids, assistant_model=model)
    with pytest.raises(ConfigError, match="either `using` or `drafter`"):
        specfw.hf.generate(model, ids, using=specfw.hf.custom_generate(), drafter="ngram")
    with pytest.raises(ConfigError, match="expected no target"):
        specfw.hf.custom_generate(target="demo")
    with pytest.raises(SpecfwError, match="unknown option 'draftr'"):
        run(model, 1, {}, custom_generate=specfw.hf.custom_generate(draftr="none"))
    model.train()
    with pytest.raises(ConfigError, match=r"eval mode.*call model.eval\(\)"):
        run(model, 1, {}, custom_generate=specfw.hf.custom_generate())


@pytest.mark.parametrize(
    ("processor", "sentence"),
    [
        (lambda ids, scores: 1 / 0, r"raised ZeroDivisionError at position 9 \(division by zero\)"),
        (lambda ids, scores: scores[0], r"scores \[1, 64\] back, got torch.float32 \[64\]"),
        (lambda ids, scores: None, r"got None at position 9"),
    ],
)
def test_a_broken_processor_gives_one_sentence(processor: Any, sentence: str) -> None:
    """A traceback from inside the engine, or a row of the wrong shape that is broadcast."""

    class Broken(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return processor(input_ids, scores)

    custom, _ = decoder("llama", "ngram")
    with pytest.raises(ContractError, match=rf"logits processor Broken: .*{sentence}"):
        run(tiny("llama"), 1, {}, logits_processor=[Broken()], custom_generate=custom)
    assert (
        run(tiny("llama"), 1, {}, custom_generate=custom).tolist()
        == run(tiny("llama"), 1, {}).tolist()
    )


def test_a_call_may_choose_its_drafter() -> None:
    """A wish that is dropped between `generate` and specfw, or that builds the pipeline anew."""
    model = tiny("llama")
    custom = specfw.hf.custom_generate(
        "none",
        drafters={"lookup": "ngram"},
        speculation=SpeculationParams(drafter="lookup"),
    )
    other = custom.carrying(speculation=SpeculationParams())
    assert run(model, 3, {}, custom_generate=custom).tolist() == run(model, 3, {}).tolist()
    assert all(output.speculation.drafted for output in custom.outputs)
    assert run(model, 3, {}, custom_generate=other).tolist() == run(model, 3, {}).tolist()
    assert not any(output.speculation.drafted for output in other.outputs)
    assert custom._pipelines is other._pipelines
    wrong = custom.carrying(speculation=SpeculationParams(drafter="x"))
    with pytest.raises(ConfigError, match=r"held ready \(lookup\), got 'x'"):
        run(model, 1, {}, custom_generate=wrong)


def test_changed_weights_are_noticed() -> None:
    """Keys and values kept from before a training step."""
    model, custom = build("llama", seed=3), specfw.hf.custom_generate("ngram")
    before = run(model, 1, {}, custom_generate=custom)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    after = run(model, 1, {}, custom_generate=custom)
    assert after.tolist() == run(model, 1, {}).tolist()
    assert after.tolist() != before.tolist()
    assert run(model, 3, {"max_new_tokens": 200}, custom_generate=custom).tolist() == (
        run(model, 3, {"max_new_tokens": 200}).tolist()
    )
    custom.close()
