"""ResponseParser: the head and the body of one HTTP/1.1 response, by llhttp.

    bytes of a connection, cut anywhere ──► feed ──► the bytes of the body among them, in one piece

A response is complete at the end that its head announced: by its chunks or its length, or, without either, when the
server closes the connection.

Source: RFC 9112, section 6.3.
"""

from __future__ import annotations

import httptools
import httpx2

UNFRAMED_MAX_BYTES = 100 * 1024
"""Most bytes in a row that belong to no body: of a head, of trailers, or around a chunk."""

ENDED = "Server disconnected without sending a response"
CUT = "peer closed connection without sending the complete body"


class ResponseParser:
    """One response to a request with this method.

    Interim responses are passed over. Raise RemoteProtocolError for anything else than one response that a client can
    read; also for a length beside chunks, for another transfer coding, and for a change of protocol.
    """

    def __init__(self, method: str) -> None:
        self._llhttp: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._is_head = method == "HEAD"
        self._parts: list[bytes] = []
        self._unframed_bytes = 0
        self._keeps_alive = self._has_excess = self._ends_by_close = False
        self._refused = ""
        self.status = 0
        """Status of the response, once its head is there."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the response, in their order."""
        self.has_begun = False
        """Whether any byte has come."""
        self.has_head = False
        """Whether the head is there."""
        self.is_complete = False
        """Whether the response has ended as its head announced."""
        self.failure: httpx2.RemoteProtocolError | None = None
        """What is wrong with the response."""

    @property
    def keeps_connection(self) -> bool:
        """Whether the connection can be used again: the response is complete, and nothing came behind it."""
        return self.is_complete and self._keeps_alive and not self._has_excess

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body in these bytes of the connection; often none.

        What is wrong behind some of them becomes `failure`, and is raised by the next call.
        """
        if self._llhttp is None:
            raise self.failure or httpx2.RemoteProtocolError("bytes behind the end of a response")
        self.has_begun = True
        try:
            self._llhttp.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(self._refused or str(error), error)
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unframed_bytes = 0 if body else self._unframed_bytes + len(data)
        if self._unframed_bytes > UNFRAMED_MAX_BYTES:
            self._fail(f"more than {UNFRAMED_MAX_BYTES} bytes that belong to no body")
        if self.is_complete:
            self._llhttp = None  # the two refer to each other
        elif self.failure is not None and not body:
            raise self.failure
        return body

    def end(self) -> bytes:
        """Return an empty body at the end of the connection. Raise RemoteProtocolError unless it completes the
        response."""
        self._llhttp = None
        if not self.has_head:
            raise httpx2.RemoteProtocolError(ENDED)
        if not self._ends_by_close:
            raise httpx2.RemoteProtocolError(CUT)
        self.is_complete = True
        return b""

    # -- called by llhttp

    def on_message_begin(self) -> None:
        self._has_excess = self.is_complete
        if not self.has_head:
            self.headers.clear()  # of an interim response

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # later ones are trailers
            self.headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self.has_head or self._llhttp is None:
            return
        status, version = self._llhttp.get_status_code(), self._llhttp.get_http_version()
        if status == 101 or version not in ("1.0", "1.1"):
            self._refuse(f"a response with status {status} of HTTP/{version}")
        if status < 200:
            return
        codings = [value.lower() for name, value in self.headers if name.lower() == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._refuse("a transfer coding other than chunked")
        has_length = any(name.lower() == b"content-length" for name, _ in self.headers)
        self.status, self.has_head = status, True
        self.is_complete = self._is_head or status in (204, 304)
        self._ends_by_close = not (codings or has_length)
        self._keeps_alive = self._llhttp.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if self.is_complete:
            self._has_excess = True
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = self.has_head

    def _fail(self, reason: str, cause: Exception | None = None) -> None:
        self._has_excess = True
        if not self.is_complete:  # what is behind a complete response is none of it
            self.failure = httpx2.RemoteProtocolError(reason)
            self.failure.__cause__, self._llhttp = cause, None

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        raise ValueError(reason)
