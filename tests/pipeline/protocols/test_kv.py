"""KV events and their wire form."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline import InvalidArgument
from pipeline.protocols import BlockExtraInfo, MmObject
from pipeline.protocols.kv import (
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    RecoveredEvents,
    RouterEvent,
    StoredBlock,
    StoredBlocks,
)
from pipeline.wire import from_json, from_plain, to_json, to_plain

MEDIA = BlockExtraInfo([MmObject(7, [(0, 3)])])
EVENTS = [
    KvEvent(1, KvStored(None, [StoredBlock(1, 2)])),
    KvEvent(2, KvStored(2**64 - 1, [StoredBlock(1, 2, MEDIA), StoredBlock(3, 4)], 5), 3),
    KvEvent(3, KvRemoved([1, 2])),
    KvEvent(4, KvCleared()),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_the_wire(event: KvEvent) -> None:
    router_event = RouterEvent(9, event)
    assert from_json(to_json(router_event), RouterEvent) == router_event


def test_the_residency_domain_is_the_workers_unless_it_is_named() -> None:
    plain = to_plain(RouterEvent(9, EVENTS[0]))
    assert "residency_domain" not in plain
    assert from_plain(plain, RouterEvent).residency_domain == "worker"
    assert from_plain({**plain, "residency_domain": "worker", "state_source": "x"}, RouterEvent) == RouterEvent(
        9, EVENTS[0]
    )


def test_an_unknown_residency_domain_does_not_spoil_the_batch() -> None:
    plain = to_plain(RouterEvent(9, EVENTS[0]))
    batch = from_plain({"events": [plain, {**plain, "residency_domain": "pool"}, plain]}, RecoveredEvents)
    assert [event.residency_domain for event in batch.events] == ["worker", "pool", "worker"]
    assert from_json(to_json(batch.events[1]), RouterEvent) == batch.events[1]


def test_blocks_in_columns_are_those_blocks() -> None:
    listed, columns = [StoredBlock(1, 2), StoredBlock(3, 4)], StoredBlocks([1, 3], [2, 4])
    assert KvStored(None, columns) == KvStored(None, listed)
    assert columns != StoredBlocks([1, 3], [2, 5])
    assert (columns[1], list(columns[:1]), len(columns)) == (listed[1], listed[:1], 2)
    assert to_json(KvStored(5, columns)) == to_json(KvStored(5, listed))
    assert StoredBlocks.of(columns) is columns
    assert StoredBlocks.of(listed) == columns


def test_an_event_has_the_originals_wire_form() -> None:
    stored = {"stored": {"parent_hash": None, "blocks": [{"block_hash": 1, "tokens_hash": 2}]}}
    assert to_plain(EVENTS[0]) == {"event_id": 1, "data": stored, "dp_rank": 0}
    assert to_plain(EVENTS[3])["data"] == "cleared"
    assert from_plain({"event_id": 1, "data": stored, "unknown": 1}, KvEvent) == EVENTS[0]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ([], ""),
        ({"event_id": 1}, "data"),
        ({"data": "cleared"}, "event_id"),
        ({"event_id": True, "data": "cleared"}, "event_id"),
        ({"event_id": 1, "data": "gone"}, "data"),
        ({"event_id": 1, "data": {"stored": {}, "removed": {}}}, "data"),
        ({"event_id": 1, "data": {"removed": {"block_hashes": [2**64]}}}, "data.removed.block_hashes[0]"),
        ({"event_id": 1, "data": {"stored": {"blocks": [{"block_hash": 1}]}}}, "data.stored.blocks[0].tokens_hash"),
        ({"event_id": 1, "data": {"stored": {"blocks": 1}}}, "data.stored.blocks"),
        ({"event_id": 1, "data": "cleared", "dp_rank": 2**32}, "dp_rank"),
    ],
)
def test_a_wrong_event_is_refused_naming_the_place(value: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        from_plain(value, KvEvent)
    assert refused.value.field == place
