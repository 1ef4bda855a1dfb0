"""Http1Transport: HTTP/1.1 for httpx2, parsed by llhttp, over connections that are kept.

    request ──► a kept connection, else a new one ──► one write
    parts   ◄── ResponseParser                    ◄── one read: all bytes of the body in it are one part

For answers of many small chunks. httpx2's own transport parses in Python and returns each chunk by itself, which is
some 10 µs a token, and looks at every kept connection for every request, some 300 µs with 64 of them.
"""

from __future__ import annotations

import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import anyio
import httpcore2
import httpx2
from attrs import define

from .response_parser import ResponseParser

READ_BYTES = 64 * 1024
"""Most bytes of one read."""

IS_NEW = "is_new_connection"
"""Extension of a response: whether a connection was made for its request."""

_Origin = tuple[str, str, int | None]
_ERRORS: dict[type[Exception], type[httpx2.TransportError]] = {
    httpcore2.ConnectTimeout: httpx2.ConnectTimeout,
    httpcore2.ReadTimeout: httpx2.ReadTimeout,
    httpcore2.WriteTimeout: httpx2.WriteTimeout,
    httpcore2.ConnectError: httpx2.ConnectError,
    httpcore2.ReadError: httpx2.ReadError,
    httpcore2.WriteError: httpx2.WriteError,
    ssl.SSLError: httpx2.ReadError,
}
"""Error of the network -> error of a transport."""

_NETWORK_ERRORS = tuple(_ERRORS)


@define(eq=False)
class _Connection:
    """One connection: in use by one response, or kept for the next one."""

    stream: httpcore2.AsyncNetworkStream
    origin: _Origin
    kept_at_s: float = 0.0


