"""The drafter `lookahead`: its window, its pool, that every option does what it says, and no text changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from specfw_plugin_compose import Merge
from specfw_plugin_lookahead import LookaheadDrafter, LookaheadOptions

from specfw.contracts import Drafter, DraftLimits, Feedback, RankedRows, TargetInfo
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.draft import Draft
from specfw.plugins import PluginManager
from specfw.testing.conformance import DrafterConformance
from specfw.testing.drafting import Text, builder_for
from specfw.types import SamplingParams
from tests.engine_kit import make_engine, outputs, prompt_of, reference

VOCAB = 64
EOS = 2
WIDE = DraftLimits(200, 200, 200)

Target = Callable[[Sequence[int]], int]
"""The next token after a text."""


def bigram(text: Sequence[int]) -> int:
    return (5 * text[-1] + 3) % VOCAB


def whole(text: Sequence[int]) -> int:
    """A token that depends on every token before it, so that a wrong path shows."""
    value = 7
    for token in text:
        value = (value * 31 + token + 1) % 10_007
    return value % VOCAB


class World:
    """A drafter with one request, stepped by hand: each step emits some tokens that a target names."""

    def __init__(
        self,
        target: Target = bigram,
        prompt: Sequence[int] = (5, 9, 4),
        stops: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        self.target, self.text = target, list(prompt)
        self.drafter: Drafter = LookaheadDrafter(LookaheadOptions(**options))
        device = torch.device("cpu")
        self.drafter.attach(TargetInfo("x", VOCAB, 99, stops, None, None, device, torch.float32))
        self.drafter.begin(Text(self.text))

    @property
    def state(self) -> Any:
        return self.drafter._states[0]  # type: ignore[attr-defined]

    def step(
        self, emit: int = 1, limits: DraftLimits = WIDE, reach: int | None = None
    ) -> tuple[Draft, list[list[int]]]:
        """One step; the draft, and the text that each extra row ends."""
        builder = builder_for([Text(self.text)], [limits], reach=None if reach is None else [reach])
        self.drafter.propose([Text(self.text)], builder)
        draft = builder.build()
        draft.check()
        paths = self._paths(builder)
        top = np.array([[self.target(path)] for path in paths], np.int64).reshape(-1, 1)
        rows = builder.extras[0]
        extra = RankedRows(np.array(rows.tokens), np.array(rows.parents), top)
        emitted = []
        for _ in range(emit):
            emitted.append(self.target(self.text))
            self.text.append(emitted[-1])
        self.drafter.observe(
            Feedback([Text(self.text)], [emitted], [[]], [0], extra=[extra] if len(rows) else ())
        )
        return draft, paths

    def _paths(self, builder: DraftBuilder) -> list[list[int]]:
        paths: list[list[int]] = []
        for token, parent in zip(builder.extras[0].tokens, builder.extras[0].parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else self.text), token])
        return paths

    def pooled(self) -> dict[int, list[tuple[int, ...]]]:
        return {first: list(grams) for first, grams in self.state.pool._grams.items()}


def leaves(draft: Draft) -> list[list[int]]:
    """The drafted paths from below the root to each leaf."""
    inner = set(draft.parent[0].tolist())
    return [
        [int(draft.token[0, i]) for i in draft.path(0, node)]
        for node in range(1, int(draft.sizes[0]))
        if node not in inner
    ]


# The window


@pytest.mark.parametrize(("window", "level"), [(1, 2), (1, 4), (2, 3), (4, 2), (3, 5), (7, 4)])
def test_a_full_window_has_its_size(window: int, level: int) -> None:
    """W columns of N - 1 levels, one token of which is the text's last; while filling, one more for each missing."""
    world = World(window=window, level=level, guesses=1)
    for step in range(level + 3):
        levels = min(step + 1, level - 1)
        columns = window + level - 1 - levels
        assert [len(tokens) for tokens in world.state.window.levels] == [columns] * levels
        assert len(world.step()[1]) == columns * levels - 1


@given(st.lists(st.integers(1, 6), min_size=3, max_size=12), st.integers(1, 5), st.integers(2, 5))
def test_rows_see_their_own_column_only(emits: list[int], window: int, level: int) -> None:
    """Fault: a row sees another column's levels, or stands at another position than its token will."""
    world = World(whole, window=window, level=level, from_text=False)
    for emit in emits:
        levels = [list(tokens) for tokens in world.state.window.levels]
        assert levels[0][0] == world.text[-1]
        expected = [
            [
                *world.text,
                *levels[0][1 : column + 1],
                *(levels[up][column] for up in range(1, row + 1)),
            ]
            for row in range(len(levels))
            for column in range(len(levels[0]))
        ][1:]
        assert world.step(emit)[1] == expected


