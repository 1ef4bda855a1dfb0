"""How much one connection, one client and all of them together may take; what is refused is released."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from pipeline.testing import ScriptedEngine, Stall
from serving.http import ON_GONE
from serving.http import app as http_app
from serving.socket.connections import client_of
from tests.serving.socket.worlds import serve

pytestmark = pytest.mark.anyio

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
MB = 1024 * 1024


def post(body: bytes, *lines: str) -> bytes:
    head = ["POST / HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


class Counting:
    """An app that answers when it is let, and counts what reached it."""

    def __init__(self, *, held: bool = False) -> None:
        self.requests = self.running = self.body_bytes = 0
        self.may_answer = asyncio.Event()
        if not held:
            self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        self.running += 1
        try:
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                self.body_bytes += len(message["body"])
                more = message["more_body"]
            await self.may_answer.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.running -= 1


# -- heads


@pytest.mark.parametrize(
    ("data", "status", "limit"),
    [
        (GET[:-2] + b"a: " + b"b" * 1000, 431, "max_header_bytes"),
        (GET[:-2] + b"a: " + b"b" * 1000 + b"\r\n\r\n", 431, "max_header_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a" * 1000, 431, "max_header_bytes"),
        (GET[:-2] + b"a:b\r\n" * 11, 431, "max_headers"),
        (GET[:-2] + b"a:b\r\n" * 11 + b"\r\n", 431, "max_headers"),
        (b"GET /" + b"a" * 200, 414, "max_url_bytes"),
        (b"GET /" + b"a" * 100 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "max_url_bytes"),
        (b"GET /?" + b"a" * 100 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414, "max_url_bytes"),
        (CHUNKED + b"1;" + b"e" * 1000 + b"\r\n", 431, "max_header_bytes"),
        (CHUNKED + b"0" * 1000, 431, "max_header_bytes"),
        (CHUNKED + b"1\r\na\r\n" + b"0\r\n" + b"a: b\r\n" * 200, 431, "max_header_bytes"),
        (CHUNKED + b"1\r\na\r\n" + b"0\r\na: " + b"b" * 2000, 431, "max_header_bytes"),
    ],
)
@pytest.mark.parametrize("piece", [50, 10_000])
async def test_a_head_or_what_stands_between_chunks_is_refused_while_it_grows(
    data: bytes, status: int, limit: str, piece: int
) -> None:
    async with serve(Counting(), max_header_bytes=500, max_headers=10, max_url_bytes=100) as served:
        raw = await served.connect()
        for start in range(0, len(data), piece):
            await raw.send(data[start : start + piece])
            await asyncio.sleep(0)
        answer = await raw.answer()
        assert (answer.status, answer.json["limit"]["name"]) == (status, limit)
        assert answer.json["limit"]["value"] > answer.json["limit"]["threshold"]
        assert await raw.rest() == b""
    assert served.limits_hit == [limit]


async def test_a_client_that_sends_100_mb_of_headers_reads_its_answer() -> None:
    async with serve() as served:
        raw = await served.connect()
        await raw.send(GET[:-2])
        for _ in range(100):
            await raw.send(b"a: b\r\n" * (MB // 6))
        assert (await raw.answer()).status == 431


# -- connections


async def test_connections_beyond_the_limit_get_503_and_a_place_is_free_when_one_ends() -> None:
    async with serve(max_connections=3) as served:
        opened = [await served.connect() for _ in range(3)]
        for raw in opened:
            await raw.send(GET)
            assert (await raw.answer()).status == 200
        answer = await served.request(GET)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["limit"] == {"name": "max_connections", "value": 4, "threshold": 3}
        await opened[0].send(GET)
        assert (await opened[0].answer()).status == 200
        await opened[0].close()
        while len(served.server._connections.open) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await served.request(GET)).status == 200


async def test_one_client_gets_429_beyond_its_own_limit() -> None:
    async with serve(max_connections_per_client=2) as served:
        opened = [await served.connect() for _ in range(2)]
        await opened[0].send(GET)
        await opened[0].answer()
        answer = await served.request(GET)
        assert (answer.status, answer.json["limit"]["name"]) == (429, "max_connections_per_client")
        other = await served.connect(local_addr=("127.0.0.2", 0))
        await other.send(GET)
        assert (await other.answer()).status == 200
    assert served.refused[0][1] == "127.0.0.1"


async def test_a_trusted_proxy_has_no_limit_of_its_own() -> None:
    async with serve(max_connections_per_client=1, trusted=lambda address: address == "127.0.0.1") as served:
        for _ in range(5):
            raw = await served.connect()
            await raw.send(GET)
            assert (await raw.answer()).status == 200


async def test_a_flood_of_connections_is_cut_without_answers_and_leaves_the_open_ones() -> None:
    async with serve(max_connections=5, max_connections_per_client=0) as served:
        first = await served.connect()
        await first.send(GET)
        await first.answer()
        opened = [await served.connect() for _ in range(200)]
        await asyncio.sleep(0.2)
        assert len(served.server._connections.open) <= 5 + 64
        await first.send(GET)
        assert (await first.answer()).status == 200
        answered = 0
        for raw in opened:
            await raw.close()
        answered = sum(problem.status == 503 for problem, _ in served.refused)
        assert answered == 196


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("no address", "no address"),
    ],
)
def test_connections_are_counted_by_address_or_network(address: str, key: str) -> None:
    assert client_of(address) == key


async def test_the_last_request_of_a_connection_closes_it() -> None:
    async with serve(max_requests_per_connection=3) as served:
        raw = await served.connect()
        await raw.send(GET * 5)
        answers = [await raw.answer() for _ in range(3)]
        assert [each.headers.get("connection") for each in answers] == [None, None, "close"]
        assert await raw.rest() == b""


# -- pipelining


async def test_pipelined_requests_are_answered_in_their_order() -> None:
    count = 2000
    data = b"".join(post(b"%d" % n) if n % 2 else GET.replace(b"/live", b"/%d" % n) for n in range(count))
    async with serve() as served:
        raw = await served.connect()

        async def send() -> None:
            for start in range(0, len(data), 777):
                await raw.send(data[start : start + 777])

        bodies: list[bytes] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            bodies += [(await raw.answer()).body for _ in range(count)]
        assert bodies == [b"POST /  %d" % n if n % 2 else b"GET /%d  " % n for n in range(count)]


@pytest.mark.parametrize("request_bytes", [GET, post(b"x" * 100), CHUNKED + b"1\r\na\r\n0\r\n\r\n"])
async def test_no_request_is_parsed_before_its_turn_and_little_is_held(request_bytes: bytes) -> None:
    """46 MB of pipelined requests that were never read held 3.4 GB."""
    app = Counting(held=True)
    async with serve(app) as served:
        raw = await served.connect()
        raw.writer.write(request_bytes * (46 * MB // len(request_bytes)))
        while not app.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert app.requests == 1
        connection: Any
        [connection] = served.server._connections.open
        assert len(connection._held) <= 2 * 256 * 1024 + 16 * 1024
        assert raw.writer.transport.get_write_buffer_size() > 20 * MB  # the rest is still the client's
        raw.writer.transport.abort()
        app.may_answer.set()
        while served.server._connections.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert app.requests < 1000


async def test_a_request_behind_a_running_one_waits_and_its_client_is_still_watched() -> None:
    app = Counting(held=True)
    async with serve(app) as served:
        raw = await served.connect()
        await raw.send(GET + GET)
        while not app.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await raw.close()
        app.may_answer.set()
        with anyio.fail_after(5):
            while app.running or served.server._connections.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert app.requests <= 2


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

    async def app(scope: Any, receive: Any, send: Any) -> None:
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

    async def app(scope: Any, receive: Any, send: Any) -> None:
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

    async def app(scope: Any, receive: Any, send: Any) -> None:
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

    async def app(scope: Any, receive: Any, send: Any) -> None:
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
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})

    async with serve(app) as served:
        raw = await served.connect()
        await raw.send(post(bytes(40 * MB)))
        answer = await raw.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")


# -- Expect: 100-continue


async def test_a_client_that_waits_is_told_to_go_on_once_the_app_wants_the_body() -> None:
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
