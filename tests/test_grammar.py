"""Structured output is exact under speculation: the masked law at every node, in every form that it can be asked for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from torch import Tensor

from specfw import Pipeline, SamplingParams
from specfw.builtins import NoDrafter
from specfw.contracts import (
    Drafter,
    LoadedTarget,
    RequestView,
    TargetInfo,
    TargetLoader,
    Verifier,
)
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.forks import Forks
from specfw.decoding.grammar import Grammars, Matcher
from specfw.decoding.history import History
from specfw.decoding.random import RandomSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import KVMemory
from specfw.engine.model_runner import ModelRunner
from specfw.engine.requests import Request
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.testing import MixtureDrafter, ScriptedDrafter, TableDrafter, certify
from specfw.testing.cases import SETTINGS, WATCHED
from specfw.testing.laws import output_law, target_law, total_variation
from specfw.testing.table_model import TableLM, TableTokenizer
from specfw.types import Output, SpeculationParams
from tests.byte_models import EOS, VOCAB_SIZE, Oracle, byte_tokenizer, ids_of
from tests.tiny_models import build

MANAGER = PluginManager()
VERIFIERS: dict[str, Callable[[], Verifier]] = {
    name: MANAGER.bind("verifier", {"name": name}).build
    for name in ("coupled", "rejection", "block")
    if name in MANAGER.names("verifier")
}
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "chain": lambda: TableDrafter("near", depth=2),
    "tree": lambda: TableDrafter("unrelated", depth=2, width=2),
    "mixture": lambda: MixtureDrafter("near", depth=1),
    "script": lambda: ScriptedDrafter(seed=2),
}


@dataclass(frozen=True)
class Language:
    """A structure, the letters that texts are written in (the first one ends them), and its texts."""

    asked: dict[str, Any]
    letters: str
    has: Callable[[str], Any] | tuple[str, ...]
    """All its texts, or whether it has one."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Its texts, up to a length that all texts of half of it can be completed in."""
        if isinstance(self.has, tuple):
            return self.has
        words = ("".join(word) for n in range(8) for word in product(self.letters[1:], repeat=n))
        return tuple(filter(self.has, words))


LANGUAGES = {
    "regex": Language({"regex": "b(b|cb)*"}, "$bc", re.compile("b(b|cb)*").fullmatch),
    "choices": Language({"choices": ("é", "éa", "a b", "a?")}, "$éa b?", ("é", "éa", "a b", "a?")),
    "lark": Language(
        {"grammar": 'start: "b" start "c" | "d"'},
        "$bcd",
        lambda text: any(text == "b" * n + "d" + "c" * n for n in range(4)),
    ),
    "gbnf": Language(
        {"grammar": 'root ::= "b" [cd] | "d" root'}, "$bcd", re.compile("d*b[cd]").fullmatch
    ),
    "schema": Language(
        {"json_schema": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 1}},
        "$[]12,",
        ("[]", "[1]", "[2]"),
    ),
    "object": Language(
        {
            "json_schema": {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"enum": [1, "b"]}},
                "additionalProperties": False,
            }
        },
        '${}"ab: 1',
        ('{"a": 1}', '{"a": "b"}'),
    ),
}


