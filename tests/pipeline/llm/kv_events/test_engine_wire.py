"""The messages of an engine: which bytes are a batch, and the forms an event may have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidMessage
from pipeline.llm import block_hashes
from pipeline.llm.kv_events import (
    EngineBatch,
    EngineChange,
    EngineCleared,
    EngineEvents,
    EngineIgnored,
    EngineRemoved,
    EngineStored,
    Filtered,
    Origin,
    Undecodable,
    decode_event,
    decode_frames,
)
from pipeline.protocols import BlockExtraInfo, MmObject
from pipeline.protocols.kv import KvRemoved, KvStored, StoredBlock
from pipeline.wire import to_msgpack

from .worlds import MEDIA_HASH, decoded, frames, one, stored


def test_a_message_has_a_topic_a_sequence_and_a_batch() -> None:
    batch = decode_frames(frames(["AllBlocksCleared"], rank=3, sequence=2**40))
    assert batch == EngineBatch(2**40, 1.5, 3, [EngineCleared(Origin())])
    assert decode_frames(frames()).dp_rank == 0
    assert decode_frames([b"", bytes(8), to_msgpack([1, []])]) == EngineBatch(0, 1.0, 0, [])


@pytest.mark.parametrize(
    "message",
    [
        [],
        [b"", bytes(8)],
        [b"", bytes(4), to_msgpack([1.0, [], 0])],
        [b"", bytes(8), b"\xc1"],
        [b"", bytes(8), to_msgpack({})],
        [b"", bytes(8), to_msgpack([])],
        [b"", bytes(8), to_msgpack(["now", [], 0])],
        [b"", bytes(8), to_msgpack([1.0, {}, 0])],
        [b"", bytes(8), to_msgpack([1.0, [], -1])],
    ],
)
def test_bytes_that_are_no_batch_are_refused(message: list[bytes]) -> None:
    with pytest.raises(InvalidMessage):
        decode_frames(message)


def test_an_event_is_an_object_or_an_array_of_the_same_fields() -> None:
    by_name = stored([1, 2], parent_block_hash=9, lora_name="a", medium="CPU", group_idx=1, kv_cache_spec_kind="mamba")
    by_place = ["BlockStored", [1, 2], 9, [10, 11], 2, None, "CPU", "a", None, 1, "mamba", 128, "LOCAL", None, "later"]
    assert decoded(by_place) == decoded({**by_name, "locality": "LOCAL", "unknown": 1})
    assert decoded(by_place).origin == Origin("CPU", 1, "mamba", "LOCAL", None)
    assert decode_event(["BlockRemoved", [5], "GPU", 2]) == EngineRemoved([5], Origin("GPU", 2))
    assert decode_event({"type": "BlockRemoved", "block_hashes": [5]}) == EngineRemoved([5], Origin())
    assert decode_event(["AllBlocksCleared", "worker"]) == EngineCleared(Origin(ownership="worker"))
    assert decode_event(["Ignored"]) == EngineIgnored()


def test_an_array_may_end_early_and_have_empty_places() -> None:
    assert decoded(["BlockStored", [1], None, [10, 11], 2]) == decoded(stored())
    assert decoded(["BlockStored", [1], None, [10, 11], 2, *[None] * 9]) == decoded(stored())


def test_media_infos_may_stand_before_the_tail() -> None:
    info = {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 1]]}]}
    expected = decoded(stored(block_mm_infos=[info], group_idx=1, kv_cache_spec_kind="mla_attention"))
    assert expected.media == [BlockExtraInfo([MmObject(7, [(0, 1)])])]
    head = ["BlockStored", [1], None, [10, 11], 2, None, None, None, None]
    assert decoded([*head, [info], 1, "mla_attention"]) == expected
    assert decoded([*head, None, 1, "mla_attention"]).origin == expected.origin


@pytest.mark.parametrize(
    ("tail", "group", "kind"),
    [
        (["full_attention"], None, "full_attention"),
        ([1, "mamba"], 1, "mamba"),
        ([None, "mamba"], None, "mamba"),
        ([None, 3, "full_attention", True], 3, "full_attention"),
        ([3, "full_attention", True], 3, "full_attention"),
        ([3, "full_attention", None, None, None, True], 3, "full_attention"),
        ([1, 128], 1, None),
    ],
)
def test_old_engines_omit_fields_they_do_not_send(tail: list[Any], group: int | None, kind: str | None) -> None:
    expected = Origin(group=group, kind=kind)
    assert decoded(["BlockStored", [1], None, [10, 11], 2, None, None, None, None, *tail]).origin == expected
    assert decode_event(["BlockRemoved", [1], None, *tail]) == EngineRemoved([1], expected)


def test_blocks_that_are_not_here_are_not_let_in_by_an_odd_tail() -> None:
    for tail in ([1, "full_attention", True, "REMOTE"], ["full_attention", None, None, "REMOTE"]):
        event = ["BlockStored", [1], None, [10, 11], 2, None, None, None, None, *tail]
        assert one(EngineEvents(2), event) == Filtered(0, "non_local_locality")
        assert one(EngineEvents(2), ["BlockRemoved", [1], None, *tail]) == Filtered(0, "non_local_locality")


def test_media_infos_may_be_nil_before_a_kind_without_a_group() -> None:
    event = decoded(["BlockStored", [1], None, [10, 11], 2, None, None, None, None, None, None, "mamba"])
    assert event.origin == Origin(kind="mamba")


def test_an_adapters_name_is_no_media_however_it_looks() -> None:
    event = decoded(stored(extra_keys=[[MEDIA_HASH]], lora_name=MEDIA_HASH))
    assert (event.lora_name, list(event.media)) == (MEDIA_HASH, [None])


def test_what_has_a_place_in_a_block_is_media_however_it_is_named() -> None:
    event = decoded(stored(extra_keys=[[["image-0", -3], ["", 1], ["image-1", "x"], "image-2"]]))
    assert event.media == [BlockExtraInfo([MmObject(0x2640FB5108373053, [])])]


def test_tokens_in_pairs_look_one_ahead() -> None:
    pairs = [[10, 11], [11, 12], [12, 13], [13, 14]]
    event = decoded(["BlockStored", [11, 12], None, pairs, 2, None, None, None])
    assert (event.token_ids, event.block_size_tokens, event.is_eagle) == ([10, 11, 12, 13, 14], 2, True)
    change = one(EngineEvents(2), ["BlockStored", [11, 12], None, pairs, 2, None, None, None])
    local = block_hashes([10, 11, 12, 13, 14], 2, is_eagle=True)
    assert change == EngineChange(0, KvStored(None, [StoredBlock(11, local[0]), StoredBlock(12, local[1])]))


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_negative_hash_is_the_u64_of_the_same_bits(value: int) -> None:
    expected = value if value >= 0 else int.from_bytes(value.to_bytes(8, "big", signed=True), "big")
    assert decode_event(["BlockRemoved", [value]]) == EngineRemoved([expected], Origin())


@given(st.binary(min_size=8, max_size=64))
def test_a_hash_of_bytes_is_the_u64_of_its_last_eight(digest: bytes) -> None:
    """Engines that do not shorten their digests send them whole."""
    short = int.from_bytes(digest[-8:], "big")
    event = {**stored(), "block_hashes": [digest], "parent_block_hash": digest}
    store = decoded(event)
    assert (store.names, store.parent) == ([short], short)
    assert decode_event(["BlockRemoved", [digest, 5]]) == EngineRemoved([short, 5], Origin())


def test_a_batch_with_hashes_of_bytes_is_read_from_its_message() -> None:
    digest = bytes(range(32))
    (event,) = decode_frames(frames({**stored(), "block_hashes": [digest]})).events
    assert isinstance(event, EngineStored)
    assert event.names == [0x18191A1B1C1D1E1F]


def test_bytes_too_short_for_a_hash_are_none() -> None:
    for value in (b"", b"1234567", "12345678"):
        assert isinstance(decode_event(["BlockRemoved", [value]]), Undecodable)


def test_salt_and_media_are_found_among_the_extra_keys() -> None:
    assert decoded(stored(cache_salt="tenant-a")).namespace == "tenant-a"
    for keys in (
        ["adapter-a", MEDIA_HASH, "dynamo-cache-salt:tenant-a"],
        [["adapter-a", [MEDIA_HASH, 3], "dynamo-cache-salt:tenant-a"]],
    ):
        event = decoded(stored(extra_keys=keys, lora_name="adapter-a"))
        assert (event.namespace, event.media) == ("tenant-a", [BlockExtraInfo([MmObject(0x0123456789ABCDEF, [])])])
    event = decoded(stored(extra_keys=[["dynamo-cache-salt:" + MEDIA_HASH]]))
    assert (event.namespace, event.media) == (MEDIA_HASH, [None])
    event = decoded(stored([1, 2], extra_keys=[None, [MEDIA_HASH, 5, True, "other", MEDIA_HASH[:-1]]]))
    assert event.media == [None, BlockExtraInfo([MmObject(0x0123456789ABCDEF, [])])]
    assert event.namespace is None
    assert decoded(stored(extra_keys=[["dynamo-cache-salt:a"]], lora_name="dynamo-cache-salt:a")).namespace is None
    assert decoded(stored(extra_keys=[["dynamo-cache-salt:"]])).namespace is None
    assert decoded(stored([1, 2], extra_keys=[None, ["dynamo-cache-salt:t"]])).namespace is None, "in the first block"
    assert decoded(["BlockStored", [1], None, [1, 2], 2, None, None, {"cache_salt": "t"}]).namespace == "t"


@pytest.mark.parametrize(
    "event",
    [
        None,
        [],
        5,
        {},
        ["Unheard"],
        {"type": 5},
        ["BlockStored"],
        ["BlockRemoved", 5],
        ["BlockRemoved", [True]],
        ["BlockRemoved", [1.5]],
        ["BlockRemoved", [1], 5],
        ["BlockRemoved", [1], "GPU", -1],
        stored(parent_block_hash="a"),
        stored(token_ids=None),
        stored(token_ids=[-1]),
        stored(token_ids=[[1, 2], 3]),
        stored(block_size=None),
        stored(lora_name=5),
        stored(cache_salt=5),
        stored(block_mm_infos=[{"mm_objects": [{}]}]),
    ],
)
def test_an_event_that_cannot_be_read_spoils_no_other(event: Any) -> None:
    batch = decode_frames(frames(event, ["BlockRemoved", [5]]))
    assert isinstance(batch.events[0], Undecodable)
    results = EngineEvents(2).convert(batch)
    assert results == [Filtered(0, "undecodable"), EngineChange(0, KvRemoved([5]))]
