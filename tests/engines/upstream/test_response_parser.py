"""ResponseParser: what it reads of a response, wherever its bytes are cut, beside h11."""

from __future__ import annotations

from itertools import pairwise

import h11
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.upstream.response_parser import CUT, ENDED, UNFRAMED_MAX_BYTES, ResponseParser

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """The data in pieces."""
    edges = [0, *sorted({place % (len(data) + 1) for place in at}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


def read(pieces: list[bytes], method: str = "GET", *, ends: bool = False) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser(method)
    body = b"".join(parser.feed(piece) for piece in pieces)
    return parser, body + (parser.end() if ends else b"")


def read_by_h11(pieces: list[bytes], method: str = "GET") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body by h11, of a response behind which the connection ends."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    status, headers, body, left = 0, [], b"", [*pieces, b""]
    while True:
        match connection.next_event():
            case h11.Response() as head:
                status, headers = head.status_code, [*head.headers]
            case h11.Data() as part:
                body += bytes(part.data)
            case h11.EndOfMessage():
                return status, headers, body
            case h11.NEED_DATA:
                connection.receive_data(left.pop(0))


TOKENS = st.text("abcXYZ-09", min_size=1, max_size=8).map(str.encode)
VALUES = st.text("abc XYZ;=/,\t\xe9", max_size=20).map(lambda text: text.strip(" \t").encode("latin-1"))
PARTS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    """A response in any of the three framings, with interim ones before it."""
    parts, status = draw(PARTS), draw(st.sampled_from([200, 206, 204, 304, 404, 500, 599]))
    headers = [(b"X-" + name, value) for name, value in draw(st.lists(st.tuples(TOKENS, VALUES), max_size=4))]
    framing = draw(st.sampled_from(["chunks", "length", "close"]))
    body = b"".join(parts)
    if framing == "chunks":
        headers.append((b"transfer-encoding", b"chunked"))
        extension = draw(st.sampled_from([b"", b";a=b"]))
        trailer = draw(st.sampled_from([b"", b"X-Trailer: 1\r\n"]))
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n%b\r\n" % trailer
    elif framing == "length":
        headers.append((b"content-length", b"%d" % len(body)))
    if status in (204, 304):
        body = b""
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * draw(st.integers(0, 2))
    head = b"".join(b"%b: %b\r\n" % header for header in headers)
    return interim + b"HTTP/1.1 %d Some Reason\r\n%b\r\n" % (status, head) + body


@given(responses(), st.lists(st.integers(0, 2**16), max_size=12))
def test_a_response_is_read_as_by_h11_wherever_it_is_cut(data: bytes, at: list[int]) -> None:
    pieces = cut(data, at)
    parser, body = read(pieces)
    if not parser.is_complete:
        parser.end()
    status, headers, expected = read_by_h11(pieces)
    assert (parser.status, body) == (status, expected)
    assert [(name.lower(), value) for name, value in parser.headers] == headers
    assert parser.is_complete


@given(PARTS.filter(bool), st.integers(0, 2**16), st.booleans())
def test_a_response_that_is_cut_short_is_never_complete(parts: list[bytes], at: int, is_chunked: bool) -> None:
    body = b"".join(parts)
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    if is_chunked:
        whole = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    parser, read_so_far = read([whole[: at % len(whole)]] if at % len(whole) else [])
    assert not parser.is_complete
    assert body.startswith(read_so_far)
    with pytest.raises(httpx2.RemoteProtocolError, match=CUT if parser.has_head else ENDED):
        parser.end()


@given(st.binary(max_size=200), st.lists(st.integers(0, 2**16), max_size=5))
def test_any_bytes_are_a_response_or_an_error_of_the_protocol(data: bytes, at: list[int]) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\n", CHUNKED):
        parser = ResponseParser("GET")
        try:
            for piece in cut(start + data, at):
                parser.feed(piece)
                if parser.is_complete:
                    break
        except httpx2.RemoteProtocolError:
            assert not parser.is_complete


def test_all_the_chunks_of_one_read_are_one_part() -> None:
    parser = ResponseParser("POST")
    assert parser.feed(CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n") == b"abcde"
    assert parser.feed(b"1\r\nf\r\n0\r\n\r\n") == b"f"
    assert parser.keeps_connection


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_ends_with_its_head(status: int) -> None:
    parser, body = read([b"HTTP/1.1 %d x\r\nContent-Length: 5\r\n\r\n" % status])
    assert parser.keeps_connection
    assert body == b""


def test_the_answer_to_a_head_ends_with_its_head() -> None:
    parser, body = read([b"HTTP/1.1 200 x\r\nContent-Length: 5\r\n\r\n"], "HEAD")
    assert parser.keeps_connection
    assert body == b""


@pytest.mark.parametrize(
    "behind", [b"HTTP/1.1 200 OK\r\n\r\n", b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_connection_with_bytes_behind_a_response_is_not_kept(behind: bytes, method: str) -> None:
    body = b"" if method == "HEAD" else b"no"
    parser, found = read([b"HTTP/1.1 200 x\r\nContent-Length: 2\r\n\r\n" + body + behind], method)
    assert found == body
    assert parser.is_complete
    assert not parser.keeps_connection


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 x\r\nConnection: close\r\n", b"HTTP/1.0 200 x\r\n", b"HTTP/1.1 200 x\r\nConnection: a, Close\r\n"],
)
def test_a_connection_that_the_server_closes_is_not_kept(head: bytes) -> None:
    parser, body = read([head + b"Content-Length: 2\r\n\r\nno"])
    assert (body, parser.is_complete, parser.keeps_connection) == (b"no", True, False)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser, body = read([b"HTTP/1.1 200 x\r\n\r\nab", b"c"], ends=True)
    assert (body, parser.is_complete, parser.keeps_connection) == (b"abc", True, False)


@pytest.mark.parametrize(
    "data",
    {
        "another protocol": b"220 smtp ready\r\n\r\n",
        "another version": b"HTTP/3.0 200 OK\r\n\r\n",
        "a length beside chunks": CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n",
        "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "a length below zero": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "another protocol from now on": b"HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n",
        "a zero in a header": b"HTTP/1.1 200 OK\r\nA: b\0c\r\n\r\n",
        "no number of a chunk": CHUNKED + b"zz\r\n",
    }.values(),
)
def test_what_is_no_response_is_an_error(data: bytes) -> None:
    parser = ResponseParser("GET")
    with pytest.raises(httpx2.RemoteProtocolError):
        parser.feed(data)
    with pytest.raises(httpx2.RemoteProtocolError):
        parser.feed(b"more")


def test_what_came_before_an_error_is_returned_first() -> None:
    parser = ResponseParser("GET")
    assert parser.feed(CHUNKED + b"3\r\nabc\r\nzz\r\n") == b"abc"
    assert parser.failure is not None
    with pytest.raises(httpx2.RemoteProtocolError):
        parser.feed(b"more")


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nA: ", CHUNKED + b"1;", CHUNKED + b"0\r\nA: "])
def test_bytes_that_belong_to_no_body_have_a_limit(start: bytes) -> None:
    parser = ResponseParser("GET")
    parser.feed(start + b"x" * (UNFRAMED_MAX_BYTES - len(start)))
    with pytest.raises(httpx2.RemoteProtocolError, match="belong to no body"):
        parser.feed(b"x")
