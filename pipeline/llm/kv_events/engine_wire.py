"""What an inference engine sends of its cache over ZMQ, read into records; `engine_changes.py` has their meaning.

    topic │ sequence, 8 bytes big endian │ MessagePack [time_s, [event, ...], data_parallel_rank]

An event is an object with the key `type`, or an array that begins with the type and goes on with the fields in order.
Block hashes are integers, signed or not, or whole digests as bytes.

Source: vllm/distributed/kv_events.py and v1/core/kv_cache_utils.py, maybe_convert_block_hash; dynamo
lib/kv-router/src/zmq_wire, deserialize.rs and extra_keys.rs.

The extra keys of an engine's stored blocks: the media in them, and the tenant they are of.

One list for each block, None for a block without; a bare list of texts is the first block's. Among the keys stand the
adapter's name, a tenant's salt, names of media, bare or with a place in the block, and others that are not for us.
Source: vllm/v1/core/kv_cache_utils.py; dynamo lib/kv-router/src/zmq_wire/extra_keys.rs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from reprlib import repr as shortened
from typing import Any, Literal, TypeAlias

from attrs import define, frozen

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.llm import SEED, hash_seed
from pipeline.protocols import BlockExtraInfo, MmObject
from pipeline.protocols.field_rules import U32, skip
from pipeline.wire import from_msgpack, from_plain

SALT_PREFIX = "dynamo-cache-salt:"
"""Marks a tenant's salt among the keys, where it could be taken for a name."""

_MEDIA_HASH = re.compile(r"([0-9a-fA-F]{16})[0-9a-fA-F]{48}")
"""The hash we know media by is the beginning of the engine's."""


def cache_namespace(extra_keys: Any, lora_name: str | None) -> str | None:
    """The salt among the first block's keys, where engines put it; the adapter's name is none, however it looks."""
    keys = [key for key in next(iter(_by_block(extra_keys)), []) if type(key) is str]
    if lora_name in keys:
        keys.remove(lora_name)
    return next((key[len(SALT_PREFIX) :] for key in keys if key.startswith(SALT_PREFIX) and key != SALT_PREFIX), None)


def media_of(extra_keys: Any, lora_name: str | None) -> list[BlockExtraInfo | None]:
    """The media of each block, without their places in it."""
    hashes = [
        [found for key in keys if key != lora_name and (found := _media_hash(key)) is not None]
        for keys in _by_block(extra_keys)
    ]
    return [BlockExtraInfo([MmObject(found, []) for found in block]) if block else None for block in hashes]


def _by_block(extra_keys: Any) -> list[list[Any]]:
    if type(extra_keys) is not list:
        return []
    if any(type(keys) is str for keys in extra_keys):
        return [extra_keys]
    return [keys if type(keys) is list else [] for keys in extra_keys]


def _media_hash(key: Any) -> int | None:
    """Of a text only if it looks like one; with a place in the block it is one, in whatever form."""
    has_place = type(key) is list and len(key) == 2 and type(key[1]) is int
    text = key[0] if has_place else key
    if type(text) is not str or not text:
        return None
    if matched := _MEDIA_HASH.fullmatch(text):
        return int(matched[1], 16)
    return (hash_seed(text) - SEED) % 2**64 if has_place else None  # the plain XXH3 of the text


_HEADS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": ("ownership",),
    "Ignored": (),
}
"""Type -> the fields an array begins with."""
_TAIL: Sequence[tuple[str, type]] = (
    ("group_idx", int),
    ("kv_cache_spec_kind", str),
    ("kv_cache_spec_sliding_window", int),
    ("locality", str),
    ("ownership", str),
)
"""What follows for stored and removed blocks, as far as it is there."""
_HASH_BYTES = 8


@define
class Origin:
    """Where blocks are and whose they are, in the engine's words; None where it sends none."""

    medium: str | None = None
    group: U32 | None = skip(name="group_idx")
    kind: str | None = skip(name="kv_cache_spec_kind")
    locality: str | None = None
    ownership: str | None = None

    def __attrs_post_init__(self) -> None:
        self.medium, self.kind = self.medium or None, self.kind or None


