"""Tokens of several streams as MessagePack: a list of streams and token ids, by turns, uint32 each.

What many streams get in one step of their engine is written and read in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from ..errors import InvalidMessage
from ..protocols.field_rules import U32_MAX
from .token_items import token_to_msgpack

_read: Final = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=U32_MAX)]]).decode

stream_tokens_to_msgpack: Final = msgspec.msgpack.Encoder().encode
"""Returns the bytes of such a list, which must be one."""


def stream_tokens_from_msgpack(body: bytes) -> Iterator[tuple[int, int]]:
    """Return streams and token ids, at least one of each. Raise InvalidMessage if the bytes are something else."""
    try:
        numbers = _read(body)
    except ValueError as error:
        raise InvalidMessage(f"expected tokens of streams: {error}") from None
    if not numbers or len(numbers) % 2:
        raise InvalidMessage(f"expected tokens of streams, not {len(numbers)} numbers")
    each = iter(numbers)
    return zip(each, each, strict=True)


def items_of_token(token_id: int) -> bytes:
    """Return the list of items that a token of a stream stands for: one short item, `[[[token id], nil]]`."""
    return b"\x91" + token_to_msgpack(token_id, None)
