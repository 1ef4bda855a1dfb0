"""KV events as vLLM publishes them: the bytes of a batch, and a replay of the last batches.

    published    topic (empty) │ sequence, u64 big-endian │ MessagePack of [timestamp_s, [event, ...], dp_rank]
    requested    identity │ empty │ first sequence wanted
    replayed     identity │ empty │ topic (empty) │ sequence │ batch, for each kept; then the same with sequence -1

Source: dynamo lib/mocker/src/services/zmq_events.rs. Other than there, a cleared cache is an event too, tokens that do
not fit their blocks are an error instead of a panic, and a malformed request for a replay is not answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

from attrs import frozen

from pipeline import InvalidArgument
from pipeline.protocols.kv import KvCleared, KvEventData, KvRemoved, KvStored, StorageTier
from pipeline.wire import to_msgpack

TOPIC = b""
REPLAY_BATCHES = 10_000
"""How many of the last batches can be replayed."""

_SEQUENCE_BYTES = 8
_REQUEST_FRAMES = 3
END_OF_REPLAY = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)
"""In the place of a sequence: nothing follows."""

_MEDIUM: dict[StorageTier, str | None] = {
    "device": None,
    "host_pinned": "CPU_PINNED",
    "disk": "DISK",
    "external": "EXTERNAL",
}
_GROUP = 0
"""The attention group of every block: a mock worker has one."""

Frames = list[bytes]


@frozen
class EngineEvent:
    """A change of the cache as an engine publishes it: with the tokens of stored blocks and their tier."""

    data: KvEventData
    block_token_ids: Sequence[Sequence[int]] = ()
    tier: StorageTier = "device"


def encode_batch(timestamp_s: float, events: Sequence[EngineEvent], block_size_tokens: int, dp_rank: int = 0) -> bytes:
    """Return one batch as MessagePack. Raises InvalidArgument if a stored event lacks tokens of a block."""
    return to_msgpack([timestamp_s, [_plain(event, block_size_tokens) for event in events], dp_rank])


def sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(_SEQUENCE_BYTES, "big")


def published(sequence: int, batch: bytes) -> Frames:
    """Return the message of a batch."""
    return [TOPIC, sequence_bytes(sequence), batch]


class ReplayRing:
    """The last batches with their sequences, which count up from 0; the oldest make room for new ones."""

    def __init__(self, batches_max: int = REPLAY_BATCHES) -> None:
        self.next_sequence = 0
        self._batches: deque[bytes] = deque(maxlen=batches_max)

    def append(self, batch: bytes) -> int:
        """Keep the batch and return its sequence."""
        self._batches.append(batch)
        self.next_sequence += 1
        return self.next_sequence - 1

    def since(self, first_sequence: int) -> list[tuple[int, bytes]]:
        """Return the kept batches from that sequence on, oldest first."""
        oldest = self.next_sequence - len(self._batches)
        return [(number, batch) for number, batch in enumerate(self._batches, oldest) if number >= first_sequence]


def replay_answer(request: Sequence[bytes], ring: ReplayRing) -> list[Frames]:
    """Return the messages that answer a request for a replay; none if it is malformed.

    Batches that are not kept any more are left out: the reader sees it by the first sequence.
    """
    if len(request) != _REQUEST_FRAMES or len(request[-1]) != _SEQUENCE_BYTES:
        return []
    to, first = [request[0], b"", TOPIC], int.from_bytes(request[-1], "big")
    batches = [[*to, sequence_bytes(sequence), batch] for sequence, batch in ring.since(first)]
    return [*batches, [*to, END_OF_REPLAY, b""]]


def _plain(event: EngineEvent, block_size_tokens: int) -> dict[str, Any]:
    data = event.data
    if isinstance(data, KvCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(data, KvRemoved):
        return {"type": "BlockRemoved", "block_hashes": data.block_hashes} | _place(event.tier)
    return {
        "type": "BlockStored",
        "block_hashes": [block.block_hash for block in data.blocks],
        "parent_block_hash": data.parent_hash,
        "token_ids": _token_ids(data, event.block_token_ids, block_size_tokens),
        "block_size": block_size_tokens,
    } | _place(event.tier)


def _place(tier: StorageTier) -> dict[str, Any]:
    """Return the fields for the tier of blocks; the device has no medium."""
    medium = _MEDIUM[tier]
    return {"group_idx": _GROUP} if medium is None else {"medium": medium, "group_idx": _GROUP}


def _token_ids(stored: KvStored, block_token_ids: Sequence[Sequence[int]], block_size_tokens: int) -> list[int]:
    lengths = [len(tokens) for tokens in block_token_ids]
    if lengths != [block_size_tokens] * len(stored.blocks):
        expected = f"{len(stored.blocks)} blocks of {block_size_tokens} tokens"
        raise InvalidArgument(f"expected {expected}, got lengths {lengths}", field="block_token_ids")
    return list(chain.from_iterable(block_token_ids))
