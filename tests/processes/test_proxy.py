"""The proxy of these tests does what they rely on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from tests.ports import reserved_port
from tests.processes.proxy import Proxy, proxy


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    """A proxy in front of a server that sends back what it gets."""

    async def echo(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError):
                async for part in stream:
                    await stream.send(part)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        async with proxy("127.0.0.1", ("127.0.0.1", listener.extra(SocketAttribute.local_port))) as made:
            yield made
        tasks.cancel_scope.cancel()


async def test_it_passes_bytes_on_and_cuts_connections() -> None:
    async with echoing() as made, await anyio.connect_tcp("127.0.0.1", made.port) as client:
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        assert (made.made, made.passed_bytes) == (1, 10)
        made.cut()
        with anyio.fail_after(5), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await client.receive()
        async with await anyio.connect_tcp("127.0.0.1", made.port) as again:
            await again.send(b"again")
            assert await again.receive() == b"again"


async def test_a_silent_connection_stays_open_and_nothing_comes() -> None:
    async with echoing() as made, await anyio.connect_tcp("127.0.0.1", made.port) as client:
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        made.is_silent = True
        await client.send(b"lost")
        with anyio.move_on_after(0.05) as waited:
            await client.receive()
        assert waited.cancelled_caught
        made.is_silent = False
        await client.send(b"more")
        assert await client.receive() == b"more"


async def test_a_connection_made_in_silence_is_taken_and_shows_not_whether_the_target_is_there() -> None:
    async with proxy("127.0.0.1", ("127.0.0.1", reserved_port())) as made:  # nothing listens there
        made.is_silent = True
        async with await anyio.connect_tcp("127.0.0.1", made.port) as client:
            with anyio.move_on_after(0.05) as waited:
                await client.receive()
            assert waited.cancelled_caught
            made.cut()
            with anyio.fail_after(5), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
                await client.receive()


async def test_a_delay_holds_bytes_back() -> None:
    async with echoing() as made, await anyio.connect_tcp("127.0.0.1", made.port) as client:
        made.delay_s = 0.03
        begun_s = anyio.current_time()
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        assert anyio.current_time() - begun_s >= 0.06
