"""Links on asyncio and uvloop: the transport calls the connection, without a task between."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import cast

from anyio.lowlevel import cancel_shielded_checkpoint

from .links import HIGH_WATER_BYTES, Address, Link, LinkHandler, Listener

BACKLOG = 1024


class AsyncioLink(Link, asyncio.Protocol):
    """One connection."""

    _handler: LinkHandler

    def __init__(self, accept: Callable[[], LinkHandler]) -> None:
        self._accept = accept
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_due = self._is_paused = self._is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.peer = _peer_of(transport)
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family != getattr(socket, "AF_UNIX", None):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._handler = self._accept()  # not before: a TLS handshake may have failed
        self._handler.opened(self)

    def data_received(self, data: bytes) -> None:
        self._handler.received(data)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.ready()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._handler.lost(exc)

    def ready(self) -> None:
        if not (self._is_due or self._is_paused or self._is_closing):
            self._is_due = True
            self._loop.call_soon(self._write_soon)

    def _write_soon(self) -> None:
        self._is_due = False
        if not self._is_paused:
            self._write()

    def _write(self) -> None:
        if self._transport is not None and not self._is_closing and (data := self._handler.output()):
            self._transport.write(data)

    def close(self) -> None:
        self._write()
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()


class AsyncioListener(Listener):
    """A server of asyncio."""

    def __init__(self, server: asyncio.Server, address: Address) -> None:
        self._server = server
        self.address = address

    async def close(self) -> None:
        # What asyncio has accepted in this turn gets its transport in the next one; a server that is closed by then
        # refuses it, and it stays open. uvloop has no such turn between.
        loop = asyncio.get_running_loop()
        for listening in self._server.sockets:
            loop.remove_reader(listening.fileno())
        await cancel_shielded_checkpoint()
        self._server.close()


async def dial(address: Address, handler: LinkHandler, context: ssl.SSLContext | None, name: str | None) -> None:
    """Connect the handler. `name`: what the certificate of the other side is checked for."""
    loop = asyncio.get_running_loop()
    if address.path:
        await loop.create_unix_connection(lambda: AsyncioLink(lambda: handler), address.path)
    else:
        await loop.create_connection(
            lambda: AsyncioLink(lambda: handler), address.host, address.port, ssl=context, server_hostname=name
        )


async def listen(address: Address, accept: Callable[[], LinkHandler]) -> AsyncioListener:
    """Accept connections without TLS."""
    loop = asyncio.get_running_loop()

    def made() -> AsyncioLink:
        return AsyncioLink(accept)

    if address.path:
        return AsyncioListener(await loop.create_unix_server(made, address.path, backlog=BACKLOG), address)
    server = await loop.create_server(made, address.host, address.port, backlog=BACKLOG)
    port = server.sockets[0].getsockname()[1]
    return AsyncioListener(server, Address(address.host, port))


def _peer_of(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a process of this machine"
