"""Where requests end, and the text and the streamed pieces that come of it.

The reference is the plain way: decode everything again after each token, and look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from specfw.decoding.detokenizer import REPLACEMENT, Detokenizer
from specfw.decoding.stopping import Stopper
from specfw.errors import ConfigError, ContractError
from specfw.types import FinishReason, SamplingParams, Usage

LINES = [
    "The quick brown fox jumps over the lazy dog; then it stops, stops and stops again.",
    "Übung macht den Meister, größer als je zuvor.",
    "你好，世界。今天天气很好。",
    "Привет, мир! Как дела?",
    "Party 🎉🎉 time 😀👍🏽 now 👩‍👩‍👧",
    "def f(x):\n    return x + 1\n\n",
]
MARKS = ["<eos>", "<bos>", "<unk>"]


def wrap(fast: FastTokenizer) -> PreTrainedTokenizerFast:
    """Named special tokens first, then a special token without a name and a plain added one."""
    fast.add_special_tokens([*MARKS, "<turn>"])
    fast.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any token may end or begin within a character."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(LINES, trainer)
    return wrap(fast)


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's kind: words with a leading space, and `<0x..>` tokens for what is not a word."""
    words = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁▁", "▁stop", "s", "▁the", "a", "好", ",", REPLACEMENT, "op▁st", ""]
    vocabulary = {word: index for index, word in enumerate(words)}
    fast = FastTokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(fast)


def words_of(words: Sequence[str], decoder: Any) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate([*MARKS, *words])}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.decoder = decoder
    return wrap(fast)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    words = ["▁", "▁▁", "▁stop", "s", "st", "op", "▁the", "好", "a▁b", "\n", REPLACEMENT]
    return words_of(words, decoders.Metaspace())


@cache
def word_piece() -> PreTrainedTokenizerFast:
    words = ["stop", "##s", "the", "##op", "st", ".", ",", "'", "do", "not", "n't", "好"]
    return words_of(words, decoders.WordPiece())


@cache
def letters() -> PreTrainedTokenizerFast:
    """Tokens that simply follow each other, for tests whose text is seen at a glance."""
    words = [*"abcdefgho", "STOP", "ST", "OP", "xST", "OPy", "好", "é", "xé", "好y"]
    return words_of(words, decoders.Fuse())


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "word piece": word_piece,
    "letters": letters,
}
TWO_WORDS = {
    "byte level": ["Ġst", "å¥½"],
    "byte fallback": ["▁stop", "好"],
    "metaspace": ["▁stop", "好"],
    "word piece": ["stop", "##s"],
    "letters": ["ST", "OP"],
}
EOS = 0
every_kind = pytest.mark.parametrize("kind", KINDS)
few = settings(max_examples=100, deadline=None)


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def ids_of(*words: str) -> list[int]:
    return [letters().convert_tokens_to_ids(word) for word in words]


