"""The usual item of a token stream as MessagePack, without the general codec: the same bytes, in a fifth of the time.

It is an `Annotated[LLMEngineOutput]` of token ids and perhaps the index of its choice, and nothing else. All of it but
these two are the same bytes each time. The bytes before, between and behind come from the general codec, so a change of
the record changes both. The first and the last item of an answer are read and written by `answer_ends`, any other item
by the general codec.

Such items that wait for a slow reader can be read as one item with the tokens of all: see `ready_reader`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Annotated as Marked
from typing import Any

import msgspec

from ..annotated import Annotated
from ..protocols import LLMEngineOutput
from ..protocols.field_rules import U32_MAX
from .answer_ends import end_to_msgpack, ends_from_msgpack
from .codec import from_msgpack, from_plain, to_msgpack

_INDEX_MAX = 127
"""Integers up to here are one byte."""
_NIL = 0xC0
_SHORT_LIST, _LIST_16 = 0x90, 0xDC
_EXAMPLE_IDS = to_msgpack([1])


def _ends() -> tuple[bytes, bytes]:
    """Return the bytes before the token ids, and those from there to the index."""
    written = to_msgpack(Annotated(LLMEngineOutput([1], index=0)))
    head, tail = written[:-1].split(b"\xa9token_ids" + _EXAMPLE_IDS)
    return head + b"\xa9token_ids", tail


_HEAD, _TAIL = _ends()
_HEAD_BYTES, _TAIL_BYTES = len(_HEAD), len(_TAIL)
_LIST_OF_1 = b"\x91"
_ONE_ITEM = _LIST_OF_1 + _HEAD
_ONE_ITEM_BYTES = len(_ONE_ITEM)
_ENDS = {index: _TAIL + bytes([index]) for index in range(_INDEX_MAX + 1)} | {None: _TAIL + bytes([_NIL])}
_encode_ids = msgspec.msgpack.Encoder().encode
_decode_ids = msgspec.msgpack.Decoder(list[Marked[int, msgspec.Meta(ge=0, le=U32_MAX)]]).decode


def item_to_msgpack(item: Any) -> bytes:
    """Return any item of a stream as `to_msgpack` does."""
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
            return end_to_msgpack(chunk) or to_msgpack(item)
        try:
            return _HEAD + _encode_ids(chunk.token_ids) + _ENDS[chunk.index]
        except (KeyError, TypeError, OverflowError):  # a large index, or what no list of token ids holds
            pass
    return to_msgpack(item)


_END_BYTES = _TAIL_BYTES + 1
_INDEXES = {end: index for index, end in _ENDS.items()}
_JOINED_BYTES = 32 * 1024
"""Bytes of several frames whose tokens become one item."""

Ready = tuple[list[Any], int, int]
"""Items, how many they were when they came, and the bytes that they came in."""


def items_reader(kind: Any) -> Callable[[bytes], list[Any]]:
    """Return the function that reads a MessagePack list of items of this type. It raises InvalidArgument."""
    if kind is Any:
        return lambda body: from_msgpack(body, list)

    def read(body: bytes) -> list[Any]:
        return [from_plain(item, kind) for item in from_msgpack(body, list)]

    if kind != Annotated[LLMEngineOutput]:
        return read

    def read_tokens(body: bytes) -> list[Any]:
        if body.startswith(_ONE_ITEM):
            tail_at = len(body) - _TAIL_BYTES - 1
            index = body[-1]
            if body.startswith(_TAIL, tail_at) and (index <= _INDEX_MAX or index == _NIL):
                try:
                    chunk = LLMEngineOutput(_decode_ids(body[_ONE_ITEM_BYTES:tail_at]))
                except ValueError:  # a DecodeError is one
                    return read(body)
                if index != _NIL:
                    chunk.index = index
                return [Annotated(chunk)]
        found = _short_way(body, 1)
        return read(body) if found is None else found[0]

    return read_tokens


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

    if kind != Annotated[LLMEngineOutput] or join_max == 1:
        return read_first

    def read_joined(bodies: deque[bytes]) -> Ready:
        if len(bodies) > 1 and (joined := _joined(bodies, join_max)) is not None:
            return joined
        body = bodies[0]
        if not body.startswith(_ONE_ITEM) and (found := _short_way(body, join_max)) is not None:
            bodies.popleft()
            return *found, len(body)
        return read_first(bodies)

    return read_joined


def _joined(bodies: deque[bytes], join_max: int) -> Ready | None:
    """Remove the first lists that have one usual item of the same choice. None if the first is no such list."""
    end = bodies[0][-_END_BYTES:]
    if end not in _INDEXES:
        return None
    token_ids: list[int] = []
    count = size_bytes = 0
    while bodies:
        body = bodies[0]
        if not (body.startswith(_ONE_ITEM) and body.endswith(end)):
            break
        try:
            more = _decode_ids(body[_ONE_ITEM_BYTES:-_END_BYTES])
        except ValueError:  # a DecodeError is one
            break
        if count and (len(token_ids) + len(more) > join_max or size_bytes + len(body) > _JOINED_BYTES):
            break
        token_ids += more
        count += 1
        size_bytes += len(body)
        bodies.popleft()
    if not count:
        return None
    return [Annotated(LLMEngineOutput(token_ids, index=_INDEXES[end]))], count, size_bytes


def _short_way(body: bytes, join_max: int) -> tuple[list[Any], int] | None:
    """Return the items of a list of usual items, or with the first or last of an answer, and how many they were.

    None for any other list. Usual items are joined up to so many tokens.
    """
    if not body.startswith(_LIST_OF_1) and (found := _usual_items(body, join_max)) is not None:
        return found
    ends = ends_from_msgpack(body)
    return None if ends is None else (ends, len(ends))


def _usual_items(body: bytes, join_max: int) -> tuple[list[Any], int] | None:
    """Return the items of a list of up to 65,535, joined up to so many tokens, and their number before that.

    None if one of them is another one than the usual. Bytes that are cut into head, list of ids, tail and index without
    a rest can be read in no other way.
    """
    items: list[Any] = []
    last: LLMEngineOutput | None = None
    found = 0
    try:
        count, at, end = body[0] ^ _SHORT_LIST, 1, len(body)
        if count == _LIST_16 ^ _SHORT_LIST:
            count, at = int.from_bytes(body[1:3], "big"), 3
        while at < end and body.startswith(_HEAD, at):
            ids_at = at + _HEAD_BYTES
            tail_at = body.index(_TAIL, ids_at)
            at = tail_at + _END_BYTES
            index = _INDEXES[body[tail_at:at]]
            token_ids = _decode_ids(body[ids_at:tail_at])
            found += 1
            joins = join_max > 1 and last is not None and last.index == index
            if joins and last is not None and len(last.token_ids) + len(token_ids) <= join_max:
                last.token_ids += token_ids
            else:
                last = LLMEngineOutput(token_ids, index=index)
                items.append(Annotated(last))
    except (LookupError, ValueError):  # a DecodeError is one
        return None
    return (items, count) if at == end and found == count else None
