"""Frames of the request plane: a length, then MessagePack.

    u32 length of the rest, big endian │ [kind, stream, body] in MessagePack

The array's header is one byte, `kind` a positive fixint, `stream` always a uint32, so that all before the body has 11
bytes, and whole frames remain MessagePack that any library reads. `stream` is 0 for what concerns the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import Final

from pipeline.errors import InvalidMessage, MessageTooLarge

VERSION: Final = 1

HELLO: Final = 1
"""Each side's first frame: a `Hello`."""
PROOF: Final = 2
"""Each side's second frame: 32 bytes that prove that it knows the token."""
BEAT: Final = 3
"""Either side, if it has sent nothing else for a while."""
CALL: Final = 4
"""Caller: a `CallHead`. Streams are numbered upwards from 1."""
BEGUN: Final = 5
"""Worker: the engine has returned a stream."""
ITEMS: Final = 6
"""Worker: a list of items, at least one."""
END: Final = 7
"""Worker: the stream has ended."""
ERROR: Final = 8
"""Worker: the call has failed, with an error record. On stream 0, by either side: the connection ends, and why."""
CREDIT: Final = 9
"""Caller: `[items, bytes]` that its reader has taken."""
STOP: Final = 10
KILL: Final = 11
CLOSE: Final = 12
"""Caller: as KILL, but its reader has left without a kill."""
PART: Final = 13
"""A part of a body: of a CALL by the caller, of ITEMS by the worker. Only to a side that takes parts."""
TOKENS: Final = 14
"""Worker, on stream 0: a list of streams and token ids, by turns: for each stream an item of that token alone."""

NIL: Final = b"\xc0"
_ARRAY_OF_3, _UINT32 = 0x93, 0xCE
_HEADER, _ITEM_HEAD = Struct(">IBBBI"), Struct(">BBBIB")
_LENGTH_BYTES = 4
HEADER_BYTES: Final = _HEADER.size
_BEFORE_BODY = HEADER_BYTES - _LENGTH_BYTES
_BEFORE_ITEM = _BEFORE_BODY + 1
_SHORT_LENGTHS = [(_BEFORE_ITEM + size_bytes).to_bytes(_LENGTH_BYTES, "big") for size_bytes in range(128)]
_ARRAY_16, _ARRAY_32 = Struct(">BH"), Struct(">BI")

BODY_MAX = 2**32 - 1 - _BEFORE_BODY
HEADROOM_BYTES: Final = 64 * 1024
"""Bytes that a frame may have beyond the limit of a message: what goes with a payload, and list headers."""


def header(kind: int, stream: int, body_bytes: int) -> bytes:
    """Return what stands before a body of so many bytes."""
    return _HEADER.pack(_BEFORE_BODY + body_bytes, _ARRAY_OF_3, kind, _UINT32, stream)


def list_header(count: int) -> bytes:
    """Return the header of a MessagePack list."""
    if count < 16:
        return _SHORT[count]
    return _ARRAY_16.pack(0xDC, count) if count < 2**16 else _ARRAY_32.pack(0xDD, count)


_SHORT = [bytes([0x90 | count]) for count in range(16)]


def item_length(size_bytes: int) -> bytes:
    """Return what a frame begins with that has one item of so many bytes; then come `item_head` and the item."""
    if size_bytes < len(_SHORT_LENGTHS):
        return _SHORT_LENGTHS[size_bytes]
    return (_BEFORE_ITEM + size_bytes).to_bytes(_LENGTH_BYTES, "big")


def item_head(stream: int) -> bytes:
    """Return what stands between the length and the item, the same for all of a stream; the list's header included."""
    return _ITEM_HEAD.pack(_ARRAY_OF_3, ITEMS, _UINT32, stream, 0x91)


def list_length(body: bytes) -> int:
    """Return how many items the list has that `body` is. Raise InvalidMessage if it is no list."""
    first = body[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    if first == 0xDC and len(body) >= 3:
        return int.from_bytes(body[1:3], "big")
    if first == 0xDD and len(body) >= 5:
        return int.from_bytes(body[1:5], "big")
    raise InvalidMessage("expected a list of items")


Handler = Callable[[int, bytes], None]
"""Called with stream and body."""


class FrameReader:
    """Frames out of a stream of bytes that is cut anywhere.

    It holds at most one incomplete frame. Both of its settings may be changed between two frames.
    """

    def __init__(self, limit_bytes: int, handlers: Mapping[int, Handler]) -> None:
        self.limit_bytes = limit_bytes
        """The length of a frame, at most."""
        self.handlers = handlers
        """What is called with frames of a kind; others are refused."""
        self._rest = bytearray()
        self._needed = HEADER_BYTES
        self._is_closed = False

    def close(self) -> None:
        """Drop what has come and what comes, also the frames behind the one that is being handled."""
        self._is_closed = True
        self._rest.clear()

    def feed(self, data: bytes) -> None:
        """Hand over each frame that is whole now. What its handler raises is raised.

        Raise InvalidMessage or MessageTooLarge, before storing more, for what cannot be a frame. Not to be called after
        that.
        """
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data, self._rest = bytes(self._rest), bytearray()
        at, end = 0, len(data)
        while (begin := at + HEADER_BYTES) <= end and not self._is_closed:
            length, array, kind, mark, stream = _HEADER.unpack_from(data, at)
            if array != _ARRAY_OF_3 or mark != _UINT32 or length <= _BEFORE_BODY:
                raise InvalidMessage("what came is no frame of the request plane")
            if length > self.limit_bytes:
                raise MessageTooLarge(size_bytes=length, limit_bytes=self.limit_bytes)
            behind = at + _LENGTH_BYTES + length
            if behind > end:
                self._needed = behind - at
                break
            handler = self.handlers.get(kind)
            if handler is None:
                raise InvalidMessage(f"a frame of kind {kind} is not expected here")
            handler(stream, data[begin:behind])
            at = behind
        else:
            self._needed = HEADER_BYTES
        if at < end and not self._is_closed:
            self._rest += data[at:] if at else data
