"""Connection: one client's requests over one transport, one after the other, within limits and time-outs.

    bytes ──► held ──► head ──► body ──► Cycle ──► app
                                            │
    transport ◄──────── answer ◄────────────┘

A request is parsed when the answer before it is complete. Until then what came is held as it is; with more than a
little of it, or while the app has enough of a body, nothing is read. So one connection holds at most a head, or the
part of a body that waits, and what one read of the transport brings.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from enum import Enum
from ssl import SSLContext
from typing import Any

from pipeline.errors import ExceededLimit

from ..http import Problem, Refusal
from .answer_head import answer_of, header_lines
from .chunked import ChunkedBody
from .connections import NEVER, Application, Connections
from .cycle import Cycle
from .head import END, TLS_HANDSHAKE, check_start, malformed, parse_head
from .tls import start_tls
from .unsent import unsent_bytes
from .waiters import Waiters

HELD_BYTES = 16 * 1024
"""Bytes of later requests that are held without pausing: a client that leaves is noticed only while it is read."""

CHUNKED_BYTES_PER_TURN = 64 * 1024
"""Bytes of a chunked body decoded in one turn of the loop, some 5 ms when every chunk holds a byte."""

LINGER_S = 5.0
"""How long what a refused client still sends is read and dropped, so that it gets to read its answer."""


class _State(Enum):
    HANDSHAKE = "TLS begins"
    IDLE = "no byte of the next request has come"
    HEAD = "the head is incomplete, or its first byte is waited for on a new connection"
    BODY = "the body is incomplete"
    ANSWERING = "the request is complete and its answer is not"
    LINGERING = "everything is written, and what comes is dropped"
    CLOSING = "the transport closes once all is written"


_HANDSHAKE, _IDLE, _HEAD, _BODY = _State.HANDSHAKE, _State.IDLE, _State.HEAD, _State.BODY
_ANSWERING, _LINGERING, _CLOSING = _State.ANSWERING, _State.LINGERING, _State.CLOSING


class Hosted:
    """What the connections of one server share: the app, its tasks, and the headers of every answer."""

    def __init__(
        self,
        application: Application,
        connections: Connections,
        *,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        self.application = application
        self.connections = connections
        self.tasks = tasks
        self.forget_task = tasks.discard
        self.context = copy_context()
        """Where tasks are forgotten. With the method bound once this saves each task a context and a method."""
        self.is_draining = False
        self.default_lines = b""

    def set_defaults(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Set the headers of every answer."""
        self.default_lines = header_lines(headers)