def bring_back(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that makes the impossible possible."""
    return scores.nan_to_num(neginf=-1.0)


OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 1},
    "top-p": {"top_p": 0.4},
    "processor": {"logits_processors": (bring_back,)},
    "minimum": {"min_new_tokens": 2},
    "own end": {"stop_token_ids": (2,)},
    "no EOS": {"ignore_eos": True, "stop_token_ids": (2,)},
}


def table_engine(
    language: Language, drafter: Drafter, verifier: Verifier, source: RandomSource, **asked: Any
) -> tuple[Engine, list[Request]]:
    """An engine on a table model that writes in the language's letters, with one request."""
    size = len(language.letters)
    runner = ModelRunner(TableLM(size, seed=3), prepack=False, check=False)
    tokenizer = TableTokenizer(size, language.letters)
    info = TargetInfo(
        "table",
        size,
        runner.max_length,
        (0,),
        tokenizer,
        runner.model,
        runner.device,
        runner.dtype,
    )
    engine = Engine(
        runner, KVMemory(24, 2), info, drafter, verifier, [FixedScheduler(3, 2, 2)], source
    )
    return engine, [engine.add([1, 2], SamplingParams(seed=WATCHED, **asked))]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", LANGUAGES)
def test_the_law_is_the_masked_law(name: str, verifier: str) -> None:
    """A mask that is missing, late, or of another node; a state that a refused token has moved."""
    language = LANGUAGES[name]
    horizon = 8 if name == "object" else 3
    accepted = sum(
        assert_masked(language, drafter, verifier, horizon, {"top_k": turn + 2})
        for turn, drafter in enumerate(["none", "tree"])
    )
    assert accepted


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("other", OTHERS)
def test_other_settings_act_on_the_masked_law(other: str, drafter: str) -> None:
    """Filters that choose among forbidden tokens, processors that bring them back, a foreign end."""
    language = LANGUAGES["gbnf" if "stop_token_ids" not in OTHERS[other] else "regex"]
    for verifier in ("coupled", "rejection"):
        assert_masked(language, drafter, verifier, 3, OTHERS[other])


def assert_masked(
    language: Language, drafter: str, verifier: str, horizon: int, other: dict[str, Any]
) -> int:
    """The engine's law is that of the language's texts listed one by one; how many drafts were kept."""
    asked = {"temperature": 1.0, "max_new_tokens": horizon, **other}
    seen = output_law(
        lambda source: table_engine(
            language,
            DRAFTERS[drafter](),
            VERIFIERS[verifier](),
            source,
            **asked,
            **language.asked,
        ),
        watch=WATCHED,
    )
    tokenizer = TableTokenizer(len(language.letters), language.letters)
    listed = SamplingParams(choices=language.texts, **asked)
    model = TableLM(len(language.letters), seed=3)
    expected = target_law(model, [1, 2], horizon, listed, (0,), tokenizer.decode)
    assert total_variation(expected, seen.law) < 1e-9, (expected, seen.law)
    assert not seen.faults
    return seen.accepted


@pytest.mark.parametrize("drafter", ["chain", "tree"])
@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_an_unmasked_bonus_row_is_caught(
    monkeypatch: pytest.MonkeyPatch, verifier: Callable[[], Verifier], drafter: str
) -> None:
    """The test must be able to fail: masks at the nodes only, and none at the end of a kept path."""
    allowed = History.allowed

    def but_at_the_end(self: History, path: Sequence[int]) -> Any:
        return None if len(path) == 2 else allowed(self, path)

    monkeypatch.setattr(History, "allowed", but_at_the_end)
    certificate = certify(
        DRAFTERS[drafter],
        verifier,
        settings={"grammar": SETTINGS["grammar"]},
        memory_cases=["plain"],
        sizes=[(3, 3)],
    )
    assert certificate.max_tv > 1e-3


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_a_matcher_that_drafted_tokens_move_is_caught(
    monkeypatch: pytest.MonkeyPatch, verifier: Callable[[], Verifier]
) -> None:
    """The test must be able to fail: one state for what is committed and what is drafted."""

    def same(self: Forks[Any], path: Sequence[int]) -> Any:
        for token in path[getattr(self, "moved", 0) :]:
            self.committed.advance(token)
        self.moved = len(path)  # type: ignore[attr-defined]
        return self.committed

    monkeypatch.setattr(Forks, "at", same)
    certificate = certify(
        DRAFTERS["tree"],
        verifier,
        settings={"grammar": SETTINGS["grammar"]},
        memory_cases=["plain"],
        sizes=[(3, 3)],
    )
    assert certificate.max_tv > 1e-3


class Ready(TargetLoader):
    """A tiny random model that speaks bytes."""

    def load(self) -> LoadedTarget:
        model = build(
            "llama",
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=512,
            eos_token_id=EOS,
            bos_token_id=0,
            pad_token_id=None,
        )
        return LoadedTarget("bytes", model, byte_tokenizer())


def made_pipeline(drafter: Any = "none", **config: Any) -> Pipeline:
    return Pipeline.from_config(
        {"target": Ready(), "drafter": drafter, "engine": {"max_length": 400}, **config}
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[Pipeline]:
    with made_pipeline() as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def drafting() -> Iterator[Pipeline]:
    """N-grams of a few tokens, so that texts of a few characters have some."""
    with made_pipeline({"name": "ngram", "min_ngram": 1}) as pipeline:
        yield pipeline


LETTERS = "abc"
NAMES = st.text(LETTERS, min_size=1, max_size=2)


@st.composite
def integers(draw: st.DrawFn) -> dict[str, Any]:
    least = draw(st.integers(-50, 50))
    return {"type": "integer", "minimum": least, "maximum": least + draw(st.integers(0, 99))}


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    most = draw(st.integers(0, 4))
    return {"type": "string", "minLength": draw(st.integers(0, most)), "maxLength": most}


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    most = draw(st.integers(0, 2))
    least = draw(st.integers(0, most))
    return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": most}


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=2))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def schemas() -> st.SearchStrategy[Any]:
    """JSON schemas whose texts are short, whatever is written."""
    leaves = st.one_of(
        integers(),
        strings(),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "pattern": "^[ab]{1,3}$"}]),
        st.lists(st.one_of(st.booleans(), st.integers(0, 99), NAMES), min_size=1, max_size=3).map(lambda values: {"enum": values}),
        st.builds(lambda value: {"const": value}, NAMES),
    )  # fmt: skip
    some = st.one_of(leaves, arrays(leaves), objects(leaves))
    either = st.lists(leaves, min_size=1, max_size=2).map(lambda each: {"anyOf": each})
    return st.one_of(some, either, arrays(some), objects(some))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=st.lists(schemas(), min_size=20, max_size=20), seed=st.integers(0, 999))
