"""Draft models with another tokenizer: through text, or through the tokens that both have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from specfw_plugin_adaptive_k import AdaptiveKOptions, AdaptiveKScheduler
from specfw_plugin_ngram import NgramDrafter
from specfw_plugin_small_model import SmallModelDrafter
from specfw_plugin_small_model.vocabularies import Retokenized, Shared, meet
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from specfw.builtins import NoDrafter
from specfw.contracts import (
    Drafter,
    Feedback,
    LoadedTarget,
    RequestView,
    Scheduler,
    TargetInfo,
    Verifier,
)
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.random import KeyedSource
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine
from specfw.engine.fixed import FixedScheduler
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.runner import KVMemory, ModelRunner
from specfw.testing.certification import certify
from specfw.testing.conformance import DrafterConformance
from specfw.testing.table_model import TableLM
from specfw.types import SamplingParams

TEXT = "the cat and the other cat: naïve 好好 😀 they then the end"


# Tokenizers


def _finished(fast: Tokenizer, *others: str, **roles: str) -> PreTrainedTokenizerFast:
    fast.add_special_tokens([*others, *roles.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        additional_special_tokens=list(others),
        **{f"{role}_token": text for role, text in roles.items()},
    )


@cache
def byte_level(*merges: tuple[str, str], bos: str = "<s>", reverse: bool = False) -> Any:
    """A byte-level tokenizer: a token for each byte, and one for each merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    tokens = [bos, "</s>", "<|x|>", *alphabet, *(a + b for a, b in merges)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    fast = Tokenizer(models.BPE(vocabulary, list(merges)))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return _finished(fast, "<|x|>", bos=bos, eos="</s>")


LONG = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("c", "a"), ("ca", "t"), ("Ġ", "cat"), ("e", "n"))
OTHER = (("h", "e"), ("Ġ", "t"), ("a", "n"), ("an", "d"), ("å", "¥"), ("Ġ", "c"))


@cache
def word_piece() -> Any:
    """A word-piece tokenizer, which lowers letters and does not know everything."""
    letters = "abcdefghijklmnopqrstuvwxyz:"
    pieces = ["the", "cat", "and", "##en", "##ey", "好", *letters, *(f"##{x}" for x in letters)]
    vocabulary = {token: id for id, token in enumerate(["[UNK]", "[CLS]", "[SEP]", *pieces])}
    fast = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer()
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(cleanup=False)
    return _finished(fast, unk="[UNK]", bos="[CLS]", eos="[SEP]")


TARGETS = {"byte level": lambda: byte_level(*LONG), "word pieces": word_piece}
DRAFTS = {
    "bytes": lambda: byte_level(bos="<b>", reverse=True),  # longer for the same text
    "other merges": lambda: byte_level(*OTHER, reverse=True),
    "word pieces": word_piece,
}


class Letters:
    """Tokens are given strings of letters; text becomes the longest that fit."""

    eos_token_id = None

    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self._tokens)}

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        ids = []
        while text:
            best = max((t for t in self._tokens if text.startswith(t)), key=len, default=None)
            if best is not None:
                ids.append(self._tokens.index(best))
            text = text[len(best or "?") :]
        return ids

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        return "".join(self._tokens[id] for id in token_ids)


# Models


def tiny(kind: str, vocab: int, positions: int = 256, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    special: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    if kind == "gpt2":  # absolute positions
        return AutoModelForCausalLM.from_config(
            GPT2Config(
                vocab_size=vocab, n_positions=positions, n_embd=32, n_layer=2, n_head=4, **special
            )
        ).eval()
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=positions,
            **special,
        )
    ).eval()


