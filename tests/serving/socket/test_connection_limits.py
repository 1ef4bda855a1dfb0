"""How much one connection, one client and all of them together may take; what is refused is released."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from serving.socket.connections import client_of
from tests.serving.socket.worlds import Counting, post, serve

GET = b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
MB = 1024 * 1024


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
