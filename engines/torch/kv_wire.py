"""The bytes of a KV cache over the request plane: what decode calls for, and the pieces they come in.

decode ──► KvCall ─────────────────────────────► prefill
       ◄── KvPiece of 1 MiB, each with a checksum
       ──► KvCall with `has_all`, once all are there and right
"""

from __future__ import annotations

from collections.abc import Iterator

from anyio import fail_after
from attrs import frozen

from pipeline import ResponseStream
from pipeline.errors import InvalidMessage
from pipeline.protocols.field_rules import U64
from pipeline.wire import FrameDecoder, encode_frame

PIECE_BYTES = 1 << 20
_FRAME_BYTES_MAX = PIECE_BYTES + 4096


@frozen
class KvCall:
    """A call for one prompt's cache, answered by its pieces."""

    transfer_id: str
    has_all: bool = False
    """All of it has come, and is over for every other worker; answered by no item."""


@frozen
class KvPiece:
    """The next bytes of a cache."""

    total_bytes: U64
    """Bytes of all pieces together."""
    frame: bytes
    """The bytes and their checksum: see `pipeline.wire.frames`."""


def pieces(data: bytes) -> Iterator[KvPiece]:
    """Yield the pieces of the bytes."""
    view = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        yield KvPiece(len(data), encode_frame(b"", bytes(view[start : start + PIECE_BYTES]), checksum=True))


async def received(stream: ResponseStream[KvPiece], size_bytes: int, stall_s: float) -> bytes:
    """Return the bytes of all pieces.

    Raise InvalidMessage unless there are exactly so many, another CodecError for a damaged piece, TimeoutError if
    nothing comes for `stall_s`, and what reading the stream raises.
    """
    data = bytearray()
    while True:
        with fail_after(stall_s):
            piece = await anext(stream, None)
        if piece is None:
            break
        if piece.total_bytes != size_bytes:
            raise InvalidMessage(f"{piece.total_bytes} bytes of a cache come, {size_bytes} are needed")
        decoder = FrameDecoder(limit_bytes=_FRAME_BYTES_MAX)
        data += b"".join(frame.body for frame in decoder.feed(piece.frame))
        decoder.finish()
        if len(data) > size_bytes:
            break
    if len(data) != size_bytes:
        raise InvalidMessage(f"{len(data)} bytes of a cache came instead of {size_bytes}")
    return bytes(data)
