"""Broken components that the exact-law kit must catch: each keeps its promise in words and breaks it in law.

A control that passes is a hole in the kit. Small deviations count: some of these differ from the target
by less than sampled tests could ever see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import specfw.engine.batching as batching
import specfw.engine.engine as engine
import specfw.engine.model_runner as model_runner
import specfw.testing.cases as kit_cases
from specfw.contracts import Drafter, Feedback, Outcome, RequestView, TargetInfo, Verifier
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft, Kind
from specfw.decoding.probabilities import NodeLaws, SamplingBatch
from specfw.decoding.random import Purpose, RandomSource, Site
from specfw.decoding.rejection import RejectionVerifier
from specfw.engine.attention import KVStore
from specfw.engine.batching import Segment
from specfw.engine.fixed import FixedScheduler
from specfw.engine.memory import _PrefixIndex
from specfw.engine.requests import Request
from specfw.testing import Case, Certificate, TableDrafter, certify
from specfw.testing.cases import SETTINGS, DrafterFactory, VerifierFactory
from specfw.types import Guarantee, SamplingParams

PLAIN = SamplingParams(temperature=1.0, ignore_eos=True)
CAUGHT = 1e-6
"""A thousand times the tolerance of a certification, and far below what samples could show."""


def cases(params: SamplingParams = PLAIN, batch: int = 1) -> list[Case]:
    """Deep with two tokens, wide with three; every control must show on at least one."""
    return [
        Case(params, vocab_size=size, horizon=horizon, batch=batch, seed=seed)
        for size, horizon, seed in ((2, 3, 0), (3, 2, 5))
    ]


def judge(
    drafter: DrafterFactory,
    verifier: VerifierFactory = RejectionVerifier,
    over: Sequence[Case] | None = None,
) -> Certificate:
    certificate = certify(
        drafter, verifier, [lambda: FixedScheduler(4, 3, 3)], cases=over or cases()
    )
    assert not certificate.faults, certificate.faults
    assert certificate.drafted > 0
    return certificate


def assert_caught(certificate: Certificate) -> None:
    assert certificate.max_tv > CAUGHT, str(certificate)
    assert not certificate.ok
    assert certificate.counterexample is not None
    assert certificate.counterexample.tv > 0


class StatingBuilder(DraftBuilder):
    """A builder that lets drafters do what the real one does not: draw by themselves and state laws."""

    def __init__(self, root, start, seed, limits, sampling, random, *rest) -> None:
        super().__init__(root, start, seed, limits, sampling, random, *rest)
        self.start, self.seed, self.random = start, seed, random
        self.stated: dict[int, Tensor] = {}

    def build(self) -> Draft:
        draft = super().build()
        if not self.stated:
            return draft
        kind, qrow = draft.kind.copy(), draft.qrow.copy()
        for row, handle in enumerate(self.stated):
            place = next(
                (b, node)
                for b, size in enumerate(draft.sizes)
                for node in range(size)
                if self.handles_of(b, [node]) == [handle]
            )
            kind[place], qrow[place] = Kind.DENSE, row
        return replace(draft, kind=kind, qrow=qrow, qstore=torch.stack([*self.stated.values()]))


@pytest.fixture(autouse=True)
def _stating_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DraftBuilder", StatingBuilder)


class Stating(TableDrafter):
    """A drafter that draws by itself and states its own laws."""

    def __init__(self) -> None:
        super().__init__("unrelated")

    def propose(self, requests: Sequence[RequestView], builder: DraftBuilder) -> None:
        assert isinstance(builder, StatingBuilder)
        self.builder = builder
        for row, (root, request) in enumerate(zip(builder.roots.tolist(), requests, strict=True)):
            self.row, self.drawn = slice(row, row + 1), 0
            self.draft(root, list(request.tokens), builder.limits[row].max_depth)

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        """The honest way: a chain whose laws are those drawn from."""
        for _ in range(min(depth, 2)):
            q = self.q(tokens)
            token = self.draw(q)
            root = self.state(root, token, q)
            tokens = [*tokens, token]

    def q(self, tokens: list[int]) -> Tensor:
        return torch.from_numpy(self._model.law(tokens).copy())

    def draw(self, q: Tensor) -> int:
        self.drawn += 1
        site = Site(
            Purpose.DRAFT,
            self.builder.seed[self.row],
            self.builder.start[self.row],
            1000 + self.drawn,
        )
        return int(self.builder.random.categorical(q[None], site)[0])

    def state(self, parent: int, token: int, q: Tensor) -> int:
        """Add a node that claims to be a draw from q."""
        (handle,) = self.builder.guess(parent, [token])
        self.builder.stated[handle] = q / q.sum()
        return handle


def without(q: Tensor, token: int) -> Tensor:
    rest = q.clone()
    rest[token] = 0
    return rest / rest.sum()


class ArgmaxAsSampled(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            self.state(root, int(q.argmax()), q)


class OtherTemperature(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            self.state(root, self.draw(q**2 / (q**2).sum()), q)


class DrawLookDrop(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            token = self.draw(q)
            if token == q.argmax():
                self.state(root, token, q)


class LengthAfterLooking(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth < 2:
            return
        first_law = self.q(tokens)
        first = self.draw(first_law)
        second_law = self.q([*tokens, first])
        second = self.draw(second_law)
        node = self.state(root, first, first_law)
        if second == second_law.argmax():
            self.state(node, second, second_law)


class ResortedSiblings(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            first = self.draw(q)
            rest = without(q, first)
            drawn = [(first, q), (self.draw(rest), rest)]
            for token, law in sorted(drawn, key=lambda pair: -float(q[pair[0]])):
                self.state(root, token, law)


class BestOfTwo(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            drawn = [self.draw(q), self.draw(q)]
            self.state(root, max(drawn, key=lambda token: float(q[token])), q)


class DuplicatesDropped(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            for token in dict.fromkeys([self.draw(q), self.draw(q)]):
                self.state(root, token, q)


class StaleAsFresh(Stating):
    """Says of a token that was never verified that it was drawn just now."""

    def attach(self, target: TargetInfo) -> None:
        super().attach(target)
        self.stale: list[int] = []

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        for _ in range(min(depth, 2)):
            q = self.q(tokens)
            token = self.stale.pop() if self.stale else self.draw(q)
            root = self.state(root, token, q)
            tokens = [*tokens, token]
        self.tail = tokens[-1:]

    def observe(self, feedback: Feedback) -> None:
        self.stale = self.tail if not any(feedback.kept) else []


class CutBeforeEnd(Stating):
    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        for _ in range(min(depth, 2)):
            q = self.q(tokens)
            token = self.draw(q)
            if token == 0:
                return
            root = self.state(root, token, q)
            tokens = [*tokens, token]


def test_honest_statements_pass() -> None:
    """The controls below must fail for what they get wrong, not for going past the builder."""
    assert judge(Stating).ok
    assert judge(Stating, over=cases(SETTINGS["end of text"])).ok


@pytest.mark.parametrize(
    "drafter",
    [
        ArgmaxAsSampled,
        OtherTemperature,
        DrawLookDrop,
        LengthAfterLooking,
        ResortedSiblings,
        BestOfTwo,
        DuplicatesDropped,
        StaleAsFresh,
    ],
)
def test_a_misstated_draft_law_is_caught(drafter: type[Drafter]) -> None:
    """A draft law that is not the law given all earlier draws and given that the token was kept."""
    assert_caught(judge(drafter))


def test_a_draft_cut_before_the_end_of_text_is_caught() -> None:
    """The tokens before an end of text, stated as drawn, are drawn given that none is the end."""
    assert_caught(judge(CutBeforeEnd, over=cases(SETTINGS["end of text"])))


class ResidualNotUpdated(RejectionVerifier):
    @staticmethod
    def _test_children(draft: Draft, node: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(node))
        share = left.new_zeros(len(node), draft.max_width + 1)
        undecided, refused = left.new_ones(len(node)), left
        for rank in range(draft.max_width):
            child = draft.children[rows, node, rank]
            token = draft.token[rows, child.clamp_min(0)]
            q = draft.laws_of(child.clamp_min(0), token, like=left)
            accept = (left[rows, token] / q[rows, token]).clamp_max(1)  # of p, not of what is left
            accept = torch.where(child >= 0, accept, 0)
            share[:, rank] = undecided * accept
            undecided = undecided * (1 - accept)
            rest = (left - q).clamp_min(0)
            rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left)
            refused = torch.where((child >= 0)[:, None], rest, refused)
        share[:, draft.max_width] = undecided
        return share, refused


class ResampledFromTarget(RejectionVerifier):
    @staticmethod
    def _test_children(draft: Draft, node: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        return RejectionVerifier._test_children(draft, node, left)[0], left


class LongestAccepted(Verifier):
    """A coin for each token of a chain, and the longest prefix that ends in heads."""

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"
    supports_trees = False

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        for depth in range(1, draft.max_depth + 1):
            above, here = torch.full_like(node, depth - 1), torch.full_like(node, depth)
            ratio = _ratio(draft, laws.rows(above), here)
            site = Site(Purpose.WALK, draft.seed, draft.start, depth)
            node = torch.where(random.bernoulli(ratio.clamp_max(1), site), here, node)
        left = laws.rows(node)
        if draft.max_depth and int(node[0]) < draft.max_depth:
            rest = _left(draft, left, node + 1)
            left = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left)
        return Outcome(
            node, random.categorical(left, Site(Purpose.RESIDUAL, draft.seed, draft.start))
        )


class Block(Verifier):
    """Block verification of chains (Sun et al., arXiv 2403.10444), for one request; exact."""

    guarantee: ClassVar[Guarantee] = "exact-law"
    noise: ClassVar[Literal["target", "draft"]] = "draft"
    supports_trees = False

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        node = torch.zeros_like(draft.start)
        weights, last = [torch.ones(len(node), dtype=torch.float64)], draft.max_depth
        for depth in range(1, last + 1):
            p = laws.rows(torch.full_like(node, depth - 1))
            weights.append(
                (weights[-1] * _ratio(draft, p, torch.full_like(node, depth))).clamp_max(1)
            )
        for depth in range(1, last + 1):
            here = torch.full_like(node, depth)
            keep = weights[depth]
            if depth < last:
                rest = _left(draft, weights[depth][:, None] * laws.rows(here), here + 1).sum(-1)
                keep = torch.where(keep < 1, rest / (rest + 1 - keep), 1.0)
            site = Site(Purpose.WALK, draft.seed, draft.start, depth)
            node = torch.where(random.bernoulli(keep, site), here, node)
        left = laws.rows(node)
        if len(node) and int(node[0]) < last:
            left = _left(draft, weights[int(node[0])][:, None] * left, node + 1)
        return Outcome(
            node, random.categorical(left, Site(Purpose.RESIDUAL, draft.seed, draft.start))
        )


def _ratio(draft: Draft, p: Tensor, node: Tensor) -> Tensor:
    rows = torch.arange(len(node))
    token = draft.token[rows, node]
    return p[rows, token] / draft.laws_of(node, token, like=p)[rows, token]


def _left(draft: Draft, p: Tensor, node: Tensor) -> Tensor:
    token = draft.token[torch.arange(len(node)), node]
    return (p - draft.laws_of(node, token, like=p)).clamp_min(0)


class Aliased(RandomSource):
    """Answers some draws from another draw's site."""

    def __init__(self, source: RandomSource, alias: Callable[[Site], Site]) -> None:
        self._source, self._alias = source, alias

    def race(self, probs: Tensor, site: Site, k: int = 1, active: Tensor | None = None) -> Tensor:
        return self._source.race(probs, self._alias(site), k, active)

    def bernoulli(self, p: Tensor, site: Site, active: Tensor | None = None) -> Tensor:
        return self._source.bernoulli(p, self._alias(site), active)


