"""Typed messages to bytes and back: codec, frames, server-sent events, errors."""

from .codec import (
    from_json,
    from_msgpack,
    from_plain,
    is_json_object,
    plain_from_json,
    plain_from_long_json,
    to_json,
    to_msgpack,
    to_plain,
)
from .errors import error_from_plain, error_to_plain
from .long_json import WINDOW, JsonSize
from .sse import DONE, SSEDecoder, SSEMessage, encode

__all__ = [
    "DONE",
    "WINDOW",
    "JsonSize",
    "SSEDecoder",
    "SSEMessage",
    "encode",
    "error_from_plain",
    "error_to_plain",
    "from_json",
    "from_msgpack",
    "from_plain",
    "is_json_object",
    "plain_from_json",
    "plain_from_long_json",
    "to_json",
    "to_msgpack",
    "to_plain",
]