def test_columns_go_on_as_the_target_says() -> None:
    """Each new level is what the target says after the newest token of each column (a Jacobi iteration).

    Tokens keep their absolute places: after a token, the window begins one further on.
    """
    world = World(whole, window=4, level=4, from_text=False)
    for step in range(8):
        before = [list(tokens) for tokens in world.state.window.levels]
        last, paths = world.text[-1], world.step()[1]
        columns = len(before[0])
        new = [whole(path) for path in paths][-columns:]
        levels = [*before, new if len(new) == columns else [whole([last]), *new]]
        # while filling, all levels go one column on; then the oldest one goes, and each other is one on
        levels = [tokens[1:] for tokens in levels] if step < 2 else levels[1:]
        assert world.state.window.levels[0][0] == world.text[-1]
        after = world.state.window.levels
        assert [after[0][1:], *after[1:]] == [levels[0][1:], *levels[1:]]


def test_the_pool_gets_the_n_grams_of_every_column() -> None:
    """After a bigram target all columns are its chains: a mixed-up column or level would break one.

    Only the first column begins with the text's last token, which replaces what the window made up.
    """
    world = World(bigram, window=5, level=4, guesses=9, from_text=False)
    for step in range(10):
        last = world.text[-1]
        before = {(first, gram) for first, grams in world.pooled().items() for gram in grams}
        world.step()
        after = {(first, gram) for first, grams in world.pooled().items() for gram in grams}
        assert bool(after - before) == (step >= 2)  # filled first
        for first, gram in after - before:
            assert len(gram) == 3
            assert [bigram([token]) for token in gram[:-1]] == list(gram[1:])
            assert first == last or bigram([first]) == gram[0]


def test_what_the_pool_knows_is_drafted() -> None:
    """Fault: keys and n-grams are a place apart, so that drafts repeat the last token."""
    world = World(bigram, window=6, level=4, from_text=False)
    hits = 0
    for _ in range(80):  # the target's cycle of 64, so that the text comes to where columns were
        path = [world.text[-1]]
        for _ in range(3):
            path.append(bigram(path))
        hits += path[1:] in leaves(world.step()[0])
    assert hits > 8


def test_tokens_that_end_the_text_do_not_stay_in_the_window() -> None:
    """Fault: columns behind an end token make up n-grams that can never come."""
    for stops, stay in (((), True), ((EOS,), False)):
        world = World(lambda text: EOS if text[-1] == 9 else 9, stops=stops, window=4, level=4)
        world.step()
        inside = [token for tokens in world.state.window.levels for token in tokens][1:]
        assert (EOS in inside) == stay


def test_a_step_without_the_window_only_moves_it() -> None:
    """Fault: a step without room, or one that another drafter had, leaves stale columns behind."""
    world = World(whole, window=4, level=3)
    world.step()
    world.step()
    before = [list(tokens) for tokens in world.state.window.levels]
    draft, paths = world.step(2, limits=DraftLimits())
    assert (int(draft.sizes[0]), paths) == (1, [])
    after = world.state.window.levels
    assert [tokens[1:2] for tokens in after] == [tokens[3:4] for tokens in before]


@given(
    nodes=st.integers(0, 30),
    reach=st.integers(0, 9),
    window=st.integers(1, 6),
    level=st.integers(2, 5),
    guesses=st.integers(1, 5),
)
def test_tight_limits_are_kept_and_shared(
    nodes: int, reach: int, window: int, level: int, guesses: int
) -> None:
    """Fault: a window as large as all that is allowed, so that nothing is ever drafted; or one too large."""
    world = World(whole, window=window, level=level, guesses=guesses)
    for emit in (1, 2, 1, 1, 3, 1):
        known = world.state.pool.get(world.text[-1])
        start = len(world.text)
        draft, paths = world.step(emit, DraftLimits(nodes, 9, 9), reach)
        drafted = int(draft.sizes[0]) - 1
        assert drafted + len(paths) <= nodes
        assert all(len(path) - start <= reach for path in paths)
        part = nodes - nodes * window // (window + guesses)
        if known:
            assert drafted >= min(part, len(known[0]), 9)


# The options


@pytest.mark.parametrize("guesses", [6, 2])
def test_B45_lookahead_verifies_as_many_guesses_as_set(guesses: int) -> None:
    """Fault: the window's size, here 2, also limits the guesses, so that more of them have no effect."""
    counts = []
    world = World(lambda text: 11 + whole(text) % 13, window=2, level=3, guesses=guesses)
    for _ in range(300):
        draft, _ = world.step()
        paths = leaves(draft)
        assert all(len(path) == 2 for path in paths)  # n-grams of 3 with the last token
        counts.append(len(paths))
    assert max(counts) == guesses


