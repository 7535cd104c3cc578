"""The public face for drafters that run a model of their own, on the engine's packed forward and paged KV.

A `ModelRunner` attaches to a causal language model. A `KVMemory` says which slots of a `KVStore`
each sequence's keys and values are in. A pass runs one `Segment` for each sequence:

    memory = KVMemory(num_blocks=1024, block_size=16)
    store = runner.new_store(memory.num_slots)
    sequence = memory.open(tokens)
    with memory.transaction() as transaction:
        transaction.reserve(sequence, len(tokens))
        chain = np.arange(len(tokens))
        rows = runner.run(store, [Segment(sequence, np.array(tokens), chain - 1, chain[-1:])])
        transaction.commit(sequence, tokens, len(tokens))

`rows.logits` [1, V] then follow the last token. What is reserved and not committed when the
transaction ends is forgotten, which is how rejected drafts leave no trace.
"""

from __future__ import annotations

from specfw.engine.attention import KVStore
from specfw.engine.batching import Segment
from specfw.engine.memory import KVMemory, KVSequence, OutOfBlocks, Transaction
from specfw.engine.model_runner import ModelRunner, Rows

__all__ = [
    "KVMemory",
    "KVSequence",
    "KVStore",
    "ModelRunner",
    "OutOfBlocks",
    "Rows",
    "Segment",
    "Transaction",
]
