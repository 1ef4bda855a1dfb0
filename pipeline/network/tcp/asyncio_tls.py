"""Listening with TLS on asyncio and uvloop: connections are accepted as long as there are places for handshakes.

asyncio's own servers accept without a bound, and their handshakes end without a notice.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.abc import TaskGroup

from pipeline.rx import AnyIOScheduler, Disposable, DisposableBase

from ..log_limit import LogLimit
from .asyncio_links import BACKLOG, AsyncioLink
from .handshakes import Handshakes
from .links import ACCEPT_PAUSE_S, Address, LinkHandler, Listener

_log = logging.getLogger(__name__)


class AsyncioTlsListener(Listener):
    """Sockets whose connections are accepted in a task."""

    def __init__(
        self,
        address: Address,
        sockets: list[socket.socket],
        accept: Callable[[], LinkHandler],
        context: ssl.SSLContext,
        handshake_timeout_s: float,
    ) -> None:
        self.address = address
        self._sockets, self._accept = sockets, accept
        self._context, self._timeout_s = context, handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._handshakes = Handshakes(str(address))
        self._fresh: set[socket.socket] = set()  # accepted, and their tasks have not begun
        self._task: DisposableBase = Disposable()
        self._closed = anyio.Event()

    def serve(self, scheduler: AnyIOScheduler) -> None:
        """Accept connections in a task of the scheduler."""
        self._task = scheduler.spawn(self._run)

    async def close(self) -> None:
        self._task.dispose()
        await self._closed.wait()

    async def _run(self, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                async with anyio.create_task_group() as tasks:
                    for listening in self._sockets:
                        tasks.start_soon(self._accept_all, listening, tasks)
        finally:
            for each in (*self._sockets, *self._fresh):
                each.close()
            self._closed.set()

    async def _accept_all(self, listening: socket.socket, tasks: TaskGroup) -> None:
        faults = LogLimit(_log)
        while True:
            await self._handshakes.place()
            try:
                accepted = await _accept(listening)
            except OSError as error:  # no file descriptor is free, or the caller has left again
                self._handshakes.end()
                faults.warning("%s: a connection cannot be accepted: %s", self.address, error)
                await anyio.sleep(ACCEPT_PAUSE_S)
            else:
                self._fresh.add(accepted)
                tasks.start_soon(self._shake_hands, accepted)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        self._fresh.discard(accepted)
        try:
            with suppress(OSError):  # what failed was closed
                await self._loop.connect_accepted_socket(
                    lambda: AsyncioLink(self._accept),
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=self._timeout_s,
                )
        except Exception:  # a fault of this process must not end its listener
            _log.exception("%s: a TLS handshake could not be held", self.address)
        finally:
            self._handshakes.end()


async def _accept(listening: socket.socket) -> socket.socket:
    """Return the next connection.

    Not by `loop.sock_accept`: what that has accepted is lost if its task is cancelled before its next turn.
    """
    while True:
        await anyio.wait_readable(listening)
        with suppress(BlockingIOError):  # another process took it, or the caller has left again
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            return accepted


async def listen_with_tls(
    scheduler: AnyIOScheduler,
    address: Address,
    accept: Callable[[], LinkHandler],
    context: ssl.SSLContext,
    handshake_timeout_s: float,
) -> AsyncioTlsListener:
    """Accept connections. A side whose TLS is not done in time is never accepted."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    port = address.port
    try:
        for family, _, _, _, where in dict.fromkeys(found):
            sockets.append(socket.create_server((str(where[0]), port), family=family, backlog=BACKLOG))
            sockets[-1].setblocking(False)
            port = sockets[0].getsockname()[1]
    except BaseException:
        for each in sockets:
            each.close()
        raise
    listener = AsyncioTlsListener(Address(address.host, port), sockets, accept, context, handshake_timeout_s)
    listener.serve(scheduler)
    return listener