def test_two_hundred_schemas(
    plain: Pipeline, drafting: Pipeline, asked: list[Any], seed: int
) -> None:
    """A text that does not parse, does not validate, or that a draft has changed."""
    prompt = ids_of("one", "two")
    params = [
        SamplingParams(json_schema=schema, temperature=1.0, seed=seed + i, max_new_tokens=300)
        for i, schema in enumerate(asked)
    ]
    found = drafting.generate([prompt] * len(asked), params)
    for schema, output in zip(asked, found, strict=True):
        assert output.finish_reason == "stop", (schema, output)
        value = json.loads(output.text)
        jsonschema.validate(value, schema)
    off = SpeculationParams(enabled=False)
    alone = plain.generate([prompt] * 5, [one.model_copy(update={"speculation": off}) for one in params[:5]])  # fmt: skip
    assert [output.token_ids for output in alone] == [output.token_ids for output in found[:5]]
    assert sum(output.speculation.accepted for output in found)


class Place(BaseModel):
    """What a text is to be about."""

    name: Annotated[str, Field(max_length=3)]
    big: bool


PLACE = Place.model_json_schema() | {"additionalProperties": False}
FORCED = '{"name": "'


def test_forced_tokens_are_drafts_without_a_drafter(plain: Pipeline) -> None:
    """A pass for each token that could not be another."""
    asked = {"json_schema": PLACE, "max_new_tokens": 40, "temperature": 1.0, "seed": 4}
    [output] = plain.generate(["abc"], **asked)
    [off] = plain.generate(["abc"], speculation=SpeculationParams(enabled=False), **asked)
    [few] = plain.generate(["abc"], speculation=SpeculationParams(max_nodes=1), **asked)
    assert output.text.startswith(FORCED)
    assert output.token_ids == off.token_ids == few.token_ids
    stats = output.speculation
    assert stats.accepted == stats.drafted > len(FORCED)
    assert stats.target_passes + stats.accepted <= len(output.token_ids) + 1
    assert off.speculation.drafted == 0
    assert set(few.speculation.accepted_histogram) == {1}


