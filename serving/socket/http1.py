"""The text of HTTP/1.1: heads and chunked bodies of requests, heads of answers.

The head of a request is given to the parser in one piece and with nothing behind it, so an incomplete one costs its
bytes only, its size is known before it is parsed, and no request is parsed before its turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import unquote
from uuid import uuid4

from attrs import define, field
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from pipeline.errors import ExceededLimit

from ..limits import HttpLimits
from ..problems import REQUEST_ID, Problem, Refusal

# -- heads of requests

END = b"\r\n\r\n"
"""What a head ends with."""

_VERSIONS = {b" HTTP/1.1": "1.1", b" HTTP/1.0": "1.0"}
_LONGEST_METHOD_BYTES = 32
TLS_HANDSHAKE = 0x16


@define(eq=False)
class Head:
    """One request's head, filled by the parser."""

    version: str
    keep_alive: bool
    """Whether the client wants to use the connection again."""
    expects_continue: bool = False
    headers: list[tuple[bytes, bytes]] = field(factory=list)
    """Their names are in lower case."""
    hosts: int = 0
    is_complete: bool = False
    length_bytes: int | None = 0
    """Length of the body, None for a chunked one."""
    method: str = ""
    url: bytes = b""
    raw_path: bytes = b""
    query: bytes = b""
    path: str = ""

    # -- called by the parser

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if name in _TAKEN:
            self._take(name, value)

    def on_headers_complete(self) -> None:
        self.is_complete = True

    def _take(self, name: bytes, value: bytes) -> None:
        """Use a header that the connection itself needs. Raise Refusal for what cannot be met."""
        if name == b"host":
            self.hosts += 1
        elif name == b"content-length":
            self.length_bytes = int(value)
        elif name == b"connection":
            if b"close" in (value := value.lower()):
                self.keep_alive = self.keep_alive and b"close" not in [part.strip() for part in value.split(b",")]
        elif name == b"expect":
            if self.version == "1.1" and value.strip().lower() != b"100-continue":
                raise Refusal(417, "Expect: only 100-continue can be met")
            self.expects_continue = self.version == "1.1"
        elif self.version == "1.0":
            raise Refusal(400, "Transfer-Encoding: HTTP/1.0 has none")
        elif value.strip().lower() != b"chunked":
            raise Refusal(400, "Transfer-Encoding: only chunked is supported")
        else:
            self.length_bytes = None

    def split_url(self) -> None:
        """Set the path and the query from the URL, in origin form, absolute form, or `*`."""
        if self.url.startswith(b"/"):
            self.raw_path, _, self.query = self.url.partition(b"#")[0].partition(b"?")
        elif self.url == b"*":
            self.raw_path = self.url
        else:
            parts = parse_url(self.url)
            self.raw_path, self.query = parts.path or b"/", parts.query or b""
        path = self.raw_path.decode("ascii")
        self.path = unquote(path) if "%" in path else path


_TAKEN = frozenset([b"host", b"content-length", b"connection", b"expect", b"transfer-encoding"])
"""The headers that the connection itself needs."""


def parse_head(raw: bytes, limits: HttpLimits) -> Head:
    """Return the head in these bytes, which end with `END`. Raise Refusal if it is malformed or beyond a limit."""
    check_size("max_header_bytes", len(raw), limits.max_header_bytes)
    check_size("max_headers", raw.count(b"\n") - 2, limits.max_headers)
    line_end = raw.find(b"\r\n")
    version = _version_of(raw[max(line_end - 9, 0) : line_end])
    head = Head(version, keep_alive=version == "1.1")
    parser = HttpRequestParser(head)
    try:
        parser.feed_data(raw)
    except HttpParserUpgrade:
        pass  # no upgrade is supported: the request is answered as HTTP/1.1
    except HttpParserError as error:
        if isinstance(error.__context__, Refusal):  # raised while a header was taken
            raise error.__context__ from None
        raise malformed(str(error)) from None
    if not head.is_complete:
        raise malformed("it has no end")
    _complete(head, parser.get_method().decode("ascii"), limits)
    return head


def _complete(head: Head, method: str, limits: HttpLimits) -> None:
    head.method = method
    check_size("max_url_bytes", len(head.url), limits.max_url_bytes, status=414)
    if method == "CONNECT":
        raise Refusal(400, "CONNECT: this server is no proxy")
    if head.hosts != 1 and (head.hosts or head.version == "1.1"):
        raise malformed("it needs one Host header")
    try:
        head.split_url()
    except (HttpParserError, UnicodeDecodeError):
        raise malformed("its URL cannot be read") from None


