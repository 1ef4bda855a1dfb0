"""Exchange: one request over a connection, and its answer as it comes; a stop or a kill ends every wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import anyio

from pipeline import Cancelled, Control
from pipeline.errors import Disconnected, InvalidMessage, ResponseTimeout

from .connection import Connection
from .dialing import Connections

T = TypeVar("T")

_BODY_MAX_BYTES = 4 * 1024 * 1024
_TAIL_S = 0.2
"""How long the end of a body may take to follow the end of its answer, for the connection to be used again."""


class Exchange:
    """One request and its answer.

    Every wait raises Cancelled once the request is stopped or killed, ResponseTimeout where nothing comes for
    `silence_s`, and what connecting and reading raise. Leaving the block gives the connection back, which is kept if
    the answer was read to its end and closed if not: so the server hears that nobody waits any more.
    """

    def __init__(self, connections: Connections, control: Control, silence_s: float) -> None:
        self._connections = connections
        self._control = control
        self._silence_s = silence_s
        self._connection: Connection | None = None
        self._scope: anyio.CancelScope | None = None
        self._forget: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        self._forget = self._control.on_stop(self._cut)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forget is not None:
            self._forget()
        await self._give_back()

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "nothing was asked"
        return self._connection

    async def ask(self, request: bytes) -> int:
        """Sends the request; the status of the answer. One that a kept connection did not take goes out again."""
        self._connection = await self._wait(self._connections.take)
        try:
            return await self._wait(lambda: self.connection.ask(request))
        except Disconnected:
            if not self.connection.was_gone:
                raise
        await self._give_back()
        self._connection = await self._wait(lambda: self._connections.take(fresh=True))
        return await self._wait(lambda: self.connection.ask(request))

    async def read(self) -> bytes:
        """What has come of the body; nothing once it has ended."""
        return await self._wait(self.connection.read)

    async def body(self) -> bytes:
        """The whole body, up to more than any message or list of models needs."""
        parts: list[bytes] = []
        while sum(map(len, parts)) < _BODY_MAX_BYTES and (data := await self.read()):
            parts.append(data)
        return b"".join(parts)

    async def finish(self) -> None:
        """The answer is complete; reads what is still to come before the connection can be used again."""
        with suppress(Disconnected, InvalidMessage):  # there is nothing left to lose
            with anyio.CancelScope(deadline=anyio.current_time() + _TAIL_S) as self._scope:
                while not (self.connection.is_whole or self._control.is_stopped) and await self.connection.read():
                    pass

    async def _wait(self, wait: Callable[[], Awaitable[T]]) -> T:
        if self._control.is_stopped:
            raise Cancelled("the request was stopped")
        limit_s = anyio.current_time() + self._silence_s
        with anyio.CancelScope(deadline=limit_s) as self._scope:
            return await wait()
        if self._control.is_stopped:
            raise Cancelled("the request was stopped")
        raise ResponseTimeout(f"the server said nothing for {self._silence_s:g} s")

    async def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await self._connections.give_back(connection)

    def _cut(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
