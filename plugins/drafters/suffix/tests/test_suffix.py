"""The drafter `suffix`: its automaton, what it drafts, what it remembers, and that it changes no text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from specfw_plugin_suffix import Library, SuffixAutomaton, SuffixDrafter, SuffixOptions

from specfw.contracts import Drafter, DraftLimits, Feedback, TargetInfo
from specfw.decoding.draft import Draft
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.testing import drafting
from specfw.testing.conformance import DrafterConformance
from specfw.testing.drafting import ROOMY, Text

VOCAB = 128
CPU = torch.device("cpu")
draft = partial(drafting.draft, vocab_size=VOCAB)


def paths(drafted: Draft) -> list[list[int]]:
    """The tokens on the way to each leaf, in draw order."""
    inner = set(drafted.parent[0].tolist())
    leaves = [node for node in range(1, int(drafted.sizes[0])) if node not in inner]
    return [[int(drafted.token[0, i]) for i in drafted.path(0, leaf)] for leaf in leaves]


def drafted_paths(
    tokens: Sequence[int], limits: DraftLimits = ROOMY, **options: Any
) -> list[list[int]]:
    """What a new drafter drafts after `tokens`."""
    drafter, request = SuffixDrafter(SuffixOptions(**options)), Text(tokens)
    drafter.begin(request)
    return paths(draft(drafter, request, limits))


def live(drafter: SuffixDrafter, prompt: Sequence[int], output: Sequence[int], id: int = 0) -> None:
    """A whole request's life."""
    request = Text(list(prompt), id, len(prompt))
    drafter.begin(request)
    for token in output:
        request.tokens = [*request.tokens, token]
        drafter.observe(Feedback([request], [[token]], [[]], [0]))
    drafter.end(request)


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(several=st.lists(texts, min_size=1, max_size=3))
def test_counts_and_places_equal_those_of_a_search(several: list[list[int]]) -> None:
    """Fault: a clone takes over wrong counts, or texts run into each other."""
    automaton = SuffixAutomaton()
    for text in several:
        automaton.start_text()
        for token in text:
            automaton.append(token)
    for text in several:
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + 5) + 1):
                part = text[start:end]
                state, length = automaton.match(part)
                ends = [
                    sum(map(len, several[:i])) + j
                    for i, other in enumerate(several)
                    for j in range(len(part), len(other) + 1)
                    if other[j - len(part) : j] == part
                ]
                assert length == len(part)
                assert (automaton.count[state], automaton.seen[state]) == (len(ends), max(ends))


@given(tokens=texts)
def test_the_repeated_suffix_is_the_longest_one(tokens: list[int]) -> None:
    """Fault: a match is taken for longer or shorter than it is, and with it the draft."""
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    earlier = [tokens[i:j] for j in range(len(tokens)) for i in range(j + 1)]
    longest = max(n for n in range(len(tokens)) if n == 0 or tokens[-n:] in earlier)
    assert automaton.repeated[1] == longest


def test_drafts_what_followed_the_longest_suffix() -> None:
    tokens = [1, 2, 3, 10, 11, 9, 3, 20, 21, 1, 2, 3]
    assert drafted_paths(tokens, max_nodes=2) == [[10, 11]]
    assert drafted_paths([7]) == []
    assert drafted_paths([1, 2, 3, 4]) == []


def test_a_long_copy_is_one_chain() -> None:
    tokens = [*range(20, 40), *range(20, 32)]
    assert drafted_paths(tokens, max_nodes=5) == [[32, 33, 34, 35, 36]]
    drafter, request = SuffixDrafter(), Text(tokens)
    drafter.begin(request)
    assert draft(drafter, request).path(0, 5) == [1, 2, 3, 4, 5]


def test_the_more_frequent_continuation_comes_first() -> None:
    tokens = [1, 2, 10, 3, 1, 2, 11, 4, 1, 2, 10, 5, 1, 2, 10, 6, 1, 2]
    found = drafted_paths(tokens, max_nodes=5, max_depth=1)
    assert [path[0] for path in found][:2] == [10, 11]


