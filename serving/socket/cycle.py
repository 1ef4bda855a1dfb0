"""Cycle: one request as the app sees it, and its answer on the way out; Waiters: tasks that wait for its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ..http import ON_GONE
from ..problems import INTERNAL
from .arrivals import Arrivals
from .connections import Application, Message
from .http1 import CLOSE, Head, Headers, answer_head, answer_of

_log = logging.getLogger("uvicorn.error")

BODY_BUFFER_BYTES = 64 * 1024
"""Bytes of a body that wait for the app, above which no more are read."""

_CHUNKED, _UNTIL_CLOSE = -1, -2
"""Instead of the bytes left of an answer: it is chunked, or it ends with the connection."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = (204, 304)
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Channel(Protocol):
    """A cycle's connection.

    `write_paused` is set while enough waits to be written; `writable` is woken when that changes, or the connection is
    lost. `may_continue`: whether another request may follow this one.
    """

    transport: Any
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    scheme: str
    write_paused: bool
    writable: Waiters

    @property
    def may_continue(self) -> bool: ...

    @property
    def default_lines(self) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    def body_taken(self) -> None: ...

    def answered(self, *, keep_alive: bool) -> None: ...

    def broken(self) -> None: ...


class Cycle:
    """A request and its answer. `receive` and `send` follow ASGI 2.3: a client that left gets nothing more.

    `left` is set once the client has nothing more to send, `gone` once nothing can reach it either.
    """

    __slots__ = (
        "_body",
        "_changed",
        "_channel",
        "_delivered",
        "_head",
        "_keep_alive",
        "_left_bytes",
        "_length_bytes",
        "_more_body",
        "_on_gone",
        "_unsent_head",
        "awaits_continue",
        "gone",
        "is_complete",
        "is_started",
        "left",
        "scope",
    )

    def __init__(self, head: Head, channel: Channel) -> None:
        self._head = head.method == "HEAD"
        self._channel = channel
        self._keep_alive = head.keep_alive
        self._body = self._unsent_head = b""
        self._length_bytes = head.length_bytes or 0
        self._more_body = head.length_bytes != 0
        self._delivered = False
        self._changed = Waiters()
        self._on_gone: Callable[[], object] | None = None
        self._left_bytes = _CHUNKED if head.version == "1.1" else _UNTIL_CLOSE
        self.awaits_continue = head.expects_continue
        self.is_started = self.is_complete = self.left = self.gone = False
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": head.version,
            "server": channel.server,
            "client": channel.client,
            "scheme": channel.scheme,
            "method": head.method,
            "root_path": "",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            ON_GONE: self.on_gone,
        }

    @property
    def transport(self) -> Any:
        return self._channel.transport

    # -- called by the connection

    @property
    def is_full(self) -> bool:
        """Whether enough of the body waits for the app, so that reading should pause."""
        return len(self._body) > BODY_BUFFER_BYTES

    @property
    def closes(self) -> bool:
        """Whether an answer has begun that is the last one of its connection."""
        return self.is_started and not self._keep_alive

    def feed(self, body: bytes, *, is_last: bool) -> None:
        """Add a part of the body."""
        self._body = self._body + body if self._body else body
        self._more_body = not is_last
        self._changed.wake()

    def leave(self, *, is_gone: bool) -> None:
        """Called when the client has closed its side, or is gone: the app gets `http.disconnect` next."""
        self.left = True
        self.gone = self.gone or is_gone
        self._body = b""
        self._changed.wake()
        if (callback := self._on_gone) is not None:
            self._on_gone = None
            callback()

    async def run(self, app: Application, arrivals: Arrivals) -> None:
        """Run the app once the request may begin. Its error is logged, and answered if no answer has begun."""
        try:
            if (turn := arrivals.enter(self._length_bytes)) is not None:
                await turn
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._channel.broken()
            raise
        except BaseException as error:
            _log.error("Exception in ASGI application\n", exc_info=error)
        else:
            if not self.is_complete and not self.left:
                what = "completing" if self.is_started else "starting"
                _log.error("ASGI callable returned without %s response.", what)
        finally:
            self.scope.pop(ON_GONE, None)  # it refers to this cycle, which would live until a garbage collection
        if not self.is_complete:
            self._end_early()

    def _end_early(self) -> None:
        """End the request of an app that sent no complete answer: the client gets status 500, or a cut connection."""
        if not self.is_started and not self.left:
            self._channel.write(answer_of(INTERNAL, self._channel.default_lines))
        self.is_started = self.is_complete = True
        self._channel.broken()

    # -- called by the app

    def on_gone(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call `callback` once the client has left, at once if it has by now. Return a function that removes it.

        There is one callback at a time.
        """
        if self.left:
            callback()
        else:
            self._on_gone = callback
        return self._forget_callback

    def _forget_callback(self) -> None:
        self._on_gone = None

    async def receive(self) -> Message:
        """Return the next part of the body, or `http.disconnect` once the answer is complete or the client left."""
        if self.awaits_continue and not self.is_started:
            self.awaits_continue = False
            self._channel.write(_CONTINUE)
        while not (self.left or self.is_complete):
            if self._body or not (self._more_body or self._delivered):
                body, self._body = self._body, b""
                self._delivered = not self._more_body
                more = self._more_body
                self._channel.body_taken()
                return {"type": "http.request", "body": body, "more_body": more}
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Write a part of the answer; wait before that while the client reads too slowly."""
        channel = self._channel
        while channel.write_paused and not self.gone:
            await channel.writable.wait()
        if self.gone:
            return
        kind = message["type"]
        if self.is_started:
            if self.is_complete:
                raise RuntimeError(f"Unexpected ASGI message '{kind}' sent, after response already completed.")
            if kind != "http.response.body":
                raise RuntimeError(f"Expected ASGI message 'http.response.body', but got '{kind}'.")
            self._add(message.get("body", b""), is_last=not message.get("more_body"))
        elif kind == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"Expected ASGI message 'http.response.start', but got '{kind}'.")

    def write_part(self, body: bytes, *, start: tuple[int, Headers] | None = None, is_last: bool = False) -> bool:
        """Write a part of a chunked answer as `send` does, at once; the tokens of a stream come this way.

        `start`, the status and the headers, begins an answer of any form with this part. Return False, with nothing
        written, where `send` would wait, drop the part, or do anything else than that.
        """
        channel = self._channel
        if (
            self._left_bytes != _CHUNKED
            or self.is_started == (start is not None)
            or self.is_complete
            or self.gone
            or channel.write_paused
        ):
            return False
        if start is not None:
            self._start(*start)
        if is_last or self._unsent_head:
            self._add(body, is_last=is_last)
        elif body:
            channel.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _start(self, status: int, headers: Headers) -> None:
        channel, own, closes = self._channel, list(headers), False
        names = [name.lower() for name, _ in own]
        if b"content-length" in names:
            self._left_bytes = int(own[names.index(b"content-length")][1])
        if b"connection" in names:
            closes = b"close" in own[names.index(b"connection")][1].lower()
        self._keep_alive = self._keep_alive and not closes and channel.may_continue
        if self._head or status in _NO_BODY:
            self._left_bytes = 0
        elif self._left_bytes == _CHUNKED and b"transfer-encoding" not in names:
            own.append((b"transfer-encoding", b"chunked"))
        if not self._keep_alive and not closes:
            own.append(CLOSE)
        head = answer_head(status, channel.default_lines, own)
        self.is_started, self.awaits_continue, self._unsent_head = True, False, head

    def _add(self, body: bytes, *, is_last: bool) -> None:
        """Write a part of the body."""
        if is_last:
            self._finish(body)
        elif self._left_bytes == _CHUNKED:
            self._put(b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
        else:
            self._write(body)

    def _put(self, data: bytes) -> None:
        """Write a part of the answer; its first part, also an empty one, leaves with the head."""
        head, self._unsent_head = self._unsent_head, b""
        if head or data:
            self._channel.write(head + data if head else data)

    def _write(self, body: bytes) -> None:
        """Write a part of a body that has a length, or ends with the connection."""
        if self._left_bytes >= 0 and not self._head:
            self._left_bytes -= len(body)
            if self._left_bytes < 0:
                raise RuntimeError("Response content longer than Content-Length")
        self._put(b"" if self._head else body)

    def _finish(self, body: bytes) -> None:
        if self._left_bytes == _CHUNKED:
            last = b"%x\r\n%b\r\n%b" % (len(body), body, _LAST_CHUNK) if body else _LAST_CHUNK
            self._put(last)
        else:
            self._write(body)
            if self._left_bytes > 0:
                raise RuntimeError("Response content shorter than Content-Length")
        self.is_complete = True
        self._changed.wake()
        self._channel.answered(keep_alive=self._keep_alive)


class Waiters:
    """An event that is never set: `wake` wakes the tasks that wait at that moment."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] | None = None

    async def wait(self) -> None:
        """Return after the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._futures is None:
            self._futures = []
        futures = self._futures
        futures.append(future)
        try:
            await future
        finally:
            if future in futures:
                futures.remove(future)

    def wake(self) -> None:
        """Wake the waiting tasks; a task that is cancelled meanwhile is skipped."""
        futures, self._futures = self._futures, None
        for future in futures or ():
            if not future.done():
                future.set_result(None)
