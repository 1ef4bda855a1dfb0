"""Long bodies in parts, so that frames of other streams go between: requests of callers, items of workers.

    OutgoingParts ──► PART [bytes of the body, some of them], ... ──► IncomingParts ──► the body of a CALL or of ITEMS

Each output of a connection ends with one part, of each body under way in turn. What is under way together is bounded
by both sides: the sender lets others wait, the receiver ends a connection that has more.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

from attrs import define

from pipeline.errors import InvalidMessage, MessageTooLarge
from pipeline.loop import Wakeup

from . import framing

PART_BYTES: Final = 256 * 1024
"""Bytes of a body that are sent at once; longer ones are sent in parts."""
BODIES_MAX: Final = 64
"""Bodies of a connection and direction that may be under way in parts."""
LIMITS_MAX: Final = 2
"""Bytes of them, in lengths of the longest that may be."""
_STALE_BEATS = 3
"""Heartbeats without a part after which a body is not coming."""

_HEAD = Struct(">BBIBI")
_ARRAY_OF_2, _UINT32, _BIN_32 = 0x92, 0xCE, 0xC6


def part_frame(stream: int, body_bytes: int, part: bytes) -> list[bytes]:
    """Return the frame of a part, of a body of so many bytes."""
    head = _HEAD.pack(_ARRAY_OF_2, _UINT32, body_bytes, _BIN_32, len(part))
    return [framing.header(framing.PART, stream, len(head) + len(part)), head, part]


@define(eq=False)
class SentBody:
    """A body that is sent in parts."""

    body: bytes
    open: Callable[[], int]
    """Called when its turn has come, before its first part. Returns its stream."""
    wakeup: Wakeup
    """Woken once it is sent."""
    prefix: bytes = b""
    """What the body begins with."""
    stream: int = 0
    """0 before its first part."""
    is_sent: bool = False
    """Whether its last part was handed to the link."""
    _at: int = 0

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return len(self.prefix) + len(self.body)

    def next_part(self) -> list[bytes]:
        """Return the frame of its next part."""
        if not self.stream:
            self.stream = self.open()
        prefix = b"" if self._at else self.prefix
        behind = self._at + PART_BYTES - len(prefix)
        part = prefix + self.body[self._at : behind]
        self._at = behind
        self.is_sent = behind >= len(self.body)
        return part_frame(self.stream, self.size_bytes, part)


class OutgoingParts:
    """The bodies that a side sends in parts: some under way, the others wait in turn."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        """The longest body that the other side takes; 0: it takes no parts."""
        self._waiting: dict[SentBody, None] = {}
        self._under_way: dict[SentBody, None] = {}
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._under_way or self._waiting)

    def add(self, body: SentBody) -> None:
        """Send the body behind those that wait."""
        self._waiting[body] = None

    def remove(self, body: SentBody) -> None:
        """Send no more of the body. The other side drops what it has with the end of the stream."""
        self._waiting.pop(body, None)
        self._end(body)

    def clear(self) -> None:
        """Send nothing more, and wake what waits for it."""
        for body in (*self._waiting, *self._under_way):
            body.wakeup.wake()
        self._waiting.clear()
        self._under_way.clear()
        self._bytes = 0

    def next_part(self) -> list[bytes]:
        """Return the frame of the next part of the body whose turn it is. There must be one."""
        self._begin()
        body = next(iter(self._under_way))
        frame = body.next_part()
        if body.is_sent:
            self._end(body)
            body.body = b""
            body.wakeup.wake()
        else:
            del self._under_way[body]
            self._under_way[body] = None
        return frame

    def _begin(self) -> None:
        """Let those begin that may be under way beside the others, in their order."""
        while self._waiting and len(self._under_way) < BODIES_MAX:
            body = next(iter(self._waiting))
            if self._under_way and self._bytes + body.size_bytes > LIMITS_MAX * self.limit_bytes:
                break
            del self._waiting[body]
            self._under_way[body] = None
            self._bytes += body.size_bytes

    def _end(self, body: SentBody) -> None:
        if body in self._under_way:
            del self._under_way[body]
            self._bytes -= body.size_bytes


class IncomingParts:
    """The bodies that come in parts, by stream. `limit_bytes`: the longest that may come."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bodies: dict[int, tuple[int, bytearray]] = {}
        self._stated_bytes = 0
        self._idle_beats, self._was_beaten = 0, False

    def __contains__(self, stream: int) -> bool:
        return stream in self._bodies

    def take(self, stream: int, frame: bytes) -> bytes | None:
        """Take a part of the stream's body. Return the body once it is whole. Raise InvalidMessage, MessageTooLarge."""
        size_bytes, part = _read(frame)
        self._idle_beats, self._was_beaten = 0, False
        if (known := self._bodies.get(stream)) is None:
            known = self._begun(stream, size_bytes)
        stated_bytes, body = known
        if size_bytes != stated_bytes or len(body) + len(part) > stated_bytes:
            raise InvalidMessage("parts that are not of one body")
        body += part
        if len(body) < stated_bytes:
            return None
        self.drop(stream)
        return bytes(body)

    def _begun(self, stream: int, size_bytes: int) -> tuple[int, bytearray]:
        if size_bytes > self._limit_bytes:
            raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=self._limit_bytes)
        self._stated_bytes += size_bytes
        if len(self._bodies) >= BODIES_MAX or self._stated_bytes > LIMITS_MAX * self._limit_bytes:
            raise InvalidMessage("too many bodies in parts at a time")
        begun = self._bodies[stream] = (size_bytes, bytearray())
        return begun

    def drop(self, stream: int) -> bool:
        """Forget what has come of the stream's body. Return whether there was any."""
        if (known := self._bodies.pop(stream, None)) is None:
            return False
        self._stated_bytes -= known[0]
        return True

    def clear(self) -> None:
        """Forget all."""
        self._bodies.clear()
        self._stated_bytes = 0

    def on_beat(self) -> None:
        """The other side has had nothing to send for a while."""
        self._was_beaten = True

    def check(self) -> None:
        """Called every heartbeat. Raise InvalidMessage for a body that the other side does not go on with.

        A side with parts to send sends no heartbeats, but for those that waited while it could send nothing.
        """
        if self._bodies and self._was_beaten:
            self._idle_beats += 1
            self._was_beaten = False
            if self._idle_beats >= _STALE_BEATS:
                raise InvalidMessage("a body in parts does not come to its end")


def _read(frame: bytes) -> tuple[int, bytes]:
    """Return the length of the body, and the part."""
    if len(frame) <= _HEAD.size:
        raise InvalidMessage("expected a part of a body")
    array, mark, size_bytes, bin_mark, part_bytes = _HEAD.unpack_from(frame)
    if (array, mark, bin_mark, part_bytes) != (_ARRAY_OF_2, _UINT32, _BIN_32, len(frame) - _HEAD.size):
        raise InvalidMessage("expected a part of a body")
    return size_bytes, frame[_HEAD.size :]
