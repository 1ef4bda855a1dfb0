"""Typed messages to bytes and back: codec, frames, server-sent events, errors.

What is imported under its own name again is for sibling packages; users take the names of `__all__`.
"""

from .codec import from_json, from_msgpack, from_plain, to_json, to_msgpack, to_plain
from .codec import is_json_object as is_json_object
from .codec import is_readable as is_readable
from .codec import plain_from_json as plain_from_json
from .codec import plain_from_long_json as plain_from_long_json
from .codec import plain_to_json as plain_to_json
from .frames import FrameDecoder as FrameDecoder
from .frames import encode_frame as encode_frame
from .long_json import WINDOW as WINDOW
from .long_json import JsonSize as JsonSize
from .sse import DONE as DONE
from .sse import SSEDecoder, SSEMessage, encode
from .stream_tokens import items_of_token as items_of_token
from .stream_tokens import stream_tokens_from_msgpack as stream_tokens_from_msgpack
from .stream_tokens import stream_tokens_to_msgpack as stream_tokens_to_msgpack
from .token_items import is_of_tokens as is_of_tokens
from .token_items import item_to_msgpack as item_to_msgpack
from .token_items import items_reader as items_reader
from .token_items import plain_reader as plain_reader
from .token_items import ready_reader as ready_reader
from .token_items import token_to_msgpack as token_to_msgpack
from .typed_records import record_reader as record_reader

__all__ = [
    "SSEDecoder",
    "SSEMessage",
    "encode",
    "from_json",
    "from_msgpack",
    "from_plain",
    "to_json",
    "to_msgpack",
    "to_plain",
]
