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
from .errors import LINKS_MAX, error_from_plain, error_to_plain
from .frames import Frame, FrameDecoder, decode_frame, encode_frame
from .json_pieces import decode_in_pieces
from .json_size import WINDOW, JsonSize
from .sse import DONE, SSEDecoder, SSEMessage, encode, to_annotated

__all__ = [
    "DONE",
    "LINKS_MAX",
    "WINDOW",
    "Frame",
    "FrameDecoder",
    "JsonSize",
    "SSEDecoder",
    "SSEMessage",
    "decode_frame",
    "decode_in_pieces",
    "encode",
    "encode_frame",
    "error_from_plain",
    "error_to_plain",
    "from_json",
    "from_msgpack",
    "from_plain",
    "is_json_object",
    "plain_from_json",
    "plain_from_long_json",
    "to_annotated",
    "to_json",
    "to_msgpack",
    "to_plain",
]
