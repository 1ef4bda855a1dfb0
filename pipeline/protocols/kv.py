"""KV cache events: changes of the blocks in an engine's cache, published to routers; and the recovery of missed ones.

    RecoveryRequest ──► endpoint of the worker's rank ──► RecoveryReply, which holds one of the answers

Source: dynamo lib/kv-router/src/protocols.rs, KvCacheEvent, RouterEvent and ActiveLoad; indexer/types.rs,
WorkerKvQueryRequest and WorkerKvQueryResponse. Other than there, a request for recovery names no worker, which the
instance does, a failed worker ends its stream with an error, and a reply names the publisher of the events it covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, overload

from attrs import define, frozen

from .field_rules import U32, U64, InvalidRecord, Tagged, skip
from .request import BlockExtraInfo

__all__ = [
    "KV_EVENTS_TOPIC",
    "ActiveLoad",
    "KvCleared",
    "KvEvent",
    "KvEventData",
    "KvRemoved",
    "KvStored",
    "PassRates",
    "RankRates",
    "RouterEvent",
    "StorageTier",
    "StoredBlock",
]

StorageTier = Literal["device", "host_pinned", "disk", "external"]

KV_EVENTS_TOPIC = "kv-events"
"""Topic of `RouterEvent` on the event plane, in the scope of the worker's component."""
KV_METRICS_TOPIC = "kv_metrics"
"""Topic of `ActiveLoad`, in the same scope."""
KV_RATES_TOPIC = "kv_rates"
"""Topic of `RankRates`, in the same scope: seldom published, so that who reads only these is not sent every load."""

LOADS_EVERY_S = 5.0
"""A worker publishes its loads when they change, and so often: a router that starts late, or lost one, knows them."""

WORKER_DOMAIN = "worker"
"""The residency domain of blocks in the worker's own cache."""


@define(slots=True)
class StoredBlock:
    """A block: the engine's sequence hash, and the hash of the block's own tokens.

    It is never changed, like the other events; a frozen class would cost four times as much to construct.
    """

    wire_columns: ClassVar[Any] = None  # the class below

    block_hash: U64
    tokens_hash: U64
    mm_extra_info: BlockExtraInfo | None = None


class StoredBlocks(Sequence[StoredBlock]):
    """Blocks by the columns of their hashes: an engine of this process makes no record of each, and no reader needs it.

    Equal to a list of the same blocks.
    """

    __slots__ = ("block_hashes", "tokens_hashes")

    def __init__(self, block_hashes: Sequence[int], tokens_hashes: Sequence[int]) -> None:
        self.block_hashes = block_hashes
        self.tokens_hashes = tokens_hashes

    @classmethod
    def of(cls, blocks: Sequence[StoredBlock]) -> StoredBlocks:
        """Return the blocks as columns, without what they have of media."""
        if isinstance(blocks, StoredBlocks):
            return blocks
        return cls([block.block_hash for block in blocks], [block.tokens_hash for block in blocks])

    def __len__(self) -> int:
        return len(self.block_hashes)

    def __iter__(self) -> Iterator[StoredBlock]:
        return map(StoredBlock, self.block_hashes, self.tokens_hashes)

    @overload
    def __getitem__(self, index: int) -> StoredBlock: ...
    @overload
    def __getitem__(self, index: slice) -> StoredBlocks: ...
    def __getitem__(self, index: int | slice) -> StoredBlock | StoredBlocks:
        names, hashes = self.block_hashes[index], self.tokens_hashes[index]
        if isinstance(names, int) and isinstance(hashes, int):
            return StoredBlock(names, hashes)
        assert not isinstance(names, int)
        assert not isinstance(hashes, int)
        return StoredBlocks(names, hashes)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, StoredBlocks | list) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))


StoredBlock.wire_columns = StoredBlocks


@define
class KvStored:
    """Consecutive blocks were stored; the first follows `parent_hash` (None: it begins a sequence)."""

    wire_nullable: ClassVar[Sequence[str]] = ("parent_hash",)

    parent_hash: U64 | None
    blocks: Sequence[StoredBlock]
    start_position: U32 | None = None


@define
class KvRemoved:
    """Blocks left the cache."""

    block_hashes: list[U64]


@frozen
class KvCleared:
    """All blocks of the rank left the cache."""