def test_a_shorter_suffix_adds_what_the_longest_does_not_know() -> None:
    """Fault: one old occurrence of a long suffix hides all that is known about the shorter ones."""
    tokens = [5, 1, 2, 10, 0, 2, 11, 6, 2, 11, 7, 2, 11, 8, 5, 1, 2]
    found = drafted_paths(tokens, max_nodes=6, max_depth=1)
    assert [path[0] for path in found] == [10, 11]


def test_the_draft_grows_with_the_match() -> None:
    """Fault: `factor` or `offset` has no effect (NVIDIA/TensorRT-LLM#4003 for another setting)."""
    base = [*range(20, 50), 1, 2, 3]

    def depth(match: int, **options: Any) -> int:
        tokens = [*base, *range(20, 20 + match)]
        found = drafted_paths(tokens, max_nodes=30, min_probability=0.0, **options)
        return max(map(len, found), default=0)

    assert [depth(match, factor=1, offset=0) for match in (1, 2, 5)] == [1, 2, 5]
    assert [depth(match, factor=2, offset=0) for match in (1, 2, 5)] == [2, 4, 10]
    assert [depth(match, factor=1, offset=3) for match in (1, 2, 5)] == [4, 5, 8]
    assert depth(5, factor=0, offset=0) == 0
    assert depth(9, max_depth=4) == 4


def test_shorter_matches_and_unlikely_paths_can_be_left_out() -> None:
    """Fault: `min_match` or `min_probability` has no effect."""
    tokens = [1, 2, 3, 9, 8, 3]
    assert drafted_paths(tokens, min_match=1)
    assert drafted_paths(tokens, min_match=2) == []
    sizes = [
        sum(map(len, drafted_paths(tokens, min_probability=least, offset=9)))
        for least in (0.0, 0.2, 0.9)
    ]
    assert sizes[0] > sizes[1] > sizes[2] == 0


def test_a_suffix_that_anything_follows_is_not_continued() -> None:
    """Fault: a common word with hundreds of continuations costs milliseconds and finds nothing."""
    followed = {most: [t for other in range(1, most + 1) for t in (0, other)] for most in (60, 70)}
    assert drafted_paths([*followed[60], 0], min_probability=0.0)
    assert drafted_paths([*followed[70], 0], min_probability=0.0) == []


@given(
    tokens=texts,
    limits=st.builds(DraftLimits, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)),
    max_nodes=st.integers(1, 8),
    max_depth=st.none() | st.integers(1, 5),
)
def test_every_limit_holds(
    tokens: list[int], limits: DraftLimits, max_nodes: int, max_depth: int | None
) -> None:
    """Fault: nodes beyond the request's share of the step."""
    drafter = SuffixDrafter(
        SuffixOptions(max_nodes=max_nodes, max_depth=max_depth, min_probability=0.0)
    )
    request = Text(tokens)
    drafter.begin(request)
    drafted = draft(drafter, request, limits)
    assert drafted.sizes[0] - 1 <= min(limits.max_nodes, max_nodes)
    assert drafted.max_depth <= min(limits.max_depth, max_depth or max_nodes)
    assert drafted.max_width <= limits.max_width


@given(tokens=texts, cuts=st.lists(st.integers(1, 6), max_size=20))
def test_state_after_observing_equals_a_fresh_start(tokens: list[int], cuts: list[int]) -> None:
    """Fault: tokens are indexed twice or left out where a text grows in pieces."""
    grown, drafter = Text(tokens[:1]), SuffixDrafter()
    drafter.begin(grown)
    for cut in [*cuts, len(tokens)]:
        grown.tokens = tokens[: len(grown.tokens) + cut]
        drafter.observe(Feedback([grown], [[]], [[]], [0]))
        fresh, again = SuffixDrafter(), Text(grown.tokens)
        fresh.begin(again)
        assert paths(draft(drafter, grown)) == paths(draft(fresh, again))


