"""EngineEvents: an engine's own cache events, converted into changes that a router can apply.

    EngineBatch ──► are its blocks here, ours, and of main attention? ──yes──► hash their tokens ──► EngineChange
                                       └─ no: Filtered, with the reason

What is filtered takes no event id. Source: dynamo lib/kv-router/src/zmq_wire, mod.rs, filter.rs and convert.rs. Other
than there a block on disk or further away is filtered by its attention, and has its parent's tenant, as any other.

Namespaces: the tenant of a rank's blocks, for stores that omit it because they continue one that named it.

DuplicateFilter, merged: a worker reduces its engine's changes before they become events.

    changes ──DuplicateFilter──► those that change a rank's cache ──merged──► as few as possible

Source: dynamo lib/llm/src/kv_router/publisher, event coalescing and EventDedupFilter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.llm import block_hashes, hash_seed, media_hashes
from pipeline.protocols.kv import KvCleared, KvEventData, KvRemoved, KvStored, StorageTier, StoredBlock

from .engine_wire import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineIgnored,
    EngineRemoved,
    EngineStored,
    Origin,
    Undecodable,
)

LIMIT_BLOCKS = 2**20
_BITS: Mapping[StorageTier, int] = {"device": 1, "host_pinned": 2, "disk": 4, "external": 8}


class AmbiguousNamespace(Exception):
    """The parent is known under two tenants, so that of the child is unknown."""


class Namespaces:
    """The tenant of each salted block of one rank, by the engine's name of it; over `limit_blocks` the oldest go.

    Blocks without a tenant are not kept: a parent that is not known has none. A block stored under two tenants, or
    under one and none, stays ambiguous until the rank is cleared. One that several tiers hold is gone with the last.
    """

    def __init__(self, limit_blocks: int = LIMIT_BLOCKS) -> None:
        self._limit_blocks = limit_blocks
        self._of: dict[int, str | None] = {}  # None: ambiguous
        self._tiers: dict[int, int] = {}  # as bits

    def __len__(self) -> int:
        return len(self._of)

    def of_store(self, parent: int | None, named: str | None) -> str | None:
        """Return the tenant of a store: the one it names, else its parent's. Raises AmbiguousNamespace."""
        if named is not None or parent is None or parent not in self._of:
            return named
        inherited = self._of[parent]
        if inherited is None:
            raise AmbiguousNamespace
        return inherited

    def stored(self, names: Iterable[int], namespace: str | None, tier: StorageTier = "device") -> None:
        """Note blocks that were stored, for that tenant."""
        of, tiers = self._of, self._tiers
        for name in names:
            if name in of:
                of[name] = namespace if of[name] == namespace else None
            elif namespace is not None:
                of[name] = namespace
                tiers[name] = 0
            else:
                continue
            tiers[name] |= _BITS[tier]
        while len(of) > self._limit_blocks:
            oldest = next(iter(of))
            del of[oldest], tiers[oldest]

    def removed(self, names: Iterable[int], tier: StorageTier = "device") -> None:
        """Note blocks that were removed from that tier; an ambiguous one stays so even if it is in no other."""
        for name in names:
            if name in self._of:
                self._tiers[name] &= ~_BITS[tier]
                if not self._tiers[name] and self._of[name] is not None:
                    del self._of[name], self._tiers[name]


_log = logging.getLogger(__name__)

FilterReason = Literal[
    "undecodable",
    "ignored_event",
    "non_local_locality",
    "unknown_medium",
    "unsupported_ownership",
    "unknown_ownership",
    "ambiguous_scoped_clear",
    "ambiguous_cache_namespace",
    "non_main_attention_kind",
    "unknown_kind",
    "non_main_attention_group",
    "unlearned_group_idx",
    "no_tokens",
    "other_block_size",
    "fewer_hashes_than_blocks",
    "fewer_blocks_than_hashes",
    "repeated_block",
]