def reciting(vocab: int, script: Sequence[int], rest: int = 3) -> Any:
    """A model that says what comes next in its script at each position, then `rest`, whatever it reads."""
    model = tiny("llama", vocab, positions=len(script) + 300)
    said = torch.tensor([*script[1:], *[rest] * 301])

    def recite(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        rows = kwargs.get("position_ids")
        if rows is None:  # the probe, which asks for the model's own forward
            rows = torch.arange(kwargs["input_ids"].shape[1])[None]
        keep = kwargs.get("logits_to_keep", slice(None))
        output.logits = 8.0 * torch.nn.functional.one_hot(said[rows[:, keep]], vocab).float()
        return output

    model.register_forward_hook(recite, with_kwargs=True)
    return model


class Checked(SmallModelDrafter):
    """Compares what follows each context with the draft model's own forward over all of its ids."""

    contexts = 0
    went_back = 0

    def _read_context(self, trees: Any) -> torch.Tensor:
        logits = super()._read_context(trees)
        for tree, row in zip(trees, logits, strict=True):
            assert list(tree.ids) == list(self._vocabularies.context(tree.request.tokens))
            expected = self._runner.stock_logits(list(tree.ids))[-1]
            assert (row - expected).abs().max() < 1e-3 * expected.std()
            self.contexts += 1
        return logits

    def _alike(self, read: Any, ids: Any) -> int:
        alike = super()._alike(read, ids)
        self.went_back += alike < len(read)
        return alike


def engine_of(
    model: Any,
    tokenizer: Any,
    drafter: Drafter,
    verifier: type[Verifier] = CoupledVerifier,
    scheduler: Scheduler | None = None,
) -> Engine:
    runner = model if isinstance(model, ModelRunner) else ModelRunner(model, check=False)
    size = runner.model.config.vocab_size
    info = TargetInfo(
        "big", size, runner.max_length, (), tokenizer, runner.model, runner.device, runner.dtype
    )
    scheduler = scheduler or FixedScheduler(max_nodes=12, max_depth=12)
    memory = KVMemory(120, 4)
    return Engine(
        runner, memory, info, drafter, verifier(), [scheduler], KeyedSource(), max_batch=3
    )


def play(engine: Engine, prompts: Sequence[Sequence[int]], **settings: Any) -> tuple[Any, Any]:
    requests = [
        engine.add(prompt, SamplingParams(ignore_eos=True, seed=i, **settings))
        for i, prompt in enumerate(prompts)
    ]
    for _ in range(400):
        if not engine.has_work:
            break
        engine.step()
        engine.memory.check()
        if isinstance(drafter := engine.drafters.default, SmallModelDrafter):
            drafter._memory.check()
    stats = [request.stats for request in requests]
    total = SimpleNamespace(
        drafted=sum(one.drafted for one in stats),
        accepted=sum(one.accepted for one in stats),
        passes=sum(one.target_passes for one in stats),
    )
    return [request.tokens for request in requests], total


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """Texts, one cut within a character, special tokens, and a prompt of one token."""
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    face = tokenizer.encode("the 😀", add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    chat = [bos, *text[:4], eos, *text[4:7]]
    prompts = [text, text[:9], face[:-1], face[:-2], chat, [bos], [eos, bos], text[:1], face[-1:]]
    return [prompt for prompt in prompts if prompt]


WAYS = [
    ("retokenize", "byte level", "bytes"),
    ("retokenize", "byte level", "other merges"),
    ("retokenize", "byte level", "word pieces"),
    ("retokenize", "word pieces", "other merges"),
    ("shared", "byte level", "bytes"),
    ("shared", "byte level", "other merges"),
    ("shared", "word pieces", "bytes"),
]


@pytest.mark.parametrize(("way", "target", "draft"), WAYS)
def test_B26_the_text_is_plain_decodings(way: Any, target: str, draft: str) -> None:
    """The draft model's positions or ids taken from the target's encoding of the text: a crash, ids of
    the wrong vocabulary, KV of an encoding that has changed (huggingface/transformers#46936)."""
    ours, theirs = DRAFTS[draft](), TARGETS[target]()
    runner = ModelRunner(tiny("llama", len(theirs) + 5))
    prompts = prompts_of(theirs)
    for kind, temperature in (("gpt2", 0.0), ("llama", 0.9)):
        settings = {"max_new_tokens": 12, "temperature": temperature}
        plain, _ = play(engine_of(runner, theirs, NoDrafter()), prompts, **settings)
        model = LoadedTarget("small", tiny(kind, len(ours) + 3, seed=3), ours)
        drafter = Checked(model, tokenizer=way, max_nodes=3)
        engine = engine_of(runner, theirs, drafter)
        drafted, stats = play(engine, prompts, **settings)
        assert drafted == plain
        assert not engine.faults
        assert stats.drafted > 0
        assert drafter.contexts > 30
        assert drafter._memory.used == 0
        assert drafter._read == drafter._sequences == {}


def test_B26_kv_goes_back_where_the_encoding_changes() -> None:
    """KV of a token that the running text, encoded again, no longer has."""
    ours, theirs = DRAFTS["other merges"](), byte_level()
    script = theirs.encode("and 好 the hen and 好 the hand", add_special_tokens=False)
    target = reciting(len(theirs), script)
    model = LoadedTarget("small", tiny("llama", len(ours)), ours)
    drafter = Checked(model, tokenizer="retokenize")
    tokens, _ = play(
        engine_of(target, theirs, drafter), [script[:1]], max_new_tokens=len(script) - 1
    )
    assert tokens == [script]
    assert drafter.went_back > 5
    assert drafter.contexts > 20


@pytest.mark.parametrize("target", ["byte level", "bytes"])
@pytest.mark.parametrize("draft", list(DRAFTS))
def test_B26_the_right_text_is_guessed_in_the_targets_tokens(target: str, draft: str) -> None:
    """Guesses that spell something else, lost characters of several bytes, borders that do not meet."""
    ours, theirs = DRAFTS[draft](), byte_level(*(LONG if target == "byte level" else ()))
    text = "the cat and then the cat and they and the end: the cat and then the cat"
    if draft != "word pieces":
        text = text.replace(":", " 好好 😀 naïve:")
    script = theirs.encode(text, add_special_tokens=False)
    own = ours.encode(text, add_special_tokens=False)
    model = LoadedTarget("small", reciting(len(ours), [ours.bos_token_id, *own]), ours)
    drafter = SmallModelDrafter(model, tokenizer="retokenize", max_nodes=6)
    engine = engine_of(reciting(len(theirs), script), theirs, drafter)
    tokens, stats = play(engine, [script[:2]], max_new_tokens=len(script) - 2)
    assert tokens == [script]
    assert not engine.faults
    assert stats.accepted / (len(script) - 2) > 0.6
    assert stats.accepted >= 0.25 * stats.drafted  # it recites by its own count of tokens


def test_B26_specials_are_mapped_or_left_out_and_never_spelled() -> None:
    """An id of the draft model's vocabulary in the target's text, or the letters of a special token."""
    ours, theirs = word_piece(), byte_level(*LONG)
    words = Retokenized(
        LoadedTarget("small", tiny("llama", len(ours)), ours), info(theirs, len(theirs))
    )
    chat = [theirs.bos_token_id, *theirs.encode("the cat", add_special_tokens=False)]
    own = ours.encode("the cat", add_special_tokens=False)
    assert words.context(chat) == [ours.bos_token_id, *own]
    assert words.context([theirs.convert_tokens_to_ids("<|x|>")]) == [ours.bos_token_id]
    ended = [*ours.encode("and", add_special_tokens=False), ours.eos_token_id, 5, 6]
    guess = words.guess(chat, words.context(chat), ended)
    assert guess == [
        *theirs.encode(" and", add_special_tokens=False),
        theirs.eos_token_id,
    ]
    assert words.guess(chat, words.context(chat), [ours.unk_token_id, 5]) == []


def test_B26_a_character_that_is_begun_is_finished() -> None:
    """Bytes that do not yet form a character, on either side of the border."""
    theirs, ours = byte_level(*LONG), byte_level(*OTHER, reverse=True)
    words = Retokenized(
        LoadedTarget("small", tiny("llama", len(ours)), ours), info(theirs, len(theirs))
    )
    whole = theirs.encode("the 好 cat", add_special_tokens=False)
    own = ours.encode("好 cat", add_special_tokens=False)
    for begun in (3, 4):  # after one of three bytes, and after two
        assert words.context(whole[:begun]) == words.context(whole[:2])
        assert words.guess(whole[:begun], words.context(whole[:begun]), own) == whole[begun:]
    assert words.guess(whole[:2], words.context(whole[:2]), own[:1]) == []  # two bytes of three


def info(tokenizer: Any, size: int) -> TargetInfo:
    return TargetInfo("big", size, 99, (), tokenizer, None, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("way", ["retokenize", "shared"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_drafting_ends_where_the_draft_models_positions_do(way: Any, kind: str) -> None:
    """The limit counted in the target's tokens, of which the same text has fewer."""
    theirs, ours = byte_level(*LONG), DRAFTS["bytes"]()
    runner = ModelRunner(tiny("llama", len(theirs)))
    drafter = Checked(
        LoadedTarget("small", tiny(kind, len(ours), positions=40), ours), tokenizer=way
    )
    prompts = [theirs.encode("the cat the cat the cat", add_special_tokens=False)]
    plain, _ = play(engine_of(runner, theirs, NoDrafter()), prompts, max_new_tokens=40)
    engine = engine_of(runner, theirs, drafter)
    drafted, stats = play(engine, prompts, max_new_tokens=40)
    assert drafted == plain
    assert not engine.faults
    assert 0 < drafter.contexts < stats.passes


# The law


def letters(*tokens: str) -> Callable[[TargetInfo], LoadedTarget]:
    def load(target: TargetInfo) -> LoadedTarget:
        known = [token for token in tokens if max(token) < chr(ord("a") + target.vocab_size)]
        return LoadedTarget("table", TableLM(len(known), seed=5), Letters(*known))

    return load


class OnTables(SmallModelDrafter):
    """With a draft model for the letters of whatever table it is attached to."""

    def __init__(self, load: Callable[[TargetInfo], LoadedTarget], **options: Any) -> None:
        super().__init__(None, max_nodes=3, max_depth=2, **options)  # type: ignore[arg-type]
        self._load = load

    def attach(self, target: TargetInfo) -> None:
        self._loaded = self._load(target)
        super().attach(target)


def shared(width: int) -> Drafter:
    return OnTables(letters("d", "b", "ab", "a"), tokenizer="shared", width=width)


def retokenizing() -> Drafter:
    return OnTables(letters("ba", "c", "aa", "b", "a", "d"), tokenizer="retokenize")


class TestShared(DrafterConformance):
    def make(self) -> Drafter:
        return shared(2)


class TestRetokenized(DrafterConformance):
    def make(self) -> Drafter:
        return retokenizing()


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
def test_the_law_over_what_both_have_is_exact(verifier: type[Verifier]) -> None:
    """Tokens that only one side has keep a share of the law that is stated."""
    certificate = certify(lambda: shared(1), verifier, batch_sizes=(1,))
    assert certificate.ok, certificate.counterexample
    assert certificate.max_tv <= 1e-9
    assert certificate.accepted
    assert not certificate.faults


def test_the_law_is_the_draft_models_given_what_both_have() -> None:
    """The draft model's id drawn for the target's, or mass on tokens that the target has not."""
    ours, theirs = Letters("d", "b", "ab", "a"), Letters("a", "b", "c")
    model = LoadedTarget("table", TableLM(4, seed=5), ours)
    way = meet(model, info(theirs, 3), "shared", 1)
    assert isinstance(way, Shared)
    assert way.context([0, 1, 2, 0]) == [3, 1, 3]
    logits, vocab = way.law(torch.arange(4.0)[None])
    assert vocab is not None
    assert dict(zip(vocab.tolist(), logits[0].tolist(), strict=True)) == {0: 3.0, 1: 1.0}
    assert way.drafted(torch.tensor([1, 0])).tolist() == way.ids_of([1, 0]) == [1, 3]


# Options


def test_auto_takes_what_fits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A way that is chosen in silence, or one that cannot work."""
    theirs = byte_level(*LONG)
    for ours, width, expected in (
        (byte_level(*LONG), 1, "Same"),
        (byte_level(*OTHER), 1, "Shared"),
        (word_piece(), 1, "Retokenized"),
        (word_piece(), 2, "Shared"),
    ):
        caplog.clear()
        draft = LoadedTarget("small", tiny("llama", len(ours)), ours)
        way = meet(draft, info(theirs, len(theirs)), "auto", width)
        assert type(way).__name__ == expected
        assert [expected.lower()[:6] in r.getMessage() for r in caplog.records] == (
            [] if expected == "Same" else [True]
        )


def test_what_cannot_meet_is_refused_in_one_sentence() -> None:
    theirs = Letters("a", "b")
    for ours, way, width, why in (
        (Letters("x", "y"), "shared", 1, "no token of the target"),
        (Letters("x", "y"), "retokenize", 2, "width is 2; use width=1"),
        (Letters("b", "a"), "same", 1, "token id 0 is 'a' for the target and 'b'"),
        (None, "shared", 1, "needs the tokenizers of both models"),
    ):
        draft = LoadedTarget("small", TableLM(2), ours)
        with pytest.raises(ConfigError, match=why):
            meet(draft, info(theirs, 2), way, width)  # type: ignore[arg-type]


def test_the_option_reaches_the_drafter() -> None:
    bound = PluginManager().bind("drafter", "small-model(model='table', tokenizer='shared')")
    built = bound.build()
    assert isinstance(built, SmallModelDrafter)
    assert built._way == "shared"
    with pytest.raises(ConfigError, match="tokenizer"):
        PluginManager().bind("drafter", "small-model(model='table', tokenizer='other')")


def test_logits_that_overflow_cost_drafts_only(caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = byte_level(*LONG), byte_level(*OTHER)
    runner = ModelRunner(tiny("llama", len(theirs)))
    model = tiny("llama", len(ours))
    drafter = SmallModelDrafter(LoadedTarget("small", model, ours), tokenizer="retokenize")
    engine = engine_of(runner, theirs, drafter)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    prompts = prompts_of(theirs)[:2]
    plain, _ = play(engine_of(runner, theirs, NoDrafter()), prompts, max_new_tokens=8)
    drafted, stats = play(engine, prompts, max_new_tokens=8)
    assert drafted == plain
    assert stats.drafted == 0
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1


# Adaptive depth


class Halves(Drafter):
    """Two siblings at each depth, of which the first is right while `right` says so."""

    def __init__(self, script: Sequence[int], until: int) -> None:
        self._script, self._until = list(script), until

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root in zip(requests, builder.roots.tolist(), strict=True):
            place = len(request.tokens)
            node = root
            for token in self._script[place : place + 8]:
                right = token if place < self._until else 7
                children = [builder.guess(node, [t]) for t in (right, 8)]
                if not children[0]:
                    break
                node = children[0][0]


class Watched(AdaptiveKScheduler):
    """Notes the depth allowed for each length of text, and what was drafted and kept."""

    def __init__(self, options: AdaptiveKOptions) -> None:
        super().__init__(options)
        self.depths: list[tuple[int, int]] = []
        self.nodes: list[int] = []
        self.rounds: list[tuple[int, int, int]] = []

    def plan(self, view: Any) -> Any:
        limits = super().plan(view)
        self.nodes = [one.max_nodes for one in limits]
        self.depths += [
            (len(r.tokens), one.max_depth) for r, one in zip(view.requests, limits, strict=True)
        ]
        return limits

    def observe(self, feedback: Feedback) -> None:
        drafting = 0.1 * sum(feedback.drafted)
        super().observe(replace(feedback, seconds={"draft": drafting, "forward": 1.0}))
        self.rounds += zip(feedback.drafted, feedback.tested, map(len, feedback.kept), strict=True)


@pytest.mark.parametrize("kind", ["retokenizing", "tree", "ngram"])
def test_B33_adaptive_depth_counts_the_targets_tokens(kind: str) -> None:
    """Matched tokens counted in the target's units and compared with drafts in the draft model's, so that
    "all accepted" is never seen or by accident (huggingface/transformers#34803)."""
    theirs, ours = byte_level(*LONG), DRAFTS["bytes"]()
    good = " the cat" * 60
    script = [*theirs.encode(good, add_special_tokens=False)]
    until = len(script)
    others = theirs.encode("opqrsuvwxyz", add_special_tokens=False)
    places = np.add.outer(np.arange(1, 11), np.zeros(11, np.int64)).reshape(-1).cumsum() % 11
    script += [others[place] for place in places]  # after each token always another one
    own = [ours.bos_token_id, *ours.encode(good, add_special_tokens=False)]
    drafter: Drafter
    if kind == "retokenizing":
        [rest] = ours.encode("!", add_special_tokens=False)
        model = LoadedTarget("small", reciting(len(ours), own, rest), ours)
        drafter = SmallModelDrafter(model, tokenizer="retokenize", max_nodes=16)
    elif kind == "tree":
        drafter = Halves(script, until)
    else:
        drafter = NgramDrafter()
    width = 2 if kind == "tree" else 1
    options = AdaptiveKOptions(
        min_depth=1, start=3, max_nodes=6 * width, max_depth=6, max_width=width, memory=8
    )
    scheduler = Watched(options)
    engine = engine_of(reciting(len(theirs), script), theirs, drafter, scheduler=scheduler)
    tokens, _ = play(engine, [script[:4]], max_new_tokens=len(script) - 4)
    assert tokens == [script]
    assert not engine.faults
    first = scheduler.depths
    assert max(depth for at, depth in first if at < until) == 6
    assert {depth for at, depth in first if until - 30 < at < until - 10} == {6}
    assert {depth for at, depth in first if at > len(script) - 20} <= {0, 1}  # 0 at the very end
    assert all(
        kept <= tested <= depth
        for (_, depth), (_, tested, kept) in zip(first, scheduler.rounds, strict=True)
    )
    engine.add(script[:4], SamplingParams(max_new_tokens=8))
    engine.step()
    assert scheduler.nodes == [3]
