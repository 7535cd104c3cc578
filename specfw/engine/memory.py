"""Which blocks hold whose keys and values: the host side of the KV memory, without any tensor.

A slot is one position's row in the pools that hold keys and values; a block is `block_size` slots.
Three invariants keep everything here short:

1. Between transactions a sequence holds exactly the blocks that its `n_kv` positions fill, so no
   draft slot is left.
2. With the prefix cache on, the published blocks of a sequence are exactly its full ones. A block
   is published once its tokens are committed and their KV is written, and is never written again.
3. Whoever refers to a published block refers to all its ancestors, and drops the deepest first.
   So in the order of eviction children come before parents, and only leaves are evicted.

Not thread-safe: one thread steps the engine.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as counter

import numpy as np
from numpy.typing import NDArray

from specfw.errors import ConfigError, ContractError, SpecfwError

__all__ = ["TRASH", "KVMemory", "KVSequence", "OutOfBlocks", "Transaction"]

TRASH = 0
"""The block that is never handed out: padding rows write to and read from its slots."""


class OutOfBlocks(SpecfwError):
    """More blocks were asked for than are free or cached; nothing was changed.

    An event rather than a fault: the engine answers it with a preemption.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"KVMemory: {needed} more blocks are needed but {available} are available; "
            "release a sequence or reserve less"
        )
        self.needed = needed
        self.available = available


@dataclass(eq=False, slots=True)
class KVSequence:
    """The block table of one request; made by `KVMemory.open`, changed by its memory only."""

    block_size: int
    blocks: list[int] = field(default_factory=list)
    """Physical block of logical positions [i * block_size, (i + 1) * block_size), by i."""
    n_kv: int = 0
    """Committed tokens whose KV is written: positions [0, n_kv)."""

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Physical slots of logical positions [start, stop): int64 [stop - start].

        Valid until the next commit, truncation or release of this sequence, or the end of the
        transaction; each may replace or free blocks.

        Raises:
            ContractError: the range is not within the sequence's blocks.
        """
        if not 0 <= start <= stop <= len(self.blocks) * self.block_size:
            raise ContractError(
                f"KVSequence.slots: expected 0 <= start <= stop <= "
                f"{len(self.blocks) * self.block_size}, got [{start}, {stop}); reserve room first"
            )
        first = start // self.block_size
        table = np.array(self.blocks[first : -(-stop // self.block_size)], dtype=np.int64)
        block, offset = np.divmod(np.arange(start, stop, dtype=np.int64), self.block_size)
        slots: NDArray[np.int64] = table[block - first] * self.block_size + offset
        return slots


class Transaction:
    """One step's changes to a memory; see `KVMemory.transaction`."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._granted: dict[KVSequence, int] = {}
        """First position beyond the reserved room, by sequence."""
        self._closed = False

    def reserve(self, sequence: KVSequence, count: int) -> None:
        """Make room for `count` slots beyond `n_kv`; what stays uncommitted is freed at the end.

        Reserving again in the same transaction only ever adds room.

        Raises:
            OutOfBlocks: too few blocks are available; nothing was changed.
            ContractError: `count` is negative, or the sequence or the transaction is closed.
        """
        self._must_be_running("reserve")
        needed = self._memory.blocks_needed(sequence, count)
        if needed > self._memory.available:
            raise OutOfBlocks(needed, self._memory.available)
        granted = self._granted.get(sequence, sequence.n_kv)
        self._granted[sequence] = max(granted, sequence.n_kv + count)
        self._memory._grow(sequence, needed)

    def commit(self, sequence: KVSequence, tokens: Sequence[int], n_kv: int) -> None:
        """Declare that `tokens[:n_kv]` are committed and their KV is written in the right slots.

        Sets the sequence's `n_kv` and publishes the blocks that became full. Where another
        sequence has published the same block first, ours is freed and that one takes its place,
        so move kept rows into place before, and ask for slots again afterwards.

        Raises:
            ContractError: `n_kv` is lower than before, beyond the reserved room or beyond
                `tokens`, or the sequence or the transaction is closed.
        """
        self._must_be_running("commit")
        self._memory._must_be_open(sequence, "commit")
        limit = min(len(tokens), self._granted.get(sequence, sequence.n_kv))
        if not sequence.n_kv <= n_kv <= limit:
            raise ContractError(
                f"KVMemory.commit: expected n_kv from {sequence.n_kv} (committed before) to "
                f"{limit} (reserved and in tokens), got {n_kv}; reserve enough room first, and "
                "use truncate to go back"
            )
        self._memory._advance(sequence, tokens, n_kv)

    def _must_be_running(self, verb: str) -> None:
        if self._closed:
            raise ContractError(
                f"KVMemory.{verb}: expected a running transaction, got one that has ended; "
                "start another"
            )

    def _close(self) -> None:
        self._closed = True
        for sequence in self._granted:
            self._memory._trim(sequence)


