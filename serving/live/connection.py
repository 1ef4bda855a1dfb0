"""One HTTP/1.1 connection, a request at a time. The door of httptools.

    status = await connection.ask(request)     sends it, reads until the head of the answer is there
    while data := await connection.read(): ... its body as it comes

Redirects are not followed, proxies not asked, trailers not looked at.
"""

from __future__ import annotations

import anyio
from anyio.abc import ByteStream
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pipeline.errors import Disconnected, InvalidMessage

_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)
_EXCERPT_BYTES = 60


class Connection:
    """A stream of bytes to a server, which it owns.

    Every wait raises Disconnected if the stream breaks, InvalidMessage for what is no HTTP.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._answer = _Answer()
        self._was_used = False
        self.idle_since_s = 0.0

    @property
    def was_gone(self) -> bool:
        """Whether it served before and then brought not a byte of the last answer: the request was never taken."""
        return self._was_used and not self._answer.has_begun

    @property
    def is_whole(self) -> bool:
        """Whether the last answer has been read to the end that its head promised."""
        return self._answer.is_whole

    @property
    def may_go_on(self) -> bool:
        """Whether another request may be sent on it."""
        return self._answer.is_whole and self._answer.keeps_alive

    @property
    def content_type(self) -> str:
        """Of the last answer, without its parameters; in lower case."""
        return self._answer.content_type

    async def ask(self, request: bytes) -> int:
        """Sends the request; the status of the answer."""
        self._was_used = self._answer.is_whole
        answer = self._answer = _Answer()
        try:
            await self._stream.send(request)
        except _BROKEN as error:
            raise Disconnected("the connection broke while the request was sent") from error
        while not answer.has_head:
            if not await self._receive(answer):
                raise Disconnected("the connection was closed before there was an answer")
        return answer.status

    async def read(self) -> bytes:
        """What has come of the body, at least a byte; nothing once it has ended or the connection was closed."""
        answer = self._answer
        while not (answer.parts or answer.is_whole):
            if not await self._receive(answer):
                return b""
        data = b"".join(answer.parts)
        answer.parts.clear()
        return data

    async def aclose(self) -> None:
        """Closes it at once: the server hears that nobody reads on."""
        await anyio.aclose_forcefully(self._stream)

    async def _receive(self, answer: _Answer) -> bool:
        """Whether something came: nothing does once the server has closed the connection."""
        try:
            data = await self._stream.receive()
        except anyio.EndOfStream:
            return False
        except _BROKEN as error:
            raise Disconnected("the connection broke") from error
        answer.feed(data)
        return True


class _Answer:
    """What the parser finds, by its callbacks. An answer of status 1xx comes before the one that counts."""

    def __init__(self) -> None:
        self.has_begun = self.has_head = self.is_whole = self.keeps_alive = False
        self.status = 0
        self.content_type = ""
        self.parts: list[bytes] = []
        self._parser = HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            raise InvalidMessage(f"the answer is no HTTP: {data[:_EXCERPT_BYTES]!r}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.content_type = value.partition(b";")[0].strip().lower().decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.keeps_alive = self._parser.should_keep_alive() and not self.is_whole
            self.is_whole = True