def bytes_of(text: str) -> list[int]:
    """Byte-level tokens of one byte each, whatever the training merged."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(spelled, _)] = letters.pre_tokenize_str(text)
    return [byte_level().convert_tokens_to_ids(letter) for letter in spelled]


def stopper_for(tokenizer: PreTrainedTokenizerFast | None, **params: Any) -> Stopper:
    return Stopper(SamplingParams(**params), [EOS], tokenizer, [7, 8])


@dataclass
class Ending:
    token_ids: list[int]
    text: str
    finish: FinishReason | None
    stop: str | int | None


def plain_decoding(
    tokenizer: PreTrainedTokenizerFast, params: SamplingParams, ids: Sequence[int]
) -> Ending:
    """The reference: one token, one full decode, one look at every rule."""
    seen = 0
    text = ""
    for count in range(1, len(ids) + 1):
        kept, last = list(ids[:count]), ids[count - 1]
        text = decode(tokenizer, kept)
        if count > params.min_new_tokens and (
            (last == EOS and not params.ignore_eos) or last in params.stop_token_ids
        ):
            return Ending(kept, text, "stop", last)
        ends = [
            (end, -len(stop), stop)
            for stop in params.stop
            for end in range(seen + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends and count >= params.min_new_tokens:
            end, _, stop = min(ends)
            cut = end if params.include_stop else end - len(stop)
            return Ending(kept, text[:cut], "stop", stop)
        if count == params.max_new_tokens:
            return Ending(kept, text, "length", None)
        seen = max(seen, len(text.rstrip(REPLACEMENT)))
    return Ending(list(ids), text, None, None)


@st.composite
def sequences(draw: st.DrawFn, kind: str, max_size: int = 40) -> list[int]:
    """Real text, then any ids at all: half characters, special tokens, ids that no token has."""
    tokenizer = KINDS[kind]()
    ids: list[int] = []
    if kind == "byte level":
        ids = tokenizer.encode(draw(st.sampled_from(LINES)), add_special_tokens=False)
        begin = draw(st.integers(0, len(ids)))
        ids = ids[begin : begin + draw(st.integers(0, 20))]
    elif kind == "byte fallback":
        characters = draw(st.text("aé好🎉\n", max_size=4)).encode()
        ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in characters]
    any_id = st.integers(0, len(tokenizer) + 2)
    before = draw(st.lists(any_id, max_size=max_size // 4))
    return [*before, *ids, *draw(st.lists(any_id, max_size=max_size))]


@st.composite
def blocks_of(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    blocks = []
    while ids:
        size = draw(st.integers(1, 7))
        blocks.append(ids[:size])
        ids = ids[size:]
    return blocks


# Detokenizing


@every_kind
@few
@given(data=st.data())
def test_text_is_the_one_shot_decode_and_settled_text_is_never_withdrawn(
    kind: str, data: st.DataObject
) -> None:
    """Guards against lost leading spaces, split characters, and text that later tokens change."""
    tokenizer = KINDS[kind]()
    ids = data.draw(sequences(kind))
    detokenizer = Detokenizer(tokenizer)
    done = 0
    settled = [""]
    for block in data.draw(blocks_of(ids)):
        detokenizer.extend(block)
        done += len(block)
        assert detokenizer.text == decode(tokenizer, ids[:done])
        assert detokenizer.settled.startswith(settled[-1])
        settled.append(detokenizer.settled)
    assert all(decode(tokenizer, ids).startswith(piece) for piece in settled)


@every_kind
def test_every_token_alone_and_every_pair_decode_as_in_one_call(kind: str) -> None:
    """Guards against a token whose kind (special, byte, added, unknown) is misjudged."""
    tokenizer = KINDS[kind]()
    base = tokenizer.convert_tokens_to_ids(TWO_WORDS[kind])
    assert tokenizer.unk_token_id not in base
    for token_id in range(len(tokenizer) + 3):
        for ids in ([token_id], [*base, token_id], [token_id, *base], [*base * 4, token_id, *base]):
            detokenizer = Detokenizer(tokenizer)
            for one in ids:
                detokenizer.extend([one])
            assert detokenizer.text == decode(tokenizer, ids)


def test_a_token_without_text_does_not_cost_the_next_its_leading_space() -> None:
    """Guards against an anchor without text: the decoder strips the space of the first text."""
    empty, word = byte_fallback().convert_tokens_to_ids(["", "▁stop"])
    for before in range(1, 30):
        detokenizer = Detokenizer(byte_fallback())
        for token_id in [*[word] * before, empty, word]:
            detokenizer.extend([token_id])
        assert detokenizer.text == "stop" + " stop" * before


class Counting:
    """A tokenizer that counts what it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self.decoded = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.decoded += len(token_ids)
        return str(self._tokenizer.decode(token_ids, **options))


def endless(kind: str, what: str) -> list[int]:
    tokenizer = KINDS[kind]()
    if what == "text":
        return tokenizer.encode("".join(LINES) * 40, add_special_tokens=False)
    token = tokenizer.convert_tokens_to_ids(what)
    return [*tokenizer.encode("s", add_special_tokens=False), *[token] * 2000]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("byte level", "text"),
        ("byte level", "<eos>"),
        ("byte level", "<turn>"),
        ("byte level", "<think>"),
        ("byte level", "Ģ"),  # the byte 0x80: never a character, always U+FFFD
        ("byte level", "ð"),  # the byte 0xF0: always the beginning of a character
        ("metaspace", "▁"),
        ("metaspace", REPLACEMENT),
    ],
)
def test_cost_per_token_does_not_grow(kind: str, what: str) -> None:
    """Guards against a window that grows while nothing visible or nothing complete comes.

    A token may be decoded with an anchor and its rest (under 30), or alone to learn its kind.
    """
    tokenizer = Counting(KINDS[kind]())
    stopper = Stopper(
        SamplingParams(max_new_tokens=10**6, stop=("zzz",), ignore_eos=True), [EOS], tokenizer
    )
    ids = endless(kind, what)
    stopper.extend(ids)
    assert len(ids) > 2000
    assert tokenizer.decoded < 40 * len(ids)