class KVMemory:
    """Hands out KV blocks to sequences, shares full blocks of equal prefixes, and evicts old ones.

    A usable block (ids 1 to `num_blocks`) is in exactly one state: free; used, by one or more
    sequences; or cached, which is published but used by none, and evicted when the free blocks
    run out, the longest unused first.

    Raises:
        ConfigError: `num_blocks` or `block_size` is below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(
                    f"KVMemory: expected {name} of at least 1, got {value}; raise {name}"
                )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.query_tokens = 0
        """Tokens of all sequences opened so far."""
        self.hit_tokens = 0
        """Those of them whose KV was found by `open`."""
        self._free = list(range(num_blocks, TRASH, -1))
        self._references: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index = _PrefixIndex()
        self._sequences: set[KVSequence] = set()
        self._transaction: Transaction | None = None

    @property
    def num_slots(self) -> int:
        """Rows that each pool of keys or values needs, those of the trash block included."""
        return (self.num_blocks + 1) * self.block_size

    @property
    def available(self) -> int:
        """Blocks that can be reserved: the free ones and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Blocks that sequences refer to, a shared block counted once."""
        return len(self._references)

    @property
    def cached(self) -> int:
        """Published blocks that no sequence refers to."""
        return len(self._cached)

    def open(self, tokens: Sequence[int], most: int | None = None) -> KVSequence:
        """Start a sequence, which shares the longest published chain of full blocks of `tokens`.

        Of these, at most the first `most` are shared, if given.

        `n_kv` starts at the number of shared tokens: at most `len(tokens) - 1`, since the last
        committed token must be in the next forward. Without the prefix cache nothing is ever
        published, so nothing is shared. Takes no block from the free ones.
        """
        sequence = KVSequence(self.block_size)
        self._sequences.add(sequence)
        for block in self._index.chain(tokens[:-1][:most], self.block_size):
            self._refer(block)
            sequence.blocks.append(block)
        sequence.n_kv = len(sequence.blocks) * self.block_size
        self.query_tokens += len(tokens)
        self.hit_tokens += sequence.n_kv
        return sequence

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Reserve and commit within; on any exit reserved sequences keep only what is committed.

        Sequences may be opened and released meanwhile.

        Raises:
            ContractError: another transaction of this memory is running.
        """
        if self._transaction is not None:
            raise ContractError(
                "KVMemory.transaction: expected none to be running, got a second one; end the first"
            )
        self._transaction = running = Transaction(self)
        try:
            yield running
        finally:
            self._transaction = None
            running._close()

    def blocks_needed(self, sequence: KVSequence, count: int) -> int:
        """Blocks that `reserve(sequence, count)` would take now.

        Raises:
            ContractError: `count` is negative, or the sequence is not open here.
        """
        self._must_be_open(sequence, "reserve")
        if count < 0:
            raise ContractError(
                f"KVMemory.reserve: expected a count of at least 0, got {count}; "
                "use truncate to go back"
            )
        return max(0, self._filled(sequence.n_kv + count) - len(sequence.blocks))

    def truncate(self, sequence: KVSequence, n_kv: int) -> int:
        """Go back to at most `n_kv` positions; returns the sequence's `n_kv` from now on.

        Where `n_kv` lies inside a published block, which must not be written again, the sequence
        goes back to that block's start, and the caller recomputes up to `block_size - 1` tokens.
        Published blocks stay findable: their KV is right for the tokens they are found by.

        Raises:
            ContractError: `n_kv` is negative or above the present one, the sequence is not open
                here, or it has slots reserved in the running transaction.
        """
        self._must_be_open(sequence, "truncate")
        if self._transaction is not None and sequence in self._transaction._granted:
            raise ContractError(
                "KVMemory.truncate: expected a sequence without reserved slots, got one that the "
                "running transaction reserved for; truncate before reserving or after the end"
            )
        if not 0 <= n_kv <= sequence.n_kv:
            raise ContractError(
                f"KVMemory.truncate: expected n_kv from 0 to {sequence.n_kv}, got {n_kv}; "
                "only commit goes forward"
            )
        index, offset = divmod(n_kv, self.block_size)
        if offset and sequence.blocks[index] in self._index:
            n_kv -= offset
        sequence.n_kv = n_kv
        self._trim(sequence)
        return n_kv

    def release(self, sequence: KVSequence) -> None:
        """End a sequence that finished, was cancelled or is preempted, and drop all its blocks.

        Its published blocks stay findable until they are evicted.

        Raises:
            ContractError: the sequence is not open here (released before, or another memory's).
        """
        self._must_be_open(sequence, "release")
        sequence.n_kv = 0
        self._trim(sequence)
        self._sequences.remove(sequence)

    def check(self) -> None:
        """Check every invariant of this memory; slow, for tests.

        Raises:
            ContractError: an invariant does not hold; the message names it.
        """
        self._check_blocks()
        for sequence in self._sequences:
            self._check_sequence(sequence)
        self._index.check(self.block_size, list(self._cached))

    def _filled(self, n: int) -> int:
        """Blocks that n positions fill, the last perhaps in part."""
        return -(-n // self.block_size)

    def _must_be_open(self, sequence: KVSequence, verb: str) -> None:
        if sequence not in self._sequences:
            raise ContractError(
                f"KVMemory.{verb}: expected a sequence that is open in this memory, got one that "
                "was released or belongs to another; open a sequence and release it once"
            )

    def _grow(self, sequence: KVSequence, blocks: int) -> None:
        for _ in range(blocks):
            block = self._take()
            self._refer(block)
            sequence.blocks.append(block)

    def _trim(self, sequence: KVSequence) -> None:
        """Drop the blocks beyond `n_kv`, the deepest first (invariant 3)."""
        keep = self._filled(sequence.n_kv)
        while len(sequence.blocks) > keep:
            self._drop(sequence.blocks.pop())

    def _advance(self, sequence: KVSequence, tokens: Sequence[int], n_kv: int) -> None:
        if self.prefix_cache:
            for index in range(sequence.n_kv // self.block_size, n_kv // self.block_size):
                self._publish(sequence, tokens, index)
                sequence.n_kv = (index + 1) * self.block_size
        sequence.n_kv = n_kv

    def _publish(self, sequence: KVSequence, tokens: Sequence[int], index: int) -> None:
        """Publish a sequence's block, or take the equal one that is published already."""
        parent = sequence.blocks[index - 1] if index else TRASH
        content = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
        ours = sequence.blocks[index]
        theirs = self._index.find(parent, content)
        if theirs is None:
            self._index.add(parent, content, ours)
        else:
            # Taking theirs, not keeping ours unpublished, is what makes invariant 3 hold.
            self._refer(theirs)
            sequence.blocks[index] = theirs
            self._drop(ours)

    def _take(self) -> int:
        """A block that nobody refers to and nobody can find any more."""
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        self._index.remove(block)
        return block

    def _refer(self, block: int) -> None:
        self._cached.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1

    def _drop(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        del self._references[block]
        if block in self._index:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _check_blocks(self) -> None:
        held = Counter(block for sequence in self._sequences for block in sequence.blocks)
        _expect(held == self._references, "references do not equal those of the block tables")
        places = sorted([*self._free, *self._cached, *self._references])
        _expect(
            places == list(range(1, self.num_blocks + 1)),
            "free, used and cached blocks do not partition the pool",
        )
        _expect(not any(block in self._index for block in self._free), "a free block is published")
        _expect(
            all(block in self._index for block in self._cached), "a cached block is not published"
        )
        _expect(
            all(n == 1 or block in self._index for block, n in held.items()),
            "a block that is not published is shared",
        )

    def _check_sequence(self, sequence: KVSequence) -> None:
        blocks, full = sequence.blocks, sequence.n_kv // self.block_size
        _expect(len(set(blocks)) == len(blocks), "a sequence holds a block twice")
        granted = self._transaction._granted if self._transaction is not None else {}
        _expect(
            len(blocks) == self._filled(max(sequence.n_kv, granted.get(sequence, 0))),
            "a sequence holds more or fewer blocks than its n_kv and reserved room fill",
        )
        published = full if self.prefix_cache else 0
        _expect(
            all((block in self._index) == (i < published) for i, block in enumerate(blocks)),
            "the published blocks of a sequence are not its full, committed ones",
        )
        _expect(
            self._index.is_chain(blocks[:published]),
            "the published blocks of a sequence do not follow each other",
        )


@dataclass(frozen=True, slots=True)
class _Published:
    """A node of the prefix trie."""

    serial: int
    parent: int
    """Serial of the block before, 0 for the first of a sequence."""
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.parent, self.tokens


class _PrefixIndex:
    """The published blocks, as a trie: a block is found by the block before it and its own tokens.

    Keys are compared token by token, so unequal prefixes never meet. Parents are named by serials
    that are never used again, so nothing that hung from an evicted block can be found. The trash
    block, never published, stands for the trie's root.
    """

    def __init__(self) -> None:
        self._serials = counter(1)
        self._blocks: dict[tuple[int, tuple[int, ...]], int] = {}
        self._nodes: dict[int, _Published] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def find(self, parent: int, tokens: tuple[int, ...]) -> int | None:
        """The block that holds `tokens` after the published block `parent`."""
        return self._blocks.get((self._serial(parent), tokens))

    def chain(self, tokens: Sequence[int], block_size: int) -> Iterator[int]:
        """The blocks of the longest published chain of full blocks of `tokens`, in order."""
        parent = TRASH
        for stop in range(block_size, len(tokens) + 1, block_size):
            block = self.find(parent, tuple(tokens[stop - block_size : stop]))
            if block is None:
                return
            yield block
            parent = block

    def add(self, parent: int, tokens: tuple[int, ...], block: int) -> None:
        """Publish `block`, which holds the KV of `tokens` after the published block `parent`."""
        node = _Published(next(self._serials), self._serial(parent), tokens)
        self._nodes[block] = node
        self._blocks[node.key] = block

    def remove(self, block: int) -> None:
        """Make `block` unfindable."""
        del self._blocks[self._nodes.pop(block).key]

    def is_chain(self, blocks: Iterable[int]) -> bool:
        """Whether the published `blocks` follow each other from the start of a sequence."""
        parent = TRASH
        for block in blocks:
            if self._nodes[block].parent != self._serial(parent):
                return False
            parent = block
        return True

    def check(self, block_size: int, eviction_order: Sequence[int]) -> None:
        """Check that the trie is whole, and stays whole if blocks are evicted in this order.

        Raises:
            ContractError: it is not.
        """
        _expect(
            {node.key: block for block, node in self._nodes.items()} == self._blocks,
            "a published block is not found by its own tokens",
        )
        _expect(
            all(len(node.tokens) == block_size for node in self._nodes.values()),
            "a published block is not full",
        )
        alive = {node.serial for node in self._nodes.values()} | {self._serial(TRASH)}
        _expect(
            all(node.parent in alive for node in self._nodes.values()),
            "a published block outlived the one before it",
        )
        parents = Counter(node.parent for node in self._nodes.values())
        for block in eviction_order:
            node = self._nodes[block]
            _expect(not parents[node.serial], "a cached block would be evicted before its children")
            parents[node.parent] -= 1

    def _serial(self, block: int) -> int:
        return 0 if block == TRASH else self._nodes[block].serial


def _expect(holds: bool, fault: str) -> None:
    if not holds:
        raise ContractError(
            f"KVMemory.check: {fault}; block tables are changed by their memory only"
        )
