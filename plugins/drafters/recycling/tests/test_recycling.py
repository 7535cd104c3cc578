"""The drafter `recycling`: what it learns, what it drafts, its warm table, and that it changes no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from specfw_plugin_recycling import RecyclingDrafter, RecyclingOptions, WarmTable

from specfw.contracts import Drafter, DraftLimits, Feedback, RankedRows, TargetInfo
from specfw.decoding.draft import Draft
from specfw.errors import ConfigError
from specfw.plugins import PluginManager
from specfw.testing.conformance import DrafterConformance
from specfw.testing.drafting import Text, draft

VOCAB = 64
CPU = torch.device("cpu")


def begun(
    lists: Mapping[Sequence[int], Sequence[int]], request: Text, **options: Any
) -> RecyclingDrafter:
    """A drafter that has begun `request` and seen the target rank `lists` after pairs of tokens."""
    drafter = RecyclingDrafter(RecyclingOptions(**options))
    drafter.attach(TargetInfo("x", VOCAB, 99, (), None, None, CPU, torch.float32))
    drafter.begin(request)
    for pair, successors in lists.items():
        teach(drafter, pair, successors, request.id)
    return drafter


def teach(drafter: Drafter, pair: Sequence[int], successors: Sequence[int], id: int = 0) -> None:
    """One step whose root is the last token of `pair`, and nothing was drafted."""
    rows = RankedRows(np.array([pair[-1]]), np.array([-1]), np.array([successors]))
    text = Text([*pair, successors[0]], id)
    drafter.observe(Feedback([text], [[successors[0]]], [[]], [0], ranked=[rows]))


def paths(drafted: Draft) -> list[tuple[int, ...]]:
    """The tokens on the way to each node, in draw order."""
    return [
        tuple(int(drafted.token[0, i]) for i in drafted.path(0, node))
        for node in range(1, int(drafted.sizes[0]))
    ]


CHAIN = {(1, 2): [3, 4], (2, 3): [5, 6], (2, 4): [7, 8], (3, 5): [9, 10]}


def test_the_likeliest_path_comes_first() -> None:
    """Fault: the tree is filled level by level, so that a sure path is cut short."""
    request = Text([1, 2])
    drafter = begun(CHAIN, request, pair_weights=[0.6, 0.3], max_nodes=5)
    # 3: 0.6, 3 5: 0.36, 4: 0.3, 3 5 9: 0.216, then 4 7 and 3 6 with 0.18 each, the first found first
    assert paths(draft(drafter, request)) == [(3,), (3, 5), (4,), (3, 5, 9), (3, 6)]


def test_weights_shape_the_tree() -> None:
    """Fault: `pair_weights` or `rank_weights` has no effect."""
    request = Text([1, 2])
    deep = begun(CHAIN, request, pair_weights=[0.9, 0.01], max_nodes=3)
    wide = begun(CHAIN, request, pair_weights=[0.3, 0.3], max_nodes=2)
    assert paths(draft(deep, request)) == [(3,), (3, 5), (3, 5, 9)]
    assert paths(draft(wide, request)) == [(3,), (4,)]
    single = {(1, 2): [3, 4], (0, 3): [5, 6]}
    for weights, found in (([0.9], (3, 5)), ([0.1], (4,))):
        drafter = begun(single, request, pair_weights=[0.6, 0.3], rank_weights=weights, max_nodes=2)
        assert paths(draft(drafter, request)) == [(3,), found]


def test_a_pair_comes_before_the_single_token() -> None:
    """Fault: what the token alone was followed by hides what the pair was followed by."""
    lists = {(1, 2): [3, 4], (7, 2): [5, 6]}
    for pairs, known in ((True, 3), (False, 5)):
        request = Text([1, 2])
        drafter = begun(lists, request, pairs=pairs, max_nodes=1)
        assert paths(draft(drafter, request)) == [(known,)]
    request = Text([8, 2])  # a new pair: back to the single token
    assert paths(draft(begun(lists, request, max_nodes=1), request)) == [(5,)]


def test_what_the_target_ranked_last_counts() -> None:
    request = Text([1, 2])
    drafter = begun({(1, 2): [3, 4]}, request, max_nodes=1)
    teach(drafter, (1, 2), [4, 3])
    assert paths(draft(drafter, request)) == [(4,)]


def test_refused_nodes_teach_too() -> None:
    """Fault: only accepted rows are learned, which wastes most of what the target has computed."""
    request = Text([1, 2, 3])
    drafter = begun({}, request, max_nodes=1)
    rows = RankedRows(np.array([2, 9, 8]), np.array([-1, 0, 1]), np.array([[3, 9], [8, 7], [6, 5]]))
    drafter.observe(Feedback([request], [[3]], [[]], [2], ranked=[rows]))
    for tokens, known in (((1, 2), 3), ((2, 9), 8), ((9, 8), 6)):
        assert paths(draft(drafter, Text(tokens))) == [(known,)]


def test_only_k_successors_are_kept() -> None:
    """Fault: `k` has no effect, or more is asked of the target than is used."""
    for k in (1, 3):
        request = Text([1, 2])
        drafter = begun({(1, 2): [3, 4, 5, 6]}, request, k=k)
        assert drafter.requires.top_k == k
        assert len(paths(draft(drafter, request, DraftLimits(9, 1, 9)))) == k


def test_memory_is_bounded() -> None:
    """Fault: memory grows with the text; or what was used last is forgotten first."""
    request = Text([1, 2])
    drafter = begun({(1, 2): [3, 4]}, request, max_entries=6, max_nodes=1)
    for token in range(20, 60):
        teach(drafter, (token, token), [5, 6])
        assert paths(draft(drafter, request)) == [(3,)]  # in use all the time
    assert len(drafter._own[0]) == 6
    assert paths(draft(drafter, Text([20, 20]))) == []


def test_across_requests_or_not() -> None:
    """Fault: one request's statistics reach another though that is off (ggml-org/llama.cpp#27852)."""
    for across, known in ((False, []), (True, [(3,)])):
        request, later = Text([1, 2]), Text([1, 2], id=1)
        drafter = begun({(1, 2): [3, 4]}, request, across_requests=across, max_nodes=1)
        drafter.end(request)
        drafter.begin(later)
        assert paths(draft(drafter, later)) == known
        drafter.end(later)
        assert drafter._own == {}


