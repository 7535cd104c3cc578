"""How drafters propose: they hand over logits or guesses, and the framework draws, records and keys.

There are two verbs and no third: nothing that was drawn can be removed again, and no drafter can state
a law, so losslessness does not depend on drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specfw.contracts import DraftLimits
from specfw.decoding.draft import Draft, Kind
from specfw.decoding.probabilities import SamplingBatch
from specfw.decoding.random import Purpose, RandomSource, Site
from specfw.errors import ContractError

__all__ = ["DraftBuilder"]

Handles = NDArray[np.int64]


class DraftBuilder:
    """Grows the draft trees of B requests.

    A node is named by a handle, an integer that is good for this step only; -1 is no node. Handles
    that a verb returns are in draw order.
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
        may_draw: Callable[[Tensor], Tensor | None] = lambda q: None,
    ) -> None:
        """Start with roots only.

        Args:
            root, start, seed: last committed token, its absolute position, the seed: int64 [B].
            limits: what may be drafted for each request.
            sampling: the settings of the requests, in the same order.
            random: the source of all chance.
            noise: the verifier's (`Verifier.noise`).
            vocab_size: width of the target's logits rows.
            may_draw: the schedulers' stop rule, asked with each law q [M, V] before a draw.
        """
        self.limits = list(limits)
        self._draft = Draft.empty(root, start, seed)
        self._sampling, self._random, self._noise = sampling, random, noise
        self._vocab_size, self._may_draw = vocab_size, may_draw
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
        self._laws: list[Tensor] = []
        self._law_rows = 0
        self._drafter_index = -1
        self.non_finite = torch.zeros_like(root, dtype=torch.bool)
        """bool [B]: requests for which a drafter handed over logits without a law."""

    @property
    def roots(self) -> Handles:
        """The handle of each request's root, [B]."""
        return np.arange(len(self.limits), dtype=np.int64) * self._capacity

    def request_of(self, nodes: Handles) -> NDArray[np.int64]:
        """Which request each node belongs to, [M]."""
        return np.asarray(nodes, np.int64) // self._capacity

    def depth_of(self, nodes: Handles) -> NDArray[np.int64]:
        """Draft tokens from the root to each node, [M]; 0 at a root."""
        return self._depth.reshape(-1)[np.asarray(nodes, np.int64)].astype(np.int64)

    def parent_of(self, nodes: Handles) -> Handles:
        """The parents' handles, [M]; -1 for a root."""
        nodes = np.asarray(nodes, np.int64)
        parent = self._parent.reshape(-1)[nodes].astype(np.int64)
        return np.where(parent < 0, -1, self.request_of(nodes) * self._capacity + parent)

    def tokens_of(self, nodes: Handles) -> Tensor:
        """The tokens that nodes carry: int64 [M], on the target's device."""
        self._upload_guesses()
        index = torch.from_numpy(np.asarray(nodes, np.int64)).to(self._token.device)
        return self._token.view(-1).index_select(0, index)

    def room(self, parents: Handles) -> NDArray[np.int64]:
        """How many children each node may still get, were it the only one to get any: [M]."""
        return np.array([self._room(int(parent)) for parent in parents], np.int64)

    def wants_more(self, parents: Handles) -> NDArray[np.bool_]:
        """Whether a draft may go on below each node: bool [M]."""
        return self.room(parents) > 0

    def guess(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """Add a chain of guesses below `parent` (a handle): one handle a token, cut at the limits.

        A guess that is there already is walked through, not doubled.

        Raises:
            ContractError: a token id is outside the target's vocabulary.
        """
        handles: list[int] = []
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise ContractError(
                    f"draft: token id {token} is outside the target's vocabulary of {self._vocab_size}; "
                    "guess only ids that the target can emit"
                )
            known = self._find_guess(parent, token)
            if known is None:
                if self._room(parent) == 0:
                    break
                known = self._add(parent, Kind.POINT, -1)
                self._guessed.reshape(-1)[known] = token
            handles.append(known)
            parent = known
        return handles

    def sample(self, parents: Handles, logits: Tensor, width: int = 1, vocab: Tensor | None = None) -> Handles:
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
        handles = np.full((len(parents), width), -1, np.int64)
        room = np.minimum(self._shared_room(parents), width)
        rows = np.flatnonzero(room)
        if not len(rows):
            return handles
        scores = self._scores(parents[rows], logits[self._index(rows)], vocab)
        for greedy in (True, False):
            part = np.flatnonzero(self._sampling.greedy[self.request_of(parents[rows])] == greedy)
            if len(part):
                draw = self._take_best if greedy else self._draw
                drawn = draw(parents[rows[part]], scores[self._index(part)], room[rows[part]])
                handles[rows[part], : drawn.shape[1]] = drawn
        return handles

    def build(self) -> Draft:
        """The finished draft, padded to its largest tree."""
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
            qstore=torch.cat(self._laws) if self._laws else None,
            drafter=self._drafter[:, :nodes],
            start=self._draft.start,
            seed=self._draft.seed,
        )

    def as_drafter(self, index: int) -> DraftBuilder:
        """Note that nodes added from here on are the work of drafter `index` (for statistics)."""
        self._drafter_index = index
        return self

    def handles_of(self, request: int, nodes: Sequence[int]) -> list[int]:
        """The handles of nodes of the finished draft."""
        return [request * self._capacity + node for node in nodes]

    def _scores(self, parents: Handles, logits: Tensor, vocab: Tensor | None) -> Tensor:
        """Logits over the target's vocabulary after everything but temperature and filters: [M, V]."""
        if vocab is not None:
            full = logits.new_full((len(logits), self._vocab_size), -torch.inf)
            logits = full.index_copy(1, vocab.to(logits.device), logits)
        elif logits.shape[1] < self._vocab_size:
            missing = self._vocab_size - logits.shape[1]
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        logits = logits[:, : self._vocab_size].to(self._token.device)
        request = self.request_of(parents)
        bad = ~logits.amax(-1).isfinite()
        index = self._index(request)
        self.non_finite |= torch.zeros_like(self._token[:, 0]).index_add(0, index, bad.long()) > 0
        logits = torch.where(bad[:, None], 0, logits)
        depth = self._index(self.depth_of(parents))
        path = self._path_tokens(parents) if self._sampling.penalised else depth.new_empty(len(parents), 0)
        return self._sampling.scores(logits, request, path, depth)

    def _path_tokens(self, nodes: Handles) -> Tensor:
        """Draft tokens from below the root to each node: int64 [M, D], -1 padded."""
        columns = []
        while (nodes >= 0).any():
            inner = (nodes >= 0) & (self.depth_of(np.maximum(nodes, 0)) > 0)
            tokens = self.tokens_of(np.maximum(nodes, 0))
            columns.append(torch.where(torch.from_numpy(inner).to(tokens.device), tokens, -1))
            nodes = np.where(nodes >= 0, self.parent_of(np.maximum(nodes, 0)), -1)
        return torch.stack(columns, 1)

    def _take_best(self, parents: Handles, scores: Tensor, room: NDArray[np.int64]) -> Handles:
        width = min(int(room.max()), scores.shape[1])
        if width == 1:  # the lowest id on ties, as the verifier has it
            return self._add_children(parents, scores.argmax(-1, keepdim=True), room)
        return self._add_children(parents, scores.topk(width, -1).indices, room)

    def _draw(self, parents: Handles, scores: Tensor, room: NDArray[np.int64]) -> Handles:
        q = self._sampling.laws(scores, self.request_of(parents))
        keep = self._may_draw(q)
        if keep is not None:
            room = room * keep.cpu().numpy()
        rows = np.flatnonzero(room)
        handles = np.full((len(parents), int(room.max(initial=0))), -1, np.int64)
        if len(rows):
            draw = self._draw_coupled if self._noise == "target" else self._draw_fresh
            handles[rows] = draw(parents[rows], q[self._index(rows)], room[rows])
        return handles

    def _draw_coupled(self, parents: Handles, q: Tensor, room: NDArray[np.int64]) -> Handles:
        request = self._index(self.request_of(parents))
        position = self._draft.start[request] + self._index(self.depth_of(parents)) + 1
        width = min(int(room.max()), q.shape[1])
        return self._add_children(parents, self._random.coupled(q, self._draft.seed[request], position, width), room)

    def _draw_fresh(self, parents: Handles, q: Tensor, room: NDArray[np.int64]) -> Handles:
        request = self._index(self.request_of(parents))
        law, top = _set_top_aside(q, self._index(room - 1))
        node = self._index(self._next_nodes(parents, room))
        site = Site(Purpose.DRAFT, self._draft.seed[request], self._draft.start[request], node)
        tokens = torch.cat([self._random.categorical(law, site)[:, None], top], 1)
        handles = self._add_children(parents, tokens, room, first_law=self._law_rows)
        self._laws.append(law)
        self._law_rows += len(law)
        return handles

    def _room(self, parent: int) -> int:
        request, node = divmod(parent, self._capacity)
        limit = self.limits[request]
        if self._depth[request, node] >= limit.max_depth:
            return 0
        nodes = limit.max_nodes + 1 - int(self._count[request])
        return max(0, min(nodes, limit.max_width - int(self._width[request, node])))

    def _shared_room(self, parents: Handles) -> NDArray[np.int64]:
        """Children that each of `parents` may get when they are served in order: [M]."""
        room = self.room(parents)
        left = [limit.max_nodes + 1 - int(count) for limit, count in zip(self.limits, self._count, strict=True)]
        for row, request in enumerate(self.request_of(parents)):
            room[row] = min(room[row], left[request])
            left[request] -= room[row]
        return room

    def _next_nodes(self, parents: Handles, room: NDArray[np.int64]) -> NDArray[np.int64]:
        """The node index that each parent's first child will get, [M]."""
        count = self._count.copy()
        first = np.zeros(len(parents), np.int64)
        for row, request in enumerate(self.request_of(parents)):
            first[row] = count[request]
            count[request] += room[row]
        return first

    def _add_children(
        self, parents: Handles, tokens: Tensor, room: NDArray[np.int64], first_law: int | None = None
    ) -> Handles:
        """Add the first `room` [M] of `tokens` [M, W] as children: handles [M, max(room)], -1 padded.

        With `first_law`, the first child of row m is DENSE with law row first_law + m.
        """
        handles = np.full((len(parents), int(room.max())), -1, np.int64)
        for row, parent in enumerate(parents):
            for rank in range(min(int(room[row]), tokens.shape[1])):
                dense = first_law is not None and rank == 0
                handles[row, rank] = self._add(int(parent), Kind.DENSE if dense else Kind.POINT, (first_law or 0) + row)
        rows, ranks = np.nonzero(handles >= 0)
        source = self._index(rows * tokens.shape[1] + ranks)
        self._token.view(-1)[self._index(handles[rows, ranks])] = tokens.reshape(-1)[source]
        return handles

    def _add(self, parent: int, kind: Kind, qrow: int) -> int:
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

    def _find_guess(self, parent: int, token: int) -> int | None:
        request, above = divmod(parent, self._capacity)
        same = (self._parent[request] == above) & (self._guessed[request] == token)
        return request * self._capacity + int(same.argmax()) if same.any() else None

    def _upload_guesses(self) -> None:
        known = np.flatnonzero(self._guessed.reshape(-1) >= 0)
        if len(known):
            values = self._index(self._guessed.reshape(-1)[known])
            self._token.view(-1)[self._index(known)] = values

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._token.device)


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