class Recorder(Drafter):
    """Notes behind which tokens it was asked, and guesses a quote there."""

    def __init__(self, reads_ahead: bool) -> None:
        self.reads_ahead = reads_ahead  # type: ignore[misc]
        self.asked: list[str] = []

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root in zip(requests, builder.roots, strict=True):
            self.asked.append(byte_tokenizer().decode(request.tokens[request.prompt_length :]))
            builder.guess(int(root), ids_of('"'))


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_drafter_goes_on_behind_what_is_forced(plain: Pipeline, reads_ahead: bool) -> None:
    """A drafter that doubles the forced nodes, or that takes guesses for text."""
    asked = {"json_schema": PLACE, "temperature": 1.0, "seed": 4, "max_new_tokens": 40}
    drafter = Recorder(reads_ahead)
    scheduler = {"name": "fixed", "max_nodes": 20, "max_depth": 20}
    with made_pipeline(drafter, scheduler=scheduler) as pipeline:
        outputs = pipeline.generate(["abc", "abc"], [SamplingParams(**asked), SamplingParams(max_new_tokens=3)])  # fmt: skip
    assert outputs[0].token_ids == plain.generate(["abc"], **asked)[0].token_ids
    assert drafter.asked[:2] == ([FORCED, ""] if reads_ahead else ["", drafter.asked[1]])
    assert (FORCED in drafter.asked) == reads_ahead


class Guesser(Drafter):
    """Guesses the same text always."""

    def __init__(self, text: str) -> None:
        self._tokens = [*ids_of(text), EOS, EOS]
        self.kept: list[int] = []

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        self.kept += [len(builder.guess(int(root), self._tokens)) for root in builder.roots]


def test_guesses_end_where_the_grammar_forbids_them() -> None:
    """Rows of the target pass for tokens that cannot come."""
    drafter = Guesser("abcabc")
    with made_pipeline(
        drafter, scheduler={"name": "fixed", "max_nodes": 9, "max_depth": 9}
    ) as made:
        made.generate([ids_of("x")] * 3, [SamplingParams(regex=one) for one in ("[abc]{4}", "[ab]+[ab]", ".*")], max_new_tokens=20)  # fmt: skip
    assert drafter.kept[:3] == [4, 2, 7]  # the last one with the end of the text


def test_B18_a_refused_draft_leaves_no_trace_in_a_grammar(plain: Pipeline) -> None:
    """A matcher that holds drafted tokens, skips committed ones, or is another request's."""
    prompts = [ids_of("abc"), ids_of("xyz")]
    params = [
        SamplingParams(json_schema=PLACE, temperature=1.0, seed=seed, max_new_tokens=40)
        for seed in range(2)
    ]
    texts = plain.generate(prompts, params)
    told = {tuple(p): t.token_ids for p, t in zip(prompts, texts, strict=True)}
    with made_pipeline(Oracle(told, wrong_every=3)) as pipeline:
        engine = pipeline.engine
        requests = [engine.add(p, one) for p, one in zip(prompts, params, strict=True)]
        while engine.has_work:
            engine.step()
            for request in requests:
                fresh = engine.grammars.matcher(request.params, [EOS])
                assert fresh is not None
                for token in request.emitted:
                    fresh.advance(token)
                assert same_state(matcher_of(request), fresh)
    assert [request.emitted for request in requests] == [text.token_ids for text in texts]
    assert all(0 < request.stats.accepted < request.stats.drafted for request in requests)


def matcher_of(request: Request) -> Matcher:
    history = request.sampling.history
    assert history is not None
    assert history._grammar is not None
    return history._grammar.committed


