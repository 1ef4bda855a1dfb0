"""KV events: what an engine says about the blocks in its cache, and how routers hear of it.

Source: dynamo lib/kv-router/src/protocols.rs, KvCacheEvent, RouterEvent and ActiveLoad.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from attrs import define, frozen

from ..field_rules import U32, U64, InvalidRecord, skip
from ..request import BlockExtraInfo, MmObject

StorageTier = Literal["device", "host_pinned", "disk", "external"]

KV_EVENTS_TOPIC = "kv-events"
"""Topic of `RouterEvent` on the event plane, in the scope of the worker's component."""
KV_METRICS_TOPIC = "kv_metrics"
"""Topic of `ActiveLoad`, in the same scope."""

WORKER_DOMAIN = "worker"
"""The residency domain of blocks in the worker's own cache."""

_U32_END, _U64_END = 2**32, 2**64


@define(slots=True)
class StoredBlock:
    """A block: its sequence hash as the engine names it, and the hash of its own tokens.

    Never changed once made, like the other events; frozen, making one would cost four times as much.
    """

    block_hash: U64
    tokens_hash: U64
    mm_extra_info: BlockExtraInfo | None = None


@frozen
class KvStored:
    """Consecutive blocks came into the cache, the first one below `parent_hash` (None: it begins a sequence)."""

    parent_hash: U64 | None
    blocks: list[StoredBlock]
    start_position: U32 | None = None


@frozen
class KvRemoved:
    """Blocks left the cache."""

    block_hashes: list[U64]


@frozen
class KvCleared:
    """Everything of the rank left the cache."""


KvEventData: TypeAlias = KvStored | KvRemoved | KvCleared


@frozen
class KvEvent:
    """One change of one rank's cache. The ids of a rank count up from 1 without a gap.

    On the wire `data` is an object with the one key `stored` or `removed`, or the text `cleared`.
    """

    event_id: U64
    data: KvEventData
    dp_rank: U32 = 0

    def to_wire(self) -> dict[str, Any]:
        return {"event_id": self.event_id, "data": _data_to_wire(self.data), "dp_rank": self.dp_rank}

    @classmethod
    def from_wire(cls, value: Any) -> KvEvent:
        """Raises InvalidRecord, naming the place, for anything that is no event."""
        event = _object(value, "")
        if "data" not in event:
            raise InvalidRecord("is required", "data")
        event_id = _integer(event.get("event_id"), _U64_END, "event_id")
        dp_rank = _integer(event.get("dp_rank", 0), _U32_END, "dp_rank")
        return cls(event_id, _data_from_wire(event["data"]), dp_rank)


@frozen
class RouterEvent:
    """An event and the worker it is from.

    `residency_domain` is whose cache the blocks are in. A reader applies events of WORKER_DOMAIN alone: any other text
    makes the event unusable, not the batch it comes in.
    """

    worker_id: U64
    event: KvEvent
    storage_tier: StorageTier = "device"
    residency_domain: str = skip(default=WORKER_DOMAIN)


@define(slots=True)
class ActiveLoad:
    """How full a rank of a worker is, as it says itself; what it does not know is None."""

    worker_id: U64
    dp_rank: U32 = 0
    active_decode_blocks: U64 | None = None
    active_prefill_tokens: U64 | None = None
    kv_used_blocks: U64 | None = None


def _data_to_wire(data: KvEventData) -> Any:
    if isinstance(data, KvRemoved):
        return {"removed": {"block_hashes": data.block_hashes}}
    if isinstance(data, KvCleared):
        return "cleared"
    stored: dict[str, Any] = {"parent_hash": data.parent_hash, "blocks": [_block_to_wire(b) for b in data.blocks]}
    if data.start_position is not None:
        stored["start_position"] = data.start_position
    return {"stored": stored}


def _block_to_wire(block: StoredBlock) -> dict[str, Any]:
    plain: dict[str, Any] = {"block_hash": block.block_hash, "tokens_hash": block.tokens_hash}
    if block.mm_extra_info is not None:
        objects = [{"mm_hash": o.mm_hash, "offsets": o.offsets} for o in block.mm_extra_info.mm_objects]
        plain["mm_extra_info"] = {"mm_objects": objects}
    return plain


def _data_from_wire(value: Any) -> KvEventData:
    if value == "cleared":
        return KvCleared()
    if not isinstance(value, dict) or value.keys() not in ({"stored"}, {"removed"}):
        raise InvalidRecord("expected an object with the one key stored or removed, or the text cleared", "data")
    if "removed" in value:
        place = "data.removed"
        hashes = _list(_object(value["removed"], place).get("block_hashes"), f"{place}.block_hashes")
        if not _are_hashes(hashes):
            hashes = [_integer(h, _U64_END, f"{place}.block_hashes[{i}]") for i, h in enumerate(hashes)]
        return KvRemoved(hashes)
    place = "data.stored"
    stored = _object(value["stored"], place)
    blocks = _list(stored.get("blocks"), f"{place}.blocks")
    parent, start = stored.get("parent_hash"), stored.get("start_position")
    return KvStored(
        None if parent is None else _integer(parent, _U64_END, f"{place}.parent_hash"),
        _plain_blocks(blocks) or [_block_from_wire(block, f"{place}.blocks[{i}]") for i, block in enumerate(blocks)],
        None if start is None else _integer(start, _U32_END, f"{place}.start_position"),
    )


def _plain_blocks(values: list[Any]) -> list[StoredBlock] | None:
    """Blocks of two hashes each, checked all at once; None where one is anything else, to be looked at one by one."""
    try:
        names = [block["block_hash"] for block in values]
        tokens = [block["tokens_hash"] for block in values]
        plain = not any("mm_extra_info" in block for block in values)
    except (KeyError, TypeError, IndexError):
        return None
    return list(map(StoredBlock, names, tokens)) if plain and _are_hashes(names) and _are_hashes(tokens) else None


def _are_hashes(values: list[Any]) -> bool:
    if not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < _U64_END)


def _block_from_wire(value: Any, place: str) -> StoredBlock:
    block = _object(value, place)
    hashes = [_integer(block.get(name), _U64_END, f"{place}.{name}") for name in ("block_hash", "tokens_hash")]
    media = block.get("mm_extra_info")
    return StoredBlock(hashes[0], hashes[1], None if media is None else _media(media, f"{place}.mm_extra_info"))


def _media(value: Any, place: str) -> BlockExtraInfo:
    objects = []
    for index, item in enumerate(_list(_object(value, place).get("mm_objects"), f"{place}.mm_objects")):
        where = f"{place}.mm_objects[{index}]"
        entry = _object(item, where)
        ranges = _list(entry.get("offsets"), f"{where}.offsets")
        if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in ranges):
            raise InvalidRecord("expected pairs of integers", f"{where}.offsets")
        offsets = [(_integer(a, _U64_END, where), _integer(b, _U64_END, where)) for a, b in ranges]
        objects.append(MmObject(_integer(entry.get("mm_hash"), _U64_END, f"{where}.mm_hash"), offsets))
    return BlockExtraInfo(objects)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRecord("expected an object", place)
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRecord("expected a list", place)
    return value


def _integer(value: Any, end: int, place: str) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise InvalidRecord(f"expected an integer from 0 to {end - 1}", place)
    return value
