"""The bytes of a KV cache between two processes: their description, and the frames they come in.

    decode ──► Fetch ─────────────────────────────► prefill
           ◄── Parcel, or a refusal ◄──────────────
           ◄── pieces of 1 MiB, each with a checksum
           ──► Received, once all are there and right

A frame is a header in MessagePack and a body; see `pipeline.wire.frames`. A connection serves one fetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from anyio import EndOfStream, fail_after
from anyio.abc import ByteStream
from attrs import frozen

from pipeline import InvalidArgument
from pipeline.errors import InvalidMessage
from pipeline.wire import FrameDecoder, encode_frame, from_msgpack, to_msgpack

PIECE_BYTES = 1 << 20
_FRAME_BYTES_MAX = PIECE_BYTES + 4096

T = TypeVar("T")


@frozen
class Fetch:
    """A request for one prompt's cache."""

    transfer_id: str


@frozen
class Parcel:
    """What comes, or why nothing does."""

    refusal: str = ""
    """Why nothing comes; empty: the bytes follow."""
    size_bytes: int = 0
    """Bytes of all pieces together."""


@frozen
class Received:
    """All pieces are there."""

    size_bytes: int


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield the frames of the bytes."""
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        yield encode_frame(b"", bytes(view[start : start + PIECE_BYTES]), checksum=True)


class Wire:
    """The frames of one connection, which the caller closes.

    Each call raises CodecError for bytes that are no frame, or not the expected one, and at the end of the stream;
    TimeoutError if the other side does nothing for `stall_s`; and BrokenResourceError for a broken connection.
    """

    def __init__(self, stream: ByteStream, stall_s: float) -> None:
        self._stream, self._stall_s = stream, stall_s
        self._decoder = FrameDecoder(limit_bytes=_FRAME_BYTES_MAX)
        self._frames: list[bytes] = []

    async def send(self, record: Any) -> None:
        """Send a record."""
        await self._send(encode_frame(b"", to_msgpack(record), checksum=True))

    async def receive(self, kind: type[T]) -> T:
        """Return the next frame as a record."""
        try:
            return from_msgpack(await self._body(), kind)
        except InvalidArgument as error:
            raise InvalidMessage(f"expected a {kind.__name__}: {error}") from error

    async def send_data(self, data: bytes) -> None:
        """Send bytes in pieces."""
        for frame in pieces(data):
            await self._send(frame)

    async def receive_data(self, size_bytes: int) -> bytes:
        """Return the bytes of the next pieces."""
        data = bytearray()
        while len(data) < size_bytes:
            body = await self._body()
            if not body:
                raise InvalidMessage("a piece of the cache is empty")
            data += body
        if len(data) > size_bytes:
            raise InvalidMessage(f"{len(data)} bytes of a cache came instead of {size_bytes}")
        return bytes(data)

    async def _send(self, frame: bytes) -> None:
        with fail_after(self._stall_s):
            await self._stream.send(frame)

    async def _body(self) -> bytes:
        while not self._frames:
            try:
                with fail_after(self._stall_s):
                    received = await self._stream.receive(PIECE_BYTES)
            except EndOfStream as error:
                self._decoder.finish()
                raise InvalidMessage("the connection ended before all was there") from error
            self._frames += [frame.body for frame in self._decoder.feed(received)]
        return self._frames.pop(0)
