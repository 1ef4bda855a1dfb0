"""Bodies within limits, expectations, and clients that close their side."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from pipeline.testing import ScriptedEngine, Stall
from serving.http import ON_GONE
from serving.http import app as http_app
from tests.serving.socket.worlds import Counting, post, serve

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
MB = 1024 * 1024


# -- bodies


async def test_bodies_beyond_the_budget_of_all_get_503_and_the_others_go_on() -> None:
    """Two half-read bodies never wait for each other: the one that goes beyond is refused at once."""
    app = Counting()
    async with serve(app, max_body_bytes_in_flight=MB) as served:
        first, second = await served.connect(), await served.connect()
        data = post(bytes(900_000))
        await first.send(data[:600_000])
        while app.body_bytes < 500_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await second.send(data[:600_000])
        refused = await second.answer()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.json["limit"]["name"] == "max_body_bytes_in_flight"
        await first.send(data[600_000:])
        assert (await first.answer()).status == 200
        assert (await served.request(data)).status == 200
        while app.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_body_counts_until_its_request_is_answered() -> None:
    """The app has it in memory as long, in one form or another."""
    may_answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with serve(app, max_body_bytes_in_flight=MB) as served:
        first = await served.connect()
        await first.send(post(bytes(600_000)))
        while served.server._connections._body_bytes < 600_000:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await served.request(post(bytes(600_000)))).status == 503
        may_answer.set()
        assert (await first.answer()).status == 204
        assert (await served.request(post(bytes(600_000)))).status == 204


async def test_an_app_is_called_back_once_when_its_client_has_left() -> None:
    calls: list[str] = []
    left = asyncio.Event()

    def note(what: str) -> None:
        calls.append(what)
        left.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        on_gone = scope[ON_GONE]
        on_gone(lambda: note("taken back"))()
        on_gone(lambda: note("left"))
        await left.wait()
        on_gone(lambda: note("late"))

    async with serve(app) as served:
        raw = await served.connect()
        await raw.send(post(b"{}"))
        await asyncio.sleep(0.05)
        assert calls == []
        await raw.close()
        with anyio.fail_after(5):
            while len(calls) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert calls == ["left", "late"]


async def test_an_app_is_not_called_back_after_its_answer() -> None:
    calls: list[str] = []
    scopes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        scopes.append(scope)
        scope[ON_GONE](lambda: calls.append("left"))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with serve(app) as served:
        assert (await served.request(post(b"{}"))).status == 204
    assert calls == []
    assert ON_GONE not in scopes[0], "the scope would keep its request alive"


async def test_a_body_is_read_no_faster_than_the_app_takes_it() -> None:
    taking = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await taking.wait()
        while (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with serve(app) as served:
        raw = await served.connect()
        raw.writer.write(post(bytes(30 * MB)))
        await asyncio.sleep(0.3)
        assert served.server._connections._body_bytes <= 64 * 1024 + 256 * 1024
        assert raw.writer.transport.get_write_buffer_size() > 10 * MB
        taking.set()
        assert (await raw.answer()).status == 204


async def test_an_answer_before_the_end_of_a_body_reaches_a_client_that_goes_on_sending() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with serve(app) as served:
        raw = await served.connect()
        await raw.send(post(bytes(40 * MB)))
        answer = await raw.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")


# -- Expect: 100-continue


async def test_a_client_that_waits_gets_100_once_the_app_wants_the_body() -> None:
    async with serve() as served:
        raw = await served.connect()
        data = post(b"abc", "Expect: 100-continue")
        await raw.send(data[:-3])
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(b"abc")
        assert (await raw.answer()).body == b"POST /  abc"
        await raw.send(GET)
        assert (await raw.answer()).status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/unknown"])
async def test_a_body_that_will_not_be_taken_is_refused_before_it_is_sent(path: str) -> None:
    async with serve(http_app({"m": ScriptedEngine([Stall()])})) as served:
        raw = await served.connect()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {10**12}\r\nExpect: 100-continue\r\n\r\n"
        )
        await raw.send(head.encode())
        answer = await raw.answer()
        assert answer.status in (404, 413)
        assert answer.headers["connection"] == "close"  # what follows could be the body or a request
        assert await raw.rest() == b""


async def test_another_expectation_gets_417() -> None:
    async with serve() as served:
        assert (await served.request(post(b"a", "Expect: 200-ok"))).status == 417


# -- one side closed


async def test_what_is_answered_at_once_reaches_a_client_that_has_closed_its_side() -> None:
    async with serve() as served:
        raw = await served.connect()
        await raw.send(GET)
        raw.writer.write_eof()
        answer = await raw.answer()
        assert answer.status == 200
        assert await raw.rest() == b""


@pytest.mark.parametrize("how", ["half", "close", "reset"])
async def test_a_request_whose_client_has_ended_is_killed(how: str) -> None:
    engine = ScriptedEngine([Stall()])
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    data = post(body, "Content-Type: application/json").replace(b"/ ", b"/v1/chat/completions ", 1)
    async with serve(http_app({"m": engine})) as served:
        raw = await served.connect()
        await raw.send(data)
        while not engine.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if how == "half":
            raw.writer.write_eof()
            assert await raw.rest() == b""
        elif how == "close":
            await raw.close()
        else:
            raw.writer.transport.abort()
        while engine.open or served.server._connections.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert engine.requests[0].is_killed
