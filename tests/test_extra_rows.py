"""Extra rows of the target pass: what comes back of them, and that nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from specfw.builtins import NoDrafter
from specfw.contracts import (
    Drafter,
    DraftLimits,
    Feedback,
    RequestView,
    Requirements,
    Verifier,
)
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.engine import Engine, StepReport
from specfw.errors import ContractError
from specfw.testing import CuriousDrafter, MixtureDrafter, ScriptedDrafter, certify
from specfw.testing.cases import SETTINGS
from specfw.testing.conformance import DrafterConformance
from specfw.testing.drafting import Text, builder_for
from specfw.types import SamplingParams
from tests.engine_kit import OracleDrafter, make_engine, outputs, prompt_of, reference, run
from tests.tiny_models import ARCHITECTURES, CONTEXT, VOCAB_SIZE

WORDS = {"max_new_tokens": 12, "ignore_eos": True}


class Nosy(Drafter):
    """Guesses from what extra rows of earlier steps have told: the text then decides what is asked next."""

    def __init__(self) -> None:
        self._told: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        for request, root in zip(requests, builder.roots.tolist(), strict=True):
            told = self._told.get(request.id, [])
            builder.extra(root, [*told[:1], request.tokens[-1]], [-1, *[0] * len(told[:1])])
            for token in told:
                builder.guess(root, [token, told[0]])

    def observe(self, feedback: Feedback) -> None:
        for request, rows in zip(feedback.requests, feedback.extra, strict=False):
            self._told[request.id] = rows.top[:, 0].tolist()

    def end(self, request: RequestView) -> None:
        self._told.pop(request.id, None)


@pytest.mark.parametrize("verifier", [CoupledVerifier, RejectionVerifier])
@pytest.mark.parametrize(
    "drafter",
    [lambda: CuriousDrafter(MixtureDrafter()), Nosy],
    ids=["beside draws", "guesses from what they told"],
)
def test_extra_rows_keep_the_law(
    drafter: Callable[[], Drafter], verifier: Callable[[], Verifier]
) -> None:
    """Fault: an extra row is verified as a node, or its logits are taken for a node's."""
    few = {name: SETTINGS[name] for name in ("temperature", "greedy", "sequences")}
    certificate = certify(drafter, verifier, settings=few, sizes=((3, 2), (2, 3)))
    assert certificate.ok, str(certificate)
    assert not certificate.faults
    assert certificate.drafted > 0


class TestConformance(DrafterConformance):
    def make(self) -> Drafter:
        return CuriousDrafter(ScriptedDrafter())


