"""Head: the request line and the headers of one request, parsed once they are complete.

A head is given to the parser in one piece and with nothing behind it, so an incomplete one costs its bytes only, its
size is known before it is parsed, and no request is parsed before its turn.
"""

from __future__ import annotations

from urllib.parse import unquote

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser, parse_url

from pipeline.errors import ExceededLimit

from ..http import Refusal
from ..limits import HttpLimits

END = b"\r\n\r\n"
"""What a head ends with."""

_VERSIONS = {b" HTTP/1.1": "1.1", b" HTTP/1.0": "1.0"}
_LONGEST_METHOD_BYTES = 32
TLS_HANDSHAKE = 0x16


class Head:
    """One request's head.

    `length_bytes` is the length of its body, None for a chunked one. The names of `headers` are in lower case.
    `keep_alive`: whether the client wants to use the connection again.
    """

    __slots__ = (
        "expects_continue",
        "headers",
        "hosts",
        "is_complete",
        "keep_alive",
        "length_bytes",
        "method",
        "path",
        "query",
        "raw_path",
        "url",
        "version",
    )

    def __init__(self, version: str) -> None:
        self.version = version
        self.keep_alive = version == "1.1"
        self.expects_continue = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.hosts = 0
        self.is_complete = False
        self.length_bytes: int | None = 0
        self.method = ""
        self.url = self.raw_path = self.query = b""
        self.path = ""

    # -- called by the parser

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.headers.append((name, value))
        if (take := _TAKEN.get(name)) is not None:
            take(self, value)

    def on_headers_complete(self) -> None:
        self.is_complete = True

    def _take_host(self, _: bytes) -> None:
        self.hosts += 1

    def _take_length(self, value: bytes) -> None:
        self.length_bytes = int(value)

    def _take_connection(self, value: bytes) -> None:
        if b"close" in (value := value.lower()):
            self.keep_alive = self.keep_alive and b"close" not in [part.strip() for part in value.split(b",")]

    def _take_expectation(self, value: bytes) -> None:
        if self.version == "1.1":
            if value.strip().lower() != b"100-continue":
                raise Refusal(417, "Expect: only 100-continue can be met")
            self.expects_continue = True

    def _take_encoding(self, value: bytes) -> None:
        if self.version == "1.0":
            raise Refusal(400, "Transfer-Encoding: HTTP/1.0 has none")
        if value.strip().lower() != b"chunked":
            raise Refusal(400, "Transfer-Encoding: only chunked is supported")
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


_TAKEN = {
    b"host": Head._take_host,
    b"content-length": Head._take_length,
    b"connection": Head._take_connection,
    b"expect": Head._take_expectation,
    b"transfer-encoding": Head._take_encoding,
}
"""The headers that the connection itself needs, and the methods that take them."""


def parse_head(raw: bytes, limits: HttpLimits) -> Head:
    """Return the head in these bytes, which end with `END`. Raise Refusal if it is malformed or beyond a limit."""
    check_size("max_header_bytes", len(raw), limits.max_header_bytes)
    check_size("max_headers", raw.count(b"\n") - 2, limits.max_headers)
    line_end = raw.find(b"\r\n")
    head = Head(_version_of(raw[max(line_end - 9, 0) : line_end]))
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
