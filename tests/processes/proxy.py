"""Proxy: a TCP proxy between two processes, whose connections a test cuts, silences or delays."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
from anyio.abc import SocketAttribute, SocketStream
from attrs import define, field

_READ_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset, as a machine does that knows nothing of the connection."""


@define(eq=False)
class Proxy:
    """A proxy from its own address to a target."""

    host: str
    """Address to listen on."""
    target: tuple[str, int]
    """Address and port to connect to."""
    port: int = 0
    """Port to listen on, once `proxy` has begun."""
    is_silent: bool = False
    """Whether all bytes are swallowed, of both sides: connections stay open, and nothing comes any more."""
    delay_s: float = 0.0
    """Seconds by which each part is held back."""
    made: int = 0
    """Connections there were."""
    passed_bytes: int = 0
    """Bytes that went through, both ways together."""
    _open: dict[SocketStream, anyio.CancelScope] = field(factory=dict)

    def cut(self) -> None:
        """Reset all connections; new ones are taken."""
        for stream, scope in list(self._open.items()):
            raw = stream.extra(SocketAttribute.raw_socket)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            scope.cancel()

    async def _pass_on(self, client: SocketStream) -> None:
        self.made += 1
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(client)
            with anyio.CancelScope() as scope:
                self._open[client] = scope
                try:
                    if self.is_silent:
                        await anyio.sleep_forever()  # it is taken; whether anything is behind does not get through
                    server = await opened.enter_async_context(await anyio.connect_tcp(*self.target))
                    self._open[server] = scope
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._copy, client, server, scope)
                        tasks.start_soon(self._copy, server, client, scope)
                except* OSError:
                    pass  # the target is gone: so is the client's connection
                finally:
                    self._open = {stream: own for stream, own in self._open.items() if own is not scope}

    async def _copy(self, source: SocketStream, target: SocketStream, scope: anyio.CancelScope) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                part = await source.receive(_READ_BYTES)
                if self.delay_s:
                    await anyio.sleep(self.delay_s)
                if not self.is_silent:
                    self.passed_bytes += len(part)
                    await target.send(part)
        if self.is_silent:
            await anyio.sleep_forever()  # the end does not get through either
        scope.cancel()


@asynccontextmanager
async def proxy(host: str, target: tuple[str, int], port: int = 0) -> AsyncIterator[Proxy]:
    """Run a proxy while the block runs."""
    made = Proxy(host, target)
    async with await anyio.create_tcp_listener(local_host=host, local_port=port) as listener:
        made.port = listener.extra(SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, made._pass_on)
            yield made
            tasks.cancel_scope.cancel()