def test_streaming_through_a_run_of_byte_tokens_decodes_it_once() -> None:
    """Guards against quadratic streaming: nothing of the run can be shown before it ends."""
    tokenizer = Counting(byte_fallback())
    stopper = Stopper(SamplingParams(max_new_tokens=10**6), [EOS], tokenizer)
    newline, word = byte_fallback().convert_tokens_to_ids(["<0x0A>", "s"])
    for token_id in [word, *[newline] * 2000]:
        stopper.push(token_id)
        stopper.take()
    assert tokenizer.decoded < 10
    stopper.push(word)
    assert stopper.take() == "\n" * 2000 + "s"


def test_nothing_is_decoded_without_stop_strings_and_streaming() -> None:
    """Guards against a decode per token that nobody asked for."""
    tokenizer = Counting(letters())
    stopper = Stopper(SamplingParams(max_new_tokens=10), [EOS], tokenizer)
    stopper.extend(ids_of(*"abcdefghab"))
    assert tokenizer.decoded == 0
    assert stopper.text == "abcdefghab"


# Stopping


@every_kind
@few
@given(data=st.data())
def test_any_blocks_end_as_plain_decoding_ends(kind: str, data: st.DataObject) -> None:
    """Guards against ends, texts or streams that depend on how many tokens a step emits."""
    tokenizer = KINDS[kind]()
    ids = data.draw(sequences(kind))
    whole = decode(tokenizer, ids).replace(REPLACEMENT, "")
    begin = data.draw(st.integers(0, len(whole)))
    stops = data.draw(
        st.lists(st.sampled_from(["stop", "好", " ", "s", "op st", "🎉"]), max_size=2)
    )
    if piece := whole[begin : begin + data.draw(st.integers(1, 6))]:
        stops.append(piece)
    maximum = data.draw(st.integers(1, 50))
    params = SamplingParams(
        max_new_tokens=maximum,
        min_new_tokens=data.draw(st.integers(0, min(maximum, 12))),
        stop=tuple(stops if data.draw(st.booleans()) else ()),
        stop_token_ids=tuple(data.draw(st.lists(st.sampled_from(ids), max_size=1)) if ids else ()),
        ignore_eos=data.draw(st.booleans()),
        include_stop=data.draw(st.booleans()),
    )
    expected = plain_decoding(tokenizer, params, ids)

    stopper = Stopper(params, [EOS], tokenizer)
    pieces = []
    for block in data.draw(blocks_of(ids)):
        kept, finish = stopper.extend(block)
        pieces.append(stopper.take())
        assert expected.text.startswith("".join(pieces))
        assert (kept < len(block)) <= (finish is not None)
        if finish:
            break
    if stopper.finish_reason is None:
        stopper.finish("cancelled")
        pieces.append(stopper.take())
        expected.finish = "cancelled"
    ending = Ending(stopper.token_ids, stopper.text, stopper.finish_reason, stopper.stop_reason)
    assert ending == expected
    assert "".join(pieces) == expected.text
    assert stopper.take() == ""


