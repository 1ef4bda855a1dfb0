"""Connection: one client's requests over one transport, one after the other, within limits and time-outs.

    bytes ──► held ──► head ──► body ──► Cycle ──► app
                                            │
    transport ◄──────── answer ◄────────────┘

A request is parsed when the answer before it is complete; until then its bytes are held as they came. Beyond a few of
them, or while the app has enough of a body, nothing is read. So one connection holds at most a head, or the waiting
part of a body, and what one read of the transport brings. How a connection ends is in `closing`.
"""

from __future__ import annotations

import asyncio
from ssl import SSLContext
from typing import Any

from attrs import define, field

from ..problems import Refusal
from .closing import ClosingConnection, State, too_slow
from .connections import NEVER
from .cycle import Cycle
from .http1 import END, TLS_HANDSHAKE, ChunkedBody, check_start, malformed, parse_head

HELD_BYTES = 16 * 1024
"""Bytes of later requests that are held without pausing: only a connection that is read shows that its client left."""

CHUNKED_BYTES_PER_TURN = 64 * 1024
"""Bytes of a chunked body decoded in one turn of the loop, some 5 ms when every chunk holds a byte."""

_TURNS_UNTIL_READY = 2
"""Turns of the loop until `start_tls` has set the new protocol, and that has its transport."""

_HANDSHAKE, _IDLE, _HEAD, _BODY = State.HANDSHAKE, State.IDLE, State.HEAD, State.BODY
_ANSWERING, _LINGERING, _CLOSING = State.ANSWERING, State.LINGERING, State.CLOSING


