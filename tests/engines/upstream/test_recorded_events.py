"""KV events that a real vLLM published and replayed: read, and in the form that the simulated source has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.llm import block_hashes, hash_seed
from pipeline.llm.kv_events import EngineChange, EngineFollower, EngineStored, decode_frames
from pipeline.protocols.kv import KvCleared, KvStored
from pipeline.wire import from_msgpack
from tests.pipeline.llm.kv_events.kv_source import END, stored

FOLDER = Path(__file__).with_name("recorded")
FILES = pytest.mark.parametrize("name", ["vllm", "vllm_byte_hashes"])
BLOCK_TOKENS = 32


def messages(name: str, kind: str) -> list[list[bytes]]:
    """The frames of the recorded messages."""
    record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [[bytes.fromhex(frame) for frame in one["frames"]] for one in record[kind]]


def followed(name: str) -> tuple[EngineFollower, list[EngineChange]]:
    """A follower that has taken all that was replayed, and what it delivered."""
    changes: list[EngineChange] = []
    follower = EngineFollower("tcp://127.0.0.1:1", changes.append, block_size_tokens=BLOCK_TOKENS)
    for frames in messages(name, "kv_replay")[:-1]:
        follower.receive(frames[1:])
    return follower, changes


@FILES
def test_a_replay_has_an_empty_frame_before_each_message_and_ends_with_minus_one(name: str) -> None:
    *batches, end = messages(name, "kv_replay")
    assert end == [b"", b"", END, b""]
    assert [[*frames[:2], int.from_bytes(frames[2], "big")] for frames in batches] == [
        [b"", b"", sequence] for sequence in range(len(batches))
    ]


@FILES
def test_what_was_published_is_replayed_as_it_was(name: str) -> None:
    replayed = {frames[2]: frames[3] for frames in messages(name, "kv_replay")}
    live = messages(name, "kv_events")
    assert live
    assert all(replayed[sequence] == payload for _, sequence, payload in live)


@FILES
def test_every_event_of_a_real_server_is_taken(name: str) -> None:
    follower, changes = followed(name)
    assert (follower.filtered, follower.malformed, follower.lost_batches) == ({}, 0, 0)
    assert {type(change.change) for change in changes} == {KvStored, KvCleared}


@FILES
def test_a_store_has_the_hashes_of_its_tokens_and_continues_its_parent(name: str) -> None:
    known: set[int | None] = {None}
    _, changes = followed(name)
    for change in changes:
        if isinstance(change.change, KvStored):
            assert change.change.parent_hash in known
            known |= {block.block_hash for block in change.change.blocks}
    batch = decode_frames(messages(name, "kv_events")[0])
    (event,) = [one for one in batch.events if isinstance(one, EngineStored)]
    (first,) = [
        one.change
        for one in changes
        if isinstance(one.change, KvStored) and one.change.blocks[0].block_hash == event.names[0]
    ]
    assert [block.tokens_hash for block in first.blocks] == block_hashes(event.token_ids, BLOCK_TOKENS)


def test_byte_hashes_end_with_the_integers_of_the_same_blocks() -> None:
    names: list[set[int]] = []
    for name in ("vllm", "vllm_byte_hashes"):
        _, changes = followed(name)
        names.append({b.block_hash for c in changes if isinstance(c.change, KvStored) for b in c.change.blocks})
    assert names[1] & names[0]


def test_a_salt_with_the_prefix_is_a_tenant() -> None:
    _, changes = followed("vllm")
    plain, salted = (change.change for change in changes[:2])
    assert isinstance(plain, KvStored)
    assert isinstance(salted, KvStored)
    tokens = list(range(300, 364))
    assert [block.tokens_hash for block in plain.blocks] == block_hashes(tokens, BLOCK_TOKENS)
    seed = hash_seed(None, "a")
    assert [block.tokens_hash for block in salted.blocks] == block_hashes(tokens, BLOCK_TOKENS, seed=seed)


def test_the_simulated_source_sends_what_a_real_one_sends() -> None:
    """The fields that vLLM always sends, and no other."""
    batch: list[Any] = from_msgpack(messages("vllm", "kv_events")[0][2], list[Any])
    (event,) = batch[1]
    optional = {"extra_keys", "group_idx", "kv_cache_spec_kind", "session_id"}
    assert stored(1).keys() == event.keys() - optional
    assert {name: type(value) for name, value in stored(1).items()} == {
        name: type(value) for name, value in event.items() if name not in optional
    }