def test_every_option_has_an_effect() -> None:
    """Fault: an option that is read and then forgotten (as in NVIDIA/TensorRT-LLM#4003)."""

    def run(**options: Any) -> tuple[int, int, int, int]:
        """Rows of the last step, length and number of its guesses at most, entries of the pool."""
        world = World(lambda text: 11 + whole(text) % 13, **options)
        longest = most = 0
        for _ in range(60):
            draft, paths = world.step()
            longest = max(longest, draft.max_depth)
            most = max(most, len(leaves(draft)))
        return len(paths), longest, most, len(world.pooled())

    usual: dict[str, Any] = {"window": 3, "level": 4, "guesses": 4}
    assert run(**usual) == (
        8,
        3,
        4,
        13 + 3,
    )  # after each token of the text, those of the prompt included
    assert run(**usual | {"window": 5})[0] == 14
    assert run(**usual | {"level": 3})[:2] == (5, 2)
    assert run(**usual | {"guesses": 2})[2] == 2
    assert run(**usual | {"max_entries": 4})[3] == 4
    with_text, without = (
        World(**usual, from_text=on, prompt=(1, 2, 3, 4, 1)) for on in (True, False)
    )
    assert leaves(with_text.step()[0]) == [[2, 3, 4]]
    assert leaves(without.step()[0]) == []


def test_the_newest_n_grams_are_kept_and_come_first() -> None:
    """Fault: the pool keeps the oldest n-grams of a token, or an n-gram twice."""
    world = World(prompt=(1, 7, 1, 8, 1, 9, 1, 8, 1), level=2, guesses=2)
    assert leaves(world.step()[0]) == [[8], [9]]


def test_first_tokens_used_longest_ago_are_forgotten() -> None:
    world = World(prompt=(1, 2, 3, 4, 1, 5, 1), level=2, max_entries=2)
    assert set(world.pooled()) == {5, 1}


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"level": 1}, {"guesses": 0}, {"max_entries": 0}, {"ngram": 3}]
)
def test_bad_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        LookaheadOptions(**options)


def test_too_small_a_limit_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: the configured window shrinks to the scheduler's limit without a word."""
    world = World(window=3, level=4, guesses=2)
    with caplog.at_level(logging.WARNING, "specfw"):
        world.step()
        assert not caplog.messages
        for _ in range(2):
            world.step(limits=DraftLimits(7, 7, 4))
    (message,) = caplog.messages
    assert "up to 14 nodes a step, but 7 are allowed" in message


def test_the_plugin_is_found_and_its_resolved_options_can_be_given_again() -> None:
    bound = PluginManager().bind("drafter", "lookahead(window=3)")
    assert isinstance(bound.build(), LookaheadDrafter)
    assert PluginManager().bind("drafter", bound.settings()).settings() == bound.settings()


# In an engine


class TestConformance(DrafterConformance):
    learns = True

    def make(self) -> Drafter:
        return LookaheadDrafter(LookaheadOptions(window=2, level=2, guesses=2, from_text=False))


def test_two_windows_in_one_tree_do_not_meet() -> None:
    """Fault: a drafter in a combinator reads what the target said after another one's rows."""
    options = LookaheadOptions(window=3, level=3, from_text=False)
    alone, merged = World(whole, window=3, level=3, from_text=False), World(whole)
    drafters = [LookaheadDrafter(LookaheadOptions(window=2, level=4)), LookaheadDrafter(options)]
    merged.drafter = Merge(drafters)
    merged.drafter.begin(Text(merged.text))
    for emit in (1, 1, 2, 1, 3, 1):
        alone.step(emit)
        merged.step(emit)
        assert drafters[1]._states[0].window.levels == alone.state.window.levels
    assert drafters[1]._states[0].pool.get(merged.text[-1]) == alone.state.pool.get(alone.text[-1])


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("other", [None, "suffix", "early-exit(layer=1)"])
def test_texts_stay_and_guesses_are_accepted(architecture: str, other: str | None) -> None:
    """Fault: another text; or nothing that is made up is ever right, alone or in a tree with others.

    Beside `early-exit` the window's rows stand in a pass that goes on where drafting has left it.
    """
    prompts = [prompt_of(length, length) for length in (1, 6, 19)]
    texts = [reference(architecture, tuple(prompt), 40) for prompt in prompts]
    lookahead = "lookahead(window=4, level=3, guesses=4, from_text=False)"
    drafter = PluginManager().bind(
        "drafter", f"merge({other}, {lookahead})" if other else lookahead
    )
    engine = make_engine(architecture, drafter.build(), draft=(24, 8, 8), prefill_chunk=8)
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    results = outputs(engine, prompts, params)
    for output, text, prompt in zip(results, texts, prompts, strict=True):
        assert output.token_ids == text[len(prompt) :]
        assert output.speculation.extra_rows > 0
    assert sum(output.speculation.accepted for output in results) > 20
    assert not engine.faults