@given(tokens=texts, ahead=st.lists(st.integers(0, 3), max_size=6))
def test_reading_ahead_leaves_no_trace(tokens: list[int], ahead: list[int]) -> None:
    """Fault: guesses that are drafted upon are indexed like text."""
    drafter, request = SuffixDrafter(), Text(tokens)
    drafter.begin(request)
    before = paths(draft(drafter, request))
    first = paths(draft(drafter, Text([*tokens, *ahead])))
    assert paths(draft(drafter, request)) == before
    assert paths(draft(drafter, Text([*tokens, *ahead]))) == first


def test_nothing_of_an_earlier_request_is_drafted() -> None:
    """Fault: an index that outlives its request (ggml-org/llama.cpp#27852)."""
    drafter, request = SuffixDrafter(), Text([9, 20, 21], id=1)
    live(drafter, [20, 21, 22, 23, 24, 25], [20, 21, 22, 23])
    drafter.begin(request)
    assert paths(draft(drafter, request)) == []


def test_past_outputs_are_drafted_on_request_only() -> None:
    """Fault: `across_requests` has no effect, or prompts are remembered with the outputs."""
    drafter, request = SuffixDrafter(SuffixOptions(across_requests=True)), Text([9, 30, 31], id=1)
    live(drafter, [*range(40, 60)], [30, 31, 32, 33, 34])
    drafter.begin(request)
    assert paths(draft(drafter, request)) == [[32, 33, 34]]
    asking = Text([9, 40, 41], id=2)
    drafter.begin(asking)
    assert paths(draft(drafter, asking)) == []


def test_the_beginning_of_an_output_is_found_by_the_end_of_the_prompt() -> None:
    drafter, request = SuffixDrafter(SuffixOptions(across_requests=True)), Text([8, 1, 2], id=1)
    live(drafter, [7, 1, 2], [30, 31])
    drafter.begin(request)
    assert paths(draft(drafter, request)) == [[30, 31]]


def test_a_preempted_request_is_remembered_once() -> None:
    """Fault: what was emitted before a preemption is counted again when the request ends."""
    drafter, request = SuffixDrafter(SuffixOptions(across_requests=True)), Text([1, 2], 0, 2)
    drafter.begin(request)
    request.tokens = [1, 2, 3, 4]
    drafter.end(request)
    drafter.begin(request)
    request.tokens = [1, 2, 3, 4, 5]
    drafter.end(request)
    assert drafter.library is not None
    assert sum(text.count(5) for text in drafter.library.texts()) == 1


def test_the_library_is_bounded_and_forgets_what_was_unused() -> None:
    """Fault: memory grows with the outputs, or a text that is in use is forgotten."""
    library = Library(100)
    used, unused = list(range(1000, 1010)), list(range(2000, 2010))
    library.add(used)
    library.add(unused)
    for number in range(30):
        library.add(list(range(3000 + 10 * number, 3010 + 10 * number)))
        library.lookup(used)
        assert library.size <= 100
    assert used in library.texts()
    assert unused not in library.texts()
    library.add(list(range(5000)))
    assert library.size <= 100
    assert library.texts()[-1] == list(range(4975, 5000))


def attached(path: Path, vocab_size: int = VOCAB) -> SuffixDrafter:
    drafter = SuffixDrafter(SuffixOptions(across_requests=True, file=path))
    info = TargetInfo("x", vocab_size, 99, (), None, None, CPU, torch.float32)
    drafter.attach(info)
    return drafter


def test_past_outputs_survive_in_a_file(tmp_path: Path) -> None:
    drafter = attached(tmp_path / "outputs.safetensors")
    live(drafter, [1, 2], [30, 31, 32])
    live(drafter, [3], [33])
    drafter.close()
    again = attached(tmp_path / "outputs.safetensors")
    assert drafter.library is not None
    assert again.library is not None
    assert again.library.texts() == drafter.library.texts() == [[1, 2, 30, 31, 32], [3, 33]]
    assert [path.name for path in tmp_path.iterdir()] == ["outputs.safetensors"]