KvEventData: TypeAlias = Annotated[
    KvStored | KvRemoved | KvCleared, Tagged({"stored": KvStored, "removed": KvRemoved, "cleared": KvCleared})
]


@define
class KvEvent:
    """One change of one rank's cache. The ids of a rank count up from 1 without a gap."""

    event_id: U64
    data: KvEventData
    dp_rank: U32 = 0


@define
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


@frozen
class PassRates:
    """What the passes of an engine take, in picoseconds. A value that it does not know is None.

    A pass that computes prompts takes `pass_ps` and `prompt_token_ps` for each of their tokens. Where answers get a
    token it takes `step_ps` and `held_token_ps` for each token in the blocks in use, besides.
    """

    pass_ps: U64 | None = None
    prompt_token_ps: U64 | None = None
    step_ps: U64 | None = None
    held_token_ps: U64 | None = None


@define(slots=True)
class RankRates:
    """What the passes of a worker's rank took lately, as the worker measured it."""

    worker_id: U64
    rates: PassRates
    dp_rank: U32 = 0


ENDPOINT_PREFIX = "worker_kv_indexer_query_dp"


def recovery_endpoint(dp_rank: int) -> str:
    """Return the name of the endpoint, in the worker's component, at which its rank answers; one for each rank."""
    return f"{ENDPOINT_PREFIX}{dp_rank}"


@frozen
class RecoveryRequest:
    """The rank's events from the start on, both ends included; without a start everything it holds.

    The end is checked, and bounds nothing: an answer goes to the newest event.
    """

    dp_rank: U32 = 0
    start_event_id: U64 | None = None
    end_event_id: U64 | None = None


@frozen
class RecoveredEvents:
    """All events from the requested one to the newest; or from the last clear on, which makes those before it void."""

    events: list[RouterEvent]


@frozen
class RecoveredTree:
    """Everything the rank holds after event `last_event_id`, to be installed in place of what is known of it.

    Stores that build the tree, then maybe some later events as they came; the ids of the stores mean nothing.
    """

    events: list[RouterEvent]
    last_event_id: U64


@frozen
class InvalidRange:
    """The requested end lies before the start."""

    start_id: U64
    end_id: U64


@frozen
class TooNew:
    """The start lies after the newest event: this is another worker, or it has restarted."""

    requested_start: U64
    requested_end: U64 | None
    newest_available: U64


@frozen
class DumpFailed:
    """The state of the rank could not be read; a second request may succeed."""

    message: str


RecoveryAnswer: TypeAlias = RecoveredEvents | RecoveredTree | InvalidRange | TooNew | DumpFailed


@frozen
class RecoveryReply:
    """An answer as a message: an object with one key, the kind of answer. Raises InvalidRecord for any other object.

    `publisher_id`, beside that key, is the id under which the worker that answers publishes its events on the event
    plane. It identifies the life of the worker: a worker that starts again, under the same worker id, publishes under
    another. None, and omitted, if the worker does not know it.
    """

    events: RecoveredEvents | None = skip(name="Events")
    tree: RecoveredTree | None = skip(name="TreeDump")
    too_new: TooNew | None = skip(name="TooNew")
    invalid_range: InvalidRange | None = skip(name="InvalidRange")
    dump_failed: DumpFailed | None = skip(name="TreeDumpFailed")
    publisher_id: U64 | None = skip()

    def __attrs_post_init__(self) -> None:
        if len(self._answers()) != 1:
            raise InvalidRecord("expected exactly one answer")

    @classmethod
    def of(cls, answer: RecoveryAnswer, publisher_id: int | None = None) -> Self:
        """Return the reply that holds the answer."""
        fields: dict[str, Any] = {_FIELDS[type(answer)]: answer}
        return cls(**fields, publisher_id=publisher_id)

    @property
    def answer(self) -> RecoveryAnswer:
        (answer,) = self._answers()
        return answer

    def _answers(self) -> list[RecoveryAnswer]:
        return [answer for name in _FIELDS.values() if (answer := getattr(self, name)) is not None]


_FIELDS: dict[type[RecoveryAnswer], str] = {
    RecoveredEvents: "events",
    RecoveredTree: "tree",
    TooNew: "too_new",
    InvalidRange: "invalid_range",
    DumpFailed: "dump_failed",
}
"""The field of a reply for each kind of answer."""
