"""Events as bytes: an envelope in MessagePack inside a frame of version and length.

    byte 0: version 1    bytes 1-4: payload length, big endian    then the payload

Source: dynamo lib/runtime/src/transports/event_plane, frame.rs and codec.rs.
"""

from __future__ import annotations

import struct
from typing import Any

from attrs import frozen

from pipeline.codec import from_msgpack, to_msgpack
from pipeline.errors import InvalidMessage

from .event_plane import Event

FRAME_VERSION = 1
_HEADER = struct.Struct(">BI")


@frozen
class EventIdentity:
    """Who published an event, and as which one; `published_at` is in milliseconds."""

    publisher_id: int
    sequence: int


@frozen
class _Envelope:
    publisher_id: int
    sequence: int
    published_at: int
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
    """The event in an envelope. Raises InvalidArgument for anything else."""
    envelope = from_msgpack(data, _Envelope)
    if not isinstance(envelope.payload, bytes):
        raise InvalidMessage("the payload of an event is bytes")
    return Event(envelope.publisher_id, envelope.sequence, envelope.published_at, envelope.topic, envelope.payload)


def decode_identity(data: bytes) -> EventIdentity:
    """Publisher and sequence alone. Raises InvalidArgument for anything that is not an envelope."""
    return from_msgpack(data, EventIdentity)