MEDIA: dict[str | None, StorageTier] = {
    **dict.fromkeys([None, "GPU", "DEVICE"], "device"),
    **dict.fromkeys(["CPU", "CPU_PINNED", "CPU_TIER1"], "host_pinned"),
    **dict.fromkeys(["CPU_TIER2", "DISK", "NVME", "STORAGE"], "disk"),
    **dict.fromkeys(["EXTERNAL", "NETWORK", "REMOTE", "SHARED"], "external"),
}
"""The names of storage tiers in engines' events, compared in capitals; None where the event has none."""

MAIN_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
"""Attention whose blocks a prompt can be continued from."""
OTHER_KINDS = {
    *("sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention"),
    *("encoder_only_attention", "cross_attention"),
}
_OWN = {None, "worker"}
"""The owners whose blocks are the worker's own; events of a cache manager beside the engine are filtered."""
_CACHE_MANAGER = "kvcr"
_TEACHING: set[StorageTier] = {"device", "host_pinned"}
"""Tiers whose events are complete. For blocks further away engines send little more than the names."""
_WARNINGS = 3


@frozen
class EngineChange:
    """A change of a rank's cache, to be published under the rank's next id."""

    dp_rank: int
    change: KvEventData
    storage_tier: StorageTier = "device"


@frozen
class Filtered:
    """An event that is not passed on, and why."""

    dp_rank: int
    reason: FilterReason