class Asking(OracleDrafter):
    """Guesses as an oracle and notes, with the tokens on the way to each extra row, what it is told."""

    def __init__(self, texts: Sequence[Sequence[int]], top_k: int) -> None:
        super().__init__(texts, right=0.7, depth=3, branches=2)
        self.requires = Requirements(top_k=top_k)  # type: ignore[misc]
        self.rows: list[tuple[list[int], list[int]]] = []

    def observe(self, feedback: Feedback) -> None:
        super().observe(feedback)
        assert feedback.rows >= sum(len(rows.tokens) for rows in feedback.extra)
        for i, rows in enumerate(feedback.extra):
            request, emitted = feedback.requests[i], feedback.emitted[i]
            text = list(request.tokens[: len(request.tokens) - len(emitted)])
            paths: list[list[int]] = []
            for token, parent in zip(rows.tokens.tolist(), rows.parents.tolist(), strict=True):
                above = paths[parent] if parent >= 0 else text + self._path(feedback, i, ~parent)
                paths.append([*above, token])
            self.rows += zip(paths, rows.top.tolist(), strict=True)

    def _path(self, feedback: Feedback, i: int, node: int) -> list[int]:
        """Draft tokens on the way to a node."""
        if node == 0:
            return []
        nodes = feedback.ranked[i]
        return [*self._path(feedback, i, int(nodes.parents[node])), int(nodes.tokens[node])]


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_are_those_of_the_stock_forward(architecture: str, top_k: int) -> None:
    """Fault: a wrong position, mask, window or slot of an extra row, or another request's row comes back."""
    prompts = [prompt_of(length, length) for length in (1, 9, 30)]
    texts = [reference(architecture, tuple(prompt), 12) for prompt in prompts]
    asking = Asking(texts, top_k)
    drafter = CuriousDrafter(asking, most=6, anywhere=top_k > 0)
    engine = make_engine(architecture, drafter, draft=(16, 8, 4), prefill_chunk=8)
    for output, text, prompt in zip(
        outputs(engine, prompts, SamplingParams(temperature=0.0, **WORDS)),
        texts,
        prompts,
        strict=True,
    ):
        assert output.token_ids == text[len(prompt) :]
    assert len(asking.rows) > 40
    for tokens, top in asking.rows[:: len(asking.rows) // 12]:
        logits = engine.runner.stock_logits(tokens)[-1]
        assert logits.topk(max(top_k, 1)).indices.tolist() == top


def test_they_leave_memory_as_it_would_be_without_them() -> None:
    """Fault: an extra row's KV is kept, or its blocks are."""

    def states(drafter: Drafter) -> tuple[list[tuple[int, ...]], list[StepReport]]:
        engine = make_engine("llama", drafter, draft=(40, 8, 4), block_size=2)
        for prompt in prompts:
            engine.add(prompt, SamplingParams(temperature=0.0, **WORDS))
        seen, reports = [], []
        while engine.has_work:
            reports.append(engine.step())
            engine.memory.check()
            held = [request.sequence for request in engine.planner.running]
            seen.append(
                (engine.memory.used, engine.memory.cached, *(s.n_kv for s in held if s is not None))
            )
        return seen, reports

    prompts = [prompt_of(length, length) for length in (3, 11)]
    texts = [reference("llama", tuple(prompt), 12) for prompt in prompts]
    without, plain = states(OracleDrafter(texts, 0.6))
    with_rows, reports = states(CuriousDrafter(OracleDrafter(texts, 0.6), anywhere=False))
    assert with_rows == without
    assert sum(report.extra_rows for report in reports) > 0
    assert [report.rows - report.extra_rows for report in reports] == [one.rows for one in plain]


def test_they_are_counted_as_what_they_are() -> None:
    """Fault: extra rows count as drafted tokens, so that acceptance looks worse, or not at all."""
    prompt = prompt_of(5)
    text = reference("llama", tuple(prompt), 12)
    engine = make_engine("llama", CuriousDrafter(OracleDrafter([text])), draft=(30, 4, 4))
    request = engine.add(prompt, SamplingParams(temperature=0.0, **WORDS))
    reports = run(engine)
    stats = request.stats
    assert stats.extra_rows == sum(report.extra_rows for report in reports) > 0
    assert stats.drafted == stats.accepted > 0
    fed = len(prompt) + stats.drafted + stats.extra_rows + stats.target_passes - 1
    assert sum(report.rows for report in reports) == fed


@pytest.mark.parametrize("architecture", ["gpt2", "mistral"])
def test_they_end_where_the_context_ends(architecture: str) -> None:
    """Fault: a position beyond the last one, which a learned table of positions does not have."""

    class Deep(Drafter):
        def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
            builder.extra(int(builder.roots[0]), [5] * 20, range(-1, 19))

    prompt = prompt_of(CONTEXT - 8)
    texts, counts = [], []
    for drafter in (NoDrafter(), Deep()):
        engine = make_engine(architecture, drafter, draft=(20, 1, 1))
        request = engine.add(prompt, SamplingParams(max_new_tokens=20, temperature=0.0))
        counts.append([report.extra_rows for report in run(engine)])
        texts.append(request.tokens)
        assert not engine.faults
    assert texts[0] == texts[1]
    assert counts[1] == [
        8,
        7,
        6,
        5,
        4,
        3,
        2,
        0,
    ]  # positions behind the root; none for the last token


def test_they_need_one_host_synchronisation_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: each kind of result is fetched on its own, and the device waits for the host each time."""
    import torch

    fetched = []
    inner = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: fetched.append(1) or inner(self))
    prompt = prompt_of(5)
    text = reference("llama", tuple(prompt), 12)
    engine: Engine = make_engine("llama", CuriousDrafter(Asking([text], 3)), draft=(30, 4, 4))
    engine.add(prompt, SamplingParams(temperature=0.0, **WORDS))
    reports = run(engine)
    assert len(fetched) == len(reports)


# DraftBuilder.extra


def test_they_share_the_nodes_with_the_draft_but_not_depth_and_width() -> None:
    builder = builder_for([Text([1]), Text([2])], [DraftLimits(5, 1, 1), DraftLimits(2, 9, 9)])
    first, second = builder.roots.tolist()
    assert builder.extra(first, [3, 4, 5], [-1, 0, 0]) == [0, 1, 2]
    assert builder.guess(first, [6, 7]) != []
    assert builder.extra(first, [8, 9], [-1, -1]) == [3]
    assert builder.extra(second, [8, 9, 10], [-1, 0, 1]) == [0, 1]
    assert builder.guess(second, [1]) == []
    assert (builder.added.tolist(), builder.spent.tolist()) == ([1, 0], [5, 2])
    assert builder.extras[0].parents == [-1, 0, 0, -1]
    assert [limit.max_nodes for limit in builder.extra_limits] == [0, 0]


def test_they_can_hang_below_any_node() -> None:
    builder = builder_for([Text([1])], [DraftLimits(9, 9, 9)], reach=[4])
    node = builder.guess(int(builder.roots[0]), [5, 6])[1]
    assert builder.extra(node, [7, 8, 9], [-1, 0, 1]) == [0, 1]  # depths 3 and 4; 5 is too deep
    assert builder.extras[0].parents == [~2, 0]


def test_limited_builders_share_places_and_limits() -> None:
    """Fault: two drafters of one combinator get the same places, and read each other's results."""
    builder = builder_for([Text([1])], [DraftLimits(6, 9, 9)], reach=[5])
    root = int(builder.roots[0])
    node = builder.guess(root, [5])[0]
    one = builder.limited([DraftLimits(2, 9, 9)])
    other = builder.limited([DraftLimits(9, 9, 9)], builder.roots + 1)
    assert one.extra(root, [1, 2, 3], [-1, 0, 1]) == [0, 1]
    assert other.extra_limits == [DraftLimits(3, 4, 3)]
    assert other.extra(node, [4, 5], [-1, 0]) == [2, 3]
    assert builder.extras[0].parents == [~0, 0, ~1, 2]
    assert (one.added.tolist(), one.spent.tolist()) == ([0], [2])
    assert builder.spent.tolist() == [5]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([VOCAB_SIZE], [-1], "vocabulary"),
        ([1, 2], [1, -1], "earlier row"),
        ([1], [0], "earlier row"),
    ],
)
def test_bad_rows_are_refused(tokens: list[int], parents: list[int], message: str) -> None:
    builder = builder_for([Text([1])], [DraftLimits(6, 9, 9)])
    with pytest.raises(ContractError, match=message):
        builder.extra(int(builder.roots[0]), tokens, parents)
