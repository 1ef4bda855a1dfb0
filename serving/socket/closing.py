"""ClosingConnection: the state of one connection, and every way it ends.

    refusal ──► answer ──► linger: drop what still comes ──► close
    last answer, idle too long, shutdown ──► close once all is written
    stalled client, failed handshake, flood ──► abort

What it reads, and what the event loop calls, is in `connection`. Both are one object: a connection is kept for as long
as its client, and may be one of ten thousand.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextvars import Context, copy_context
from enum import Enum
from typing import Any

from attrs import Factory, define, field

from pipeline.errors import ExceededLimit

from ..problems import Problem, Refusal
from .arrivals import Arrivals
from .connections import NEVER, Application, Connections
from .cycle import Cycle, Waiters
from .http1 import ChunkedBody, answer_of, header_lines

try:
    from fcntl import ioctl
    from termios import TIOCOUTQ  # the same number as SIOCOUTQ, see tcp(7)
except ImportError:  # missing on Windows
    ioctl, TIOCOUTQ = None, 0  # type: ignore[assignment, misc]

UNSENT_BYTES = 128 * 1024
"""Bytes that the system takes of an answer beyond what is on its way; by default it takes megabytes."""

LINGER_S = 5.0
"""How long the input of a refused client is read and dropped, so that it can read its answer."""


class State(Enum):
    """Where a connection is between its first byte and its end."""

    HANDSHAKE = "TLS begins"
    IDLE = "no byte of the next request has arrived"
    HEAD = "the head is incomplete; a new connection waits for its first byte here"
    BODY = "the body is incomplete"
    ANSWERING = "the request is complete and its answer is not"
    LINGERING = "everything is written, and all input is dropped"
    CLOSING = "the transport closes once all is written"


_BODY, _HANDSHAKE, _LINGERING, _CLOSING = State.BODY, State.HANDSHAKE, State.LINGERING, State.CLOSING


@define(eq=False)
class AppHost:
    """What the connections of one server share: the app, its tasks, and the headers of every answer."""

    application: Application
    connections: Connections
    tasks: set[asyncio.Task[None]] = field(kw_only=True)
    """Holds the task of each request while it runs."""
    forget_task: Callable[[asyncio.Task[None]], None] = field(
        init=False, default=Factory(lambda self: self.tasks.discard, takes_self=True)
    )
    arrivals: Arrivals = field(init=False, factory=Arrivals)
    context: Context = field(init=False, factory=copy_context)
    """The context of that callback. With the method bound once, it saves each task a context and a method."""
    is_draining: bool = field(init=False, default=False)
    """Whether every answer that begins closes its connection."""
    is_handing_over: bool = field(init=False, default=False)
    """Whether, while draining, a connection waits for the further request that the head of its answer allowed."""
    default_lines: bytes = field(init=False, default=b"")

    def set_defaults(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Set the headers of every answer."""
        self.default_lines = header_lines(headers)


@define(eq=False)
class ClosingConnection(asyncio.Protocol):
    """The state of a connection and its end."""

    _host: AppHost
    _shared: Connections = field(init=False, default=Factory(lambda self: self._host.connections, takes_self=True))
    _state: State = field(init=False, default=State.HEAD)
    _held: bytes = field(init=False, default=b"")
    _at: int = field(init=False, default=0)
    _cycle: Cycle | None = field(init=False, default=None)
    _chunked: ChunkedBody | None = field(init=False, default=None)
    _requests: int = field(init=False, default=0)
    _is_paused: bool = field(init=False, default=False)
    _body_bytes: int = field(init=False, default=0)
    _written_bytes: int = field(init=False, default=0)
    _flushed_bytes: int = field(init=False, default=0)
    _stalled_since_s: float = field(init=False, default=NEVER)
    deadline_s: float = field(init=False, default=NEVER)
    """When `overdue` is called, by the clock of the sweep."""
    transport: Any = field(init=False, default=None)
    client: tuple[str, int] | None = field(init=False, default=None)
    """Address of the peer; None on a Unix socket."""
    server: tuple[str, int] | None = field(init=False, default=None)
    scheme: str = field(init=False, default="http")
    write_paused: bool = field(init=False, default=False)
    """Whether the transport has enough to write for now."""
    writable: Waiters = field(init=False, factory=Waiters)
    """Woken when `write_paused` is cleared, or the connection is lost."""

    def write(self, data: bytes) -> None:
        """Write a part of an answer."""
        self._written_bytes += len(data)
        self.transport.write(data)

    def abort(self) -> None:
        """Cut the connection; what waits to be written is lost."""
        self._state, self.deadline_s = _CLOSING, NEVER
        self.transport.abort()

    def _refuse(self, problem: Problem, *, can_answer: bool = True) -> None:
        """Answer with the problem if an answer is still possible, and end the connection."""
        self._report(problem)
        cycle = self._cycle
        if not can_answer or self._state is _HANDSHAKE or (cycle is not None and cycle.is_started):
            self.abort()
        elif problem.status == 408 and not self._requests and not self._held:
            self._close()  # browsers open connections ahead, and expect no answer without a request
        else:
            self.write(answer_of(problem, self._host.default_lines))
            self._linger()

    def _report(self, problem: Problem) -> None:
        self._shared.refused(problem, self.client[0] if self.client else "")

    def _close(self) -> None:
        """Close once all is written. Input that still comes is dropped first: closing on it could lose the answer."""
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
        """Release everything that belongs to a request; the app sees that its client is gone."""
        self._held, self._at, self._chunked = b"", 0, None
        self._give_back_body()
        if (cycle := self._cycle) is not None:
            self._cycle = None
            cycle.leave(is_gone=True)

    def _give_back_body(self) -> None:
        self._shared.give_back_body(self._body_bytes)
        self._body_bytes = 0

    def _check_stall(self, now_s: float) -> None:
        """Cut a client that has taken nothing of its waiting answer for too long."""
        limit_s = self._shared.limits.write_timeout_s
        flushed_bytes = self._written_bytes - unsent_bytes(self.transport)
        if flushed_bytes > self._flushed_bytes or self._stalled_since_s == NEVER:
            self._flushed_bytes, self._stalled_since_s = flushed_bytes, now_s
        elif now_s - self._stalled_since_s >= limit_s > 0:
            exceeded = ExceededLimit("write_timeout_s", round(now_s - self._stalled_since_s, 1), limit_s)
            self._report(Refusal(408, "The client takes nothing of its answer", exceeded=exceeded).problem)
            self.abort()
            return
        self.deadline_s = now_s + self._shared.write_check_s


def too_slow(part: str, value_s: float, limit_s: float) -> Problem:
    """Return the problem of a request whose head or body took longer than its limit."""
    exceeded = ExceededLimit(f"{part}_timeout_s", round(value_s, 1), limit_s)
    return Refusal(408, f"The {part} of the request came too slowly", exceeded=exceeded).problem


# -- what the client has not taken


def limit_unsent(listener: socket.socket) -> None:
    """Let the connections of a TCP listener hold no more than `UNSENT_BYTES` in the system, where that can be set."""
    if (option := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


def unsent_bytes(transport: Any) -> int:
    """Return the bytes that wait for the client; the system's only where it shows them.

    A slow client takes bytes from the system long before the transport has room to write.
    """
    waiting_bytes: int = transport.get_write_buffer_size()
    if ioctl is None:
        return waiting_bytes
    try:
        queued = ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
    except OSError:
        return waiting_bytes
    return waiting_bytes + int(struct.unpack("i", queued)[0])
