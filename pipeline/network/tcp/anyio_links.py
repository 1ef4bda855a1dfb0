"""Links on streams of anyio, for trio: one task reads, another one writes."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
from anyio.abc import ByteStream, SocketAttribute, TaskGroup
from anyio.streams.stapled import MultiListener
from anyio.streams.tls import TLSStream

from pipeline.loop import Wakeup
from pipeline.rx import AnyIOScheduler, Disposable, DisposableBase

from ..log_limit import LogLimit
from .handshakes import Handshakes
from .links import ACCEPT_PAUSE_S, Address, Link, LinkHandler, Listener

_log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
"""What a stream raises once it has ended; under TLS the writer may see its end as well."""


class StreamLink(Link):
    """One connection. `run` carries it."""

    def __init__(self, stream: ByteStream, handler: LinkHandler) -> None:
        self._stream = stream
        self._handler = handler
        self._wakeup = Wakeup()
        self._scope = anyio.CancelScope()
        self._is_due = self._is_closing = False
        self.peer = _peer_of(stream)

    def ready(self) -> None:
        self._is_due = True
        self._wakeup.wake()

    def close(self) -> None:
        self._is_closing = True
        self.ready()

    def abort(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        """Carry bytes both ways until the connection ends."""
        error: Exception | None = None
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write, tasks.cancel_scope)
                    error = await self._read()
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.aclose_forcefully(self._stream)
            self._handler.lost(error)

    async def _read(self) -> Exception | None:
        try:
            while True:
                self._handler.received(await self._stream.receive(_READ_BYTES))
        except _BROKEN as error:
            return None if isinstance(error, anyio.EndOfStream) else error

    async def _write(self, both: anyio.CancelScope) -> None:
        with suppress(*_BROKEN):  # the reader finds out, too
            while True:
                while not self._is_due:
                    await self._wakeup.wait()
                self._is_due = False
                is_last = self._is_closing
                if data := self._handler.output():
                    await self._stream.send(data)
                if is_last:
                    break
        if self._is_closing:
            both.cancel()


class StreamListener(Listener):
    """Accepts connections in a task."""

    def __init__(
        self,
        address: Address,
        sockets: MultiListener[Any],
        scheduler: AnyIOScheduler,
        handshakes: Handshakes | None = None,
    ) -> None:
        self.address = address
        self._handshakes = handshakes
        self._sockets = sockets
        self._scheduler = scheduler
        self._task: DisposableBase = Disposable()
        self._closed = anyio.Event()

    def serve(self, handle: Callable[[ByteStream], Coroutine[Any, Any, None]]) -> None:
        """Call `handle` with each connection, in a task of the listener."""

        async def accept(scope: anyio.CancelScope) -> None:
            try:
                with scope:
                    async with anyio.create_task_group() as tasks:
                        for one in self._sockets.listeners:
                            tasks.start_soon(self._accept_all, one, handle, tasks)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._sockets.aclose()
                self._closed.set()

        self._task = self._scheduler.spawn(accept)

    async def close(self) -> None:
        self._task.dispose()
        await self._closed.wait()

    async def _accept_all(
        self, one: Any, handle: Callable[[ByteStream], Coroutine[Any, Any, None]], tasks: TaskGroup
    ) -> None:
        faults = LogLimit(_log)
        while True:
            if self._handshakes is not None:
                await self._handshakes.place()
            try:
                stream = await one.accept()
            except anyio.BrokenResourceError as error:  # no file descriptor is free, or the caller has left again
                if self._handshakes is not None:
                    self._handshakes.end()
                faults.warning("%s: a connection cannot be accepted: %s", self.address, error.__cause__)
                await anyio.sleep(ACCEPT_PAUSE_S)
            else:
                tasks.start_soon(handle, stream)


async def dial(
    scheduler: AnyIOScheduler, address: Address, handler: LinkHandler, context: ssl.SSLContext | None, name: str | None
) -> None:
    """Connect the handler. `name`: what the certificate of the other side is checked for."""
    if address.path:
        stream: ByteStream = await anyio.connect_unix(address.path)
    else:
        stream = await anyio.connect_tcp(address.host, address.port)
        if context is not None:
            stream = await _wrapped(stream, context, name)
    _start(scheduler, stream, handler)


async def listen(
    scheduler: AnyIOScheduler,
    address: Address,
    accept: Callable[[], LinkHandler],
    context: ssl.SSLContext | None,
    handshake_timeout_s: float,
) -> StreamListener:
    """Accept connections. A side whose TLS is not done in time is never accepted."""

    handshakes: Handshakes | None = None

    async def handle(stream: ByteStream) -> None:
        if context is not None and handshakes is not None:
            try:
                with anyio.fail_after(handshake_timeout_s):
                    stream = await _wrapped(stream, context, None)
            except OSError:
                return
            finally:
                handshakes.end()
        _start(scheduler, stream, accept())

    sockets: MultiListener[Any]
    if address.path:
        sockets = MultiListener([await anyio.create_unix_listener(address.path)])
    else:
        sockets = await anyio.create_tcp_listener(local_host=address.host, local_port=address.port, backlog=1024)
        address = Address(address.host, sockets.extra(SocketAttribute.local_port))
    handshakes = None if context is None else Handshakes(str(address))
    listener = StreamListener(address, sockets, scheduler, handshakes)
    listener.serve(handle)
    return listener


async def _wrapped(stream: ByteStream, context: ssl.SSLContext, name: str | None) -> ByteStream:
    try:
        return await TLSStream.wrap(
            stream, server_side=name is None, hostname=name, ssl_context=context, standard_compatible=False
        )
    except BaseException as error:
        await anyio.aclose_forcefully(stream)
        if isinstance(error, _BROKEN) and not isinstance(error, OSError):
            raise OSError("the connection ended in its TLS handshake") from error
        raise


def _start(scheduler: AnyIOScheduler, stream: ByteStream, handler: LinkHandler) -> None:
    link = StreamLink(stream, handler)
    handler.opened(link)
    scheduler.spawn(lambda _: link.run())


def _peer_of(stream: ByteStream) -> str:
    address = stream.extra(SocketAttribute.remote_address, "")
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a process of this machine"
