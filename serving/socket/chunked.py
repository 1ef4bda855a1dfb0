"""ChunkedBody: the data in the chunks of a request's body."""

from __future__ import annotations

from httptools import HttpParserError, HttpRequestParser

from pipeline.errors import ExceededLimit

from ..http import Refusal
from .head import END, malformed

_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"

_FRAME_BYTES = 20
"""Most bytes of a chunk beside its data: a size of 16 digits and two line ends."""


class ChunkedBody:
    """Decodes one body. Chunk extensions and trailers are dropped; `max_extra_bytes` bounds them, 0 for no bound.

    Nothing behind the body is read: a body ends where two line ends meet, so the parser gets the input in pieces that
    end there.
    """

    __slots__ = ("_extra_bytes", "_max_extra_bytes", "_parser", "_pieces", "_tail", "is_complete")

    def __init__(self, max_extra_bytes: int) -> None:
        self._max_extra_bytes = max_extra_bytes
        self._extra_bytes = 0
        self._pieces: list[bytes] = []
        self._tail = b""
        self.is_complete = False
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def decode(self, data: bytes, start: int, end: int) -> tuple[bytes, int]:
        """Return the body's data in `data[start:end]`, and the position up to which it was read.

        Raise Refusal if it is malformed or holds too much beside the data.
        """
        while start < end and not self.is_complete:
            piece_end = min(self._next_end(data, start), end)
            piece = data[start:piece_end]
            self._extra_bytes += len(piece)
            try:
                self._parser.feed_data(piece)
            except HttpParserError as error:
                raise malformed(str(error)) from None
            self._tail = (self._tail + piece[-3:])[-3:]
            start = piece_end
        if 0 < self._max_extra_bytes < self._extra_bytes:
            exceeded = ExceededLimit("max_header_bytes", self._extra_bytes, self._max_extra_bytes)
            raise Refusal(431, "The chunks of the body hold too much beside its data", exceeded=exceeded)
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body, start

    def _next_end(self, data: bytes, start: int) -> int:
        """Return the earliest end of the body: behind two line ends, which may begin in an earlier piece."""
        tail = self._tail
        if tail and (found := (tail + data[start : start + 3]).find(END)) >= 0:
            return start + found + len(END) - len(tail)
        found = data.find(END, start)
        return len(data) if found < 0 else found + len(END)

    # -- called by the parser

    def on_chunk_header(self) -> None:
        self._extra_bytes -= _FRAME_BYTES

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._extra_bytes -= len(data)

    def on_message_complete(self) -> None:
        self.is_complete = True