class SharesTargetNoise(RejectionVerifier):
    """Has drafts drawn with the target's noise and draws its own last token with it again."""

    noise: ClassVar[Literal["target", "draft"]] = "target"

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        def alias(site: Site) -> Site:
            if site.purpose is not Purpose.RESIDUAL:
                return site
            return Site(Purpose.TARGET, site.seed, site.position + 1)

        return super().verify(draft, laws, Aliased(random, alias))


class SharesDraftSite(RejectionVerifier):
    """Tosses its first coin with the noise that drew the first draft token."""

    def verify(self, draft: Draft, laws: NodeLaws, random: RandomSource) -> Outcome:
        def alias(site: Site) -> Site:
            if site.purpose is not Purpose.WALK:
                return site
            return Site(Purpose.DRAFT, site.seed, site.position, 1)

        return super().verify(draft, laws, Aliased(random, alias))


def chain() -> Drafter:
    return TableDrafter("unrelated", depth=2)


def tree() -> Drafter:
    return TableDrafter("near", depth=2, width=2)


class Siblings(Stating):
    """Two draws without replacement, honestly stated."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            first = self.draw(q)
            self.state(root, first, q)
            rest = without(q, first)
            self.state(root, self.draw(rest), rest)


def test_sound_parts_pass() -> None:
    """What the verifiers below build on is exact, so they fail for their own faults."""
    assert judge(Siblings).ok
    assert judge(chain, Block).ok
    assert judge(tree).ok


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [
        (Siblings, ResidualNotUpdated),
        (chain, ResampledFromTarget),
        (chain, LongestAccepted),
        (chain, SharesTargetNoise),
        (chain, SharesDraftSite),
    ],
)
def test_a_broken_verifier_is_caught(drafter: DrafterFactory, verifier: type[Verifier]) -> None:
    """Wrong residuals, wrong coins, and coins that are not independent of the draft."""
    assert_caught(judge(drafter, verifier))


class SaysSameText(RejectionVerifier):
    guarantee: ClassVar[Guarantee] = "same-text"


def test_a_text_that_is_not_plain_decodings_is_caught() -> None:
    """The law alone does not tell: the text for a seed must not depend on the draft."""
    assert_caught(judge(chain, SaysSameText))


def test_draft_noise_keyed_by_absolute_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps then share the noise of one position, which a verifier that reads ahead leaks."""
    draw = DraftBuilder._draw_fresh

    def keyed_by_position(self: DraftBuilder, parents, q, room):
        def alias(site: Site) -> Site:
            depth = torch.from_numpy(self.depth_of(parents))
            return Site(site.purpose, site.seed, site.position + depth, 0)

        source = self._random
        self._random = Aliased(source, alias)
        try:
            return draw(self, parents, q, room)
        finally:
            self._random = source

    monkeypatch.setattr(DraftBuilder, "_draw_fresh", keyed_by_position)
    assert judge(chain).ok  # one token at a time, nothing is read ahead
    assert_caught(judge(chain, Block))


