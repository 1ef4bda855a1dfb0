"""Two-part frames of a network transport: a header and a body after their lengths and a checksum.

The hand-over of KV caches uses them; the embedded runtime passes requests without bytes.

A frame is 24 bytes of three big-endian u64 (header length, body length, checksum), the header, the body. The checksum
is XXH3-64 of header and body together, 0 for none.

Source: dynamo lib/runtime/src/pipeline/network/codec/two_part.rs. Other than there, a checksum is always verified
if present, and a length above the limit is refused before any of its bytes are stored.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import xxhash

from ..errors import ChecksumMismatch, CodecError, InvalidMessage, MessageTooLarge

_PREFIX = Struct(">QQQ")


class Frame(NamedTuple):
    """One frame's two parts; either may be empty."""

    header: bytes
    body: bytes


def encode_frame(header: bytes, body: bytes, *, checksum: bool = False, limit_bytes: int | None = None) -> bytes:
    """Return the frame as bytes. Raise MessageTooLarge if all of it, the 24 bytes included, exceeds `limit_bytes`."""
    _check_size(_PREFIX.size + len(header) + len(body), limit_bytes)
    digest = _digest(header, body) if checksum else 0
    return b"".join((_PREFIX.pack(len(header), len(body), digest), header, body))


def decode_frame(data: bytes, *, limit_bytes: int | None = None) -> Frame:
    """Return the one frame that `data` is. Raise InvalidMessage if it is not exactly one whole frame, ChecksumMismatch,
    and MessageTooLarge as `encode_frame` does."""
    decoder = FrameDecoder(limit_bytes=limit_bytes)
    frames = decoder.feed(data)
    decoder.finish()
    if len(frames) != 1:
        raise InvalidMessage(f"expected one frame, found {len(frames)}")
    return frames[0]


class FrameDecoder:
    """Frames out of a stream of bytes that is cut anywhere.

    A bad frame ends it: the frames before it are still handed out, then every call raises the frame's error.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._failure: CodecError | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are whole now. Raise MessageTooLarge or ChecksumMismatch if the next one is bad."""
        frames: list[Frame] = []
        if self._failure is None:
            self._buffer += data
            try:
                while (frame := self._take()) is not None:
                    frames.append(frame)
            except CodecError as failure:
                self._failure = failure
                self._buffer.clear()
        if self._failure is not None and not frames:
            raise self._failure
        return frames

    def finish(self) -> None:
        """The stream ended here. Raise InvalidMessage if that is inside a frame, or the error of a bad one."""
        if self._failure is not None:
            raise self._failure
        if self._buffer:
            raise InvalidMessage(f"the data ends inside a frame, after {len(self._buffer)} bytes of it")

    def _take(self) -> Frame | None:
        """Return the first frame of the buffer if it is whole."""
        buffer = self._buffer
        if len(buffer) < _PREFIX.size:
            return None
        header_bytes, body_bytes, digest = _PREFIX.unpack_from(buffer)
        body_start = _PREFIX.size + header_bytes
        end = body_start + body_bytes
        _check_size(end, self._limit_bytes)
        if len(buffer) < end:
            return None
        frame = Frame(bytes(buffer[_PREFIX.size : body_start]), bytes(buffer[body_start:end]))
        if digest and digest != _digest(*frame):
            raise ChecksumMismatch("the checksum of a frame is not that of its content")
        del buffer[:end]
        return frame


def _digest(header: bytes, body: bytes) -> int:
    hasher = xxhash.xxh3_64(header)
    hasher.update(body)
    return hasher.intdigest()


def _check_size(size_bytes: int, limit_bytes: int | None) -> None:
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise MessageTooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes)
