"""An engine's events of its cache, from their bytes to changes a router can apply."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.events import (
    AmbiguousNamespace,
    EngineBatch,
    EngineChange,
    EngineCleared,
    EngineEvents,
    EngineIgnored,
    EngineRemoved,
    EngineStored,
    Filtered,
    Namespaces,
    Origin,
    Undecodable,
    decode_event,
    decode_frames,
)
from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.llm import block_hashes, hash_seed
from pipeline.protocols import BlockExtraInfo, MmObject
from pipeline.protocols.kv import KvCleared, KvRemoved, KvStored, StoredBlock
from pipeline.wire import to_msgpack

MEDIA_HASH = "0123456789abcdef00112233445566778899aabbccddeefffedcba9876543210"


def frames(*events: Any, rank: int | None = None, sequence: int = 1) -> list[bytes]:
    return [b"kv-events", sequence.to_bytes(8, "big"), to_msgpack([1.5, list(events), rank])]


def stored(names: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    """A store of one block of two tokens, unless the fields say otherwise."""
    plain = {"type": "BlockStored", "block_hashes": names or [1], "parent_block_hash": None}
    return {**plain, "token_ids": [10, 11], "block_size": 2, **fields}


def decoded(event: Any) -> EngineStored:
    result = decode_event(event)
    assert isinstance(result, EngineStored)
    return result


def convert(events: EngineEvents, *plain: Any, rank: int = 0) -> list[EngineChange | Filtered]:
    return events.convert(EngineBatch(0, 0.0, rank, [decode_event(event) for event in plain]))


def one(events: EngineEvents, plain: Any, rank: int = 0) -> EngineChange | Filtered:
    (result,) = convert(events, plain, rank=rank)
    return result


# -- reading


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


# -- converting


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, "device"),
        ("", "device"),
        ("GPU", "device"),
        ("DEVICE", "device"),
        ("CPU", "host_pinned"),
        ("CPU_PINNED", "host_pinned"),
        ("CPU_TIER1", "host_pinned"),
        ("CPU_TIER2", "disk"),
        ("DISK", "disk"),
        ("NVME", "disk"),
        ("STORAGE", "disk"),
        ("EXTERNAL", "external"),
        ("NETWORK", "external"),
        ("REMOTE", "external"),
        ("SHARED", "external"),
        ("FOO", None),
        ("gpu", "device"),
        ("Cpu", "host_pinned"),
        ("cpu_tier2", "disk"),
        ("remote", "external"),
        ("foo", None),
    ],
)
def test_an_unknown_medium_is_no_tier(medium: str | None, tier: str | None) -> None:
    """For stores and removals alike."""
    for event in (stored(medium=medium), {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}):
        result = one(EngineEvents(2), event)
        if tier is None:
            assert result == Filtered(0, "unknown_medium")
        else:
            assert isinstance(result, EngineChange)
            assert result.storage_tier == tier


@pytest.mark.parametrize("medium", ["GPU", "CPU", "DISK", "SHARED"])
@pytest.mark.parametrize("locality", ["REMOTE", "local", "", "elsewhere"])
def test_blocks_that_are_not_here_are_filtered(locality: str, medium: str) -> None:
    assert one(EngineEvents(2), stored(locality=locality, medium=medium)) == Filtered(0, "non_local_locality")
    assert isinstance(one(EngineEvents(2), stored(locality="LOCAL", medium=medium)), EngineChange)


def test_blocks_of_another_owner_are_filtered() -> None:
    events = EngineEvents(2)
    for event in (stored(ownership="pool"), ["BlockRemoved", [1], None, None, None, None, None, "pool"]):
        assert one(events, event) == Filtered(0, "unknown_ownership")
    for managed in (stored(ownership="kvcr", medium="FOO"), ["AllBlocksCleared", "kvcr"]):
        assert one(events, managed) == Filtered(0, "unsupported_ownership")
    assert one(events, ["AllBlocksCleared", "pool"]) == Filtered(0, "unknown_ownership")
    assert one(events, ["AllBlocksCleared", "worker"]) == EngineChange(0, KvCleared())


def test_what_is_filtered_leaves_the_others_in_order() -> None:
    results = convert(EngineEvents(2), stored([1]), stored([2], medium="FOO"), ["Ignored"], ["BlockRemoved", [1]])
    assert [getattr(result, "reason", "passed") for result in results] == [
        "passed",
        "unknown_medium",
        "ignored_event",
        "passed",
    ]


def test_the_kind_of_a_group_is_learned_from_stores_and_per_rank() -> None:
    events = EngineEvents(2)
    removal = {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 1}
    assert one(events, removal) == Filtered(0, "unlearned_group_idx")
    assert isinstance(one(events, {**removal, "kv_cache_spec_kind": "full_attention"}), EngineChange)
    assert one(events, removal) == Filtered(0, "unlearned_group_idx")
    assert isinstance(one(events, stored(group_idx=1, kv_cache_spec_kind="full_attention")), EngineChange)
    assert isinstance(one(events, removal), EngineChange)
    assert one(events, removal, rank=1) == Filtered(1, "unlearned_group_idx")
    assert isinstance(one(events, {**removal, "group_idx": 0}), EngineChange)


@pytest.mark.parametrize(
    ("kind", "reason", "later"),
    [
        ("sliding_window", "non_main_attention_kind", "non_main_attention_group"),
        ("mamba", "non_main_attention_kind", "non_main_attention_group"),
        ("new_attention", "unknown_kind", "unknown_kind"),
        ("mla_attention", None, None),
        ("sink_full_attention", None, None),
    ],
)
def test_blocks_of_other_attention_are_filtered(kind: str, reason: str | None, later: str | None) -> None:
    events = EngineEvents(2)
    result = one(events, stored(group_idx=0, kv_cache_spec_kind=kind))
    assert getattr(result, "reason", None) == reason
    result = one(events, {"type": "BlockRemoved", "block_hashes": [1], "group_idx": 0})
    assert getattr(result, "reason", None) == later


def local_of(events: EngineEvents, plain: Any) -> int:
    result = one(events, plain)
    assert isinstance(result, EngineChange)
    assert isinstance(result.change, KvStored)
    return result.change.blocks[0].tokens_hash


def test_a_child_is_of_its_parents_tenant() -> None:
    events = EngineEvents(2)
    salted = block_hashes([10, 11], 2, seed=hash_seed(None, "a"))[0]
    assert local_of(events, stored([1], cache_salt="a")) == salted
    assert local_of(events, stored([2], parent_block_hash=1)) == salted
    assert local_of(events, stored([3], parent_block_hash=2)) == salted
    assert local_of(events, stored([4], parent_block_hash=77)) == block_hashes([10, 11], 2)[0]
    one(events, stored([1], cache_salt="b"))
    assert one(events, stored([5], parent_block_hash=1)) == Filtered(0, "ambiguous_cache_namespace")
    assert local_of(events, stored([6], parent_block_hash=2)) == salted
    one(events, ["AllBlocksCleared"])
    assert local_of(events, stored([5], parent_block_hash=1)) == block_hashes([10, 11], 2)[0]


def test_tenants_are_remembered_of_salted_blocks_while_they_are_there_and_not_too_many() -> None:
    namespaces = Namespaces(limit_blocks=3)
    namespaces.stored([1, 2], None)
    assert len(namespaces) == 0
    namespaces.stored([1, 2, 3], "a")
    namespaces.removed([2, 9])
    assert namespaces.of_store(2, None) is None
    namespaces.stored([5, 6], "b")
    assert len(namespaces) == 3
    assert namespaces.of_store(1, None) is None
    assert namespaces.of_store(6, None) == "b"
    assert namespaces.of_store(6, "c") == "c"
    namespaces.stored([6], None)
    namespaces.removed([6])
    assert namespaces.of_store(6, "c") == "c"
    with pytest.raises(AmbiguousNamespace):
        namespaces.of_store(6, None)


def test_a_salted_block_is_remembered_until_the_last_tier_is_without_it() -> None:
    events = EngineEvents(2)
    salted = block_hashes([10, 11], 2, seed=hash_seed(None, "a"))[0]
    one(events, stored([1], cache_salt="a"))
    one(events, stored([1], cache_salt="a", medium="CPU"))
    one(events, ["BlockRemoved", [1], "GPU"])
    assert local_of(events, stored([2], parent_block_hash=1)) == salted
    one(events, ["BlockRemoved", [1], "CPU"])
    assert local_of(events, stored([3], parent_block_hash=1)) == block_hashes([10, 11], 2)[0]


@pytest.mark.parametrize("medium", ["STORAGE", "REMOTE"])
def test_events_of_blocks_further_away_teach_neither_tenants_nor_kinds(medium: str) -> None:
    events = EngineEvents(2)
    salted = block_hashes([10, 11], 2, seed=hash_seed(None, "a"))[0]
    one(events, stored([1], cache_salt="a"))
    assert local_of(events, stored([1], medium=medium)) == block_hashes([10, 11], 2)[0]
    one(events, ["BlockRemoved", [1], medium])
    assert local_of(events, stored([2], parent_block_hash=1)) == salted
    assert local_of(events, stored([3], parent_block_hash=1, medium=medium)) == salted
    one(events, stored([4], medium=medium, group_idx=1, kv_cache_spec_kind="full_attention"))
    assert one(events, ["BlockRemoved", [4], None, 1]) == Filtered(0, "unlearned_group_idx")


def test_what_is_filtered_teaches_no_tenant() -> None:
    events = EngineEvents(2)
    salted = block_hashes([10, 11], 2, seed=hash_seed(None, "a"))[0]
    one(events, stored([1], cache_salt="a"))
    for foreign in ({"medium": "FS"}, {"locality": "REMOTE"}, {"ownership": "kvcr"}, {"kv_cache_spec_kind": "mamba"}):
        assert isinstance(one(events, stored([1], **foreign)), Filtered)
    assert local_of(events, stored([2], parent_block_hash=1)) == salted


def test_tenants_are_those_of_one_rank() -> None:
    events = EngineEvents(2)
    one(events, stored([1], cache_salt="a"))
    one(events, stored([1], cache_salt="b"), rank=1)
    assert isinstance(one(events, stored([2], parent_block_hash=1)), EngineChange)
    one(events, ["AllBlocksCleared"], rank=1)
    assert local_of(events, stored([3], parent_block_hash=1)) == block_hashes([10, 11], 2, seed=hash_seed(None, "a"))[0]


def test_a_clear_of_one_tier_is_not_a_clear_of_the_rank() -> None:
    events = EngineEvents(2)
    clear = {"type": "AllBlocksCleared", "medium": "CPU"}
    assert one(events, clear) == Filtered(0, "ambiguous_scoped_clear")
    assert one(events, {**clear, "medium": ""}) == EngineChange(0, KvCleared())


def test_adapter_and_media_enter_the_hash() -> None:
    info = {"mm_objects": [{"mm_hash": 42, "offsets": []}]}
    expected = block_hashes([10, 11], 2, seed=hash_seed("adapter-a"), media=[[42]])[0]
    assert local_of(EngineEvents(2), stored(lora_name="adapter-a", block_mm_infos=[info])) == expected


def test_blocks_are_converted_as_far_as_their_tokens_go(caplog: pytest.LogCaptureFixture) -> None:
    events = EngineEvents(2)
    result = one(events, stored([1, 2, 3], token_ids=[10, 11, 12, 13, 14]))
    assert isinstance(result, EngineChange)
    assert isinstance(result.change, KvStored)
    assert [block.block_hash for block in result.change.blocks] == [1, 2]
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert one(events, stored(block_size=4, parent_block_hash=3)) == EngineChange(0, KvStored(3, []))
    assert len(caplog.records) == 3


@pytest.mark.parametrize("event", [stored([1, 1]), stored([1, 2], parent_block_hash=2)])
def test_a_store_below_itself_is_an_empty_removal(event: dict[str, Any]) -> None:
    assert one(EngineEvents(2), event) == EngineChange(0, KvRemoved([]))


def test_messages_that_did_not_arrive_are_counted() -> None:
    events = EngineEvents(2)
    for sequence in (0, 1, 4, 4, 2, 3):
        events.convert(EngineBatch(sequence, 0.0, 0, []))
    assert events.lost_batches == 2


def test_messages_before_the_first_that_arrives_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    events = EngineEvents(2)
    for sequence in (18, 19):
        events.convert(EngineBatch(sequence, 0.0, 0, []))
    assert events.lost_batches == 18
    assert "18 messages of the engine before number 18" in caplog.text


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_as_many_messages_are_lost_as_numbers_are_missing(steps: list[int]) -> None:
    sequences = [sum(steps[: end + 1]) - 1 for end in range(len(steps))]
    events = EngineEvents(2)
    for sequence in sequences:
        events.convert(EngineBatch(sequence, 0.0, 0, []))
    assert events.lost_batches == sequences[-1] + 1 - len(sequences)


@pytest.mark.parametrize("fields", [{}, {"kv_cache_spec_kind": "full_attention", "group_idx": 0}])
def test_a_store_of_fewer_hashes_than_blocks_is_refused(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Which blocks the hashes are of is not known."""
    events = EngineEvents(2)
    assert one(events, stored([2], token_ids=[10, 11, 12, 13], **fields)) == Filtered(0, "fewer_hashes_than_blocks")
    assert "the tokens of 2 blocks and the names of 1" in caplog.text
    assert isinstance(one(events, stored([1, 2], token_ids=[10, 11, 12, 13], **fields)), EngineChange)


def test_a_store_of_fewer_hashes_than_blocks_teaches_no_tenant() -> None:
    events = EngineEvents(2)
    one(events, stored([7], token_ids=[10, 11, 12, 13], cache_salt="a"))
    plain = local_of(EngineEvents(2), stored([8], parent_block_hash=7))
    assert local_of(events, stored([8], parent_block_hash=7)) == plain


@given(st.integers(0, 5), st.integers(0, 24), st.booleans())
def test_no_store_claims_a_block_under_the_name_of_another(names: int, tokens: int, is_eagle: bool) -> None:
    blocks = max(0, tokens - is_eagle) // 2
    event = {**stored(token_ids=list(range(tokens)), is_eagle=is_eagle), "block_hashes": list(range(1, names + 1))}
    result = one(EngineEvents(2), event)
    if blocks > names:
        assert result == Filtered(0, "fewer_hashes_than_blocks")
        return
    assert isinstance(result, EngineChange)
    assert isinstance(result.change, KvStored)
    assert [block.block_hash for block in result.change.blocks] == list(range(1, blocks + 1))


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(InvalidArgument):
        EngineEvents(0)
