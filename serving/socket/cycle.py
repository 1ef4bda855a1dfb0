"""Cycle: one request as the app sees it, and its answer on the way out."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any, Protocol

from ..http import INTERNAL, ON_GONE
from .answer_head import CLOSE, Headers, answer_head, answer_of
from .connections import Application, Message
from .head import Head
from .waiters import Waiters

_log = logging.getLogger("uvicorn.error")

BODY_BUFFER_BYTES = 64 * 1024
"""Bytes of a body that wait for the app above which no more are read."""

_CHUNKED, _UNTIL_CLOSE = -1, -2
"""Instead of the bytes left of an answer: it is chunked; it ends with the connection."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_NO_BODY = (204, 304)
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Line(Protocol):
    """What a cycle needs of its connection.

    `write_paused` is set while enough waits to be written; `writable` is woken when that changes, or the connection is
    lost. `may_continue` is whether another request may follow this one.
    """

    transport: Any
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
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
    """A request and its answer. `receive` and `send` are those of ASGI 2.3: a client that left gets nothing more.

    `left` is set once the client has nothing more to send, `gone` once nothing reaches it either.
    """

    __slots__ = (
        "_body",
        "_changed",
        "_delivered",
        "_head",
        "_keep_alive",
        "_left_bytes",
        "_line",
        "_more_body",
        "_on_gone",
        "awaits_continue",
        "gone",
        "is_complete",
        "is_started",
        "left",
        "scope",
    )

    def __init__(self, head: Head, line: Line) -> None:
        self._head = head.method == "HEAD"
        self._line = line
        self._keep_alive = head.keep_alive
        self._body = b""
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
            "server": line.server,
            "client": line.client,
            "scheme": line.scheme,
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
        return self._line.transport

    # -- called by the connection

    @property
    def is_full(self) -> bool:
        """Whether so much of the body waits for the app that no more should be read."""
        return len(self._body) > BODY_BUFFER_BYTES

    def feed(self, body: bytes, *, is_last: bool) -> None:
        """Add a part of the body."""
        self._body = self._body + body if self._body else body
        self._more_body = not is_last
        self._changed.wake()

    def leave(self, *, is_gone: bool) -> None:
        """The client has ended its side, or is gone altogether: the app is told when it receives next."""
        self.left = True
        self.gone = self.gone or is_gone
        self._body = b""
        self._changed.wake()
        if (callback := self._on_gone) is not None:
            self._on_gone = None
            callback()

    async def run(self, app: Application) -> None:
        """Run the app; what it raises is logged, and answered where nothing has been yet."""
        try:
            await app(self.scope, self.receive, self.send)
        except CancelledError:
            self._line.broken()
            raise
        except BaseException as error:
            _log.error("Exception in ASGI application\n", exc_info=error)
        else:
            if not self.is_complete and not self.left:
                what = "completing" if self.is_started else "starting"
                _log.error("ASGI callable returned without %s response.", what)
        finally:
            self.scope.pop(ON_GONE, None)  # it refers back to this cycle, which would then live until a collection
        if not self.is_complete:
            self._end_early()

    def _end_early(self) -> None:
        """An app that ended without an answer: the client gets one, or sees that it is incomplete."""
        if not self.is_started and not self.left:
            self._line.write(answer_of(INTERNAL, self._line.default_lines))
        self.is_started = self.is_complete = True
        self._line.broken()

    # -- called by the app

    def on_gone(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call back once the client has left, at once if it has by now; return what takes the callback back.

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
            self._line.write(_CONTINUE)
        while not (self.left or self.is_complete):
            if self._body or not (self._more_body or self._delivered):
                body, self._body = self._body, b""
                self._delivered = not self._more_body
                more = self._more_body
                self._line.body_taken()
                return {"type": "http.request", "body": body, "more_body": more}
            await self._changed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Write a part of the answer; wait before that while the client reads too slowly."""
        line = self._line
        while line.write_paused and not self.gone:
            await line.writable.wait()
        if self.gone:
            return
        kind = message["type"]
        if self.is_started:
            if self.is_complete:
                raise RuntimeError(f"Unexpected ASGI message '{kind}' sent, after response already completed.")
            if kind != "http.response.body":
                raise RuntimeError(f"Expected ASGI message 'http.response.body', but got '{kind}'.")
            body = message.get("body", b"")
            if message.get("more_body"):
                if self._left_bytes == _CHUNKED:  # the tokens of a stream come this way
                    if body:
                        line.write(b"%x\r\n%b\r\n" % (len(body), body))
                else:
                    self._write(body)
            else:
                self._finish(body)
        elif kind == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"Expected ASGI message 'http.response.start', but got '{kind}'.")

    def _start(self, status: int, headers: Headers) -> None:
        line, own, says_close = self._line, list(headers), False
        names = [name.lower() for name, _ in own]
        if b"content-length" in names:
            self._left_bytes = int(own[names.index(b"content-length")][1])
        if b"connection" in names:
            says_close = b"close" in own[names.index(b"connection")][1].lower()
        self._keep_alive = self._keep_alive and not says_close and line.may_continue
        if self._head or status in _NO_BODY:
            self._left_bytes = 0
        elif self._left_bytes == _CHUNKED and b"transfer-encoding" not in names:
            own.append((b"transfer-encoding", b"chunked"))
        if not self._keep_alive and not says_close:
            own.append(CLOSE)
        head = answer_head(status, line.default_lines, own)
        self.is_started, self.awaits_continue = True, False
        line.write(head)

    def _write(self, body: bytes) -> None:
        """Write a part of a body that has a length, or ends with the connection."""
        if self._left_bytes >= 0 and not self._head:
            self._left_bytes -= len(body)
            if self._left_bytes < 0:
                raise RuntimeError("Response content longer than Content-Length")
        if body and not self._head:
            self._line.write(body)

    def _finish(self, body: bytes) -> None:
        if self._left_bytes == _CHUNKED:
            last = b"%x\r\n%b\r\n%b" % (len(body), body, _LAST_CHUNK) if body else _LAST_CHUNK
            self._line.write(last)
        else:
            self._write(body)
            if self._left_bytes > 0:
                raise RuntimeError("Response content shorter than Content-Length")
        self.is_complete = True
        self._changed.wake()
        self._line.answered(keep_alive=self._keep_alive)
