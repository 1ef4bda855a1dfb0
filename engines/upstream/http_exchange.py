"""Exchange: one request to a server, and the bytes of its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar

import anyio
import httpx2

from pipeline import Cancelled, Context, Control, until_stopped
from pipeline.errors import Disconnected

from .client import Client

T = TypeVar("T")

_BODY_MAX_BYTES = 4 * 1024 * 1024
_TAIL_S = 0.2
"""How long to wait for the end of a body after the end of its answer, so that the connection can be used again."""


class Exchange:
    """One request and its answer.

    Every wait raises Cancelled once the request is stopped or killed, and the errors of `Client.problem`. Leaving the
    block closes the connection, which shows the server that its client is gone, unless the answer was read to its end.
    """

    def __init__(self, client: Client, control: Control) -> None:
        self._client = client
        self._control = control
        self._body: AsyncIterator[bytes] | None = None
        self._parts: AsyncGenerator[bytes, None] | None = None
        self._has_connected = self._has_sent = False
        self._scope: anyio.CancelScope | None = None
        self._guard = anyio.CancelScope()
        self._forget: Callable[[], None] | None = None
        self.content_type = ""
        """Content type of the answer in lower case, without parameters."""
        self.has_reconnected = False
        """Whether a connection was made for it, and not a kept one used."""
        self.is_whole = False
        """Whether the answer has been read to the end that its head promised."""

    async def __aenter__(self) -> Self:
        self._client.in_flight += 1
        self._forget = self._control.on_stop(self._cut)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._forget is not None:
            self._forget()
        try:
            await self.close()
        finally:
            self._client.in_flight -= 1

    async def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> int:
        """Send the request and return the status of its answer. A request that a kept connection lost is sent again.

        Raise Disconnected if the client is closed.
        """
        http = self._client.http
        request = http.build_request(method, path, headers=headers, content=body, extensions={"trace": self._trace})
        while True:
            if http.is_closed:
                raise Disconnected("the connections to the server were closed")
            self._has_connected = self._has_sent = False
            try:
                answer = await self._wait(lambda: self._sent(request))
            except Disconnected:
                if self._has_connected or not self._has_sent:
                    raise
            else:
                break
        self.has_reconnected = self._has_connected
        self._body = answer.aiter_raw()
        self._parts = until_stopped(self._body, Context(None, control=self._control))
        self.content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        return answer.status_code

    async def read(self) -> bytes:
        """Return the next part of the body; empty once it has ended or the connection is closed."""
        parts, control = self._parts, self._control
        if parts is not None and not control.is_stopped:
            try:
                return await anext(parts)
            except StopAsyncIteration:
                self.is_whole = not control.is_stopped
                if self.is_whole:
                    self._body = None  # there is nothing to close
            except httpx2.TransportError as error:
                if not isinstance(problem := self._client.problem(error), Disconnected):
                    raise problem from error
                self.is_whole = False
        if parts is None or control.is_stopped:
            raise Cancelled("the request was stopped, or its exchange closed")
        return b""

    async def body(self) -> bytes:
        """Return the whole body, up to a size that no message or list of models needs."""
        parts: list[bytes] = []
        while sum(map(len, parts)) < _BODY_MAX_BYTES and (data := await self.read()):
            parts.append(data)
        return b"".join(parts)

    async def finish(self) -> None:
        """Read the rest of a complete answer, so that the connection can be used again."""
        if self._body is None or self._control.is_stopped:
            return
        with suppress(httpx2.TransportError):  # there is nothing left to lose
            with anyio.CancelScope(deadline=anyio.current_time() + _TAIL_S) as self._scope:
                async for _ in self._body:
                    pass
                self._body = None  # there is nothing to close

    async def _sent(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer's head. A cancellation waits while a new connection is not yet in use.

        httpx2 would forget it, and leave it open, if it were cancelled there.
        """
        with anyio.CancelScope() as self._guard:
            return await self._client.http.send(request, stream=True)
        raise AssertionError  # nothing cancels the guard

    async def _wait(self, wait: Callable[[], Awaitable[T]]) -> T:
        if not self._control.is_stopped:
            with anyio.CancelScope() as self._scope:
                try:
                    return await wait()
                except httpx2.TransportError as error:
                    raise self._client.problem(error) from error
        raise Cancelled("the request was stopped")

    async def close(self) -> None:
        """Close the connection of an unfinished answer, also while no read waits; idempotent.

        It ends the answer by a read that is cancelled at once.

        That unwinds httpx2 from inside: its generators do not reach the garbage collector, which on trio would warn.
        """
        body, self._body = self._body, None
        parts, self._parts = self._parts, None
        if body is not None:
            with suppress(httpx2.TransportError), anyio.CancelScope(shield=True) as scope:
                scope.cancel()
                async for _ in body:
                    pass
        if parts is not None:
            await parts.aclose()

    def _cut(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _trace(self, event: str, info: Any) -> None:
        """Called by httpx2 when it connects, and when it sends the request."""
        self._has_connected |= event == "connection.connect_tcp.complete"
        self._has_sent |= event == "http11.send_request_headers.started"
        if event in _CONNECTED:
            self._guard.shield = True
        elif event in _IN_USE:
            self._guard.shield = False


_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")
_IN_USE = ("connection.start_tls.started", "http11.send_request_headers.started")