class EngineEvents:
    """See the module. Keeps for each rank the kind of attention of its cache groups, and its blocks' tenants."""

    def __init__(self, block_size_tokens: int) -> None:
        if block_size_tokens < 1:
            raise InvalidArgument(f"must be at least 1, got {block_size_tokens}", field="block_size_tokens")
        self.block_size_tokens = block_size_tokens
        self.lost_batches = 0
        """How many of the engine's messages did not arrive, by their sequence, which begins with 0."""
        self._next_sequence = 0
        self._kinds: dict[tuple[int, int], str] = {}
        self._namespaces: dict[int, Namespaces] = {}
        self._warned: Counter[str] = Counter()

    def convert(self, batch: EngineBatch) -> list[EngineChange | Filtered]:
        """Return the change for each event of the batch, in order.

        Batches missing before this one are counted as lost, also before the first that arrives. Blocks stored in them
        stay unknown until they are stored again, and what continues these is refused by the index; blocks removed in
        them are believed to be there until they are removed again, or all are cleared.
        """
        if (missing := batch.sequence - self._next_sequence) > 0:
            self.lost_batches += missing
            text = "%d messages of the engine before number %d did not arrive: what it has cached is known in part only"
            self._warn(text, missing, batch.sequence, kind="loss")
        self._next_sequence = batch.sequence + 1
        return [self._converted(batch.dp_rank, event) for event in batch.events]

    def _converted(self, dp_rank: int, event: EngineEvent) -> EngineChange | Filtered:
        if isinstance(event, Undecodable):
            self._warn("an event of the engine cannot be read: %s", event.reason)
            return Filtered(dp_rank, "undecodable")
        if isinstance(event, EngineIgnored):
            return Filtered(dp_rank, "ignored_event")
        if (reason := _foreign(event.origin)) is not None:
            return Filtered(dp_rank, reason)
        if not isinstance(event, EngineCleared):
            return self._moved(dp_rank, event, MEDIA[_shown(event.origin.medium)])
        if event.origin.medium is not None:  # only a tier of the rank, and there is no such change
            return Filtered(dp_rank, "ambiguous_scoped_clear")
        self._namespaces.pop(dp_rank, None)
        return EngineChange(dp_rank, KvCleared())

    def _moved(self, dp_rank: int, event: EngineStored | EngineRemoved, tier: StorageTier) -> EngineChange | Filtered:
        if isinstance(event, EngineStored) and tier in _TEACHING:
            self._learn(dp_rank, event.origin)
        if (reason := self._not_main(dp_rank, event.origin)) is not None:
            return Filtered(dp_rank, reason)
        namespaces = self._namespaces.setdefault(dp_rank, Namespaces())
        if isinstance(event, EngineRemoved):
            namespaces.removed(event.names, tier)
            return EngineChange(dp_rank, KvRemoved(event.names), tier)
        if (reason := self._not_its_hashes(event)) is not None:
            return Filtered(dp_rank, reason)
        try:
            namespace = namespaces.of_store(event.parent, event.namespace)
        except AmbiguousNamespace:
            return Filtered(dp_rank, "ambiguous_cache_namespace")
        if tier in _TEACHING:
            namespaces.stored(event.names, namespace, tier)
        return EngineChange(dp_rank, self._stored(event, namespace), tier)

    def _learn(self, dp_rank: int, origin: Origin) -> None:
        if origin.group is not None and origin.kind is not None:
            self._kinds[dp_rank, origin.group] = origin.kind

    def _not_main(self, dp_rank: int, origin: Origin) -> FilterReason | None:
        """Why blocks of this kind of attention are of no use to a router; a group has the kind of its stores."""
        kind, learned = origin.kind, False
        if kind is None:
            if origin.group is None:
                return None
            kind, learned = self._kinds.get((dp_rank, origin.group)), True
            if kind is None:
                return None if origin.group == 0 else "unlearned_group_idx"
        if kind in MAIN_KINDS:
            return None
        if kind not in OTHER_KINDS:
            return "unknown_kind"
        return "non_main_attention_group" if learned else "non_main_attention_kind"

    def _not_its_hashes(self, event: EngineStored) -> FilterReason | None:
        """Return why the tokens cannot be those of the hashes: no block may be known under the name of another.

        Groups of other attention announce some of their blocks only, and blocks further away may come without tokens.
        """
        blocks = max(0, len(event.token_ids) - event.is_eagle) // self.block_size_tokens
        names = len(event.names)
        if not event.token_ids and names:
            return "no_tokens"
        if event.block_size_tokens != self.block_size_tokens:
            self._warn("an engine has blocks of %d tokens, the router others", event.block_size_tokens)
            return "other_block_size"
        if blocks != names:
            self._warn("an engine gives the tokens of %d blocks and the names of %d", blocks, names)
            return "fewer_hashes_than_blocks" if names < blocks else "fewer_blocks_than_hashes"
        if len({event.parent, *event.names}) <= names:
            self._warn("an engine stores a block twice, or below itself")
            return "repeated_block"
        return None

    def _stored(self, event: EngineStored, namespace: str | None) -> KvStored:
        local = block_hashes(
            event.token_ids,
            self.block_size_tokens,
            seed=hash_seed(event.lora_name, namespace),
            media=media_hashes(event.media),
            is_eagle=event.is_eagle,
        )
        media = [*event.media, *[None] * len(local)]
        return KvStored(event.parent, list(map(StoredBlock, event.names, local, media)))

    def _warn(self, text: str, *values: object, kind: str = "event") -> None:
        """Log a few times only: with an engine that is set up wrongly every event is wrong."""
        self._warned[kind] += 1
        if self._warned[kind] <= _WARNINGS:
            _log.warning(text, *values)


def _foreign(origin: Origin) -> FilterReason | None:
    """Why this worker cannot serve from the blocks; None if it can."""
    if origin.ownership not in _OWN:
        return "unsupported_ownership" if origin.ownership == _CACHE_MANAGER else "unknown_ownership"
    if origin.locality not in (None, "LOCAL"):
        return "non_local_locality"
    return None if _shown(origin.medium) in MEDIA else "unknown_medium"


def _shown(medium: str | None) -> str | None:
    """The medium as `MEDIA` has it."""
    return None if medium is None else medium.upper()


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
            blocks = [*left.blocks, *right.blocks]
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
