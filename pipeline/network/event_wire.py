"""Events as bytes: an envelope in MessagePack inside a frame of version and length.

    byte 0: version 1    bytes 1-4: payload length, big endian    then the payload

Source: dynamo lib/runtime/src/transports/event_plane, frame.rs and codec.rs.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

from attrs import frozen

from pipeline.codec import from_msgpack, to_msgpack
from pipeline.errors import InvalidArgument, InvalidMessage
from pipeline.protocols.wire import U64

from .event_plane import Event

T = TypeVar("T")

FRAME_VERSION = 1
_HEADER = struct.Struct(">BI")


@frozen
class EventIdentity:
    """Who published an event, and as which one."""

    publisher_id: U64
    sequence: U64


@frozen
class _Envelope:
    """`published_at` is in milliseconds."""

    publisher_id: U64
    sequence: U64
    published_at: U64
    topic: str
    payload: Any


def encode_frame(payload: bytes) -> bytes:
    """The payload with its version and length before it."""
    return _HEADER.pack(FRAME_VERSION, len(payload)) + payload


def decode_frame(data: bytes) -> bytes:
    """The payload. Raises InvalidMessage for another version and for a frame that is not whole."""
    if len(data) < _HEADER.size:
        raise InvalidMessage(f"incomplete header: {len(data)} of {_HEADER.size} bytes")
    version, length = _HEADER.unpack_from(data)
    if version != FRAME_VERSION:
        raise InvalidMessage(f"unsupported version {version}")
    available = len(data) - _HEADER.size
    if available < length:
        raise InvalidMessage(f"incomplete payload: {available} of {length} bytes")
    return data[_HEADER.size : _HEADER.size + length]


def encode_event(event: Event[bytes]) -> bytes:
    """The envelope of an event whose payload is bytes already."""
    return to_msgpack(_Envelope(event.publisher_id, event.sequence, event.published_at_ms, event.topic, event.payload))


def decode_event(data: bytes) -> Event[bytes]:
    """The event in an envelope. Raises InvalidMessage for anything else."""
    envelope = _read(data, _Envelope)
    if not isinstance(envelope.payload, bytes):
        raise InvalidMessage("the payload of an event is bytes")
    return Event(envelope.publisher_id, envelope.sequence, envelope.published_at, envelope.topic, envelope.payload)


def decode_identity(data: bytes) -> EventIdentity:
    """Publisher and sequence alone. Raises InvalidMessage for anything that is not an envelope."""
    return _read(data, EventIdentity)


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return from_msgpack(data, kind)
    except InvalidArgument as error:
        raise InvalidMessage(f"not an envelope: {error}") from error