class Connection(asyncio.Protocol):
    """The protocol of one connection; with `tls` it begins with a handshake."""

    __slots__ = (
        "_at",
        "_body_bytes",
        "_chunked",
        "_cycle",
        "_flushed_bytes",
        "_half_closed",
        "_held",
        "_hosted",
        "_is_paused",
        "_left_bytes",
        "_requests",
        "_searched",
        "_shared",
        "_stalled_since_s",
        "_state",
        "_tls",
        "_window_bytes",
        "_written_bytes",
        "client",
        "deadline_s",
        "scheme",
        "server",
        "transport",
        "writable",
        "write_paused",
    )

    def __init__(self, hosted: Hosted, tls: SSLContext | None = None) -> None:
        self._hosted = hosted
        self._shared = hosted.connections
        self._tls = tls
        self.deadline_s = NEVER
        self.transport: Any = None
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int | None] | None = None
        self.scheme = "http"
        self.write_paused = False
        self.writable = Waiters()
        self._state = _HEAD if tls is None else _HANDSHAKE
        self._held = b""
        self._at = self._searched = 0
        self._cycle: Cycle | None = None
        self._chunked: ChunkedBody | None = None
        self._left_bytes = 0
        self._requests = 0
        self._is_paused = self._half_closed = False
        self._body_bytes = self._window_bytes = 0
        self._written_bytes = self._flushed_bytes = 0
        self._stalled_since_s = NEVER

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.client = _address(transport.get_extra_info("peername"))
        self.server = _address(transport.get_extra_info("sockname"))
        problem = self._shared.add(self, self.client and self.client[0])
        self.deadline_s = self._shared.now_s + (self._shared.head_s if self._tls is None else self._shared.handshake_s)
        if problem is not None:
            self._refuse(problem, can_answer=not self._shared.is_flooded(self))

    def data_received(self, data: bytes) -> None:
        if self._state is _LINGERING or self._state is _CLOSING:
            return
        if self._held:
            self._searched = max(self._searched - self._at, 0)
            data = self._held[self._at :] + data
            self._at = 0
        self._held = data
        if self._state is not _HANDSHAKE:
            self._consume()
        elif not self._is_paused:
            self._start_tls(data)

    def _start_tls(self, first: bytes) -> None:
        """Change to TLS. Connections are counted before: a handshake costs more than a small request."""
        if first[0] != TLS_HANDSHAKE:
            self._state = _HEAD
            self._refuse(malformed("this port speaks TLS").problem)
            return
        self._pause()
        self._held = b""
        self._spawn(self._shake_hands(first))

    async def _shake_hands(self, first: bytes) -> None:
        plain, secured = self.transport, None
        try:
            secured = await start_tls(plain, self, self._tls, first)
        except OSError:  # what came is no TLS, or the client left, or was cut
            pass
        finally:
            if secured is None or self._state is not _HANDSHAKE:
                plain.abort()
                self.connection_lost(None)  # the transport has another protocol now
        if secured is not None and self._state is _HANDSHAKE:
            self.transport, self.scheme, self._state, self._is_paused = secured, "https", _HEAD, False
            self.deadline_s = self._shared.now_s + self._shared.head_s
            self._consume()

    def eof_received(self) -> bool:
        """A client that ends its side has left, as far as a running request can tell.

        What is answered at once still reaches a client that only has no more requests; TLS has no such half.
        """
        if self._state is not _ANSWERING or self._cycle is None or self.scheme == "https":
            return False
        self._half_closed = True
        self._cycle.leave(is_gone=False)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.remove(self)
        self._state = _CLOSING
        self._drop_request()
        self.writable.wake()

    def pause_writing(self) -> None:
        self.write_paused = True

    def resume_writing(self) -> None:
        self.write_paused = False
        self.writable.wake()

    # -- called by the server

    def shutdown(self) -> None:
        """End the connection, with its answer if there is one under way."""
        if self._state in (_HANDSHAKE, _LINGERING):
            self.abort()
        elif self._cycle is None:
            self._close()

    def abort(self) -> None:
        """Cut the connection, whatever waits to be written."""
        self._state, self.deadline_s = _CLOSING, NEVER
        self.transport.abort()

    def overdue(self, now_s: float) -> None:
        """Called by the sweep once the deadline has passed."""
        state, limits = self._state, self._shared.limits
        if state is _HEAD:
            self._refuse(_too_slow("head", now_s - self.deadline_s + self._shared.head_s, limits.head_timeout_s))
        elif state is _BODY:
            self._check_body_rate(now_s)
        elif state is _HANDSHAKE or state is _LINGERING:
            self.abort()
        elif self.transport.get_write_buffer_size():
            self._check_stall(now_s)
        else:
            self._stalled_since_s = NEVER
            if state is _ANSWERING:
                self.deadline_s = now_s + self._shared.write_check_s
            elif state is _IDLE:
                self._close()
            else:
                self.abort()

    # -- reading

    def _consume(self) -> None:
        """Go on with what is held, as far as the answers and the app allow."""
        while self._at < len(self._held):
            state = self._state
            if state is _IDLE or state is _HEAD:
                go_on = self._take_head()
            elif state is _BODY:
                go_on = self._take_body()
            else:
                go_on = False
                if len(self._held) - self._at > HELD_BYTES:
                    self._pause()
            if not go_on:
                return
        self._held, self._at = b"", 0

    def _take_head(self) -> bool:
        """Begin a request if its head is complete; whether there may be more to take."""
        held, at = self._held, self._at
        while held.startswith(b"\r\n", at):  # RFC 9112, 2.2: empty lines before a request are ignored
            at += 2
        self._at = at
        end = held.find(END, max(at, self._searched))
        try:
            if end < 0:
                return self._keep_head(held[at:])
            self._searched, self._at = 0, end + len(END)
            raw = held if at == 0 and self._at == len(held) else held[at : self._at]
            self._begin(raw)
        except Refusal as refusal:
            self._refuse(refusal.problem)
            return False
        return True

    def _keep_head(self, start: bytes) -> bool:
        if self._state is _IDLE:
            self._state, self.deadline_s = _HEAD, self._shared.now_s + self._shared.head_s
        self._held, self._at, self._searched = start, 0, max(len(start) - len(END) + 1, 0)
        if len(start) > 1:
            check_start(start, self._shared.limits)
        return False

    def _begin(self, raw: bytes) -> None:
        """Give the app the request with this head. Raise Refusal if it is not valid."""
        shared = self._shared
        head = parse_head(raw, shared.limits)
        self._requests += 1
        if head.length_bytes == 0:
            self._state, self.deadline_s = _ANSWERING, shared.now_s + shared.write_check_s
        else:
            self._state, self.deadline_s = _BODY, shared.now_s + shared.body_s
            self._window_bytes = 0
            if head.length_bytes is None:
                self._chunked = ChunkedBody(shared.limits.max_header_bytes)
            else:
                self._left_bytes = head.length_bytes
        self._cycle = Cycle(head, self)
        self._spawn(self._cycle.run(self._hosted.application))

    def _spawn(self, coroutine: Any) -> None:
        tasks = self._hosted.tasks
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(self._hosted.forget_task, context=self._hosted.context)

    def _take_body(self) -> bool:
        """Give the app what is held of its body; whether there may be more to take."""
        cycle = self._cycle
        assert cycle is not None
        if cycle.is_full:
            self._pause()
            return False
        try:
            body, is_last = self._next_of_body()
        except Refusal as refusal:
            self._refuse(refusal.problem)
            return False
        self._body_bytes += len(body)
        self._window_bytes += len(body)
        if (problem := self._shared.take_body(len(body))) is not None:
            self._refuse(problem)
            return False
        if is_last:
            self._chunked = None
            self._state, self.deadline_s = _ANSWERING, self._shared.now_s + self._shared.write_check_s
        if body or is_last:
            cycle.feed(body, is_last=is_last)
        if cycle.is_full and not is_last:
            self._pause()
        elif self._chunked is not None and self._at < len(self._held):
            self._pause()
            asyncio.get_running_loop().call_soon(self._resume)
            return False
        return True

    def _next_of_body(self) -> tuple[bytes, bool]:
        """Take the next part of the body out of what is held; whether it is the last one. Raise Refusal."""
        held, at = self._held, self._at
        if self._chunked is not None:
            end = min(len(held), at + CHUNKED_BYTES_PER_TURN)
            body, self._at = self._chunked.decode(held, at, end)
            return body, self._chunked.is_complete
        self._at = min(len(held), at + self._left_bytes)
        body = held if at == 0 and self._at == len(held) else held[at : self._at]
        self._left_bytes -= len(body)
        return body, not self._left_bytes

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        """Read on, first in what is held."""
        if not self._is_paused:
            return
        self._is_paused = False
        self._window_bytes = 0
        if self._state is _BODY:
            self.deadline_s = self._shared.now_s + self._shared.body_s
        self._consume()
        if not self._is_paused:
            self.transport.resume_reading()

    def _check_body_rate(self, now_s: float) -> None:
        """Refuse a body of which too little came since the last look, unless it was the app that took none."""
        shared, limits = self._shared, self._shared.limits
        waits = self._is_paused or (self._cycle is not None and self._cycle.awaits_continue)
        if waits or self._window_bytes >= shared.body_window_bytes > 0:
            self._window_bytes = 0
            self.deadline_s = now_s + shared.body_s
        else:
            self._refuse(_too_slow("body", now_s - self.deadline_s + shared.body_s, limits.body_timeout_s))

    # -- called by the request under way

    @property
    def may_continue(self) -> bool:
        """Whether another request may follow this one, once its answer has begun."""
        if self._state is not _ANSWERING or self._half_closed or self._hosted.is_draining:
            return False
        most = self._shared.limits.max_requests_per_connection
        return not most or self._requests < most

    @property
    def default_lines(self) -> bytes:
        return self._hosted.default_lines

    def write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.transport.write(data)

    def body_taken(self) -> None:
        """The app has taken what waited of the body. Its bytes count until the answer is complete: the app has them."""
        if self._is_paused:
            self._resume()

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete; the next request may come, or has already."""
        if not keep_alive or self._state is not _ANSWERING or self._half_closed or self._hosted.is_draining:
            self._close()
            return
        self._cycle = None
        self._give_back_body()
        self._state, self.deadline_s = _IDLE, self._shared.now_s + self._shared.keep_alive_s
        if self._held:
            self._consume()
        if self._is_paused and len(self._held) - self._at <= HELD_BYTES:
            self._resume()

    def broken(self) -> None:
        """The app ended without a complete answer."""
        self._close()

    # -- ending

    def _refuse(self, problem: Problem, *, can_answer: bool = True) -> None:
        """Answer with the problem where an answer is still possible, and end the connection."""
        self._report(problem)
        cycle = self._cycle
        if not can_answer or self._state is _HANDSHAKE or (cycle is not None and cycle.is_started):
            self.abort()
        elif problem.status == 408 and not self._requests and not self._held:
            self._close()  # browsers open connections ahead, and take no answer where they asked nothing
        else:
            self.write(answer_of(problem, self._hosted.default_lines))
            self._linger()

    def _report(self, problem: Problem) -> None:
        self._shared.refused(problem, self.client[0] if self.client else "")

    def _close(self) -> None:
        """Close once all is written. What the client still sends is dropped: closing on it could lose the answer."""
        if self._state is _BODY:
            self._linger()
        elif self._state not in (_LINGERING, _CLOSING):
            self._state, self.deadline_s = _CLOSING, self._shared.now_s + self._shared.write_check_s
            self._drop_request()
            self.transport.close()

    def _linger(self) -> None:
        self._drop_request()
        self._state, self.deadline_s = _LINGERING, self._shared.now_s + LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def _drop_request(self) -> None:
        """Let go of everything that belongs to a request; the app sees that the client is gone."""
        self._held, self._at, self._chunked = b"", 0, None
        self._give_back_body()
        if (cycle := self._cycle) is not None:
            self._cycle = None
            cycle.leave(is_gone=True)

    def _give_back_body(self) -> None:
        self._shared.give_back_body(self._body_bytes)
        self._body_bytes = 0

    def _check_stall(self, now_s: float) -> None:
        """Cut a client that has taken nothing of what waits for it for too long."""
        limit_s = self._shared.limits.write_timeout_s
        flushed_bytes = self._written_bytes - unsent_bytes(self.transport)
        if flushed_bytes > self._flushed_bytes or self._stalled_since_s == NEVER:
            self._flushed_bytes, self._stalled_since_s = flushed_bytes, now_s
        elif now_s - self._stalled_since_s >= limit_s > 0:
            exceeded = ExceededLimit("write_timeout_s", round(now_s - self._stalled_since_s, 1), limit_s)
            problem = Refusal(408, "The client takes nothing of its answer", exceeded=exceeded).problem
            self._report(problem)
            self.abort()
            return
        self.deadline_s = now_s + self._shared.write_check_s


def _address(address: Any) -> tuple[str, int] | None:
    """The host and the port of an address, None for that of a Unix socket."""
    return (address[0], address[1]) if isinstance(address, tuple) else None


def _too_slow(part: str, value_s: float, limit_s: float) -> Problem:
    exceeded = ExceededLimit(f"{part}_timeout_s", round(value_s, 1), limit_s)
    return Refusal(408, f"The {part} of the request came too slowly", exceeded=exceeded).problem
