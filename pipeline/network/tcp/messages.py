"""What frames of the request plane hold: records, and the proof of the shared token."""

from __future__ import annotations

import hmac
from typing import Any, TypeVar

from attrs import field, frozen

from pipeline import InvalidArgument, PenstockError, Unknown
from pipeline.errors import CodecError, InvalidMessage
from pipeline.protocols.field_rules import U64
from pipeline.wire import from_msgpack, to_msgpack, to_plain

NONCE_BYTES = 16
NONCE_TEXT_LENGTH = 2 * NONCE_BYTES
_ERROR_BYTES, _MESSAGE_MAX = 64 * 1024, 256
"""Bytes of an error record above which its messages are cut to so many characters."""

T = TypeVar("T")


@frozen
class Hello:
    """What a side states of itself. A side of another version may have other fields beside the first."""

    version: U64
    nonce: str
    """16 random bytes in hex, for the proof."""
    heartbeat_ms: U64
    """Time in which this side sends at least something."""
    message_limit_bytes: U64
    """Bytes of a request or an item that this side takes."""
    window_items: U64
    """Items of a stream that this side takes unread."""
    window_bytes: U64
    """Bytes of them."""
    has_parts: bool = False
    """Whether this side takes long bodies in parts."""
    process: str = ""
    """Names this process; empty if its version does not."""


@frozen
class Version:
    """The part of a `Hello` that every version has."""

    version: U64


@frozen
class CallHead:
    """A call."""

    instance: str
    """Key of the instance."""
    id: str
    """Of the request."""
    payload: Any
    metadata: dict[str, str] = field(factory=dict)
    trace: dict[str, str] = field(factory=dict)
    """Headers of the trace."""
    is_stopped: bool = False
    """Whether the request was stopped before it was sent."""
    has_short_items: bool = False
    """Whether its caller reads items of tokens alone as lists of their ids and their index, and takes TOKENS."""


def read(body: bytes, cls: type[T]) -> T:
    """Return the record in a frame's body. Raise InvalidMessage if it is none."""
    try:
        return from_msgpack(body, cls)
    except InvalidArgument as error:
        raise InvalidMessage(f"a frame holds no {cls.__name__}: {error.message}") from None


def error_body(error: PenstockError) -> bytes:
    """Return the record of an error as a frame's body, with shortened messages if it would be long."""
    try:
        body = to_msgpack(error)
    except CodecError:  # a message that is no text, or a fact that is no number
        body = to_msgpack(Unknown(ascii(error.render())[:_MESSAGE_MAX]))
    if len(body) <= _ERROR_BYTES:
        return body
    record = outer = to_plain(error)
    while outer is not None:
        outer["message"] = outer["message"][:_MESSAGE_MAX]
        outer.pop("details", None)
        outer = outer.get("caused_by")
    return to_msgpack(record)


def proof(token: str, *, is_caller: bool, own_nonce: str, other_nonce: str) -> bytes:
    """Return 32 bytes that only a side with the token can give, for these two nonces and this side only."""
    content = f"penstock request plane {'caller' if is_caller else 'worker'} {own_nonce} {other_nonce}"
    return hmac.digest(token.encode(), content.encode(), "sha256")


def is_proof(given: bytes, token: str, *, is_caller: bool, own_nonce: str, other_nonce: str) -> bool:
    """Return whether the bytes are the proof of the side with `own_nonce`; compared in constant time."""
    return hmac.compare_digest(given, proof(token, is_caller=is_caller, own_nonce=own_nonce, other_nonce=other_nonce))