@define
class EngineStored:
    """Blocks of `token_ids` came into the cache; with `is_eagle` each looks at the token behind it, too."""

    names: list[int]
    parent: int | None
    token_ids: list[int]
    block_size_tokens: int
    lora_name: str | None
    namespace: str | None
    media: Sequence[BlockExtraInfo | None]
    is_eagle: bool
    origin: Origin


@define
class EngineRemoved:
    """Blocks left the cache."""

    names: list[int]
    origin: Origin


@define
class EngineCleared:
    """All blocks of the rank left the cache."""

    origin: Origin


@define
class EngineIgnored:
    """An event that the engine itself marks as empty."""


@define
class Undecodable:
    """An event that cannot be read; those around it can."""

    reason: str


EngineEvent: TypeAlias = EngineStored | EngineRemoved | EngineCleared | EngineIgnored | Undecodable


@frozen
class EngineBatch:
    """The events of one message of one rank; `sequence` counts the engine's messages."""

    sequence: int
    time_s: float
    dp_rank: int
    events: list[EngineEvent]


RefusalReason = Literal["too_large", "too_many_events", "rank_too_high"]


@frozen
class WireLimits:
    """Bounds of one message of an engine, so that no sender fills the memory of the process that reads it.

    The defaults leave room for a step of a million prompt tokens, and for engines that send one event a page.
    """

    message_bytes: int = 2**24
    """Of its frames together."""
    events: int = 2**16
    ranks: int = 1024
    """Ranks are numbered from 0; each has an account of its own."""

    def __attrs_post_init__(self) -> None:
        for field in ("message_bytes", "events", "ranks"):
            if (value := getattr(self, field)) < 1:
                raise InvalidArgument(f"must be at least 1, got {value}", field=field)