class Http1Transport(httpx2.AsyncBaseTransport):
    """Connections to servers, each for one request at a time, without a limit of their number.

    A connection is kept `keep_s` seconds for another request. A request that a kept connection lost before any byte of
    an answer is sent again. Closing a response before its end closes its connection, also by cancellation. `aclose`
    closes every connection, also those that are being made: reads from them and their requests raise ReadError. Later
    requests connect anew. `network` makes the connections.
    """

    def __init__(
        self,
        keep_s: float,
        network: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        self._keep_s = keep_s
        self._network: Any = httpcore2.AnyIOBackend() if network is None else network
        self._kept: defaultdict[_Origin, deque[_Connection]] = defaultdict(deque)
        self._open: set[_Connection] = set()
        self._closings = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the response when its head is there. Raise the TransportErrors of httpx2."""
        data = _head(request) + await request.aread()
        origin = (request.url.scheme, request.url.host, request.url.port)
        try:
            while (kept := await self._take(origin)) is not None:
                response = _Response(self, kept, request)
                try:
                    return await response.begun(data, is_new=False)
                except (httpcore2.NetworkError, httpx2.RemoteProtocolError):
                    if response.has_begun or response.was_cut_here:
                        raise
            response = _Response(self, await self._connect(request, origin), request)
            return await response.begun(data, is_new=True)
        except _NETWORK_ERRORS as error:
            raise _translated(error) from error

    async def aclose(self) -> None:
        self._closings += 1
        for kept in self._kept.values():
            kept.clear()
        while self._open:
            await self.close(next(iter(self._open)))

    def release(self, connection: _Connection) -> None:
        """Keep a connection whose response is complete."""
        if connection in self._open:
            connection.kept_at_s = anyio.current_time()
            self._kept[connection.origin].append(connection)

    async def close(self, connection: _Connection) -> None:
        """Close a connection; a cancellation waits for that."""
        self._open.discard(connection)
        with anyio.CancelScope(shield=True):
            await connection.stream.aclose()

    def has(self, connection: _Connection) -> bool:
        """Return whether the connection is open here."""
        return connection in self._open

    async def _take(self, origin: _Origin) -> _Connection | None:
        """Return the connection that was used last, if there is one that its server has not closed."""
        kept = self._kept[origin]
        while kept and kept[0].kept_at_s + self._keep_s < anyio.current_time():
            await self.close(kept.popleft())
        while kept:
            connection = kept.pop()
            # There is nothing to read but the end.
            if not connection.stream.get_extra_info("is_readable"):
                return connection
            await self.close(connection)
        return None

    async def _connect(self, request: httpx2.Request, origin: _Origin) -> _Connection:
        closings = self._closings
        scheme, host, port = origin
        is_secure, timeout_s = scheme == "https", _timeout_s(request, "connect")
        stream = await self._network.connect_tcp(host, port or (443 if is_secure else 80), timeout=timeout_s)
        connection = _Connection(stream, origin)
        self._open.add(connection)
        if is_secure:
            try:
                connection.stream = await stream.start_tls(system_tls(), host, timeout_s)
            except BaseException:
                await self.close(connection)
                raise
        if self._closings != closings:
            await self.close(connection)
            raise httpx2.ReadError("the connections were closed meanwhile")
        return connection


class _Response(httpx2.AsyncByteStream):
    """The response to one request, and the body of it: an iterator of its own, for one reader."""

    def __init__(self, transport: Http1Transport, connection: _Connection, request: httpx2.Request) -> None:
        self._transport, self._connection = transport, connection
        self._parser = ResponseParser(request.method)
        self._write_s, self._read_s = _timeout_s(request, "write"), _timeout_s(request, "read")
        self._first = b""
        self._is_over = False
        self.was_cut_here = False
        """Whether the transport was closed meanwhile."""

    @property
    def has_begun(self) -> bool:
        """Whether any byte has come."""
        return self._parser.has_begun

    async def begun(self, data: bytes, *, is_new: bool) -> httpx2.Response:
        """Send the request and return the response when its head is there."""
        parser = self._parser
        try:
            await self._connection.stream.write(data, self._write_s)
        except httpcore2.WriteError:
            pass  # the server may have answered, and closed the connection, before it read all of the request
        except BaseException:
            await self._cut()
            raise
        while not parser.has_head:
            self._first = await self._read()
        return httpx2.Response(parser.status, headers=parser.headers, stream=self, extensions={IS_NEW: is_new})

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        """Return the next part of the body. Raise ReadError, ReadTimeout, and RemoteProtocolError as ResponseParser."""
        if first := self._first:
            self._first = b""
            return first
        while not self._is_over:
            try:
                part = await self._read()
            except _NETWORK_ERRORS as error:
                raise _translated(error) from error
            if part:
                return part
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._is_over:
            await self._cut()

    async def _read(self) -> bytes:
        """Return what one read has of the body. The connection is kept, or closed, as soon as that is known."""
        parser = self._parser
        try:
            if parser.failure is not None:
                raise parser.failure
            data = await self._connection.stream.read(READ_BYTES, self._read_s)
            part = parser.feed(data) if data else parser.end()
        except BaseException:
            await self._cut()
            raise
        if parser.keeps_connection:
            self._is_over = True
            self._transport.release(self._connection)
        elif parser.is_complete:
            await self._cut()
        return part

    async def _cut(self) -> None:
        self._is_over = True
        self.was_cut_here = not self._transport.has(self._connection)
        await self._transport.close(self._connection)


@cache
def system_tls() -> ssl.SSLContext:
    """Return a context with the system's certificates. Reading them takes 26 ms: once for all transports."""
    return ssl.create_default_context()


def _timeout_s(request: httpx2.Request, kind: str) -> float | None:
    timeouts: dict[str, Any] = request.extensions.get("timeout", {})
    return timeouts.get(kind)


def _translated(error: Exception) -> httpx2.TransportError:
    return next(kind for known, kind in _ERRORS.items() if isinstance(error, known))(str(error))


def _head(request: httpx2.Request) -> bytes:
    """Return the request's head. Raise LocalProtocolError for a header that would be more than one."""
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%b: %b" % header for header in request.headers.raw]
    head = b"\r\n".join([*lines, b"\r\n"])
    ends = len(lines) + 1
    if head.count(b"\r") != ends or head.count(b"\n") != ends or b"\0" in head:
        raise httpx2.LocalProtocolError("a header with the end of a line in it")
    return head
