"""Connections in memory, as httpx2 uses them, and the server's end of one: for servers in virtual time."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpcore2
import httpx2
from anyio.abc import ByteStream
from attrs import define, field

from engines.upstream import network


@define
class Wire(ByteStream):
    """One end of a connection in memory."""

    there: Any
    back: Any

    async def send(self, item: bytes) -> None:
        await self.there.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data: bytes = await self.back.receive()
        return data

    async def send_eof(self) -> None:
        await self.there.aclose()

    async def aclose(self) -> None:
        self.there.close()
        self.back.close()


@define(eq=False)
class Plugged(httpcore2.AsyncNetworkStream):
    """The client's end, as httpx2 has it. `has_ended` is what a look at it finds: that the server has closed it.

    `on_close` is called when the client closes it.
    """

    wire: ByteStream
    has_ended: Callable[[], bool] = lambda: False
    on_close: Callable[[], object] = lambda: None

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109  (httpcore2's way)
        try:
            with anyio.fail_after(timeout):
                return await self.wire.receive(max_bytes)
        except TimeoutError as error:
            raise httpcore2.ReadTimeout(error) from error
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise httpcore2.ReadError(error) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        try:
            if buffer:
                await self.wire.send(buffer)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise httpcore2.WriteError(error) from error

    def get_extra_info(self, info: str) -> Any:
        return self.has_ended() if info == "is_readable" else None

    async def aclose(self) -> None:
        self.on_close()
        await self.wire.aclose()


@define
class Network(httpcore2.AsyncNetworkBackend):
    """Where every address is the same."""

    dial: Callable[[], Awaitable[Plugged]]

    async def connect_tcp(self, *address: Any, **more: Any) -> Plugged:
        try:
            return await self.dial()
        except OSError as error:
            raise httpcore2.ConnectError(error) from error


def plugged(dial: Callable[[], Awaitable[Plugged]]) -> httpx2.AsyncBaseTransport:
    """The transport of the product, whole, over such connections instead of those of a system."""
    return network(Network(dial))


@define
class Received:
    """A request as the server received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def as_event(value: Any) -> bytes:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


Script = Callable[["Line", Received], Awaitable[object]]


@define(eq=False)
class Line:
    """The server's end of one connection."""

    wire: Wire
    pending: bytes = b""
    keeps_alive: bool = True
    """Whether there may be another request after an answer."""
    saw_end: anyio.Event = field(factory=anyio.Event)
    parts_per_write: int = 1
    """How many parts of a body leave at once, as those of a server do that is faster than its reader."""
    _unsent: list[bytes] = field(factory=list)

    @property
    def is_closed(self) -> bool:
        """By the server."""
        return bool(self.wire.back.statistics().open_receive_streams == 0)

    async def request(self) -> Received | None:
        """The next request; None once the client has gone."""
        while b"\r\n\r\n" not in self.pending:
            if not await self._more():
                return None
        head, _, self.pending = self.pending.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(self.pending) < length:
            if not await self._more():
                return None
        body, self.pending = self.pending[:length], self.pending[length:]
        method, path, _ = first.split(" ")
        return Received(method, path, headers, body)

    async def begin(self, status: int = 200, kind: str = "text/event-stream") -> None:
        """The head of an answer in chunks."""
        more = "" if self.keeps_alive else "Connection: close\r\n"
        head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\n{more}Transfer-Encoding: chunked\r\n\r\n"
        await self.wire.send(head.encode())

    async def put(self, data: bytes) -> None:
        if data:  # an empty one would be the end
            self._unsent.append(b"%x\r\n%s\r\n" % (len(data), data))
        if len(self._unsent) >= self.parts_per_write:
            await self._flush()

    async def event(self, value: Any) -> None:
        await self.put(as_event(value))

    async def end(self) -> None:
        self._unsent.append(b"0\r\n\r\n")
        await self._flush()

    async def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if data:
            await self.wire.send(data)

    async def whole(self, status: int, body: Any) -> None:
        """An answer that is no stream."""
        await self.begin(status, "application/json")
        await self.put(body if isinstance(body, bytes) else json.dumps(body).encode())
        await self.end()

    async def _more(self) -> bool:
        try:
            self.pending += await self.wire.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.saw_end.set()
            return False
        return True


def plug(wire: Callable[[], Awaitable[ByteStream]]) -> httpx2.AsyncBaseTransport:
    """A transport whose connections are the wires that `wire` returns."""

    async def dial() -> Plugged:
        return Plugged(await wire())

    return plugged(dial)
