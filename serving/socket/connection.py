"""Connection: one client's requests over one transport, one after the other, within limits and time-outs.

    bytes ──► held ──► head ──► body ──► Cycle ──► app          reading
                                            │
    transport ◄──────── answer ◄────────────┘                   closing

This file has what the event loop, the server and the sweep call, and TLS.
"""

from __future__ import annotations

import asyncio
from ssl import SSLContext
from typing import Any

from attrs import define

from .closing import State, too_slow
from .connections import NEVER
from .http1 import TLS_HANDSHAKE, malformed
from .receiving import ReceivingConnection

_TURNS_UNTIL_READY = 2
"""Turns of the loop until `start_tls` has set the new protocol, and that has its transport."""

_HANDSHAKE, _IDLE, _HEAD, _BODY = State.HANDSHAKE, State.IDLE, State.HEAD, State.BODY
_ANSWERING, _LINGERING, _CLOSING = State.ANSWERING, State.LINGERING, State.CLOSING


@define(eq=False)
class Connection(ReceivingConnection):
    """The protocol of one connection; with `tls` it begins with a handshake."""

    _tls: SSLContext | None = None

    def __attrs_post_init__(self) -> None:
        self._state = _HEAD if self._tls is None else _HANDSHAKE

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

    # -- called by the server

    def shutdown(self) -> None:
        """End the connection, after the answer under way if there is one."""
        if self._state in (_HANDSHAKE, _LINGERING):
            self.abort()
        elif self._cycle is None:
            self._close()

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