@define(eq=False)
class Connection(ClosingConnection):
    """The protocol of one connection; with `tls` it begins with a handshake."""

    _tls: SSLContext | None = None
    _searched: int = field(init=False, default=0)
    _left_bytes: int = field(init=False, default=0)
    _window_bytes: int = field(init=False, default=0)
    _half_closed: bool = field(init=False, default=False)
    _idle_since_s: float = field(init=False, default=0.0)

    def __attrs_post_init__(self) -> None:
        self._state = _HEAD if self._tls is None else _HANDSHAKE

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.client = _address(transport.get_extra_info("peername"))
        self.server = _address(transport.get_extra_info("sockname"))
        problem = self._shared.add(self, self.client and self.client[0])
        self.deadline_s = self._shared.now_s + (self._shared.head_s if self._tls is None else self._shared.handshake_s)
        if self._host.is_handing_over:
            self._idle_since_s = asyncio.get_running_loop().time()
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

    def eof_received(self) -> bool:
        """A client that closes its side has left, as far as a running request can see.

        An answer that comes at once still reaches a client that only has no more requests; TLS has no such half.
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

    # -- reading

    def _consume(self) -> None:
        """Process the held bytes, as far as the answers and the app allow."""
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
        """Begin a request if its head is complete. Return whether more may be processed."""
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
        """Start the app for the request with this head. Raise Refusal if it is not valid."""
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
        self._spawn(self._cycle.run(self._host.application, self._host.arrivals))

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._host.tasks.add(task)
        task.add_done_callback(self._host.forget_task, context=self._host.context)

    def _take_body(self) -> bool:
        """Pass the held part of a body to the app. Return whether more may be processed."""
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
        """Remove the next part of the body from the held bytes; return it and whether it is the last. Raise Refusal."""
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
        """Read on, beginning with the held bytes."""
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
        """Refuse a body that brought too little since the last check, unless the app was the one to wait for."""
        shared, limits = self._shared, self._shared.limits
        waits = self._is_paused or (self._cycle is not None and self._cycle.awaits_continue)
        if waits or self._window_bytes >= shared.body_window_bytes > 0:
            self._window_bytes = 0
            self.deadline_s = now_s + shared.body_s
        else:
            self._refuse(too_slow("body", now_s - self.deadline_s + shared.body_s, limits.body_timeout_s))

    # -- TLS

    def _start_tls(self, first: bytes) -> None:
        """Change to TLS. The connection is counted before: a handshake costs more than a small request."""
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
        except OSError:  # the input is not TLS, or the client left or was cut
            pass
        finally:
            if secured is None or self._state is not _HANDSHAKE:
                plain.abort()
                self.connection_lost(None)  # the transport has another protocol now
        if secured is not None and self._state is _HANDSHAKE:
            self.transport, self.scheme, self._state, self._is_paused = secured, "https", _HEAD, False
            self.deadline_s = self._shared.now_s + self._shared.head_s
            self._consume()

    # -- called by the request under way

    @property
    def may_continue(self) -> bool:
        """Whether another request may follow this one, when its answer begins."""
        if self._state is not _ANSWERING or self._half_closed or self._host.is_draining:
            return False
        most = self._shared.limits.max_requests_per_connection
        return not most or self._requests < most

    @property
    def default_lines(self) -> bytes:
        """Headers of every answer."""
        return self._host.default_lines

    def body_taken(self) -> None:
        """Called when the app has taken the waiting part of the body.

        Its bytes are counted until the answer is complete: the app holds them.
        """
        if self._is_paused:
            self._resume()

    def answered(self, *, keep_alive: bool) -> None:
        """Called when the answer is complete: go on with the next request, which may be held already, or close."""
        host = self._host
        may_go_on = not host.is_draining or host.is_handing_over
        if not keep_alive or self._state is not _ANSWERING or self._half_closed or not may_go_on:
            self._close()
            return
        if host.is_handing_over:
            self._idle_since_s = asyncio.get_running_loop().time()
        self._cycle = None
        self._give_back_body()
        self._state, self.deadline_s = _IDLE, self._shared.now_s + self._shared.keep_alive_s
        if self._held:
            self._consume()
        if self._is_paused and len(self._held) - self._at <= HELD_BYTES:
            self._resume()

    def broken(self) -> None:
        """Called when the app ended without a complete answer."""
        self._close()

    # -- called by the server

    def shutdown(self) -> None:
        """End the connection, after the answer under way if there is one."""
        if self._state in (_HANDSHAKE, _LINGERING):
            self.abort()
        elif self._cycle is None:
            self._close()

    def end_if_idle(self, since_s: float) -> bool:
        """While handing over: end the connection if no request has come since then. Return whether one may still come.

        That is so until an answer has begun whose head closes the connection.
        """
        if self._cycle is not None:
            return not self._cycle.closes
        if self._state in (_LINGERING, _CLOSING):
            return False
        if self._idle_since_s > since_s:
            return True
        self.shutdown()
        return False

    def overdue(self, now_s: float) -> None:
        """Called by the sweep once the deadline has passed."""
        state, limits = self._state, self._shared.limits
        if state is _HEAD:
            self._refuse(too_slow("head", now_s - self.deadline_s + self._shared.head_s, limits.head_timeout_s))
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


def _address(address: Any) -> tuple[str, int] | None:
    """Return the host and the port of an address, None for a Unix socket."""
    return (address[0], address[1]) if isinstance(address, tuple) else None


async def start_tls(transport: Any, protocol: asyncio.BaseProtocol, context: Any, first: bytes) -> Any:
    """Return the transport of the server's side, once the handshake that begins with these bytes is complete.

    The transport must not be reading. Raise OSError if the handshake fails. `loop.start_tls` alone loses what came
    before it, and on a new connection of uvloop something may always have.
    """
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().start_tls(transport, protocol, context, server_side=True)
    )
    try:
        for _ in range(_TURNS_UNTIL_READY):
            await asyncio.sleep(0)
        handshake = transport.get_protocol()
        while first and not starting.done():
            part = handshake.get_buffer(len(first))
            size = min(len(part), len(first))
            part[:size] = first[:size]
            handshake.buffer_updated(size)
            first = first[size:]
        return await starting
    finally:
        starting.cancel()
