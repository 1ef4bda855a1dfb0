"""KV events in vLLM's wire form: the fields of each, and which batches a replay returns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mocker.zmq_events import EngineEvent, ReplayRing, encode_batch, published
from pipeline import InvalidArgument
from pipeline.protocols.kv import KvCleared, KvRemoved, KvStored, StorageTier, StoredBlock
from pipeline.wire import from_msgpack

BLOCKS = [StoredBlock(2**64 - 1, 5), StoredBlock(11, 6)]
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]


def stored(parent: int | None = None, tier: StorageTier = "device") -> EngineEvent:
    return EngineEvent(KvStored(parent, BLOCKS), TOKENS, tier)


def decoded(*events: EngineEvent) -> list[Any]:
    return from_msgpack(encode_batch(1.5, events, 4, dp_rank=3), list[Any])


def test_a_batch_is_its_time_its_events_and_its_rank() -> None:
    assert decoded() == [1.5, [], 3]


def test_a_stored_event_carries_every_token_of_its_blocks() -> None:
    (event,) = decoded(stored(parent=9))[1]
    assert event == {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 11],
        "parent_block_hash": 9,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": 4,
        "group_idx": 0,
    }


def test_a_store_that_begins_a_sequence_has_a_nil_parent() -> None:
    assert decoded(stored())[1][0]["parent_block_hash"] is None


@pytest.mark.parametrize(
    ("tier", "medium"),
    [("device", None), ("host_pinned", "CPU_PINNED"), ("disk", "DISK"), ("external", "EXTERNAL")],
)
def test_every_tier_but_the_device_names_its_medium(tier: StorageTier, medium: str | None) -> None:
    for event in decoded(stored(tier=tier), EngineEvent(KvRemoved([11]), tier=tier))[1]:
        assert event.get("medium") == medium
        assert ("medium" in event) == (medium is not None)


def test_removed_and_cleared_carry_no_tokens() -> None:
    assert decoded(EngineEvent(KvRemoved([3, 4])), EngineEvent(KvCleared()))[1] == [
        {"type": "BlockRemoved", "block_hashes": [3, 4], "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]


@pytest.mark.parametrize("tokens", [[], TOKENS[:4], TOKENS[:7], [*TOKENS, 9], [*TOKENS, 9, 9, 9, 9]])
def test_tokens_that_do_not_fill_their_blocks_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="2 blocks of 4 tokens") as raised:
        encode_batch(0.0, [EngineEvent(KvStored(None, BLOCKS), tokens)], 4)
    assert raised.value.field == "token_ids"


def test_a_message_is_topic_big_endian_sequence_and_batch() -> None:
    assert published(258, b"batch") == [b"", b"\0\0\0\0\0\0\1\2", b"batch"]


def request(first: int) -> list[bytes]:
    return [b"id", b"", first.to_bytes(8, "big")]


@given(st.integers(1, 5), st.integers(0, 12), st.integers(0, 14))
def test_a_replay_returns_the_kept_batches_from_a_sequence_on_and_an_end_mark(
    batches_max: int, appended: int, first: int
) -> None:
    ring = ReplayRing(batches_max)
    assert [ring.append(b"batch %d" % n) for n in range(appended)] == list(range(appended))
    *batches, end = ring.answer(request(first))
    kept = range(max(first, appended - batches_max), appended)
    assert batches == [[b"id", b"", b"", n.to_bytes(8, "big"), b"batch %d" % n] for n in kept]
    assert end == [b"id", b"", b"", b"\xff" * 8, b""]


def test_the_last_ten_thousand_batches_are_kept() -> None:
    ring = ReplayRing()
    for _ in range(10_001):
        ring.append(b"")
    *batches, _ = ring.answer(request(0))
    assert [int.from_bytes(batches[n][-2], "big") for n in (0, -1)] == [1, 10_000]


@pytest.mark.parametrize(
    "frames", [[], [b"id"], [b"id", request(0)[-1]], [*request(0), b""], [b"id", b"", b"short"], [b"id", b"", b""]]
)
def test_a_malformed_replay_request_is_not_answered(frames: list[bytes]) -> None:
    ring = ReplayRing()
    ring.append(b"batch")
    assert ring.answer(frames) == []
