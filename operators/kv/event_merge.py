"""What a worker does to its engine's changes before they are events: fewer of them, and none that says nothing.

    changes ──DuplicateFilter──► those that change a rank's cache ──merged──► as few as say the same

Source: dynamo lib/llm/src/kv_router/publisher, event coalescing and EventDedupFilter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pipeline.protocols.kv_events import KvEventData, KvRemoved, KvStored, StorageTier

from .engine_events import EngineChange

MERGED_BLOCKS = 128
"""Most blocks of a merged change; one that comes larger from the engine stays whole."""


def merged(changes: Iterable[EngineChange], limit_blocks: int = MERGED_BLOCKS) -> list[EngineChange]:
    """Neighbours of one rank and tier as one change: stores that continue each other, and removals.

    Another rank, tier or kind, a store that begins elsewhere, and a clear come between.
    """
    found: list[EngineChange] = []
    for change in changes:
        joint = _joined(found[-1], change, limit_blocks) if found else None
        if joint is None:
            found.append(change)
        else:
            found[-1] = joint
    return found


def _joined(first: EngineChange, second: EngineChange, limit_blocks: int) -> EngineChange | None:
    if (first.dp_rank, first.storage_tier) != (second.dp_rank, second.storage_tier):
        return None
    left, right = first.change, second.change
    data: KvEventData | None = None
    if isinstance(left, KvStored) and isinstance(right, KvStored):
        if left.blocks and right.parent_hash == left.blocks[-1].block_hash:
            blocks = left.blocks + right.blocks
            data = KvStored(left.parent_hash, blocks, left.start_position) if len(blocks) <= limit_blocks else None
    elif isinstance(left, KvRemoved) and isinstance(right, KvRemoved):
        names = left.block_hashes + right.block_hashes
        data = KvRemoved(names) if len(names) <= limit_blocks else None
    return None if data is None else EngineChange(first.dp_rank, data, first.storage_tier)


class DuplicateFilter:
    """Counts how often each block of a rank and tier was stored: it is gone when it was removed as often.

    For engines that keep one block several times. Stores pass; of a removal those names that are gone by it, or were
    never stored; a clear begins the rank's counts anew.
    """

    def __init__(self) -> None:
        self._stored: dict[tuple[int, StorageTier], Counter[int]] = {}

    def passed(self, change: EngineChange) -> EngineChange | None:
        """The change as it is to be passed on; None if nothing of it is."""
        key = (change.dp_rank, change.storage_tier)
        if isinstance(change.change, KvStored):
            self._stored.setdefault(key, Counter()).update(block.block_hash for block in change.change.blocks)
            return change
        if isinstance(change.change, KvRemoved):
            gone = [name for name in change.change.block_hashes if self._is_gone(key, name)]
            return EngineChange(change.dp_rank, KvRemoved(gone), change.storage_tier) if gone else None
        for rank_and_tier in [other for other in self._stored if other[0] == change.dp_rank]:
            del self._stored[rank_and_tier]
        return change

    def _is_gone(self, key: tuple[int, StorageTier], name: int) -> bool:
        counts = self._stored.get(key, Counter())
        if counts[name] > 1:
            counts[name] -= 1
            return False
        counts.pop(name, None)
        return True