def test_rounded_draft_laws_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws kept in bfloat16 are not those that were drawn from; the difference is small."""
    build = DraftBuilder.build

    def rounded(self: DraftBuilder) -> Draft:
        draft = build(self)
        return (
            draft
            if draft.qstore is None
            else replace(draft, qstore=draft.qstore.bfloat16().double())
        )

    monkeypatch.setattr(DraftBuilder, "build", rounded)
    assert_caught(judge(chain))


def test_penalties_that_ignore_the_drafted_path_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node penalised by the step's prefix."""
    penalise = SamplingBatch._penalise
    monkeypatch.setattr(
        SamplingBatch,
        "_penalise",
        lambda self, scores, request, path: penalise(self, scores, request, path[:, :0]),
    )
    assert_caught(judge(chain, over=cases(SETTINGS["penalties"])))


def test_penalties_that_count_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor state that is advanced by the draft and again by what was kept."""
    emit = Request.emit

    def twice(self: Request, tokens, kept):
        taken, reason = emit(self, tokens, kept)
        self.sampling.advance(self.tokens[len(self.tokens) - taken :])
        return taken, reason

    monkeypatch.setattr(Request, "emit", twice)
    assert_caught(judge(chain, over=cases(SETTINGS["penalties"])))


def test_a_minimum_length_counted_in_steps_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of text forbidden at every node of a step that begins too early."""
    forbid = SamplingBatch._forbid_early_stop
    monkeypatch.setattr(
        SamplingBatch,
        "_forbid_early_stop",
        lambda self, scores, request, depth: forbid(self, scores, request, torch.zeros_like(depth)),
    )
    params = SETTINGS["min tokens"].model_copy(update={"min_new_tokens": 1})
    assert_caught(judge(chain, over=cases(params)))


