"""Events of an engine, as the engine sends them and as they are read."""

from __future__ import annotations

from typing import Any

from pipeline.llm.kv_events import (
    EngineBatch,
    EngineChange,
    EngineEvents,
    EngineStored,
    Filtered,
    decode_event,
)
from pipeline.wire import to_msgpack

MEDIA_HASH = "0123456789abcdef00112233445566778899aabbccddeefffedcba9876543210"


def frames(*events: Any, rank: int | None = None, sequence: int = 1) -> list[bytes]:
    """The frames of one message with these events."""
    return [b"kv-events", sequence.to_bytes(8, "big"), to_msgpack([1.5, list(events), rank])]


def stored(names: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """A store of one block of two tokens; `fields` replace or extend its own."""
    plain = {"type": "BlockStored", "block_hashes": names or [1], "parent_block_hash": None}
    return {**plain, "token_ids": [10, 11], "block_size": 2, **fields}


def decoded(event: Any) -> EngineStored:
    """A store as it is read."""
    result = decode_event(event)
    assert isinstance(result, EngineStored)
    return result


def convert(events: EngineEvents, *plain: Any, rank: int = 0) -> list[EngineChange | Filtered]:
    """What a batch of these events comes to, one result for each."""
    return events.convert(EngineBatch(0, 0.0, rank, [decode_event(event) for event in plain]))


def one(events: EngineEvents, plain: Any, rank: int = 0) -> EngineChange | Filtered:
    """What a batch of this event comes to."""
    (result,) = convert(events, plain, rank=rank)
    return result
