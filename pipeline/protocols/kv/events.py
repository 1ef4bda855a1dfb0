"""KV events: changes of the blocks in an engine's cache, published to routers.

Source: dynamo lib/kv-router/src/protocols.rs, KvCacheEvent, RouterEvent and ActiveLoad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from attrs import define, frozen

from ..field_rules import U32, U64, Tagged, skip
from ..request import BlockExtraInfo

StorageTier = Literal["device", "host_pinned", "disk", "external"]

KV_EVENTS_TOPIC = "kv-events"
"""Topic of `RouterEvent` on the event plane, in the scope of the worker's component."""
KV_METRICS_TOPIC = "kv_metrics"
"""Topic of `ActiveLoad`, in the same scope."""

WORKER_DOMAIN = "worker"
"""The residency domain of blocks in the worker's own cache."""


@define(slots=True)
class StoredBlock:
    """A block: the engine's sequence hash, and the hash of the block's own tokens.

    It is never changed, like the other events; a frozen class would cost four times as much to construct.
    """

    block_hash: U64
    tokens_hash: U64
    mm_extra_info: BlockExtraInfo | None = None


@frozen
class KvStored:
    """Consecutive blocks were stored; the first follows `parent_hash` (None: it begins a sequence)."""

    wire_nullable: ClassVar[Sequence[str]] = ("parent_hash",)

    parent_hash: U64 | None
    blocks: list[StoredBlock]
    start_position: U32 | None = None


@frozen
class KvRemoved:
    """Blocks left the cache."""

    block_hashes: list[U64]


@frozen
class KvCleared:
    """All blocks of the rank left the cache."""


KvEventData: TypeAlias = Annotated[
    KvStored | KvRemoved | KvCleared, Tagged({"stored": KvStored, "removed": KvRemoved, "cleared": KvCleared})
]


@frozen
class KvEvent:
    """One change of one rank's cache. The ids of a rank count up from 1 without a gap."""

    event_id: U64
    data: KvEventData
    dp_rank: U32 = 0


@frozen
class RouterEvent:
    """An event and its worker.

    `residency_domain`: the cache that holds the blocks. Readers apply events of WORKER_DOMAIN only; any other value
    makes the event unusable, but not its batch.
    """

    worker_id: U64
    event: KvEvent
    storage_tier: StorageTier = "device"
    residency_domain: str = skip(default=WORKER_DOMAIN)


@define(slots=True)
class ActiveLoad:
    """The load of a worker's rank, as the worker reports it. A value it does not know is None."""

    worker_id: U64
    dp_rank: U32 = 0
    active_decode_blocks: U64 | None = None
    active_prefill_tokens: U64 | None = None
    kv_used_blocks: U64 | None = None