def test_top_p_on_the_bonus_token_only_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens tested against the unfiltered law."""

    class BonusOnly(NodeLaws):
        def rows(self, node: Tensor) -> Tensor:
            filtered = super().rows(node)
            bare = self._logits.index_select(0, self._first_row + node).softmax(-1)
            if not self._draft.max_width:
                return filtered
            tested = (self._draft.children[torch.arange(len(node)), node] >= 0).any(-1)
            return torch.where(tested[:, None], bare, filtered)

    monkeypatch.setattr(engine, "NodeLaws", BonusOnly)
    assert_caught(judge(chain, over=cases(SETTINGS["top-p"])))


def test_a_bonus_token_from_the_wrong_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law after the last kept token taken from the row before."""

    class RowBefore(NodeLaws):
        def rows(self, node: Tensor) -> Tensor:
            deepest = node == self._draft.parent.shape[1] - 1
            return super().rows(torch.where(deepest, (node - 1).clamp_min(0), node))

    monkeypatch.setattr(engine, "NodeLaws", RowBefore)
    assert_caught(judge(chain))


def test_a_neighbours_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that belong to another request of the batch."""

    class Shifted(NodeLaws):
        def __init__(self, logits: Tensor, draft: Draft, sampling: SamplingBatch) -> None:
            super().__init__(logits, draft, sampling)
            self._first_row = self._first_row.roll(1)

    monkeypatch.setattr(engine, "NodeLaws", Shifted)
    assert_caught(judge(chain, over=cases(batch=3)))


@pytest.mark.parametrize("verifier", [RejectionVerifier, CoupledVerifier])
class TestMemory:
    """The target's own context: its law must come from exactly the committed tokens and the path."""

    def test_kept_nodes_left_in_draft_slots_are_caught(
        self, monkeypatch: pytest.MonkeyPatch, verifier: type[Verifier]
    ) -> None:
        """Without compaction a refused sibling's keys and values stay in the context."""
        monkeypatch.setattr(KVStore, "move", lambda self, source, target: None)
        assert_caught(judge(tree, verifier))

    def test_a_refused_token_that_is_not_overwritten_is_caught(
        self, monkeypatch: pytest.MonkeyPatch, verifier: type[Verifier]
    ) -> None:
        """Slots written once keep what they hold; the next step's writes go nowhere."""
        pack, written = model_runner.pack, {}

        def write_once(segments: Sequence[Segment], *arguments, **options):
            batch = pack(segments, *arguments, **options)
            for first, segment in zip(batch.first_token, segments, strict=True):
                known = written.setdefault(segment.sequence, set())
                for row in range(len(segment.tokens)):
                    slot = int(batch.slots[first + row])
                    if slot in known:
                        batch.slots[first + row] = 0
                    known.add(slot)
            return batch

        monkeypatch.setattr(model_runner, "pack", write_once)
        assert_caught(judge(chain, verifier))

    def test_a_foreign_prefix_is_caught(
        self, monkeypatch: pytest.MonkeyPatch, verifier: type[Verifier]
    ) -> None:
        """Blocks of the prefix cache that hold other tokens."""
        chain_of = _PrefixIndex.chain

        def careless(self: _PrefixIndex, tokens: Sequence[int], block_size: int) -> list[int]:
            return list(chain_of(self, [*tokens[:-1], 1 - tokens[-1]], block_size))

        monkeypatch.setattr(_PrefixIndex, "chain", careless)
        monkeypatch.setattr(Case, "prompts", [[0, 1, 0, 0, 1]])
        fill = kit_cases._fill_cache
        monkeypatch.setattr(kit_cases, "_fill_cache", lambda to, _: fill(to, [0, 1, 0, 1, 1]))
        case = Case(PLAIN, vocab_size=2, horizon=2, memory="prefix hit")
        assert_caught(judge(chain, verifier, [case]))

    def test_positions_by_index_are_caught(
        self, monkeypatch: pytest.MonkeyPatch, verifier: type[Verifier]
    ) -> None:
        """Siblings have one position, whatever their order in the draft."""
        monkeypatch.setattr(batching, "_depths", lambda parents: np.arange(len(parents)))
        assert_caught(judge(tree, verifier))

    def test_a_visible_sibling_is_caught(
        self, monkeypatch: pytest.MonkeyPatch, verifier: type[Verifier]
    ) -> None:
        """A causal mask over a tree shows a node its siblings."""
        monkeypatch.setattr(
            batching, "_ancestry", lambda parents: np.tri(len(parents), dtype=np.bool_)
        )
        assert_caught(judge(tree, verifier))
