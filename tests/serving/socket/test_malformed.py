"""What is no valid HTTP gets a clear answer as JSON, ends its connection, and costs nothing else."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

import pytest
from starlette.types import Receive, Scope, Send

from tests.serving.socket.worlds import serve


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """The fastest loop alone: what is parsed does not depend on it."""
    return "asyncio", {"use_uvloop": True}


GET = b"GET /live HTTP/1.1\r\nHost: a\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"

MALFORMED = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "HTTP/0.9": b"GET /live\r\n",
    "HTTP/0.9 with a version": b"GET / HTTP/0.9\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: a\r\n\r\n",
    "RTSP": b"SETUP / RTSP/1.0\r\nHost: a\r\n\r\n",
    "ICE": b"SOURCE / ICE/1.0\r\nHost: a\r\n\r\n",
    "SSH": b"SSH-2.0-OpenSSH_9.9\r\n",
    "random bytes": bytes(range(256)) * 40,
    "a lower-case method": b"get / HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"BREW / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a method without end": b"A" * 1000,
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: a\n\n",
    "a bare line feed in a header": GET + b"a: b\nc: d\r\n\r\n",
    "a bare carriage return": GET + b"a: b\rc: d\r\n\r\n",
    "a folded header": GET + b"a: b\r\n c\r\n\r\n",
    "NUL in a header": GET + b"a: b\0c\r\n\r\n",
    "a header without a name": GET + b": b\r\n\r\n",
    "a header without a colon": GET + b"nonsense\r\n\r\n",
    "a blank before the colon": GET + b"a : b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: b\r\n\r\n",
    "a blank in the URL": b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
    "a URL that is no path": b"GET p HTTP/1.1\r\nHost: a\r\n\r\n",
    "bytes above 127 in the URL": b"GET /\xe9 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a length with a sign": POST + b"Content-Length: +1\r\n\r\n",
    "two equal lengths": POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na" + HIDDEN,
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 9\r\n\r\na" + HIDDEN,
    "a list of lengths": POST + b"Content-Length: 1, 1\r\n\r\na",
    "a length beyond 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a length and chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and a length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "an encoding that is none": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "an encoding under the chunks": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two encodings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two times chunked": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a quoted encoding": POST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n' + HIDDEN,
    "chunks in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size that is none": CHUNKED + b"zz\r\n",
    "a negative chunk size": CHUNKED + b"-1\r\n",
    "a chunk size with 0x": CHUNKED + b"0x1\r\na\r\n",
    "a chunk size beyond 64 bits": CHUNKED + b"f" * 17 + b"\r\n",
    "a chunk longer than its size": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "a bare line feed in chunks": CHUNKED + b"1\na\n0\n\n",
    "a carriage return in a chunk size": CHUNKED + b"1\rX\r\na\r\n0\r\n\r\n" + HIDDEN,
    "a length among the trailers": CHUNKED + b"1\r\na\r\n0\r\nContent-Length: 9\r\n\r\n" + HIDDEN,
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
async def test_what_is_no_valid_http_gets_400_as_json_and_nothing_behind_it_is_read(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    paths: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serve(app) as served:
        raw = await served.connect()
        await raw.send(data)
        answer = await raw.answer()
        assert (answer.status, answer.json["code"], answer.json["type"]) == (400, 400, "Bad Request")
        assert answer.json["message"]
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["connection"] == "close"
        UUID(answer.headers["x-request-id"])
        assert await raw.rest() == b""
    assert [(problem.status, client) for problem, client in served.refused] == [(400, "127.0.0.1")]
    assert "/hidden" not in paths
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("piece", [1, 7])
@pytest.mark.parametrize("name", ["a length and chunks", "NUL in a header", "a chunk size that is none", "no host"])
async def test_it_is_refused_in_pieces_too(name: str, piece: int) -> None:
    data = MALFORMED[name]
    async with serve() as served:
        raw = await served.connect()
        for start in range(0, len(data), piece):
            await raw.send(data[start : start + piece])
        assert (await raw.answer()).status == 400


ODD = {
    "an absolute URL": (b"GET http://b/live?q=1 HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /live q=1 "),
    "an absolute URL without a path": (b"GET http://b HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /  "),
    "an asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", b"OPTIONS *  "),
    "TRACE": (b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n", b"TRACE /  "),
    "a fragment": (b"GET /a?b#c HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /a b "),
    "escapes": (b"GET /%41%2f HTTP/1.1\r\nHost: a\r\n\r\n", b"GET /A/  "),
    "HTTP/1.0": (b"GET / HTTP/1.0\r\n\r\n", b"GET /  "),
    "empty lines before it": (b"\r\n\r\n\r\n" + GET + b"\r\n", b"GET /live  "),
    "bytes above 127 in a header": (GET + b"a: \xe9\xff\r\n\r\n", b"GET /live  "),
    "an upgrade to a WebSocket": (GET + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", b"GET /live  "),
    "an upgrade with a body": (
        POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nab",
        b"POST /  ab",
    ),
    "an upgrade with chunks": (
        POST + b"Connection: upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
        b"POST /  ab",
    ),
    "chunk extensions and trailers": (CHUNKED + b"2;a=b\r\nab\r\n0;c\r\nX: y\r\n\r\n", b"POST /  ab"),
    "a chunk that looks like an end": (CHUNKED + b"8\r\n\r\n\r\n\r\n\r\n\r\n0\r\n\r\n", b"POST /  \r\n\r\n\r\n\r\n"),
}


@pytest.mark.parametrize(("data", "seen"), ODD.values(), ids=ODD.keys())
async def test_what_is_odd_but_valid_reaches_the_app(data: bytes, seen: bytes) -> None:
    async with serve() as served:
        answer = await served.request(data)
        assert (answer.status, answer.body) == (200, seen)


async def test_an_answer_in_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b"c"})

    async with serve(app) as served:
        raw = await served.connect()
        await raw.send(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await raw.rest()).partition(b"\r\n\r\n")
        assert body == b"abc"
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head


@pytest.mark.parametrize("value", [b"a\r\nSet-Cookie: b", b"a\nb", b"a\0b"])
async def test_an_app_cannot_split_its_answer_by_a_header(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", value), (b"y", b"z")]})

    async with serve(app) as served:
        answer = await served.request(GET + b"\r\n")
        assert (answer.status, answer.json["message"]) == (500, "Internal server error")
    assert "Invalid HTTP header value." in caplog.text
