"""KV events as bytes: all records survive, and reading many blocks at once takes what reading them one by one takes."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.protocols import BlockExtraInfo, MmObject
from pipeline.protocols.kv import (
    ActiveLoad,
    DumpFailed,
    InvalidRange,
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    RecoveredEvents,
    RecoveredTree,
    RecoveryAnswer,
    RecoveryReply,
    RecoveryRequest,
    RouterEvent,
    StorageTier,
    StoredBlock,
    TooNew,
)
from pipeline.wire import from_msgpack, from_plain, to_msgpack, to_plain

MEDIA = {"mm_objects": [{"mm_hash": 7, "offsets": []}]}
hashes = st.integers(0, 2**64 - 1)
values = st.one_of(hashes, hashes, hashes, st.sampled_from([-1, 2**64, True, None, "1", 1.0]))
blocks: st.SearchStrategy[Any] = st.one_of(
    st.fixed_dictionaries({"block_hash": values, "tokens_hash": values}),
    st.fixed_dictionaries({"block_hash": hashes, "tokens_hash": hashes}, optional={"mm_extra_info": st.just(MEDIA)}),
    st.sampled_from([{}, [], "block_hash", None, 5, {"block_hash": 1}]),
)


def is_hash(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**64


def read(data: Any) -> Any:
    try:
        return from_plain({"event_id": 1, "data": data}, KvEvent).data
    except InvalidArgument as error:
        return error.field


@given(st.lists(blocks, max_size=4))
def test_a_store_is_read_whole_or_refused_at_its_first_wrong_place(plain: list[Any]) -> None:
    expected: list[StoredBlock] = []
    for index, block in enumerate(plain):
        if not isinstance(block, dict):
            assert read({"stored": {"blocks": plain}}) == f"data.stored.blocks[{index}]"
            return
        for name in ("block_hash", "tokens_hash"):
            if not is_hash(block.get(name)):
                assert read({"stored": {"blocks": plain}}) == f"data.stored.blocks[{index}].{name}"
                return
        media = BlockExtraInfo([MmObject(7, [])]) if "mm_extra_info" in block else None
        expected.append(StoredBlock(block["block_hash"], block["tokens_hash"], media))
    assert read({"stored": {"blocks": plain}}) == KvStored(None, expected)


@given(st.lists(values, max_size=4))
def test_a_removal_is_read_whole_or_refused_at_its_first_wrong_place(plain: list[Any]) -> None:
    wrong = next((index for index, value in enumerate(plain) if not is_hash(value)), None)
    expected = KvRemoved(plain) if wrong is None else f"data.removed.block_hashes[{wrong}]"
    assert read({"removed": {"block_hashes": plain}}) == expected


@given(st.lists(st.tuples(hashes, hashes), max_size=4))
def test_a_store_survives_the_wire(pairs: list[tuple[int, int]]) -> None:
    event = KvEvent(1, KvStored(3, [StoredBlock(*pair) for pair in pairs]))
    assert from_plain(to_plain(event), KvEvent) == event


u32 = st.integers(0, 2**32 - 1)
ids = st.integers(0, 2**53 - 1)
media = st.builds(BlockExtraInfo, st.lists(st.builds(MmObject, hashes, st.just([(0, 3)]))))
stored = st.builds(
    KvStored,
    st.none() | hashes,
    st.lists(st.builds(StoredBlock, hashes, hashes, st.none() | media), max_size=3),
    st.none() | u32,
)
changes = st.one_of(stored, st.builds(KvRemoved, st.lists(hashes, max_size=3)), st.just(KvCleared()))
tiers = st.sampled_from(get_args(StorageTier))
router_events = st.builds(
    RouterEvent, hashes, st.builds(KvEvent, hashes, changes, u32), tiers, st.sampled_from(["worker", "other"])
)
answers = st.one_of(
    st.builds(RecoveredEvents, st.lists(router_events, max_size=3)),
    st.builds(RecoveredTree, st.lists(router_events, max_size=3), hashes),
    st.builds(InvalidRange, hashes, hashes),
    st.builds(TooNew, hashes, st.none() | hashes, hashes),
    st.builds(DumpFailed, st.text()),
)


@given(router_events)
def test_an_event_survives_its_bytes(event: RouterEvent) -> None:
    assert from_msgpack(to_msgpack(event), RouterEvent) == event


@given(st.builds(RecoveryRequest, u32, st.none() | hashes, st.none() | hashes))
def test_a_request_for_recovery_survives_its_bytes(request: RecoveryRequest) -> None:
    assert from_msgpack(to_msgpack(request), RecoveryRequest) == request


@given(answers, st.none() | ids)
def test_an_answer_survives_its_bytes(answer: RecoveryAnswer, publisher_id: int | None) -> None:
    reply = RecoveryReply.of(answer, publisher_id)
    assert from_msgpack(to_msgpack(reply), RecoveryReply) == reply


@given(st.builds(ActiveLoad, hashes, u32, *[st.none() | hashes] * 3))
def test_a_load_survives_its_bytes(load: ActiveLoad) -> None:
    assert from_msgpack(to_msgpack(load), ActiveLoad) == load