BAD: dict[str, Callable[[Path], object]] = {
    "cannot be read": lambda path: path.write_bytes(b"no tensors"),
    "expected int64 tokens": lambda path: save_file({"tokens": np.zeros(3)}, path),
    "that sum to N": lambda path: save_file(
        {"tokens": np.zeros(3, np.int64), "lengths": np.array([2])}, path
    ),
    "expected token ids from 0 to 127": lambda path: save_file(
        {"tokens": np.array([128]), "lengths": np.array([1])}, path
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused(tmp_path: Path, message: str) -> None:
    """Fault: a file of another target, or of another kind, ends in an index error while drafting."""
    path = tmp_path / "outputs.safetensors"
    BAD[message](path)
    with pytest.raises(ConfigError, match=message):
        attached(path)


def test_a_file_needs_a_folder(tmp_path: Path) -> None:
    """Fault: all that was learned is lost at the end, because it cannot be written."""
    with pytest.raises(ConfigError, match="is none"):
        attached(tmp_path / "missing" / "outputs.safetensors")


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="across_requests=false leaves"):
        SuffixOptions(file=Path("x"))
    with pytest.raises(ValueError, match="across_requests=false leaves"):
        SuffixOptions(max_tokens=5)


def test_the_plugin_is_found_and_its_resolved_options_can_be_given_again() -> None:
    bound = PluginManager().bind("drafter", "suffix(factor=2.0)")
    assert isinstance(bound.build(), SuffixDrafter)
    assert PluginManager().bind("drafter", bound.settings()).settings() == bound.settings()


class TestConformance(DrafterConformance):
    def make(self) -> Drafter:
        return SuffixDrafter(SuffixOptions(min_probability=0.0))


class TestConformanceAcrossRequests(DrafterConformance):
    learns = True
    remembers = True

    def make(self) -> Drafter:
        return SuffixDrafter(
            SuffixOptions(min_probability=0.0, across_requests=True, max_tokens=40)
        )


def test_a_thousand_requests_leave_nothing() -> None:
    """Fault: state is kept for requests that are gone."""
    drafter = SuffixDrafter()
    for number in range(1000):
        live(drafter, [number % VOCAB, 1], [2], number)
    assert drafter._texts == {}


@pytest.fixture
def long_text() -> list[int]:
    """100,000 tokens, frequent and rare as words are, of which four in five repeat an earlier passage."""
    random = np.random.default_rng(0)
    tokens: list[int] = (random.zipf(1.3, 500) % 50_000).tolist()
    while len(tokens) < 100_000:
        if random.random() < 0.2:
            tokens += (random.zipf(1.3, 10) % 50_000).tolist()
        else:
            start = int(random.integers(len(tokens) - 40))
            tokens += tokens[start : start + 40]
    return tokens[:100_000]


def test_the_cost_of_a_token_does_not_grow_with_what_is_stored(long_text: list[int]) -> None:
    """Fault: a lookup or an append that walks the past. Counted in executed lines, not in time: each token
    is looked up and indexed as if it came alone, after few and after 100,000 past tokens."""
    few, many = lines_per_token(long_text, 5_000), lines_per_token(long_text, 100_000)
    assert many < 1.5 * few


def lines_per_token(text: Sequence[int], stored: int) -> float:
    """Lines of Python that a new token takes when `stored` tokens are in the library."""
    library, own = Library(400_000), SuffixAutomaton()  # room for all, so that none is moved
    for start in range(0, stored, 500):
        library.add(text[start : start + 500])
    part, lines = text[:500], 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for place, token in enumerate(part):
            own.append(token)
            library.lookup(part[max(0, place - 15) : place + 1])
        library.add(part)
    finally:
        sys.settrace(before)
    return lines / len(part)