@pytest.mark.parametrize(
    ("words", "kept", "finish", "text"),
    [
        (["a", "b", "STOP", "c", "d", "e"], 3, "stop", "ab"),
        (["a", "b", "ST", "OP", "c", "d"], 4, "stop", "ab"),
        (["a", "b", "xST", "OPy", "c", "d"], 4, "stop", "abx"),
        (["a", "b", "c", "d", "STOP", "e"], 5, "stop", "abcd"),
        (["a", "b", "c", "ST", "OP", "e"], 5, "stop", "abc"),
        (["a", "b", "c", "d", "e", "STOP"], 5, "length", "abcde"),
        (["a", "b", "c", "d", "ST", "OP"], 5, "length", "abcdST"),
        (["STOP", *"abcdefghabc"], 1, "stop", ""),
    ],
)
def test_B15_the_earliest_end_in_token_order_wins(
    words: list[str], kept: int, finish: FinishReason, text: str
) -> None:
    """Guards against a length cap that is tested on a whole block before the stops inside it."""
    stopper = stopper_for(letters(), max_new_tokens=5, stop="STOP")
    assert stopper.extend(ids_of(*words)) == (kept, finish)
    assert stopper.token_ids == ids_of(*words)[:kept]
    assert stopper.text == stopper.take() == text
    assert stopper.stop_reason == ("STOP" if finish == "stop" else None)
    assert stopper.usage == Usage(prompt_tokens=2, completion_tokens=kept)


@pytest.mark.parametrize("how", ["eos", "stop id"])
@pytest.mark.parametrize(
    ("place", "kept", "finish"), [(2, 3, "stop"), (4, 5, "stop"), (5, 5, "length")]
)
def test_B15_a_stop_token_inside_a_block_ends_it_before_the_cap(
    how: str, place: int, kept: int, finish: FinishReason
) -> None:
    """Guards against an EOS or stop token that the length cap hides, at and before the cap."""
    words = ids_of(*"abcde")
    token = EOS if how == "eos" else ids_of("h")[0]
    words.insert(place, token)
    stopper = stopper_for(letters(), max_new_tokens=5, stop_token_ids=ids_of("h"))
    assert stopper.extend(words) == (kept, finish)
    assert stopper.stop_reason == (token if finish == "stop" else None)
    assert stopper.text == decode(letters(), words[:kept])


def test_B15_a_stop_far_back_in_a_long_block_is_found() -> None:
    """Guards against searching only the last few tokens of a block."""
    stopper = stopper_for(letters(), stop="bc")
    assert stopper.extend(ids_of("a", "b", "c", *"dddddddddddddddddddddddd")) == (3, "stop")
    assert stopper.text == "a"


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_B16_a_stop_string_inside_a_block_cuts_tokens_and_text_alike(
    include_stop: bool, size: int
) -> None:
    """Guards against text that is cut while later token ids stay, and against withdrawn text.

    The stop begins within `xé`, spans three tokens and ends within `好y`; more tokens follow.
    """
    words = ["a", "é", "好", "xé", "b", "好y", "c", "d", "e"]
    stopper = stopper_for(letters(), stop="éb好", include_stop=include_stop)
    text = "aé好xéb好" if include_stop else "aé好x"
    pieces = []
    ids = ids_of(*words)
    while stopper.finish_reason is None:
        stopper.extend(ids[:size])
        ids = ids[size:]
        pieces.append(stopper.take())
        assert text.startswith("".join(pieces))
    assert stopper.token_ids == ids_of(*words[:6])
    assert stopper.usage.completion_tokens == 6
    assert stopper.text == "".join(pieces) == text
    decoded = decode(letters(), stopper.token_ids)
    assert decoded[: decoded.index("éb好") + (3 if include_stop else 0)] == text


def test_B16_stop_strings_of_split_characters_are_found_in_time() -> None:
    """Guards against a stop whose characters are spread over byte tokens, next to other such."""
    tokenizer = byte_level()
    ids = bytes_of("a🎉😀👍b")
    stopper = stopper_for(tokenizer, stop="😀")
    pieces = []
    for token_id in ids:
        stopper.push(token_id)
        pieces.append(stopper.take())
        if stopper.finish_reason:
            break
    assert len(stopper.token_ids) == 1 + 4 + 4
    assert [piece for piece in pieces if piece] == ["a", "🎉"]
    assert stopper.text == "a🎉"


# What ends a request, and what does not yet


