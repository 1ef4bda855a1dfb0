"""Items of a token stream as MessagePack, past the general codec: the same bytes, in a quarter of the time.

Nearly all are of the form that `typed_items` reads and writes. The usual one is an `Annotated[LLMEngineOutput]` of
token ids and perhaps the index of its choice, and nothing else: all of it but these two are the same bytes each time,
and it is written with them. The bytes before and behind come from the general codec, so a change of the record changes
both. To a reader that takes it so, the usual item is a list of these two: 8 bytes for a token instead of 114.

Usual items that wait for a slow reader can be read as one item with the tokens of all: see `ready_reader`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET

from ..annotated import Annotated
from ..errors import InvalidArgument
from ..protocols import LLMEngineOutput
from .codec import from_msgpack, from_plain, to_msgpack
from .typed_items import ShortItem, TypedItem, item_of, lone_token, short_item, typed_items, typed_to_msgpack
from .typed_records import typed_reader

_INDEX_MAX = 127
"""Integers up to here are one byte."""
_NIL = 0xC0
_EXAMPLE_IDS = to_msgpack([1])


def _ends() -> tuple[bytes, bytes]:
    """Return the bytes before the token ids, and those from there to the index."""
    written = to_msgpack(Annotated(LLMEngineOutput([1], index=0)))
    head, tail = written[:-1].split(b"\xa9token_ids" + _EXAMPLE_IDS)
    return head + b"\xa9token_ids", tail


_HEAD, _TAIL = _ends()
_ENDS = {index: _TAIL + bytes([index]) for index in range(_INDEX_MAX + 1)} | {None: _TAIL + bytes([_NIL])}
_encode = msgspec.msgpack.Encoder().encode


def item_to_msgpack(item: Any, *, is_short: bool = False) -> bytes:
    """Return any item of a stream as `to_msgpack` does. `is_short`: a usual one as a list of its ids and its index."""
    if (
        type(item) is Annotated
        and type(chunk := item.data) is LLMEngineOutput
        and item.event is None
        and item.comment is None
        and item.id is None
        and item.error is None
        and chunk.log_probs is None
        and chunk.top_logprobs is None
        and chunk.cum_log_probs is None
        and chunk.text is None
        and chunk.tokens is None
        and chunk.stop_reason is None
        and chunk.disaggregated_params is None
        and chunk.worker_trace_link is None
        and chunk.routing_data is None
        and chunk.engine_data is None
        and chunk.extra_args is None
        and chunk.encoder_result is None
        and chunk.content_parts is None
        and chunk.output_type == "text"
    ):
        if chunk.finish_reason is not None or chunk.completion_usage is not None:
            return typed_to_msgpack(chunk) or to_msgpack(item)
        try:
            if is_short:
                return _encode((chunk.token_ids, chunk.index))
            return _HEAD + _encode(chunk.token_ids) + _ENDS[chunk.index]
        except (KeyError, TypeError, OverflowError):  # a large index, or what no list of token ids holds
            pass
    return to_msgpack(item)


def token_to_msgpack(token_id: int, index: int | None) -> bytes:
    """Return the short item of one token."""
    return _encode(((token_id,), index))


_LIST_OF_1 = b"\x91"
_JOINED_BYTES = 32 * 1024
"""Bytes of several frames whose tokens become one item."""

Ready = tuple[list[Any], int, int]
"""Items, how many they were when they came, and the bytes that they came in."""


def items_reader(kind: Any) -> Callable[[bytes], list[Any]]:
    """Return the function that reads a MessagePack list of items of this type. It raises InvalidArgument.

    Items of tokens may be short ones.
    """
    if kind is Any:
        return lambda body: from_msgpack(body, list)

    def read(body: bytes) -> list[Any]:
        return [from_plain(item, kind) for item in from_msgpack(body, list)]

    return _token_items if is_of_tokens(kind) else typed_reader(list[kind], read)


def _token_items(body: bytes) -> list[Any]:
    try:
        return [item_of(found) for found in typed_items(body)]
    except ValueError:
        return [_token_item(item) for item in from_msgpack(body, list)]


def _token_item(item: Any) -> Any:
    if not isinstance(item, list):  # a record is no list
        return from_plain(item, Annotated[LLMEngineOutput])
    try:
        return item_of(short_item(item))
    except ValueError as error:
        raise InvalidArgument(f"expected an item of tokens: {error}") from None


def is_of_tokens(kind: Any) -> bool:
    """Return whether items of this type may be short ones."""
    return bool(kind == Annotated[LLMEngineOutput])


PlainToken = tuple[int, int | None]
"""A token's id and the index of its choice: all that a usual item of one token has. Behind the detokenizer a third part
is its text. These are the parts by which token streams are fed: see `ResponseStream.feed`."""


def plain_reader(kind: Any) -> Callable[[bytes], PlainToken | None] | None:
    """Return the function that reads a list of one short item with one token, and returns None for any other bytes.

    None if items of this type are no tokens.
    """
    return _plain_token if is_of_tokens(kind) else None


def _plain_token(body: bytes) -> PlainToken | None:
    try:
        (((token_id,), index),) = lone_token(body)
    except ValueError:
        return None
    return token_id, index


def _usual(found: ShortItem | TypedItem) -> ShortItem | None:
    """Return token ids and index of a usual item; None for any other one."""
    if isinstance(found, tuple):
        return found
    output = found.data
    if output.finish_reason is not None or output.completion_usage is not UNSET:
        return None
    return output.token_ids, output.index


def ready_reader(kind: Any, join_max: int) -> Callable[[deque[bytes]], Ready]:
    """Return the function that removes the first of the lists that wait, and returns its items, as `items_reader`.

    Of usual items, and of lists with one usual item each, it takes those that follow each other in one choice and
    returns one item with their tokens, `join_max` at the most; one item with more stays as it is.
    """
    read = items_reader(kind)

    def read_first(bodies: deque[bytes]) -> Ready:
        body = bodies.popleft()
        items = read(body)
        return items, len(items), len(body)

    if not is_of_tokens(kind) or join_max == 1:
        return read_first

    def read_joined(bodies: deque[bytes]) -> Ready:
        if len(bodies) > 1 and (joined := _joined(bodies, join_max)) is not None:
            return joined
        body = bodies[0]
        try:
            found = typed_items(body)
        except ValueError:
            return read_first(bodies)
        bodies.popleft()
        items = [item_of(found[0])] if len(found) == 1 else _join(found, join_max)
        return items, len(found), len(body)

    return read_joined


def _joined(bodies: deque[bytes], join_max: int) -> Ready | None:
    """Remove the first lists that have one usual item of the same choice. None if the first is no such list."""
    token_ids: list[int] = []
    index: int | None = None
    count = size_bytes = 0
    while bodies:
        body = bodies[0]
        if not body.startswith(_LIST_OF_1):
            break
        try:
            (found,) = typed_items(body)
        except ValueError:
            break
        if (usual := _usual(found)) is None:
            break
        more, its_index = usual
        if not count:
            index = its_index
        elif its_index != index or len(token_ids) + len(more) > join_max or size_bytes + len(body) > _JOINED_BYTES:
            break
        token_ids += more
        count += 1
        size_bytes += len(body)
        bodies.popleft()
    if not count:
        return None
    return [Annotated(LLMEngineOutput(token_ids, index=index))], count, size_bytes


def _join(found: list[ShortItem | TypedItem], join_max: int) -> list[Any]:
    """Return the items of one list, the usual ones of a choice that follow each other joined up to so many tokens."""
    items: list[Any] = []
    last: LLMEngineOutput | None = None
    for item in found:
        if (usual := _usual(item)) is None:
            last = None
            items.append(item_of(item))
            continue
        token_ids, index = usual
        if last is not None and last.index == index and len(last.token_ids) + len(token_ids) <= join_max:
            last.token_ids += token_ids
        else:
            last = LLMEngineOutput(token_ids, index=index)
            items.append(Annotated(last))
    return items
