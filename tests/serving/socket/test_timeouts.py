"""Peers that do too little are cut in time; those that wait for the app are not. Real, short times."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import anyio
import pytest
from starlette.types import Receive, Scope, Send

from tests.serving.socket.worlds import serve

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"

POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
QUICK: dict[str, Any] = {
    "head_timeout_s": 0.2,
    "body_timeout_s": 0.2,
    "keep_alive_timeout_s": 0.2,
    "min_body_bytes_per_s": 10_000,
}


@pytest.mark.parametrize(
    ("start", "drip", "limit"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"", "head_timeout_s"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"x", "head_timeout_s"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"a: b\r\n", "head_timeout_s"),
        (b"\r\nG", b"", "head_timeout_s"),
        (GET + b"G", b"", "head_timeout_s"),
        (POST, b"", "body_timeout_s"),
        (POST, b" ", "body_timeout_s"),
        (POST + bytes(50_000), b" ", "body_timeout_s"),
        (CHUNKED, b"1\r\na\r\n", "body_timeout_s"),
        (CHUNKED + b"5;", b"e", "body_timeout_s"),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"a: b\r\n", "body_timeout_s"),
    ],
)
async def test_a_head_or_body_that_does_not_come_to_its_end_gets_408(
    start: bytes, drip: bytes, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(**QUICK) as served:
        raw = await served.connect()
        await raw.send(start)
        if start.startswith(GET):
            assert (await raw.answer()).status == 200
        answers = []
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:

                async def go_on() -> None:
                    while drip:
                        await raw.send(drip)
                        await asyncio.sleep(0.03)

                tasks.start_soon(go_on)
                answers.append(await raw.answer())
                tasks.cancel_scope.cancel()
            await raw.send(b"x")
            await raw.rest()
        [answer] = answers
        assert (answer.status, answer.json["limit"]["name"]) == (408, limit)
        assert answer.json["limit"]["value"] >= answer.json["limit"]["threshold"] == 0.2
        assert answer.headers["x-penstock-limit"].startswith(limit)
    assert served.limits_hit == [limit]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("before", [b"", b"\r\n\r\n", GET])
async def test_a_silent_connection_is_closed_without_an_answer(before: bytes) -> None:
    async with serve(**QUICK) as served:
        raw = await served.connect()
        await raw.send(before)
        if before == GET:
            await raw.answer()
        with anyio.fail_after(5):
            assert await raw.rest() == b""
    assert served.limits_hit == ([] if before == GET else ["head_timeout_s"])


async def test_a_slow_head_and_a_slow_body_within_the_limits_are_served() -> None:
    limits: dict[str, Any] = {"head_timeout_s": 3, "body_timeout_s": 1.5, "min_body_bytes_per_s": 10}
    async with serve(**limits) as served:
        raw = await served.connect()
        for byte in b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 320\r\n\r\n":
            await raw.send(bytes([byte]))
            await asyncio.sleep(0.002)
        for _ in range(80):  # for more than twice the time of a body
            await raw.send(b" " * 4)
            await asyncio.sleep(0.04)
        assert (await raw.answer()).status == 200


async def test_the_apps_own_time_is_not_the_clients() -> None:
    """An app that takes the body late pauses the client, whose time stands still."""
    seen: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            await asyncio.sleep(0.5 if size < 300_000 else 0)
            message = await receive()
            assert message["type"] == "http.request"
            seen.append(len(message["body"]))
            size, more = size + len(message["body"]), message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with serve(app, **QUICK) as served:
        size = 1_000_000
        answer = await served.request(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
        assert answer.status == 200
    assert sum(seen) == size
    assert max(seen) <= 64 * 1024 + 256 * 1024  # the buffer, and one read of the transport beyond it
    assert served.refused == []


async def test_a_long_answer_and_a_long_wait_for_it_are_no_idle_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.8)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            await send({"type": "http.response.body", "body": b"a", "more_body": True})
            await asyncio.sleep(0.2)
        await send({"type": "http.response.body"})

    async with serve(app, **QUICK, write_timeout_s=0.2) as served:
        assert (await served.request(GET)).body == b"aaaa"
    assert served.refused == []


class Endless:
    """Answers without end; notices when its client is gone."""

    def __init__(self, piece: bytes = bytes(16 * 1024)) -> None:
        self.piece = piece
        self.sent_bytes = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                while True:
                    await send({"type": "http.response.body", "body": self.piece, "more_body": True})
                    self.sent_bytes += len(self.piece)
                    await asyncio.sleep(0)

            tasks.start_soon(write)
            assert (await receive())["type"] == "http.disconnect"
            tasks.cancel_scope.cancel()
        self.ended.set()


async def stopped_reader(port: int) -> socket.socket:
    """A client that sends a request and reads nothing, with as little room as the system gives."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(client, GET)
    return client


async def test_a_reader_that_stopped_is_cut_and_its_request_ends() -> None:
    app = Endless()
    async with serve(app, write_timeout_s=0.3) as served:
        with await stopped_reader(served.port), anyio.fail_after(5):
            await app.ended.wait()
            assert served.server._connections.open == {}
    assert served.limits_hit == ["write_timeout_s"]
    assert app.sent_bytes < 16 * 1024 * 1024


async def test_a_slow_reader_that_takes_a_little_is_not_cut() -> None:
    app = Endless()
    async with serve(app, write_timeout_s=1.5) as served:
        with await stopped_reader(served.port) as client:
            for _ in range(55):  # for more than twice that time
                await asyncio.get_running_loop().sock_recv(client, 256 * 1024)
                await asyncio.sleep(0.06)
            assert not app.ended.is_set()
            assert served.refused == []


async def test_a_reader_that_stopped_behind_its_answer_is_cut_too() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": bytes(20_000_000)})

    async with serve(app, write_timeout_s=0.3) as served:
        with await stopped_reader(served.port), anyio.fail_after(5):
            while not served.refused:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while served.server._connections.open:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert served.limits_hit == ["write_timeout_s"]


async def test_a_server_with_hostile_connections_ends_in_time() -> None:
    app = Endless()
    async with serve(app) as served:
        opened = [await served.connect() for _ in range(60)]
        for each, start in zip(
            opened, [b"", b"GET / HT", POST, CHUNKED + b"5\r\n", b"\x16", GET * 1000] * 10, strict=True
        ):
            await each.send(start)
        with await stopped_reader(served.port):
            await asyncio.sleep(0.2)
            began = asyncio.get_running_loop().time()
            served.server.stop()
            while served.server._connections.open:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert asyncio.get_running_loop().time() - began < 15


async def test_limits_of_zero_are_off() -> None:
    names = [*QUICK, "write_timeout_s", "max_connections", "max_connections_per_client", "max_body_bytes_in_flight"]
    names += ["max_requests_per_connection", "max_header_bytes", "max_headers", "max_url_bytes"]
    unlimited: dict[str, Any] = dict.fromkeys(names, 0)
    async with serve(**unlimited) as served:
        raw = await served.connect()
        await raw.send(GET[:10])
        await asyncio.sleep(0.1)
        await raw.send(GET[10:-2] + b"a: b\r\n" * 1000 + b"\r\n")
        assert (await raw.answer()).status == 200
    assert served.refused == []
