"""The best trees by dynamic programming, against every tree there is; and acceptance by sibling."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specfw.acceptance import Acceptance, AcceptanceByRequest
from specfw.contracts import DraftLimits, Feedback
from specfw.costs import expected_tokens
from specfw.shapes import best_shapes
from specfw.testing.simulation import SimulatedRequest

Table = list[list[float]]


def trees(table: Table, nodes: int, depth: int = 0, rank: int = 0) -> Iterator[float]:
    """What every way to place exactly `nodes` nodes below a node keeps: children of rank `rank` and later."""
    if nodes == 0:
        yield 0.0
    if nodes == 0 or depth == len(table) or rank == len(table[depth]):
        return
    for own in range(1, nodes + 1):
        for below in trees(table, own - 1, depth + 1):
            for beside in trees(table, nodes - own, depth, rank + 1):
                yield table[depth][rank] * (1 + below) + beside


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Shares by depth and rank, not always falling."""
    depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    share = st.sampled_from([0.01, 0.1, 0.25, 0.33])
    return [[draw(share) for _ in range(width)] for _ in range(depth)]


@given(tables(), st.integers(0, 6))
def test_no_tree_is_better(table: Table, nodes: int) -> None:
    """A division of nodes that the programme overlooks would draft worse trees for ever."""
    shapes = best_shapes(table, nodes)
    assert [shape.nodes for shape in shapes] == list(range(len(shapes)))
    for shape in shapes:
        best = max(trees(table, shape.nodes))
        assert shape.tokens == pytest.approx(1 + best, abs=1e-12)
        assert shape.depth <= len(table)
        assert shape.width <= len(table[0])
    if len(shapes) <= nodes:  # the full tree has no more
        assert not list(trees(table, len(shapes)))


def test_shapes_by_hand() -> None:
    """With .6 and .3: one node, a chain of two (.6 + .36), then a sibling (.3) before a third level (.216)."""
    shapes = best_shapes([[0.6, 0.3]] * 3, 4)
    assert [(s.nodes, s.depth, s.width) for s in shapes] == [
        (0, 0, 0),
        (1, 1, 1),
        (2, 2, 1),
        (3, 2, 2),
        (4, 3, 2),
    ]
    assert [s.tokens for s in shapes] == pytest.approx([1, 1.6, 1.96, 2.26, 2.476])
    assert shapes[3].limits == DraftLimits(3, 2, 2)


def test_a_chain_is_the_formula() -> None:
    """Without siblings, 4 nodes at a = .8 emit 3.3616 tokens."""
    shape = best_shapes([[0.8]] * 8, 4)[4]
    assert shape.tokens == pytest.approx(expected_tokens(0.8, 4))
    assert (shape.depth, shape.width) == (4, 1)


def test_nothing_can_be_drafted() -> None:
    for empty in ([], [[], []]):
        assert [shape.nodes for shape in best_shapes(empty, 3)] == [0]


def test_siblings_are_tested_in_order() -> None:
    """Of 10 steps the first sibling is kept in 4; the second is tested in 6, and kept in 3."""
    acceptance = Acceptance(memory=1e9, doubt=1e-9)
    for rank in [0] * 4 + [1] * 3:
        acceptance.add(1, 1, [rank], [2])
    for _ in range(3):
        acceptance.add(1, 0, [], [2])
    assert acceptance.shares(1, 3)[0] == pytest.approx([0.4, 0.3, 0.0], abs=1e-6)
    assert list(islice(acceptance.rates(), 1)) == pytest.approx([0.4], abs=1e-6)


def test_widths_that_never_come_are_not_planned() -> None:
    """A drafter of chains that is offered siblings would be given ever more nodes and shorter drafts."""
    acceptance, flat = Acceptance(prior=0.3), DraftLimits(4, 1, 4)
    assert acceptance.shapes(flat)[-1].width == 4  # not known yet
    acceptance.add(2, 2, [0, 0], [1, 1])
    assert [shape.tokens for shape in acceptance.shapes(flat)] == [1, 1 + 1.3 / 2]
    assert acceptance.shares(4, 3) == [[rate, 0, 0] for rate in islice(acceptance.rates(), 4)]


def test_shapes_are_worked_out_seldom() -> None:
    """The programme is dear, and evidence of one step changes little."""
    acceptance = Acceptance()
    limits, seen = DraftLimits(6, 6, 3), []
    for _ in range(40):
        acceptance.add(1, 0)
        seen.append(acceptance.shapes(limits))
    assert len({id(shapes) for shapes in seen}) <= 12
    assert seen[-1][1].tokens < 1.1


def test_what_is_known_of_all_is_passed_on() -> None:
    """One request's evidence is another's beginning, if that is wished."""
    requests = [SimulatedRequest(0), SimulatedRequest(1)]
    told = Feedback(requests[:1], [[0]], [[]], [1], tested=[1], ranks=[[]], siblings=[[1]])
    in_burst = 0.8 * 2 / 3  # whose doubt is 2; a new request is hoped to be in one
    for carry_over, like in ((True, in_burst), (False, 0.8)):
        known = AcceptanceByRequest(32.0, carry_over)
        known.observe(told)
        assert next(known.of(requests[0]).rates()) == pytest.approx(0.4)
        assert next(known.of(requests[1]).rates()) == pytest.approx(like)


def test_drafts_after_one_that_was_kept_whole_are_told_apart() -> None:
    """Copies come in bursts: what fails between them says nothing of what comes within one."""
    request, known = SimulatedRequest(), AcceptanceByRequest(32.0, False)

    def tell(kept: int) -> None:
        ranks, siblings = [[0] * kept], [[1]]
        known.observe(
            Feedback(
                [request], [[0]], [[1] * kept], [1], tested=[1], ranks=ranks, siblings=siblings
            )
        )

    for _ in range(20):
        tell(0)
    assert next(known.of(request).rates()) < 0.1
    tell(1)
    assert next(known.of(request).rates()) > 0.3  # one was refused after the hope of the beginning
    tell(1)
    assert next(known.of(request).rates()) > 0.5
    assert known.steps == known.steps_of(request) == 22


def test_shares_are_shares() -> None:
    acceptance = Acceptance()
    for rank in (0, 1, 1, 2):
        acceptance.add(1, 1, [rank], [3])
    table = np.array(acceptance.shares(2, 2))
    assert table.sum(1).max() <= 1
