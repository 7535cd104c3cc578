"""`specfw bench verifiers`: closed forms are what the verifiers keep, and every table has its rows."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import specfw.bench.verifiers as bench
from specfw.bench.verifiers import SIBLING_LAWS, VerifiersBench, bench_verifiers, kept_of_siblings
from specfw.decoding.draft import Draft, Kind
from specfw.decoding.rejection import RejectionVerifier
from tests.byte_models import save_tiny_chat

PAIRS = [
    ([0.5, 0.3, 0.2, 0.0], [0.4, 0.1, 0.3, 0.2]),
    ([0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]),
    ([0.25] * 4, [0.25] * 4),
]
each_pair = pytest.mark.parametrize(("p", "q"), PAIRS)
each_width = pytest.mark.parametrize("width", [1, 2, 3])


class Given:
    """The target's law at every node."""

    def __init__(self, p: Tensor) -> None:
        self._p = p

    def rows(self, node: Tensor) -> Tensor:
        return self._p.expand(len(node), -1)


def kept(p: Tensor, children: list[tuple[int, Tensor | None]]) -> float:
    """What rejection keeps of children, each a token with the law that it was drawn from, None for a guess."""
    count = len(children)
    laws = [q for _, q in children if q is not None]
    row, qrow = 0, np.full((1, count + 1), -1, np.int32)
    for place, (_, q) in enumerate(children, 1):
        if q is not None:
            qrow[0, place], row = row, row + 1
    draft = Draft(
        token=torch.tensor([[0, *(token for token, _ in children)]]),
        parent=np.array([[-1, *[0] * count]], np.int32),
        rank=np.array([[0, *range(count)]], np.int16),
        depth=np.array([[0, *[1] * count]], np.int16),
        valid=np.ones((1, count + 1), np.bool_),
        kind=np.where(qrow >= 0, int(Kind.DENSE), int(Kind.POINT)).astype(np.uint8),
        qrow=qrow,
        qstore=torch.stack(laws) if laws else None,
        drafter=np.zeros((1, count + 1), np.int16),
        start=torch.tensor([0]),
        seed=torch.tensor([0]),
    )
    stop = RejectionVerifier().plan(draft, Given(p))  # type: ignore[arg-type]
    return 1 - float(stop[0, 0])


def tensors(p: list[float], q: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)


@each_pair
@each_width
def test_with_replacement(p: list[float], q: list[float], width: int) -> None:
    """Over all draws, the closed form is what the verifier's plan keeps."""
    target, law = tensors(p, q)
    mean = 0.0
    for drawn in torch.cartesian_prod(*[torch.arange(4)] * width).reshape(-1, width).tolist():
        weight = float(law[drawn].prod())
        mean += weight * kept(target, [(token, law) for token in drawn])
    assert kept_of_siblings("draws with replacement", target, law, width) == pytest.approx(mean)


@each_pair
@each_width
def test_without_replacement(
    p: list[float], q: list[float], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over noise is, with every draw in its share, what the verifier's plan keeps."""
    target, law = tensors(p, q)
    draws, weights, mean = [], [], 0.0
    for drawn in permutations(range(4), width):
        rest, weight, children = law, 1.0, []
        for token in drawn:
            children.append((token, rest))
            weight *= float(rest[token])
            rest = rest.scatter(0, torch.tensor(token), 0.0)
            rest = rest / rest.sum().clamp_min(1e-300)
        if weight:
            draws.append(drawn)
            weights.append(weight)
            mean += weight * kept(target, children)
    times = [round(1000 * weight) for weight in weights]
    enough = torch.tensor([d for d, n in zip(draws, times, strict=True) for _ in range(n)])
    monkeypatch.setattr(bench, "_race", lambda law, purpose, k: enough)
    found = kept_of_siblings("draws without replacement", target, law, width)
    assert found == pytest.approx(mean, abs=2e-3)


@each_pair
@each_width
def test_a_draw_and_guesses(p: list[float], q: list[float], width: int) -> None:
    """Both orders, against the plan over all draws; the order that the builder has keeps at least as much."""
    target, law = tensors(p, q)
    sure = law.topk(width - 1).indices
    rest = law.scatter(0, sure, 0.0)
    rest = rest / rest.sum()
    guesses = [(token, None) for token in sure.tolist()]
    first = sum(float(rest[t]) * kept(target, [(t, rest), *guesses]) for t in range(4) if rest[t])
    last = sum(float(rest[t]) * kept(target, [*guesses, (t, rest)]) for t in range(4) if rest[t])
    found = {name: kept_of_siblings(name, target, law, width) for name in SIBLING_LAWS}
    assert found["a draw, then guesses"] == pytest.approx(first)
    assert found["guesses, then a draw"] == pytest.approx(last)
    assert first >= last - 1e-12
    top = [(token, None) for token in law.topk(width).indices.tolist()]
    assert found["guesses"] == pytest.approx(kept(target, top))


def test_one_race_key_by_hand() -> None:
    """P(match) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), within what some thousand draws show."""
    p, q = tensors([0.5, 0.3, 0.2], [0.2, 0.5, 0.3])
    expected = sum(1 / float(torch.maximum(p / p[i], q / q[i]).sum()) for i in range(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_NOISE", 20_000)
        found = kept_of_siblings("race keys (`coupled`)", p, q, 1)
    assert found == pytest.approx(expected, abs=0.015)


def test_every_table_has_its_rows(tmp_path: Path) -> None:
    """A drafter, verifier or width that is left out would be missed by nobody."""
    save_tiny_chat(tmp_path / "model")
    result = bench_verifiers(
        layers=[1],
        temperatures=[1.0],
        per_text=2,
        dtype="float32",
        target=str(tmp_path / "model"),
        draft_model=str(tmp_path / "model"),
    )
    assert result.places == 12
    about = result.mapping()
    assert len(about["siblings"]) == len(SIBLING_LAWS) * 4
    assert {(row["verifier"], row["width"]) for row in about["trees"]} == {
        (verifier, width) for verifier in ("rejection", "block", "coupled") for width in (1, 2, 3)
    }
    # The model drafts for itself, so a single draw is always kept.
    for row in about["siblings"]:
        if row["law"].startswith(("draws", "a draw", "race")):
            assert row["kept"] == pytest.approx(1, abs=1e-6)
    chains = [row["kept"] for row in about["trees"] if row["width"] == 1]
    assert chains == pytest.approx([6.0] * 3, abs=1e-4)
    lines = result.markdown().splitlines()
    assert sum(line.startswith("| `") for line in lines) == len(SIBLING_LAWS) + 3
    assert VerifiersBench().mapping()["trees"] == []