class RefusedMessage(InvalidMessage):
    """A message over a limit; `reason` is the limit's."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason


def decode_frames(frames: Sequence[bytes], limits: WireLimits | None = None) -> EngineBatch:
    """Return the batch in a message.

    Raises RefusedMessage for one over the limits, and InvalidMessage unless it has three frames and a payload of the
    right form.
    """
    limits = WireLimits() if limits is None else limits
    if (size := sum(map(len, frames))) > limits.message_bytes:
        raise RefusedMessage("too_large", f"a message of {size} bytes, at most {limits.message_bytes} are taken")
    if len(frames) != 3 or len(frames[1]) != 8:
        raise InvalidMessage("a message of KV events has a topic, a sequence of 8 bytes and a payload")
    try:
        payload = from_msgpack(frames[2], list[Any])
    except InvalidArgument as error:
        raise InvalidMessage(f"not a batch of KV events: {error}") from error
    time_s, events, rank = [*payload, None, None, None][:3]
    if type(time_s) not in (int, float) or type(events) is not list:
        raise InvalidMessage("a batch of KV events is [time, events, data parallel rank]")
    if rank is not None and (type(rank) is not int or not 0 <= rank < 2**32):
        raise InvalidMessage(f"not a data parallel rank: {shortened(rank)}")
    if (rank or 0) >= limits.ranks:
        raise RefusedMessage("rank_too_high", f"rank {rank}, at most {limits.ranks} ranks are taken")
    if len(events) > limits.events:
        raise RefusedMessage("too_many_events", f"{len(events)} events, at most {limits.events} a message are taken")
    return EngineBatch(int.from_bytes(frames[1], "big"), float(time_s), rank or 0, [decode_event(e) for e in events])


def decode_event(value: Any) -> EngineEvent:
    """The event in a plain value; Undecodable if there is none, or one of an unknown type."""
    try:
        tag, fields = _tagged(value)
        if tag == "BlockStored":
            return _stored(fields)
        if tag == "BlockRemoved":
            return EngineRemoved(_names(fields), from_plain(fields, Origin))
        return EngineCleared(from_plain(fields, Origin)) if tag == "AllBlocksCleared" else EngineIgnored()
    except (InvalidMessage, InvalidArgument) as error:
        return Undecodable(str(error))


def _tagged(value: Any) -> tuple[str, dict[str, Any]]:
    """The type of an event and its fields by name."""
    tag = value.get("type") if type(value) is dict else value[0] if type(value) is list and value else None
    if type(tag) is not str or tag not in _HEADS:
        raise InvalidMessage(f"unknown type of KV event: {shortened(tag)}")
    if type(value) is dict:
        return tag, value
    head, after = _HEADS[tag], value[1 + len(_HEADS[tag]) :]
    fields = dict(zip(head, value[1:], strict=False))
    if tag == "BlockStored" and _begins_with_media(after):
        fields["block_mm_infos"] = after.pop(0)
    return tag, fields | _tail(after) if tag in ("BlockStored", "BlockRemoved") else fields


def _begins_with_media(after: list[Any]) -> bool:
    """Whether media infos, or a nil in their place, stand before the tail, as some engines put them."""
    return type(next(iter(after), None)) is list or (after[:1] == [None] and type(next(iter(after[1:]), None)) is int)


def _tail(after: list[Any]) -> dict[str, Any]:
    """The fields after those of the head. Old engines omit the first ones, so that only their kinds identify them."""
    slots = list(zip(_TAIL, after, strict=False))
    if all(value is None or type(value) is kind for (_, kind), value in slots):
        return {name: value for (name, _), value in slots}
    early, late = [value for _, value in slots[:3]], slots[3:]
    fields = {name: value for (name, kind), value in late if type(value) is kind}
    fields |= {"group_idx": next((value for value in early if type(value) is int), None)}
    return fields | {"kv_cache_spec_kind": next((value for value in early if type(value) is str), None)}


@define
class _StoredFields:
    """What a store has beside its hashes and its origin."""

    token_ids: list[U32] | list[tuple[U32, U32]]
    """As pairs, each token with the one behind it."""
    block_size: U32
    lora_name: str | None = None
    extra_keys: Any = None
    cache_salt: str | None = None
    block_mm_infos: list[BlockExtraInfo | None] | None = None


def _stored(fields: dict[str, Any]) -> EngineStored:
    if isinstance(salted := fields.get("lora_name"), dict):  # how another engine sends the salt in an array
        fields = {**fields, "lora_name": None, "cache_salt": salted.get("cache_salt")}
    parent, read = fields.get("parent_block_hash"), from_plain(fields, _StoredFields)
    tokens: list[Any] = read.token_ids
    if is_in_pairs := bool(tokens) and type(tokens[0]) is tuple:
        tokens = [first for first, _ in tokens] + [tokens[-1][1]]
    return EngineStored(
        names=_names(fields),
        parent=None if parent is None else _hash(parent),
        token_ids=tokens,
        block_size_tokens=read.block_size,
        lora_name=read.lora_name,
        namespace=read.cache_salt or cache_namespace(read.extra_keys, read.lora_name),
        media=read.block_mm_infos or media_of(read.extra_keys, read.lora_name),
        is_eagle=is_in_pairs or fields.get("is_eagle") is True,
        origin=from_plain(fields, Origin),
    )


def _names(fields: dict[str, Any]) -> list[int]:
    names = fields.get("block_hashes")
    if type(names) is not list:
        raise InvalidMessage("block_hashes is a list of hashes")
    return [_hash(name) for name in names]


def _hash(value: Any) -> int:
    """A u64; a negative number stands for the one of the same bits, a digest for its last 8 bytes, big endian."""
    if type(value) is bytes and len(value) >= _HASH_BYTES:
        return int.from_bytes(value[-_HASH_BYTES:], "big")
    if type(value) is not int or not -(2**63) <= value < 2**64:
        raise InvalidMessage(f"not a block hash: {shortened(value)}")
    return value % 2**64
