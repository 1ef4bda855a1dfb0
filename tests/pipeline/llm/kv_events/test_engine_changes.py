"""An engine's events of its cache become changes that a router can apply."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from pipeline.llm import block_hashes, hash_seed
from pipeline.llm.kv_events import (
    AmbiguousNamespace,
    EngineBatch,
    EngineChange,
    EngineEvents,
    Filtered,
    Namespaces,
)
from pipeline.protocols.kv import KvCleared, KvStored

from .worlds import convert, one, stored

# -- reading


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
    one(events, stored(group_idx=1, kv_cache_spec_kind="mamba"), rank=1)
    assert one(events, removal, rank=1) == Filtered(1, "non_main_attention_group")
    assert isinstance(one(events, removal), EngineChange)
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


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([1, 2, 3], token_ids=[10, 11, 12, 13, 14]), "fewer_blocks_than_hashes"),
        (stored([1], token_ids=[10, 11, 12, 13]), "fewer_hashes_than_blocks"),
        (stored(block_size=4, parent_block_hash=3), "other_block_size"),
        (stored([1, 1], token_ids=[10, 11, 12, 13]), "repeated_block"),
        (stored([1, 2], token_ids=[10, 11, 12, 13], parent_block_hash=2), "repeated_block"),
    ],
)
def test_a_store_whose_tokens_are_not_those_of_its_hashes_is_refused(
    event: dict[str, Any], reason: Any, caplog: pytest.LogCaptureFixture
) -> None:
    events = EngineEvents(2)
    for _ in range(10):
        assert one(events, event) == Filtered(0, reason)
    assert len(caplog.records) == 3


@pytest.mark.parametrize("medium", ["GPU", "CPU", "STORAGE"])
def test_a_store_without_tokens_is_refused_quietly(medium: str, caplog: pytest.LogCaptureFixture) -> None:
    """As engines announce a block of a lower tier whose tokens they do not remember."""
    assert one(EngineEvents(2), stored(token_ids=[], block_size=0, medium=medium)) == Filtered(0, "no_tokens")
    assert not caplog.records


def test_tokens_behind_the_last_whole_block_are_left_out() -> None:
    result = one(EngineEvents(2), stored([1], token_ids=[10, 11, 12]))
    assert local_of(EngineEvents(2), stored([1], token_ids=[10, 11, 12])) == block_hashes([10, 11], 2)[0]
    assert isinstance(result, EngineChange)


@pytest.mark.parametrize("field", [{"session_id": "s-1"}, {"lora_id": 3}, {"kv_cache_spec_sliding_window": 128}])
def test_fields_that_do_not_matter_to_a_router_change_nothing(field: dict[str, Any]) -> None:
    assert one(EngineEvents(2), stored(**field)) == one(EngineEvents(2), stored())


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
    if blocks != names:
        reason: Any = (
            "fewer_hashes_than_blocks" if blocks > names else "fewer_blocks_than_hashes" if tokens else "no_tokens"
        )
        assert result == Filtered(0, reason)
        return
    assert isinstance(result, EngineChange)
    assert isinstance(result.change, KvStored)
    assert [block.block_hash for block in result.change.blocks] == list(range(1, blocks + 1))


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(InvalidArgument):
        EngineEvents(0)