@given(
    limits=st.builds(DraftLimits, st.integers(0, 6), st.integers(0, 6), st.integers(1, 3)),
    max_nodes=st.integers(1, 8),
    max_depth=st.none() | st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_every_limit_holds(
    limits: DraftLimits, max_nodes: int, max_depth: int | None, seed: int
) -> None:
    """Fault: nodes beyond the request's share of the step."""
    random = np.random.default_rng(seed)
    lists = {(a, b): random.permutation(4).tolist() for a in range(4) for b in range(4)}
    request = Text([0, 1])
    drafter = begun(lists, request, max_nodes=max_nodes, max_depth=max_depth)
    drafted = draft(drafter, request, limits)
    assert drafted.sizes[0] - 1 <= min(limits.max_nodes, max_nodes)
    assert drafted.max_depth <= min(limits.max_depth, max_depth or max_nodes)
    assert drafted.max_width <= limits.max_width


def warm(folder: Path) -> Path:
    singles = np.full((VOCAB, 2), -1, np.int32)
    singles[2] = [9, -1]
    pairs = np.array([[1, 2]], np.int32)
    WarmTable(singles, pairs, np.array([[7, 8]], np.int32)).save(folder / "warm.safetensors")
    return folder / "warm.safetensors"


def test_a_warm_table_serves_until_something_is_learned(tmp_path: Path) -> None:
    """Fault: the file hides what is learned in the run, or is not read."""
    request = Text([1, 2])
    drafter = begun({}, request, file=warm(tmp_path), max_nodes=1)
    assert paths(draft(drafter, request)) == [(7,)]
    assert paths(draft(drafter, Text([5, 2]))) == [(9,)]
    assert paths(draft(drafter, Text([5, 6]))) == []
    teach(drafter, (1, 2), [3, 4])
    assert paths(draft(drafter, request)) == [(3,)]


def test_what_was_learned_can_be_saved_and_read(tmp_path: Path) -> None:
    path = tmp_path / "learned.safetensors"
    drafter = begun(CHAIN, Text([1, 2]), across_requests=True, k=3)
    drafter.save(path)
    request = Text([1, 2])
    again = begun({}, request, file=path)
    assert paths(draft(again, request)) == paths(draft(drafter, request))
    with pytest.raises(ConfigError, match="across_requests=true"):
        begun({}, request).save(path)


def arrays(**changed: Any) -> dict[str, Any]:
    good = {
        "singles": np.zeros((VOCAB, 2), np.int32),
        "pairs": np.zeros((3, 2), np.int32),
        "pair_successors": np.zeros((3, 2), np.int32),
    }
    return {name: array for name, array in {**good, **changed}.items() if array is not None}


BAD: dict[str, Callable[[Path], object]] = {
    "cannot be read": lambda path: path.write_bytes(b"no tensors"),
    "expected singles, and pairs": lambda path: save_file(arrays(singles=None), path),
    "with pair_successors or neither": lambda path: save_file(arrays(pairs=None), path),
    "to be int32 with two": lambda path: save_file(arrays(singles=np.zeros((4, 2))), path),
    "expected ids from -1 to 63": lambda path: save_file(
        arrays(singles=np.full((4, 2), 64, np.int32)), path
    ),
    "at most 64 singles": lambda path: save_file(arrays(singles=np.zeros((65, 2), np.int32)), path),
    "as many pairs as": lambda path: save_file(arrays(pairs=np.zeros((4, 2), np.int32)), path),
    r"expected pairs \[P, 2\]": lambda path: save_file(
        arrays(pairs=np.zeros((3, 3), np.int32)), path
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_refused(tmp_path: Path, message: str) -> None:
    """Fault: a file of another target, or of another kind, ends in an index error while drafting."""
    BAD[message](tmp_path / "warm.safetensors")
    with pytest.raises(ConfigError, match=message):
        begun({}, Text([1]), file=tmp_path / "warm.safetensors")


def test_rising_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="must not rise"):
        RecyclingOptions(rank_weights=[0.1, 0.2])
    with pytest.raises(ValueError, match="must not rise"):
        RecyclingOptions(pair_weights=[0.1, 0.2])


def test_the_plugin_is_found_and_its_resolved_options_can_be_given_again() -> None:
    bound = PluginManager().bind("drafter", "recycling(k=3)")
    assert isinstance(bound.build(), RecyclingDrafter)
    assert PluginManager().bind("drafter", bound.settings()).settings() == bound.settings()


class TestConformance(DrafterConformance):
    learns = True

    def make(self) -> Drafter:
        return RecyclingDrafter()


class TestConformanceAcrossRequests(DrafterConformance):
    learns = True
    remembers = True

    def make(self) -> Drafter:
        return RecyclingDrafter(RecyclingOptions(across_requests=True, max_entries=7, k=2))


def test_a_thousand_requests_leave_nothing() -> None:
    """Fault: state is kept for requests that are gone."""
    drafter = RecyclingDrafter()
    for number in range(1000):
        request = Text([1, 2], number)
        drafter.begin(request)
        teach(drafter, (1, 2), [3, 4], number)
        drafter.end(request)
    assert drafter._own == {}
