"""Http1Transport: connections kept, lost, closed and cancelled, and what one read gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpcore2
import httpx2
import pytest
from anyio.lowlevel import checkpoint
from attrs import define

from engines.upstream.client import IDLE_S
from engines.upstream.transport import Http1Transport
from tests.engines.upstream.wire import Line, Network, Plugged, Received
from tests.engines.upstream.worlds import FakeServer

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@define(eq=False, kw_only=True)
class Scripted(FakeServer):
    """A server that answers each request by a script."""

    script: Callable[[Line, Received], Awaitable[object]]

    async def answer(self, line: Line, received: Received) -> None:
        await self.script(line, received)


@asynccontextmanager
async def scripted(script: Callable[[Line, Received], Awaitable[object]]) -> AsyncIterator[tuple[Scripted, Any]]:
    """A server and a transport to it; at the end none of its connections is open."""
    left: list[int] = []
    async with anyio.create_task_group() as tasks:
        server = Scripted(tasks, script=script)
        transport = Http1Transport(IDLE_S, Network(server.dial))
        yield server, transport
        await transport.aclose()
        await anyio.sleep(0.1)
        left.append(server.open)
        tasks.cancel_scope.cancel()
    assert left == [0]


def request(method: str = "GET", url: str = "http://far/path?a=b", **more: Any) -> httpx2.Request:
    extensions = {"timeout": dict.fromkeys(("connect", "read", "write"), 5.0)}
    return httpx2.Request(method, url, extensions=extensions, **more)


async def parts(transport: httpx2.AsyncBaseTransport, sent: httpx2.Request) -> list[bytes]:
    response = await transport.handle_async_request(sent)
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    return [part async for part in response.stream]


async def say_ok(line: Line, received: Received) -> None:
    await line.wire.send(WHOLE)


async def test_one_read_is_one_part_whatever_chunks_it_has() -> None:
    async def script(line: Line, received: Received) -> None:
        await line.wire.send(HEAD + b"1\r\na\r\n2\r\nbc\r\n")
        await line.wire.send(b"1\r\nd\r\n1\r\ne\r\n1")
        await line.wire.send(b"\r\nf\r\n0\r\n\r\n")

    async with scripted(script) as (_, transport):
        assert await parts(transport, request()) == [b"abc", b"de", b"f"]


async def test_a_kept_connection_is_that_of_one_host_and_port() -> None:
    async with scripted(say_ok) as (server, transport):
        for url, connections in (("far", 1), ("far:8000", 2), ("near", 3), ("far", 3), ("far:8000", 3)):
            assert await parts(transport, request(url=f"http://{url}/")) == [b"ok"]
            assert len(server.lines) == connections


async def test_a_request_is_written_whole() -> None:
    async with scripted(say_ok) as (server, transport):
        assert await parts(transport, request("POST", content=b"body", headers={"X-A": "b"})) == [b"ok"]
        (received,) = server.received
        assert (received.method, received.path, received.body) == ("POST", "/path?a=b", b"body")
        assert received.headers == {"host": "far", "x-a": "b", "content-length": "4"}


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_with_the_end_of_a_line_is_not_sent(value: bytes) -> None:
    async with scripted(say_ok) as (server, transport):
        with pytest.raises(httpx2.LocalProtocolError):
            await parts(transport, request(headers=[(b"a", value)]))
        assert server.lines == []


async def test_the_connection_that_was_used_last_is_used_first_and_old_ones_are_closed() -> None:
    async def script(line: Line, received: Received) -> None:
        await anyio.sleep(1.0)
        await line.wire.send(WHOLE)

    async with scripted(script) as (server, transport):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(parts, transport, request())
        for _ in range(4):
            await parts(transport, request())
        assert (len(server.lines), server.open) == (5, 5)
        await anyio.sleep(IDLE_S - 3.5)
        await parts(transport, request())
        await anyio.sleep(0.1)
        assert server.open == 1


@pytest.mark.parametrize("in_sight", [True, False])
async def test_a_request_that_a_kept_connection_lost_is_sent_again(in_sight: bool) -> None:
    async def script(line: Line, received: Received) -> None:
        await line.wire.send(WHOLE)
        await line.wire.aclose()

    async with scripted(script) as (server, transport):
        if not in_sight:
            transport._network = Network(lambda: unseen(server))
        for number in range(3):
            response = await transport.handle_async_request(request())
            assert response.extensions["is_new_connection"]
            await response.aread()
            assert (len(server.received), len(server.lines)) == (number + 1, number + 1)


async def unseen(server: FakeServer) -> Plugged:
    """A connection whose end shows only when it is used."""
    plugged = await server.dial()
    plugged.has_ended = lambda: False
    return plugged


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200", HEAD, b"HTTP/1.1 103 x\r\n\r\n"])
async def test_a_request_whose_answer_has_begun_is_not_sent_again(begun: bytes) -> None:
    async def script(line: Line, received: Received) -> None:
        if len(server.received) == 1:
            await line.wire.send(WHOLE)
            return
        await line.wire.send(begun)
        await line.wire.aclose()

    async with scripted(script) as (server, transport):
        await parts(transport, request())
        with pytest.raises(httpx2.RemoteProtocolError, match=r"closed connection|Server disconnected"):
            await parts(transport, request())
        assert len(server.received) == 2


@pytest.mark.parametrize("behind", [b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad", b"noise"])
async def test_what_is_behind_an_answer_is_never_that_of_the_next_request(behind: bytes) -> None:
    async def script(line: Line, received: Received) -> None:
        await line.wire.send(WHOLE + (behind if len(server.received) == 1 else b""))

    async with scripted(script) as (server, transport):
        for _ in range(2):
            assert await parts(transport, request()) == [b"ok"]
        assert len(server.lines) == 2


async def test_what_comes_while_a_connection_is_kept_is_never_the_answer_to_the_next_request() -> None:
    """As servers do that end a connection nobody uses."""
    said: list[bool] = []

    async def script(line: Line, received: Received) -> None:
        await line.wire.send(WHOLE)
        if not said:
            await anyio.sleep(1)
            await line.wire.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            said.append(True)

    async def dial() -> Plugged:
        plugged = await server.dial()
        plugged.has_ended = lambda: bool(said) and len(server.lines) == 1
        return plugged

    async with scripted(script) as (server, transport):
        transport._network = Network(dial)
        assert await parts(transport, request()) == [b"ok"]
        await anyio.sleep(2)
        assert await parts(transport, request()) == [b"ok"]
        assert (len(server.lines), server.open) == (2, 1)


async def test_a_transport_that_is_closed_ends_open_requests_and_sends_none_again() -> None:
    async def script(line: Line, received: Received) -> None:
        if len(server.received) == 1:
            await line.wire.send(WHOLE)
        else:
            await line.request()

    async with scripted(script) as (server, transport):
        await parts(transport, request())
        raised: list[BaseException] = []

        async def send() -> None:
            try:
                await parts(transport, request())
            except httpx2.ReadError as error:
                raised.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await anyio.sleep(1.0)
            await transport.aclose()
        assert len(raised) == 1
        assert (len(server.received), len(server.lines)) == (2, 1)


class SlowNetwork(Network):
    """Connects a second later."""

    async def connect_tcp(self, *address: Any, **more: Any) -> Plugged:
        await anyio.sleep(1.0)
        return await super().connect_tcp(*address, **more)


async def test_a_connection_that_is_made_while_its_transport_is_closed_is_closed_too() -> None:
    async with scripted(say_ok) as (server, _):
        transport = Http1Transport(IDLE_S, SlowNetwork(server.dial))

        async def refused() -> None:
            with pytest.raises(httpx2.ReadError):
                await parts(transport, request())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused)
            await anyio.sleep(0.5)
            await transport.aclose()
        assert (len(server.lines), server.received) == (1, [])
        assert await parts(transport, request()) == [b"ok"]
        await transport.aclose()


@pytest.mark.parametrize("turns", range(14))
@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_request_cancelled_at_any_turn_leaves_no_connection_in_use(turns: int, is_kept: bool) -> None:
    is_slow = False

    async def script(line: Line, received: Received) -> None:
        if not is_slow:
            await line.wire.send(WHOLE)
            return
        await line.wire.send(HEAD + b"1\r\na\r\n")
        await anyio.sleep(30.0)

    async with scripted(script) as (server, transport):
        if is_kept:
            await parts(transport, request())
        is_slow = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parts, transport, request())
            for _ in range(turns):
                await checkpoint()
            tasks.cancel_scope.cancel()
        is_slow = False
        await anyio.sleep(IDLE_S + 1.0)
        assert await parts(transport, request()) == [b"ok"]  # by a new connection; one that was kept is closed
        await anyio.sleep(0.1)
        assert server.open == 1


async def test_a_response_closed_before_its_end_closes_its_connection() -> None:
    async def script(line: Line, received: Received) -> None:
        await line.wire.send(HEAD + b"1\r\na\r\n")
        await anyio.sleep(10.0)

    async with scripted(script) as (server, transport):
        response = await transport.handle_async_request(request())
        await response.aclose()
        await anyio.sleep(0.1)
        assert server.open == 0


async def test_a_server_that_reads_no_request_but_has_answered_counts() -> None:
    """As one that refuses a large body and closes the connection."""

    class Full(Plugged):
        async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
            raise httpcore2.WriteError("full")

    async def dial() -> Plugged:
        plugged = await server.dial()
        await server.lines[-1].wire.send(b"HTTP/1.1 413 x\r\nContent-Length: 2\r\n\r\nno")
        return Full(plugged.wire)

    async with scripted(say_ok) as (server, _):
        transport = Http1Transport(IDLE_S, Network(dial))
        response = await transport.handle_async_request(request("POST", content=b"large"))
        assert (response.status_code, await response.aread()) == (413, b"no")
        await transport.aclose()


# -- connections that are secure, or take a moment to close


class SlowToClose(httpcore2.AsyncNetworkStream):
    """A connection on which nothing comes, and which takes a moment to close."""

    is_closed = False

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await checkpoint()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        await anyio.sleep_forever()
        return b""

    async def start_tls(self, *options: Any, **more: Any) -> httpcore2.AsyncNetworkStream:
        raise httpcore2.ConnectError("the certificate is of another")

    async def aclose(self) -> None:
        await anyio.sleep(0.1)
        self.is_closed = True


class Dialled(httpcore2.AsyncNetworkBackend):
    """A network of one connection."""

    def __init__(self) -> None:
        self.stream, self.addresses = SlowToClose(), list[tuple[str, int]]()

    async def connect_tcp(self, host: str, port: int, *options: Any, **more: Any) -> httpcore2.AsyncNetworkStream:
        self.addresses.append((host, port))
        return self.stream


@pytest.mark.parametrize(("url", "port"), [("https://far/", 443), ("https://far:8443/", 8443)])
async def test_a_connection_that_cannot_be_made_secure_is_closed(url: str, port: int) -> None:
    network = Dialled()
    transport = Http1Transport(IDLE_S, network)
    with pytest.raises(httpx2.ConnectError, match="of another"):
        await parts(transport, request(url=url))
    assert (network.addresses, network.stream.is_closed) == ([("far", port)], True)


async def test_a_cancellation_waits_until_the_connection_is_closed() -> None:
    network = Dialled()
    with anyio.move_on_after(1.0):
        await parts(Http1Transport(IDLE_S, network), request())
    assert (network.addresses, network.stream.is_closed) == ([("far", 80)], True)