def same_state(one: Matcher, other: Matcher) -> bool:
    if one.over or other.over:
        return one.over and other.over
    return bool((np.asarray(one.allowed()) == np.asarray(other.allowed())).all())


def test_a_grammar_survives_preemption(plain: Pipeline) -> None:
    """A request that loses its memory begins its text, or its grammar, anew."""
    prompts = [ids_of("abcdefgh"), ids_of("ijklmnop"), ids_of("qrstuvwx")]
    asked = [
        SamplingParams(json_schema=PLACE, temperature=1.0, seed=seed, max_new_tokens=30)
        for seed in range(3)
    ]
    expected = [output.token_ids for output in plain.generate(prompts, asked)]
    with made_pipeline(engine={"kv_tokens": 64, "block_size": 4, "max_length": 48}) as pipeline:
        requests = [pipeline.engine.add(p, one) for p, one in zip(prompts, asked, strict=True)]
        preempted = 0
        while pipeline.engine.has_work:
            preempted += pipeline.engine.step().preempted
    assert preempted
    assert [request.emitted for request in requests] == expected


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"json_schema": {"type": "nope"}}, r"json_schema: .* \(Invalid type: nope\); change"),
    "unsatisfiable": ({"json_schema": {"enum": []}}, r"Unsatisfiable schema: anyOf is empty"),
    "not enforced": ({"json_schema": {"uniqueItems": True}}, r'Unimplemented keys: \["uniqueItems"\]'),
    "regex": ({"regex": "(("}, r"regex: .*unclosed group.*; change it"),
    "lark": ({"grammar": "start: nothing"}, r'grammar: .*unknown name: "nothing"'),
    "gbnf": ({"grammar": "root ::= ("}, r"grammar: expected one .*; change it"),
    "endless": ({"regex": "a+", "ignore_eos": True}, r"regex: expected a token that ends .* leave out ignore_eos"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_wrong_grammar_is_refused_in_one_sentence(plain: Pipeline, case: str) -> None:
    """A grammar that is dropped in silence, an error from within a library, a batch that stops."""
    asked, sentence = MALFORMED[case]
    with pytest.raises(ConfigError, match=sentence) as caught:
        plain.generate(["a"], **asked)
    assert "\n" not in str(caught.value)
    assert not plain.engine.has_work


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import error from deep within a request."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    info = TargetInfo("x", 3, 9, (0,), TableTokenizer(3), None, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match=r"regex: .* install the extra specfw\[grammar\]"):
        Grammars(info).matcher(SamplingParams(regex="b"), [0])
    assert Grammars(info).matcher(SamplingParams(), [0]) is None


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_a_target_without_readable_tokens_is_refused(tokenizer: Any) -> None:
    """A constraint that cannot be kept, and is not."""
    info = TargetInfo("x", 3, 9, (0,), tokenizer, None, torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match=r"regex: expected a target with a fast tokenizer"):
        Grammars(info).matcher(SamplingParams(regex="b"), [0])


def test_text_that_no_tokens_spell_is_a_dead_end() -> None:
    """A vocabulary with gaps, of which a library that tokenizes forced text leaves out the rest."""
    info = TargetInfo("x", 4, 9, (0,), TableTokenizer(4), None, torch.device("cpu"), torch.float32)
    grammars = Grammars(info)
    for pattern in ("z", "bz", "zb", '"b"'):
        with pytest.raises(ConfigError, match=r"spell what must come"):
            grammars.matcher(SamplingParams(regex=pattern), [0])
    matcher = grammars.matcher(SamplingParams(regex="(b|zb)c"), [0])
    assert matcher is not None
    assert np.flatnonzero(np.asarray(matcher.allowed())).tolist() == [1]


@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_a_dead_end_costs_its_own_request(plain: Pipeline, drafter: str) -> None:
    """Settings that contradict a grammar in the middle of a text, and a batch that pays for it."""
    prompts = [ids_of("abc")] * 3
    asked = [
        SamplingParams(json_schema=PLACE, temperature=1.0, seed=1, max_new_tokens=30),
        SamplingParams(choices=("STOPtail",), min_new_tokens=20, max_new_tokens=30),
        SamplingParams(regex="[ab]{3}c", suppress_tokens=tuple(ids_of("c")), seed=2, max_new_tokens=30),
    ]  # fmt: skip
    [expected] = plain.generate([prompts[0]], asked[0])
    told = {tuple(prompts[0]): expected.token_ids}
    with made_pipeline(Oracle(told) if drafter == "oracle" else "none") as pipeline:
        first, short, banned = pipeline.generate(prompts, asked)
    assert first.token_ids == expected.token_ids
    assert short.text == "STOPtail"
    assert len(banned.text) == 3
    for output, name in ((short, "choices"), (banned, "regex")):
        assert output.finish_reason == "error"
        assert re.match(
            rf"{name}: expected the other settings to leave a token .* at position \d+, got none",
            output.error or "",
        )


def test_several_ends(plain: Pipeline) -> None:
    """An end that is forced though there are two, or one that is allowed in the middle of a text."""
    asked = {"regex": "[ab]{4}", "temperature": 1.0, "max_new_tokens": 9}
    ends = set()
    for seed in range(12):
        [output] = plain.generate(["abc"], stop_token_ids=ids_of("<|user|>"), seed=seed, **asked)
        assert re.fullmatch("[ab]{4}", output.text)
        ends.add(output.stop_reason)
    assert ends == {EOS, *ids_of("<|user|>")}


def test_an_end_that_a_grammar_cannot_have_is_an_error(plain: Pipeline) -> None:
    """A forced end that cuts a text which is then taken for complete."""
    asked = {"regex": "[ab]{5}", "temperature": 1.0, "forced_eos_token_id": EOS}
    [right] = plain.generate(["abc"], max_new_tokens=6, **asked)
    assert right.finish_reason == "stop"
    [wrong] = plain.generate(["abc"], max_new_tokens=4, **asked)
    assert wrong.error is not None
    assert len(wrong.token_ids) == 3


def test_stop_strings_cut_a_structured_text(plain: Pipeline) -> None:
    """A grammar that goes on behind a stop string, or loses it."""
    [output] = plain.generate(["abc"], json_schema=PLACE, stop='"name', max_new_tokens=30)
    assert (output.text, output.stop_reason) == ("{", '"name')


def test_a_model_class_and_text_are_schemas_too(plain: Pipeline) -> None:
    """Two forms of one schema that differ in what they ask for."""
    asked = {"max_new_tokens": 30, "temperature": 1.0, "seed": 7}
    forms: list[Any] = [Place, Place.model_json_schema(), json.dumps(Place.model_json_schema())]
    texts = [plain.generate(["abc"], json_schema=form, **asked)[0].token_ids for form in forms]
    assert texts[0] == texts[1] == texts[2]
    params = SamplingParams(json_schema=Place)
    assert SamplingParams(**params.model_dump(mode="json")) == params


def test_a_schema_can_ask_for_its_own_spacing(plain: Pipeline) -> None:
    """A default that cannot be undone."""
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    [usual] = plain.generate(["abc"], json_schema=schema)
    assert usual.text == "[1, 1]"
    own = schema | {"x-guidance": {"item_separator": ","}}
    [narrow] = plain.generate(["abc"], json_schema=own)
    assert json.loads(narrow.text) == [1, 1]
    assert narrow.text != usual.text


def test_streamed_text_is_the_text(plain: Pipeline) -> None:
    """Pieces that miss what was forced."""
    pieces = list(plain.stream(["abc"], json_schema=PLACE, temperature=1.0, seed=5, max_new_tokens=40))  # fmt: skip
    output = pieces[-1].output
    assert isinstance(output, Output)
    assert "".join(piece.text for piece in pieces) == output.text
    assert sum(map(sum, (piece.accepted for piece in pieces))) == output.speculation.accepted