def test_B14_stops_do_not_end_a_request_before_its_minimum() -> None:
    """Guards against an early end by EOS, stop token or string, and a late end by an old one."""
    stopper = stopper_for(letters(), min_new_tokens=4, stop="b", stop_token_ids=ids_of("h"))
    assert stopper.extend([*ids_of("a", "b", "h"), EOS]) == (4, None)
    assert stopper.extend(ids_of("c")) == (1, None), "the old b must not stop now"
    assert stopper.extend(ids_of("b", "c")) == (1, "stop")
    assert stopper.text == "abhc"


@pytest.mark.parametrize(("word", "place"), [("b", 3), ("<eos>", 4), ("h", 4)])
def test_B14_the_first_end_that_the_minimum_allows(word: str, place: int) -> None:
    """Guards against off-by-one minima.

    Four tokens that complete a stop string are four; an EOS or stop token may only follow four.
    """
    for index in range(6):
        ids = ids_of(*"aaaaaaa")
        ids[index] = ids_of(word)[0]
        stopper = stopper_for(letters(), min_new_tokens=4, stop="b", stop_token_ids=ids_of("h"))
        expected = (index + 1, "stop") if index >= place else (7, None)
        assert stopper.extend(ids) == expected


def test_an_old_stop_string_stays_text_when_its_run_of_bytes_goes_on() -> None:
    """Guards against an old stop that vanishes into U+FFFD for a while and comes back as new."""
    stopper = stopper_for(byte_fallback(), min_new_tokens=4, stop="好")
    run = [byte_fallback().convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "好好".encode()]
    assert stopper.extend(run) == (6, "stop")
    assert stopper.text == "好"


def test_a_stop_string_completed_by_the_last_token_of_minimum_and_maximum_is_a_stop() -> None:
    """Guards against a stop at the last allowed token that reads as a cut."""
    stopper = stopper_for(letters(), min_new_tokens=3, max_new_tokens=3, stop="c")
    assert stopper.extend(ids_of(*"abc")) == (3, "stop")
    assert stopper.text == "ab"


def test_ignore_eos_goes_on_but_keeps_listed_stop_tokens() -> None:
    """Guards against ignore_eos that also ignores what the request itself lists."""
    assert stopper_for(letters(), ignore_eos=True).extend([EOS, EOS]) == (2, None)
    stopper = stopper_for(letters(), ignore_eos=True, stop_token_ids=(EOS,))
    assert stopper.extend([EOS, EOS]) == (1, "stop")
    assert (stopper.token_ids, stopper.text, stopper.stop_reason) == ([EOS], "", EOS)


def test_every_eos_of_the_list_stops_and_is_named() -> None:
    """Guards against models with several EOS ids of which only the first one works."""
    turn = letters().convert_tokens_to_ids("<turn>")
    stopper = Stopper(SamplingParams(), [EOS, turn], letters())
    assert stopper.extend([*ids_of("a"), turn, *ids_of("b")]) == (2, "stop")
    assert (stopper.text, stopper.stop_reason) == ("a", turn)


def test_a_stop_token_that_is_not_special_keeps_its_text() -> None:
    """Guards against text that is no longer the decoded token ids."""
    stopper = stopper_for(letters(), stop_token_ids=ids_of("c"), stop="bc")
    assert stopper.extend(ids_of(*"abcd")) == (3, "stop")
    assert stopper.stop_reason == ids_of("c")[0], "token rules come before stop strings"
    assert stopper.text == "abc"


@pytest.mark.parametrize(
    ("stops", "reason", "text"),
    [
        (("OPy", "ST"), "ST", "a"),
        (("OP", "STOP"), "STOP", "a"),
        (("T", "STO"), "T", "aS"),
        (("Py", "POP", "OPy"), "OPy", "aST"),
    ],
)
def test_of_several_stop_strings_the_first_completed_counts(
    stops: tuple[str, ...], reason: str, text: str
) -> None:
    """Guards against a result that depends on the list's order when one token completes two."""
    for order in (stops, stops[::-1]):
        stopper = stopper_for(letters(), stop=order)
        stopper.extend(
            ids_of("a", "STOP", "OPy") if "ST" in "".join(stops) else ids_of("a", "ST", "OPy")
        )
        assert (stopper.stop_reason, stopper.text) == (reason, text)


