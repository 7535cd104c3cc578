"""Drafters that draw by themselves and misstate the laws they drew from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specfw.contracts import Feedback, RequestView, TargetInfo
from specfw.decoding.builder import DraftBuilder
from specfw.decoding.draft import Draft, Kind
from specfw.decoding.random import Purpose, Site
from specfw.testing.cases import SETTINGS
from specfw.testing.controls.control import Control, small_cases
from specfw.testing.drafters import TableDrafter

__all__ = ["STATEMENTS", "Siblings", "Stating", "StatingBuilder"]


class StatingBuilder(DraftBuilder):
    """A builder that lets drafters do what the real one does not: draw by themselves and state laws."""

    def __init__(
        self, root: Tensor, start: Tensor, seed: Tensor, limits: Any, sampling: Any, *rest: Any
    ) -> None:
        super().__init__(root, start, seed, limits, sampling, *rest)
        self.start, self.seed, self.random = start, seed, self._random
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
    """Says of the most likely token that it was drawn."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            self.state(root, int(q.argmax()), q)


class OtherTemperature(Stating):
    """Draws at one temperature and states another."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            self.state(root, self.draw(q**2 / (q**2).sum()), q)


class DrawLookDrop(Stating):
    """Drops what it drew unless it is the most likely token."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            token = self.draw(q)
            if token == q.argmax():
                self.state(root, token, q)


class LengthAfterLooking(Stating):
    """Decides by the second token whether to keep it."""

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
    """Puts the likelier of two drawn siblings first."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            first = self.draw(q)
            rest = without(q, first)
            drawn = [(first, q), (self.draw(rest), rest)]
            for token, law in sorted(drawn, key=lambda pair: -float(q[pair[0]])):
                self.state(root, token, law)


class BestOfTwo(Stating):
    """Draws two tokens and keeps the likelier."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            drawn = [self.draw(q), self.draw(q)]
            self.state(root, max(drawn, key=lambda token: float(q[token])), q)


class DuplicatesDropped(Stating):
    """Leaves out a sibling that was drawn twice, and states the law as if it had not."""

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
    """Ends the draft before an end of text that it drew."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        for _ in range(min(depth, 2)):
            q = self.q(tokens)
            token = self.draw(q)
            if token == 0:
                return
            root = self.state(root, token, q)
            tokens = [*tokens, token]


class AnyOrder(Stating):
    """Draws the second token first and states each law as drawn: the first token's given the second."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth < 2:
            return
        first_law = self.q(tokens)
        second_laws = torch.stack([self.q([*tokens, token]) for token in range(len(first_law))])
        marginal = first_law @ second_laws
        second = self.draw(marginal)
        posterior = first_law * second_laws[:, second]
        node = self.state(root, self.draw(posterior / posterior.sum()), posterior)
        self.state(node, second, marginal)


class HiddenMixture(Stating):
    """Draws a whole chain from one of two laws and states their mean at each place."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        which = self.draw(torch.full((2,), 0.5, dtype=torch.float64))
        for _ in range(min(depth, 2)):
            laws = torch.stack([self.q(tokens), self.q([*tokens, 0])])
            token = self.draw(laws[which])
            root = self.state(root, token, laws.mean(0))
            tokens = [*tokens, token]


class InnerAcceptedOnly(Stating):
    """Drafts with a drafter's drafter, and leaves the token out that the inner one would have corrected."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q, inner = self.q(tokens), self.q([*tokens, 0])
            token = self.draw(inner)
            keep = float((q[token] / inner[token]).clamp_max(1))
            if self.draw(torch.tensor([1 - keep, keep], dtype=torch.float64)):
                self.state(root, token, q)


class Siblings(Stating):
    """Two draws without replacement, honestly stated."""

    def draft(self, root: int, tokens: list[int], depth: int) -> None:
        if depth:
            q = self.q(tokens)
            first = self.draw(q)
            self.state(root, first, q)
            rest = without(q, first)
            self.state(root, self.draw(rest), rest)


STATEMENTS: tuple[Control, ...] = (
    Control("argmax as sampled", ArgmaxAsSampled),
    Control("draft at another temperature", OtherTemperature),
    Control("draw, look, drop", DrawLookDrop),
    Control("length after looking", LengthAfterLooking),
    Control("re-sorted siblings", ResortedSiblings),
    Control("best of two", BestOfTwo),
    Control("duplicates dropped", DuplicatesDropped),
    Control("stale token as fresh", StaleAsFresh),
    Control("cut before the end of text", CutBeforeEnd, cases=small_cases(SETTINGS["end of text"])),
    Control("drawn in another order", AnyOrder),
    Control("hidden mixture", HiddenMixture, cases=small_cases()[:1]),
    Control("inner-accepted tokens only", InnerAcceptedOnly),
)
