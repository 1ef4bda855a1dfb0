"""Exchange: one request to a server, and the bytes of its answer; fetched: one whole answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Self, TypeVar

import anyio
import httpx2

from pipeline import Cancelled, Context, Control, until_stopped
from pipeline.errors import Disconnected, InvalidMessage, ResponseTimeout

from .client import Client
from .transport import IS_NEW

T = TypeVar("T")

_BODY_MAX_BYTES = 4 * 1024 * 1024
_MESSAGE_S = 5.0
_TAIL_S = 0.2
"""How long to wait for the end of a body after the end of its answer, so that the connection can be used again."""


class Exchange:
    """One request and its answer.

    Every wait raises Cancelled once the request is stopped or killed, and the errors of `Client.problem`. Leaving the
    block closes the connection, which shows the server that its client is gone, unless the answer was read to its end.
    """

    def __init__(self, client: Client, control: Control) -> None:
        self._client = client
        self.control = self._control = control
        """Ends every wait once it is stopped or killed."""
        self._answer: httpx2.Response | None = None
        self._body: AsyncIterator[bytes] | None = None
        self._parts: AsyncGenerator[bytes, None] | None = None
        self._scope: anyio.CancelScope | None = None
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
        if self._client.is_closed:
            raise Disconnected("the connections to the server were closed")
        answer = self._answer = await self._wait(lambda: self._client.send(method, path, headers, body))
        self.has_reconnected = answer.extensions.get(IS_NEW, False)
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        self._body = aiter(answer.stream)
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
            except httpx2.TransportError as error:
                if not isinstance(problem := self._client.problem(error), Disconnected):
                    raise problem from error
                self.is_whole = False
        if parts is None or control.is_stopped:
            raise Cancelled("the request was stopped, or its exchange closed")
        return b""

    async def body(self) -> bytes:
        """Return the whole body, up to a size that no message or list of models needs."""
        body = bytearray()
        while len(body) < _BODY_MAX_BYTES and (data := await self.read()):
            body += data
        return bytes(body)

    async def message(self) -> bytes:
        """Return the body of a refusal; nothing of one that does not come within a few seconds."""
        with anyio.move_on_after(_MESSAGE_S):
            return await self.body()
        return b""

    async def finish(self) -> None:
        """Read the rest of a complete answer, so that the connection can be used again."""
        if self._body is None or self._control.is_stopped:
            return
        with suppress(httpx2.TransportError):  # there is nothing left to lose
            with anyio.CancelScope(deadline=anyio.current_time() + _TAIL_S) as self._scope:
                async for _ in self._body:
                    pass

    async def _wait(self, wait: Callable[[], Awaitable[T]]) -> T:
        if not self._control.is_stopped:
            with anyio.CancelScope() as self._scope:
                try:
                    return await wait()
                except httpx2.TransportError as error:
                    raise self._client.problem(error) from error
        raise Cancelled("the request was stopped")

    async def close(self) -> None:
        """Close the connection of an unfinished answer, also while no read waits; idempotent."""
        answer, self._answer = self._answer, None
        parts, self._parts, self._body = self._parts, None, None
        with anyio.CancelScope(shield=True):
            if answer is not None:
                await answer.aclose()
            if parts is not None:
                await parts.aclose()

    def _cut(self) -> None:
        if self._scope is not None:
            self._scope.cancel()


async def fetched(
    client: Client, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None, *, within_s: float
) -> tuple[int, bytes]:
    """Return status and body of an answer, however slowly it comes.

    Raise the errors of `Client.problem`; ResponseTimeout if the answer is not whole after `within_s`; for the status
    200 also Disconnected if it was cut, and InvalidMessage if it is larger than any page of use here.
    """
    with anyio.move_on_after(within_s):
        async with Exchange(client, Control()) as exchange:
            status = await exchange.send(method, path, headers, body)
            answer = await exchange.body()
            if status == 200 and not exchange.is_whole:
                if len(answer) >= _BODY_MAX_BYTES:
                    raise InvalidMessage(f"{path} has more than {_BODY_MAX_BYTES} bytes")
                raise Disconnected(f"the connection was closed before the end of {path}")
            await exchange.finish()
        return status, answer
    raise ResponseTimeout(f"{path} was not answered within {within_s:g} s")