def test_a_special_token_within_a_stop_string_does_not_hide_it() -> None:
    """Guards against searching text that holds, or windows that end at, special tokens."""
    stopper = stopper_for(letters(), stop="STOP", ignore_eos=True)
    assert stopper.extend([*ids_of("a", "ST"), EOS, *ids_of("OP", "b")]) == (4, "stop")
    assert stopper.text == "a"


# Streaming


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    """Guards against shown text that is cut later, and against holding back more than needed."""
    stopper = stopper_for(letters(), stop=("abac", "bad"))
    shown = []
    for token_id in ids_of(*"abaab", *"ad"):
        stopper.push(token_id)
        shown.append(stopper.take())
    # After "abaab" the end "ab" may begin "abac"; after "abaaba" the end "aba" may; "d" stops.
    assert shown == ["", "", "", "aba", "", "", "a"]
    assert (stopper.stop_reason, stopper.text) == ("bad", "abaa")


def test_a_stop_string_that_came_too_early_to_stop_is_shown_at_once() -> None:
    """Guards against holding back text that can no longer be cut."""
    stopper = stopper_for(letters(), min_new_tokens=9, stop="bc")
    stopper.extend(ids_of(*"abc"))
    assert stopper.take() == "abc"


def test_an_incomplete_character_waits_and_comes_out_at_the_end() -> None:
    """Guards against half characters on the screen, and against losing the rest at the end."""
    stopper = stopper_for(byte_level(), max_new_tokens=6)
    pieces = []
    for token_id in bytes_of("é🎉"):
        stopper.push(token_id)
        pieces.append(stopper.take())
    assert pieces == ["", "é", "", "", "", "🎉"]

    cut = stopper_for(byte_level(), max_new_tokens=4)
    cut.extend(bytes_of("é🎉")[:4])
    assert cut.take() == cut.text == "é" + REPLACEMENT


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    """Guards against withdrawn text: a run that ends in half a character is spoiled as a whole."""
    tokenizer = byte_fallback()
    run = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "好🎉".encode()]
    stopper = stopper_for(tokenizer, max_new_tokens=5)
    shown = ""
    for token_id in run[:5]:
        stopper.push(token_id)
        shown += stopper.take()
    assert shown == stopper.text == decode(tokenizer, run[:5]) == REPLACEMENT * 5


def test_an_end_from_outside_hands_out_what_was_held_back() -> None:
    """Guards against cancelled requests whose streamed text is shorter than their text."""
    stopper = stopper_for(letters(), stop="abc")
    stopper.extend(ids_of("a", "b"))
    assert stopper.take() == ""
    stopper.finish("cancelled")
    assert stopper.take() == stopper.text == "ab"
    assert (stopper.finish_reason, stopper.stop_reason) == ("cancelled", None)


def test_text_before_the_end_is_all_text_so_far() -> None:
    """Guards against a text that misses what streaming still holds back."""
    stopper = stopper_for(letters(), stop="abc")
    stopper.extend(ids_of("a", "b"))
    assert stopper.text == "ab"
    stopper.push(ids_of("d")[0])
    assert stopper.text == "abd"


# Refusals


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    """Guards against stop strings that are silently ignored for targets that speak ids only."""
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        stopper_for(None, stop="x")


def test_without_a_tokenizer_tokens_are_still_counted_and_stopped() -> None:
    """Guards against needing text where only ids are asked for."""
    stopper = stopper_for(None, max_new_tokens=3)
    assert stopper.extend([4, 5, EOS, 6]) == (3, "stop")
    assert (stopper.text, stopper.take(), stopper.token_ids) == ("", "", [4, 5, EOS])


@pytest.mark.parametrize(
    "late", [lambda s: s.push(5), lambda s: s.extend([5]), lambda s: s.finish("cancelled")]
)
def test_nothing_may_come_after_the_end(late: Callable[[Stopper], object]) -> None:
    """Guards against tokens behind the stop that leak into the ids or change the reason."""
    stopper = stopper_for(letters(), max_new_tokens=1)
    stopper.push(EOS)
    with pytest.raises(ContractError, match="after the request had ended"):
        late(stopper)
    assert (stopper.token_ids, stopper.finish_reason) == ([EOS], "stop")
    assert stopper.extend([]) == (0, "stop")