def _version_of(line: bytes) -> str:
    """Return the version in a request line: the parser also accepts RTSP, ICE and other versions of HTTP."""
    if (version := _VERSIONS.get(line[-9:])) is None:
        raise malformed("the request line must end with HTTP/1.1")
    return version


def check_start(raw: bytes, limits: HttpLimits) -> None:
    """Raise Refusal if this start of a head, without its end, cannot become a valid one."""
    first = raw[:1]
    if not b"A" <= first <= b"Z":
        raise malformed("a TLS handshake at a port without TLS" if raw[0] == TLS_HANDSHAKE else "it has no method")
    check_size("max_header_bytes", len(raw), limits.max_header_bytes)
    line, newline, _ = raw.partition(b"\n")
    if newline:
        _version_of(line.removesuffix(b"\r"))
        if raw.count(b"\n") != raw.count(b"\r\n"):
            raise malformed("lines must end with CR LF")
        check_size("max_headers", raw.count(b"\n") - 1, limits.max_headers)
    elif (space := line.find(b" ")) > _LONGEST_METHOD_BYTES or (space < 0 and len(line) > _LONGEST_METHOD_BYTES):
        raise malformed("it has no method")
    url_bytes = len(line) - line.find(b" ") - len(" HTTP/1.1\r") - 1
    check_size("max_url_bytes", url_bytes, limits.max_url_bytes, status=414)


def malformed(reason: str) -> Refusal:
    """Return the refusal of a request that is not valid HTTP."""
    return Refusal(400, f"The request is not valid HTTP: {reason}")


_TEXTS = {
    "max_header_bytes": "The headers of the request are too large",
    "max_headers": "The request has too many headers",
    "max_url_bytes": "The URL of the request is too long",
}


def check_size(name: str, value: int, threshold: int, *, status: int = 431) -> None:
    """Raise Refusal with the limit if the value is beyond it."""
    if 0 < threshold < value:
        raise Refusal(status, _TEXTS[name], exceeded=ExceededLimit(name, value, threshold))


# -- chunked bodies

_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_FRAME_BYTES = 20
"""Most bytes of a chunk beside its data: a size of 16 digits and two line ends."""


@define(eq=False)
class ChunkedBody:
    """Decodes one body. Chunk extensions and trailers are dropped; `max_extra_bytes` bounds them, 0 for no bound.

    Nothing behind the body is read: a body ends where two line ends meet, so the parser gets the input in pieces that
    end there.
    """

    _max_extra_bytes: int
    is_complete: bool = field(default=False, init=False)
    _extra_bytes: int = field(default=0, init=False)
    _pieces: list[bytes] = field(factory=list, init=False)
    _tail: bytes = field(default=b"", init=False)
    _parser: HttpRequestParser = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

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


# -- answers

Headers = Sequence[tuple[bytes, bytes]]

CLOSE = (b"connection", b"close")

_CONTROLS = bytes([*range(9), *range(11, 32), 127])
"""Bytes that no header may hold, except the line feed, which separates the headers while they are checked."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}
_known_names: set[bytes] = set()
_MAX_KNOWN_NAMES = 1000


def answer_head(status: int, defaults: bytes, headers: Headers) -> bytes:
    """Return the head of an answer; `defaults` are the lines of every answer.

    Raise RuntimeError for an invalid header.
    """
    lines = b"\n".join([b"%b: %b" % header for header in headers])
    if len(lines.translate(None, _CONTROLS)) != len(lines) or lines.count(b"\n") >= max(len(headers), 1):
        raise RuntimeError("Invalid HTTP header value.")
    for name, _ in headers:
        if name not in _known_names:
            _check_name(name)
    separator = b"\r\n\r\n" if lines else b"\r\n"
    return b"%b%b%b%b" % (_STATUS_LINES[status], defaults, lines.replace(b"\n", b"\r\n"), separator)


def _check_name(name: bytes) -> None:
    """Check a name once: an app uses the same names for all its answers."""
    if _NAME.fullmatch(name) is None:
        raise RuntimeError("Invalid HTTP header name.")
    if len(_known_names) < _MAX_KNOWN_NAMES:
        _known_names.add(name)


def header_lines(headers: Headers) -> bytes:
    """Return the headers as lines of a head."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def answer_of(problem: Problem, defaults: bytes) -> bytes:
    """Return the whole answer that refuses a request, after which the connection ends."""
    body = problem.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (REQUEST_ID.encode(), str(uuid4()).encode()),
        CLOSE,
        *problem.headers(),
    ]
    return answer_head(problem.status, defaults, headers) + body
