"""How drafters propose: they hand over logits or guesses, and the framework draws, records and keys.

There are two verbs and no third: nothing that was drawn can be removed again, and no drafter can state
a law, so losslessness does not depend on drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.contracts import DraftLimits
from specfw.decoding.coupled import CoupledVerifier
from specfw.decoding.draft import Draft, ExtraRows, Kind
from specfw.decoding.probabilities import NodeLaws, SamplingBatch
from specfw.decoding.random import InnerSource, Purpose, RandomSource, Site
from specfw.decoding.rejection import RejectionVerifier
from specfw.errors import ContractError

__all__ = ["DraftBuilder", "TargetLayers"]

Handles = NDArray[np.int64]

_NO_END = 1 << 30


class TargetLayers(Protocol):
    """The layers of the target that a drafter runs itself (`Requirements.draft_layers`)."""

    def states(self, draft: Draft, requests: NDArray[np.int64], nodes: NDArray[np.int64]) -> Tensor:
        """What they return for nodes of what has been drafted so far, [M, H], by row and place in it."""

    def logits(self, states: Tensor) -> Tensor:
        """What the target's norm and head make of such states: [M, H] -> [M, V]."""


class DraftBuilder:
    """Grows the draft trees of B requests.

    A node is named by a handle, an integer that is good for this step only; -1 is no node. Handles
    that a verb returns are in draw order. Several builders can grow the same trees (`limited`).
    """

    def __init__(
        self,
        root: Tensor,
        start: Tensor,
        seed: Tensor,
        limits: Sequence[DraftLimits],
        sampling: SamplingBatch,
        random: RandomSource,
        noise: Literal["target", "draft"],
        vocab_size: int,
        may_draw: Callable[[Tensor, Tensor], Tensor | None] | None = None,
        reach: Sequence[int] | None = None,
        layers: TargetLayers | None = None,
    ) -> None:
        """Start with roots only.

        Args:
            root, start, seed: last committed token, its absolute position, the seed: int64 [B].
            limits: what may be drafted for each request.
            sampling: the settings of the requests, in the same order.
            random: the source of all chance.
            noise: the verifier's (`Verifier.noise`).
            vocab_size: width of the target's logits rows.
            may_draw: the schedulers' stop rule, asked before a draw with each law q [M, V] and with how
                likely the tokens on the way to each parent were, [M, D].
            reach: how many positions the context has left behind each root; None for no end.
            layers: the draft layers, where the drafter requires some.
        """
        self.limits = list(limits)
        self._draft = Draft.empty(root, start, seed)
        self._sampling, self._random, self._noise = sampling, random, noise
        self._vocab_size, self._may_draw, self._layers = vocab_size, may_draw, layers
        self._capacity = 1 + max((limit.max_nodes for limit in limits), default=0)
        shape = (len(self.limits), self._capacity)
        self._count = np.ones(len(self.limits), np.int64)
        self._parent = np.full(shape, -1, np.int32)
        self._rank = np.zeros(shape, np.int16)
        self._depth = np.zeros(shape, np.int16)
        self._width = np.zeros(shape, np.int16)
        self._kind = np.zeros(shape, np.uint8)
        self._qrow = np.full(shape, -1, np.int32)
        self._drafter = np.full(shape, -1, np.int16)
        self._guessed = np.full(shape, -1, np.int64)  # tokens known on the host
        self._token = root.new_zeros(shape)
        self._token[:, 0] = root
        # how likely each token was, one at guesses; if schedulers ask
        self._chance: Tensor | None = None
        if may_draw is not None:
            self._chance = torch.ones_like(self._token, dtype=torch.float64)
        self._laws: list[Tensor] = []
        self._drafter_index = -1
        self._above: DraftBuilder | None = None  # whose limits hold too
        self._roots = np.arange(len(self.limits), dtype=np.int64) * self._capacity
        self._owner: dict[int, int] = {}  # requests of nodes, as far as a limited builder was asked
        self._guess_below: dict[tuple[int, int], int] = {}  # by parent and token
        self._spent = np.zeros(len(self.limits), np.int64)
        self._added = np.zeros(len(self.limits), np.int64)
        self._reach = [_NO_END] * len(self.limits) if reach is None else list(reach)
        self.extras = [ExtraRows() for _ in self.limits]
        """The extra rows of each request of the draft."""
        self._behalf: Any = None
        self.non_finite: dict[Any, Tensor] = {}
        """By `on_behalf_of`: bool [B], requests for which logits without a law were handed over."""

    @property
    def roots(self) -> Handles:
        """The handle of each request's root, [B]."""
        return self._roots.copy()

    @property
    def added(self) -> NDArray[np.int64]:
        """How many draft nodes each request has got through this builder, [B]."""
        return self._added.copy()

    @property
    def spent(self) -> NDArray[np.int64]:
        """How many of `max_nodes` each request has used through this builder, extra rows included: [B]."""
        return self._spent.copy()

    @property
    def extra_limits(self) -> list[DraftLimits]:
        """What `extra` may still add below each root: rows, and how deep they may lie."""
        return [self._extra_limit(int(root)) for root in self._roots]

    def limited(self, limits: Sequence[DraftLimits], roots: Handles | None = None) -> DraftBuilder:
        """A builder of the same trees that adds at most `limits` below `roots`, for combinators.

        Its requests are these roots, in this order: any nodes of this builder, all its roots unless
        given. Depths count from them, and its `limits` are cut to what this builder has left.
        """
        view = copy(self)
        view._above = self
        view._roots = self.roots if roots is None else np.asarray(roots, np.int64)
        view._owner = {root: request for request, root in enumerate(view._roots.tolist())}
        view._spent = np.zeros(len(view._roots), np.int64)
        view._added = view._spent.copy()
        view.limits = [
            limit & self._left_below(int(root))
            for limit, root in zip(limits, view._roots, strict=True)
        ]
        return view

    def for_rows(self, rows: Sequence[int]) -> DraftBuilder:
        """A builder of the same trees whose requests are these of this one's, with the same limits."""
        return self.limited([self.limits[i] for i in rows], self.roots[list(rows)])

    def on_behalf_of(self, owner: Any) -> DraftBuilder:
        """This builder for `owner` (hashable), who answers for the logits that it is handed from then on."""
        own = copy(self)
        own._behalf = owner
        return own

    def leaves(self) -> Handles:
        """The nodes at or below the roots that have no children, [M]; of one request in draw order."""
        found = [
            row * self._capacity + node
            for row in dict.fromkeys((self._roots // self._capacity).tolist())
            for node in np.flatnonzero(self._width[row, : self._count[row]] == 0).tolist()
        ]
        return np.array([node for node in found if self._find_request(node) is not None], np.int64)

    def guessed_path(self, node: int) -> list[int] | None:
        """The tokens from below the root to `node`; None if one was drawn, which the host cannot know."""
        return self._guesses_between(self._roots, node)

    def request_of(self, nodes: Handles) -> NDArray[np.int64]:
        """Which request each node belongs to, [M]."""
        if self._above is None:
            return self._row_of(nodes)
        return np.array([self._request(int(node)) for node in nodes], np.int64)

    def depth_of(self, nodes: Handles) -> NDArray[np.int64]:
        """Draft tokens from the root to each node, [M]; 0 at a root."""
        depth = self._total_depth(nodes)
        if self._above is None:
            return depth
        return depth - self._total_depth(self._roots[self.request_of(nodes)])

    def parent_of(self, nodes: Handles) -> Handles:
        """The parents' handles, [M]; -1 for a root."""
        nodes = np.asarray(nodes, np.int64)
        parent = self._parent.reshape(-1)[nodes].astype(np.int64)
        top = (parent < 0) | np.isin(nodes, self._roots)
        return np.where(top, -1, self._row_of(nodes) * self._capacity + parent)

    def tokens_of(self, nodes: Handles) -> Tensor:
        """The tokens that nodes carry: int64 [M], on the target's device."""
        self._upload_guesses()
        index = torch.from_numpy(np.asarray(nodes, np.int64)).to(self._token.device)
        return self._token.view(-1).index_select(0, index)

    def draft_states(self, nodes: Handles) -> Tensor:
        """What the required draft layers of the target return for each node: float [M, H].

        They are run, over all requests that `nodes` are in at once, for whatever was not yet run: the
        committed tokens without KV, and nodes of any drafter. Verification does not run those again
        that come first in the target without a gap.

        Raises:
            ContractError: the drafter requires no draft layers.
        """
        row, place = np.divmod(np.asarray(nodes, np.int64), self._capacity)
        return self._need_layers().states(self._outline(), row, place)

    def draft_logits(self, states: Tensor) -> Tensor:
        """What the target's own norm and head make of hidden states: float [M, H] -> [M, V].

        Raises:
            ContractError: the drafter requires no draft layers.
        """
        return self._need_layers().logits(states)

    def room(self, parents: Handles) -> NDArray[np.int64]:
        """How many children each node may still get, were it the only one to get any: [M]."""
        return np.array([self._room(int(parent)) for parent in parents], np.int64)

    def wants_more(self, parents: Handles) -> NDArray[np.bool_]:
        """Whether a draft may go on below each node: bool [M]."""
        return self.room(parents) > 0

    def guess(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """Add a chain of guesses below `parent` (a handle): one handle a token, cut at the limits.

        A guess that is there already is walked through, not doubled. Where the request's grammar
        forbids a token, the chain is cut too, unless a drawn node is above, which the host cannot know.

        Raises:
            ContractError: a token id is outside the target's vocabulary.
        """
        handles: list[int] = []
        for token in tokens:
            self._check_token(token)
            known = self._guess_below.get((parent, token))
            if known is None:
                if self._room(parent) == 0 or self._forbids(parent, token):
                    break
                known = self._guess_below[parent, token] = self._add(parent, Kind.POINT, -1)
                self._guessed.reshape(-1)[known] = token
            handles.append(known)
            parent = known
        return handles

    def sample(
        self, parents: Handles, logits: Tensor, width: int = 1, vocab: Tensor | None = None
    ) -> Handles:
        """Draw up to `width` children below each of M nodes: handles [M, width], -1 beyond the limits.

        The requests' own settings turn the logits into laws. At temperature 0 the children are the
        most likely tokens. Under the target's noise they are the best race keys of the law at the
        child's position. Under fresh noise the first is drawn from the law without its top
        width - 1 tokens, and these follow as guesses: of the sibling laws that rejection keeps
        exact, the one that accepts most.

        Args:
            parents: handles, [M].
            logits: raw draft logits, [M, Vd]; -inf bans a token.
            width: siblings to draw.
            vocab: the target's id of each draft id, int64 [Vd], if the draft's vocabulary is reduced.
        """
        parents = np.asarray(parents, np.int64)
        if logits.ndim != 2 or logits.shape[0] != len(parents):
            raise ContractError(
                f"draft: sample() wants logits [M, V] with M = {len(parents)} parents, got {list(logits.shape)}"
            )
        logits = logits.to(self._token.device)
        handles = np.full((len(parents), width), -1, np.int64)
        room = self._shared_room(parents, min(width, self._vocab_size))
        rows = np.flatnonzero(room)
        if not len(rows):
            return handles
        scores = self._scores(parents[rows], logits[self._index(rows)], vocab)
        for greedy in (True, False):
            part = np.flatnonzero(self._sampling.greedy[self._row_of(parents[rows])] == greedy)
            if len(part):
                draw = self._take_best if greedy else self._draw
                drawn = draw(parents[rows[part]], scores[self._index(part)], room[rows[part]])
                handles[rows[part], : drawn.shape[1]] = drawn
        return handles

    def extra(self, parent: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Have rows scored that are no draft: none is ever emitted, and their KV is dropped.

        What the target ranks highest after each comes back in `Feedback.extra`. They use up
        `max_nodes` as draft nodes do, but neither depth nor width, and are cut at `extra_limits`.

        Args:
            parent: the node that they hang below, as a rule a root.
            tokens: ids, [E].
            parents: for each the place in `tokens` of what it follows, an earlier place, or -1 for
                `parent`: [E].

        Returns:
            Their places in the request's entry of `Feedback.extra`, in order; fewer where they were cut.

        Raises:
            ContractError: a token id is outside the target's vocabulary, or a row follows a later one.
        """
        limit, (row, node) = self._extra_limit(parent), divmod(parent, self._capacity)
        rows, depths = self.extras[row], dict.fromkeys((-1,), 0)
        first = len(rows)
        for place, (token, above) in enumerate(zip(tokens, parents, strict=True)):
            self._check_token(token)
            if above not in depths:
                raise ContractError(
                    f"draft: extra row {place} follows row {above}, expected -1 or an earlier row; put "
                    "rows behind those that they follow"
                )
            depths[place] = depths[above] + 1
            if place >= limit.max_nodes or depths[place] > limit.max_depth:
                break
            rows.tokens.append(token)
            rows.parents.append(~node if above < 0 else first + above)
        for builder in self._chain():
            builder._spent[builder._request(parent)] += len(rows) - first
        return list(range(first, len(rows)))

    def inner(self, limits: Sequence[DraftLimits]) -> DraftBuilder:
        """A builder for a draft that a draft model is to test, before what it emits is drafted here.

        It has the requests of this one, drafts from their last committed tokens within `limits`, has
        no extra rows, and has noise of its own, unless drafts are drawn with the target's. See `emit`.

        Raises:
            ContractError: a root of this builder is not a request's last committed token.
        """
        rows = self._row_of(self._roots)
        if (self._roots % self._capacity).any():
            raise ContractError(
                "draft: an inner draft must begin at the last committed token, but a root is a draft "
                "node; draft from there first"
            )
        index = self._index(rows)
        return DraftBuilder(
            self._token[index, 0],
            self._draft.start[index],
            self._draft.seed[index],
            limits,
            self._sampling.part(rows.tolist()),
            InnerSource(self._random),
            self._noise,
            self._vocab_size,
            reach=[0] * len(rows),
        )

    def emit(self, inner: DraftBuilder, logits: Tensor, scored: Sequence[bool]) -> list[list[int]]:
        """Draft what a draft model emits that decodes speculatively: what it keeps of a draft, and one more.

        Each token's law is the draft model's, whatever was drafted for it, and the token that follows
        the kept ones is as much a draw from it as these: to leave it out would change the law.
        The length depends on what is drawn, so this waits for the device once.

        Args:
            inner: what `inner` gave, with a draft in it.
            logits: the draft model's, after each of its nodes, request by request, float [R, V].
            scored: the requests to do this for, [B].

        Returns:
            The handles of each request's chain, cut at the limits and where a scheduler stops it.
        """
        draft = inner.build()
        logits = self._widened(logits.to(self._token.device))
        laws = NodeLaws(logits, draft, inner._sampling)
        verifier = CoupledVerifier() if self._noise == "target" else RejectionVerifier()
        outcome = verifier.verify(draft, laws, inner._random)
        request = self._index(self._row_of(self._roots))
        for owner, lawless in {**inner.non_finite, self._behalf: laws.failed_at >= 0}.items():
            self._note_lawless(owner, request, lawless)
        paths = [draft.path(b, node) for b, node in enumerate(outcome.node.tolist())]
        tokens = torch.cat([draft.token, outcome.next_token[:, None]], 1)
        parents, going = self._roots.copy(), [b for b, wanted in enumerate(scored) if wanted]
        chains: list[list[int]] = [[] for _ in paths]
        for depth in range(max(map(_emitted, paths), default=0)):
            going = [b for b in going if depth < _emitted(paths[b]) and self._room(int(parents[b]))]
            if not going:
                break
            before = [[0, *path][min(depth, len(path))] for path in paths]
            q = laws.rows(self._index(np.array(before)))[going]
            keep = self._ask(parents[going], q)
            if keep is not None:
                q, going = q[keep], [b for b, go in zip(going, keep.tolist(), strict=True) if go]
            place = [[*paths[b], -1][depth] for b in going]
            parents[going] = self._chain_on(parents[going], tokens[going, place], q)
            self._note_chances(parents[going], q)
            for b in going:
                chains[b].append(int(parents[b]))
        return chains

    def build(self) -> Draft:
        """The finished draft, padded to its largest tree."""
        laws = torch.cat(self._laws) if self._laws else None
        draft, chance = self._outline(), self._chance
        if chance is not None:
            guessed = torch.from_numpy(self._guessed >= 0).to(chance.device)
            chance = torch.where(guessed, torch.nan, chance)[:, : draft.parent.shape[1]]
        return replace(draft, qstore=laws, chance=chance)

    def as_drafter(self, index: int) -> DraftBuilder:
        """Note that nodes added from here on are the work of drafter `index` (for statistics).

        Where combinators nest, the outermost one's numbering stays.
        """
        if self._above is None or self._above._drafter_index < 0:
            self._drafter_index = index
        return self

    def handles_of(self, request: int, nodes: Sequence[int]) -> list[int]:
        """The handles of nodes of the finished draft."""
        return [request * self._capacity + node for node in nodes]

    def _need_layers(self) -> TargetLayers:
        if self._layers is None:
            raise ContractError(
                "draft: expected a drafter that requires draft layers, got one that does not; "
                "set requires = Requirements(draft_layers=...)"
            )
        return self._layers

    def _outline(self) -> Draft:
        """The draft so far, without its laws."""
        self._upload_guesses()
        nodes = int(self._count.max(initial=1))
        index = np.arange(nodes)
        return Draft(
            token=self._token[:, :nodes],
            parent=self._parent[:, :nodes],
            rank=self._rank[:, :nodes],
            depth=self._depth[:, :nodes],
            valid=index < self._count[:, None],
            kind=self._kind[:, :nodes],
            qrow=self._qrow[:, :nodes],
            qstore=None,
            drafter=self._drafter[:, :nodes],
            start=self._draft.start,
            seed=self._draft.seed,
        )

    def _scores(self, parents: Handles, logits: Tensor, vocab: Tensor | None) -> Tensor:
        """Logits over the target's vocabulary after everything but temperature and filters: [M, V]."""
        logits = self._widened(logits, vocab)
        request = self._row_of(parents)
        bad = ~logits.amax(-1).isfinite()
        index = self._index(request)
        self._note_lawless(self._behalf, index, bad)
        logits = torch.where(bad[:, None], 0, logits)
        depth = self._index(self._total_depth(parents))
        path = (
            self._along_path(parents, self.tokens_of, -1)
            if self._sampling.reads_path
            else depth.new_empty(len(parents), 0)
        )
        scores = self._sampling.scores(logits, request, path, depth)
        # Where the settings ban all that the draft deems possible, any law will do.
        return torch.where(scores.amax(-1, keepdim=True) == -torch.inf, 0, scores)

    def _widened(self, logits: Tensor, vocab: Tensor | None = None) -> Tensor:
        """Logits [M, Vd] over the target's vocabulary, [M, V]."""
        if vocab is not None:
            full = logits.new_full((len(logits), self._vocab_size), -torch.inf)
            logits = full.index_copy(1, vocab.to(logits.device), logits)
        elif logits.shape[1] < self._vocab_size:
            missing = self._vocab_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def _note_lawless(self, owner: Any, request: Tensor, lawless: Tensor) -> None:
        """Note for whom `owner` handed over logits without a law: `lawless` [M] of `request` [M]."""
        none = torch.zeros_like(self._token[:, 0])
        known = self.non_finite.setdefault(owner, none > 0)
        known |= none.index_add(0, request, lawless.long()) > 0

    def _along_path(
        self, nodes: Handles, values_of: Callable[[Handles], Tensor], padding: float
    ) -> Tensor:
        """A value of every node from below the root to each of `nodes`, in order: [M, D], padded in front."""
        columns = []
        while (nodes >= 0).any():
            inner = (nodes >= 0) & (self._total_depth(np.maximum(nodes, 0)) > 0)
            values = values_of(np.maximum(nodes, 0))
            columns.append(torch.where(torch.from_numpy(inner).to(values.device), values, padding))
            above = [self._parent_handle(int(node)) if node >= 0 else -1 for node in nodes]
            nodes = np.array(above, np.int64)
        return torch.stack(columns[::-1], 1)

    def _take_best(self, parents: Handles, scores: Tensor, room: NDArray[np.int64]) -> Handles:
        def draw(parents: Handles, q: Tensor, room: NDArray[np.int64]) -> Handles:
            width = min(int(room.max()), q.shape[1])
            if width == 1:  # the lowest id on ties, as the verifier has it
                return self._add_children(parents, q.argmax(-1, keepdim=True), room)
            return self._add_children(parents, q.topk(width, -1).indices, room)

        if self._may_draw is None:
            return draw(parents, scores, room)
        return self._draw_if_wanted(parents, scores.softmax(-1), room, draw)

    def _draw(self, parents: Handles, scores: Tensor, room: NDArray[np.int64]) -> Handles:
        q = self._sampling.laws(scores, self._row_of(parents))
        draw = self._draw_coupled if self._noise == "target" else self._draw_fresh
        return self._draw_if_wanted(parents, q, room, draw)

    def _draw_if_wanted(
        self,
        parents: Handles,
        q: Tensor,
        room: NDArray[np.int64],
        draw: Callable[[Handles, Tensor, NDArray[np.int64]], Handles],
    ) -> Handles:
        """Draw where the schedulers do not stop it, and note how likely what was drawn is."""
        keep = self._ask(parents, q)
        if keep is not None:
            room = room * keep.cpu().numpy()
        handles = np.full((len(parents), int(room.max(initial=0))), -1, np.int64)
        if len(rows := np.flatnonzero(room)):
            handles[rows] = draw(parents[rows], q[self._index(rows)], room[rows])
            row, rank = np.nonzero(handles >= 0)
            self._note_chances(handles[row, rank], q[self._index(row)])
        return handles

    def _ask(self, parents: Handles, q: Tensor) -> Tensor | None:
        """What the schedulers say before draws from q [M, V] below `parents`: bool [M]; None means go on."""
        if self._may_draw is None or self._chance is None:
            return None
        chance = self._chance.view(-1)
        path = self._along_path(parents, lambda nodes: chance[self._index(nodes)], 1.0)
        return self._may_draw(q, path.to(q.dtype))

    def _note_chances(self, nodes: Handles, q: Tensor) -> None:
        """Note how likely each of `nodes` [M], drawn from q [M, V], was, for schedulers that ask."""
        if self._chance is not None and len(nodes):
            index = self._index(nodes)
            tokens = self._token.view(-1)[index]
            self._chance.view(-1)[index] = q.gather(1, tokens[:, None])[:, 0].double()

    def _draw_coupled(self, parents: Handles, q: Tensor, room: NDArray[np.int64]) -> Handles:
        request = self._index(self._row_of(parents))
        position = self._draft.start[request] + self._index(self._total_depth(parents)) + 1
        width = min(int(room.max()), q.shape[1])
        return self._add_children(
            parents, self._random.coupled(q, self._draft.seed[request], position, width), room
        )

    def _draw_fresh(self, parents: Handles, q: Tensor, room: NDArray[np.int64]) -> Handles:
        request = self._index(self._row_of(parents))
        law, top = _set_top_aside(q, self._index(room - 1))
        node = self._index(self._next_nodes(parents, room))
        site = Site(Purpose.DRAFT, self._draft.seed[request], self._draft.start[request], node)
        tokens = torch.cat([self._random.categorical(law, site)[:, None], top], 1)
        handles = self._add_children(parents, tokens, room, first_law=sum(map(len, self._laws)))
        self._laws.append(law)
        return handles

    def _chain_on(self, parents: Handles, tokens: Tensor, q: Tensor) -> Handles:
        """Add one child below each parent, drawn from q [M, V]: handles [M]."""
        fresh = self._noise == "draft"
        first_law = sum(map(len, self._laws)) if fresh else None
        room = np.ones(len(parents), np.int64)
        if not len(parents):
            return parents
        if fresh:
            self._laws.append(q)
        return self._add_children(parents, tokens[:, None], room, first_law)[:, 0]

    def _room(self, parent: int) -> int:
        room = min(builder._own_room(parent) for builder in self._chain())
        return max(0, room)

    def _own_room(self, parent: int) -> int:
        request = self._request(parent)
        limit = self.limits[request]
        if self._depth_below(request, parent) >= limit.max_depth:
            return 0
        width = int(self._width.item(parent))
        return min(limit.max_nodes - int(self._spent[request]), limit.max_width - width)

    def _extra_limit(self, parent: int) -> DraftLimits:
        left = [
            builder.limits[request].max_nodes - int(builder._spent[request])
            for builder in self._chain()
            for request in [builder._request(parent)]
        ]
        rows = max(0, min(left))
        reach = self._reach[parent // self._capacity] - int(self._depth.item(parent))
        return DraftLimits(rows, max(0, reach), rows)

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self._vocab_size:
            raise ContractError(
                f"draft: token id {token} is outside the target's vocabulary of {self._vocab_size}; "
                "use only ids that the target can emit"
            )

    def _left_below(self, node: int) -> DraftLimits:
        """What this builder's own limits leave below a node."""
        request = self._request(node)
        limit = self.limits[request]
        return DraftLimits(
            max(0, limit.max_nodes - int(self._spent[request])),
            max(0, limit.max_depth - self._depth_below(request, node)),
            limit.max_width,
        )

    def _depth_below(self, request: int, node: int) -> int:
        return int(self._depth.item(node)) - int(self._depth.item(int(self._roots[request])))

    def _shared_room(self, parents: Handles, most: int) -> NDArray[np.int64]:
        """Children, at most `most`, that each of `parents` may get when they are served in order: [M]."""
        room = np.minimum(self.room(parents), most)
        shares = [
            (
                builder.request_of(parents),
                [limit.max_nodes for limit in builder.limits] - builder._spent,
            )
            for builder in self._chain()
        ]
        for row in range(len(parents)):
            for request, left in shares:
                room[row] = min(room[row], left[request[row]])
            for request, left in shares:
                left[request[row]] -= room[row]
        return room

    def _chain(self) -> Iterator[DraftBuilder]:
        """This builder and those whose limits hold too."""
        builder: DraftBuilder | None = self
        while builder is not None:
            yield builder
            builder = builder._above

    def _row_of(self, nodes: Handles) -> NDArray[np.int64]:
        """The draft's row that each node is in, [M]."""
        return np.asarray(nodes, np.int64) // self._capacity

    def _total_depth(self, nodes: Handles) -> NDArray[np.int64]:
        """Draft tokens from the last committed token to each node, [M]."""
        return self._depth.reshape(-1)[np.asarray(nodes, np.int64)].astype(np.int64)

    def _parent_handle(self, node: int) -> int:
        row, place = divmod(node, self._capacity)
        parent = int(self._parent[row, place])
        return -1 if parent < 0 else row * self._capacity + parent

    def _request(self, node: int) -> int:
        request = self._find_request(node)
        if request is None:
            raise ContractError(
                f"draft: node {node} is not below a root of this builder; "
                "grow only what is below builder.roots"
            )
        return request

    def _find_request(self, node: int) -> int | None:
        if self._above is None:
            return node // self._capacity
        above, way = node, []
        while above >= 0 and above not in self._owner:
            way.append(above)
            above = self._parent_handle(above)
        request = self._owner.get(above)
        if request is not None:
            self._owner.update(dict.fromkeys(way, request))
        return request

    def _next_nodes(self, parents: Handles, room: NDArray[np.int64]) -> NDArray[np.int64]:
        """The node index that each parent's first child will get, [M]."""
        count = self._count.copy()
        first = np.zeros(len(parents), np.int64)
        for row, request in enumerate(self._row_of(parents)):
            first[row] = count[request]
            count[request] += room[row]
        return first

    def _add_children(
        self,
        parents: Handles,
        tokens: Tensor,
        room: NDArray[np.int64],
        first_law: int | None = None,
    ) -> Handles:
        """Add the first `room` [M] of `tokens` [M, W] as children: handles [M, max(room)], -1 padded.

        With `first_law`, the first child of row m is DENSE with law row first_law + m.
        """
        handles = np.full((len(parents), int(room.max())), -1, np.int64)
        for row, parent in enumerate(parents):
            for rank in range(min(int(room[row]), tokens.shape[1])):
                dense = first_law is not None and rank == 0
                handles[row, rank] = self._add(
                    int(parent), Kind.DENSE if dense else Kind.POINT, (first_law or 0) + row
                )
        rows, ranks = np.nonzero(handles >= 0)
        source = self._index(rows * tokens.shape[1] + ranks)
        self._token.view(-1)[self._index(handles[rows, ranks])] = tokens.reshape(-1)[source]
        return handles

    def _add(self, parent: int, kind: Kind, qrow: int) -> int:
        for builder in self._chain():
            number = builder._request(parent)
            builder._spent[number] += 1
            builder._added[number] += 1
        request, above = divmod(parent, self._capacity)
        node = int(self._count[request])
        self._count[request] += 1
        self._parent[request, node] = above
        self._rank[request, node] = self._width[request, above]
        self._width[request, above] += 1
        self._depth[request, node] = self._depth[request, above] + 1
        self._kind[request, node] = kind
        self._qrow[request, node] = qrow if kind == Kind.DENSE else -1
        self._drafter[request, node] = self._drafter_index
        return request * self._capacity + node

    def _forbids(self, parent: int, token: int) -> bool:
        """Whether a grammar is known to forbid this token below `parent`."""
        row = parent // self._capacity
        if not self._sampling.constrains(row):
            return False
        path = self._guesses_between((row * self._capacity,), parent)
        return path is not None and not self._sampling.allows(row, path, token)

    def _guesses_between(self, roots: Iterable[int], node: int) -> list[int] | None:
        """The tokens from below one of `roots` to `node`; None if one was drawn."""
        path, above = [], set(roots)
        while node not in above:
            path.append(int(self._guessed.reshape(-1)[node]))
            node = self._parent_handle(node)
        return None if -1 in path else path[::-1]

    def _upload_guesses(self) -> None:
        known = np.flatnonzero(self._guessed.reshape(-1) >= 0)
        if len(known):
            values = self._index(self._guessed.reshape(-1)[known])
            self._token.view(-1)[self._index(known)] = values

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._token.device)


def _emitted(path: Sequence[int]) -> int:
    """How many tokens come of a path that was kept."""
    return len(path) + 1


def _set_top_aside(q: Tensor, aside: Tensor) -> tuple[Tensor, Tensor]:
    """q [M, V] without its `aside` [M] most likely tokens, normalised, and those tokens [M, max(aside)].

    Where nothing would be left, q itself: the guesses that follow may then repeat the draw, which
    costs nodes but stays exact.
    """
    most = min(int(aside.max()), q.shape[1] - 1)
    if most <= 0:
        return q, aside.new_empty(len(q), 0)
    top = q.topk(most, -1).indices
    taken = torch.arange(most, device=q.device) < aside[:, None]
    rest = q * torch.ones_like(q).scatter_(1, top, (~taken).to(q.dtype))
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, q), top
