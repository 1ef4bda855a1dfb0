"""Peer: another process that this one connects to.

    call ──► connect ──────────────► Peer ──► attempt ──► connection      made for the call
    keep ──► Kept ──► Ahead, in turn ─┘                                   made ahead of calls, again after a loss

A process that refuses is tried again after 0.05 s, then ever later, up to 5 s; at once after the loss of a connection
that had lasted. One whose connections end as soon as they are made has the same pauses. They are 0.5 s at most where it
is announced anew, or a request has no other worker. Where another process is at its addresses it counts as one that
refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
from attrs import frozen

from pipeline import CannotConnect
from pipeline.loop import clock
from pipeline.rx import Disposable, DisposableBase

from ..requests import Connectivity, KeptConnection
from .caller import CallerConnection
from .connection import Connection
from .links import Address, Network
from .shared import Shared

_log = logging.getLogger(__name__)

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 5.0
"""Seconds from a failed attempt to the next one that no call makes; doubled at each."""
_REFUSES_S = 0.5
"""For so long at most calls fail after a failed attempt without another, and nothing else makes one sooner."""
_PATIENCE_S = 0.5
"""Seconds for a process to answer before others are preferred to it. The attempt goes on."""
_LASTED_S = 5.0
"""Seconds after which a connection counts as one that has lasted."""
_AHEAD_MAX = 32
"""Attempts at a time that no call has made. A thousand at once would hold up the first requests of a front end."""


@frozen
class Destination:
    """A process, and where it is reached."""

    addresses: tuple[Address, ...]
    """The best first."""
    process: str = ""
    """Its name, as in its `Hello`; empty if it was not announced with one, and any process there will do."""

    def __str__(self) -> str:
        return " or ".join(map(str, self.addresses))


class Kept(KeptConnection):
    """One instance's share in the connection to its process."""

    def __init__(self, peer: Peer, on_change: Callable[[], object]) -> None:
        self._peer = peer
        self.on_change = on_change
        peer.keep(self)

    @property
    def state(self) -> Connectivity:
        return self._peer.state

    @property
    def losses(self) -> int:
        return self._peer.losses

    def retry(self) -> None:
        self._peer.retry()

    def close(self) -> None:
        self._peer.release(self)


class Ahead:
    """The attempts that no call has made: some at a time, the others wait in turn."""

    def __init__(self) -> None:
        self._waiting: dict[Peer, None] = {}
        self._trying: set[Peer] = set()

    def want(self, peer: Peer) -> None:
        """Have an attempt of this process as soon as it is its turn, if it wants one then."""
        self._waiting[peer] = None
        self._start()

    def leave(self, peer: Peer) -> None:
        """The process wants no attempt, or has had its time: it is another one's turn."""
        self._waiting.pop(peer, None)
        self._trying.discard(peer)
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._trying) < _AHEAD_MAX:
            peer = next(iter(self._waiting))
            del self._waiting[peer]
            if peer.wants_attempt:
                self._trying.add(peer)
                peer.start()


class _Attempt:
    """An attempt to connect, which any number of calls wait for."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.connection: CallerConnection | None = None
        self.error: Exception | None = None
        self.task: DisposableBase = Disposable()
        self.waiting = 0


class Peer:
    """Another process."""

    def __init__(self, shared: Shared, network: Network, ahead: Ahead, destination: Destination) -> None:
        self._shared, self._network, self._ahead = shared, network, ahead
        self._destination = destination
        self._clock = clock()
        self._current: CallerConnection | None = None
        self._opened_s = 0.0
        self.existing: set[Connection] = set()
        """Connections that are not closed, in use or not."""
        self.losses = 0
        """Connections that were lost after they had been open."""
        self._attempt: _Attempt | None = None
        self._failure: Exception | None = None
        self._is_unreachable = False
        self._backoff_s = 0.0
        self._again_s = self._retry_s = 0.0
        self._kept: dict[Kept, None] = {}
        self._next: DisposableBase = Disposable()
        self._patience: DisposableBase = Disposable()
        self._is_closed = False

    def __str__(self) -> str:
        return str(self._destination)

    @property
    def connection(self) -> CallerConnection | None:
        """The connection, if there is one for new calls."""
        current = self._current
        return current if current is not None and current.is_usable else None

    @property
    def state(self) -> Connectivity:
        """Whether there is a connection; without one whether the last attempt failed, or takes too long."""
        if self._current is not None:
            return "connected"
        return "unreachable" if self._is_unreachable else "connecting"

    @property
    def is_unused(self) -> bool:
        """Whether nothing is known that a new record would not know."""
        return not (self.existing or self._kept) and self._attempt is None and self._clock() >= self._again_s

    # -- for calls

    async def connect(self) -> CallerConnection:
        """Return the connection, made if there is none. Raise CannotConnect if that fails, or has just failed."""
        if (connection := self.connection) is not None:
            return connection
        if (attempt := self._attempt) is None:
            if self._clock() < self._again_s:
                raise self._refusal(self._failure)
            attempt = self.start()
        attempt.waiting += 1
        try:
            await attempt.ended.wait()
        finally:
            attempt.waiting -= 1
        if attempt.connection is None:
            raise self._refusal(attempt.error)
        return attempt.connection

    def close(self) -> None:
        """Make no more attempts, and end one under way."""
        self._is_closed = True
        self._kept.clear()
        self._rest()
        if self._attempt is not None:
            self._attempt.task.dispose()

    def _refusal(self, failure: Exception | None) -> CannotConnect:
        return CannotConnect(f"cannot connect to {self}: {failure}", cause=failure)

    # -- ahead of calls

    def keep(self, kept: Kept) -> None:
        """Have a connection until `release`. One more to keep it is news of the process: it is tried again soon."""
        self._kept[kept] = None
        if self._attempt is None:
            self.retry()
        elif len(self._kept) == 1 and self._current is None:
            self._wait_patiently()

    def retry(self) -> None:
        """Have the next attempt now, or half a second after the last one at most."""
        if self.wants_attempt:
            self._plan(self._retry_s - self._clock())

    def release(self, kept: Kept) -> None:
        """Make no more attempts once nothing else wants a connection, and end one that no call waits for."""
        self._kept.pop(kept, None)
        if self._kept:
            return
        self._rest()
        if (attempt := self._attempt) is not None and not attempt.waiting:
            self._attempt = None
            attempt.task.dispose()

    @property
    def wants_attempt(self) -> bool:
        """Whether a connection is wanted, and there is none and none under way."""
        return bool(self._kept) and self._current is None and self._attempt is None

    def _plan(self, delay_s: float) -> None:
        """Have an attempt after this time, unless a call makes one before."""
        self._next.dispose()
        if not self._kept:
            return
        if delay_s <= 0:
            self._ahead.want(self)
        else:
            self._next = self._shared.scheduler.schedule_relative(delay_s, lambda *_: self._ahead.want(self))

    def _rest(self) -> None:
        """Wait for nothing: no attempt is wanted."""
        self._next.dispose()
        self._patience.dispose()
        self._ahead.leave(self)

    def _wait_patiently(self) -> None:
        """Leave the process out if it has not answered after a while."""
        if self._kept:
            self._patience = self._shared.scheduler.schedule_relative(_PATIENCE_S, self._lose_patience)

    def _lose_patience(self, *_: object) -> None:
        self._changed(is_unreachable=True, why=f"no answer in {_PATIENCE_S:g} s")
        self._ahead.leave(self)

    def _changed(self, *, is_unreachable: bool, why: object = "") -> None:
        """There is another state; an outage is logged once, and its end."""
        if is_unreachable != self._is_unreachable and self._kept:
            if is_unreachable:
                _log.warning("%s cannot be reached, and gets no requests until it can: %s", self, why)
            elif self._current is not None:
                _log.warning("%s can be reached again", self)
        self._is_unreachable = is_unreachable
        for kept in list(self._kept):
            kept.on_change()

    # -- attempts

    def start(self) -> _Attempt:
        """Begin an attempt."""
        attempt = self._attempt = _Attempt()
        attempt.task = self._shared.scheduler.spawn(lambda scope: self._run(attempt, scope))
        self._wait_patiently()
        return attempt

    async def _run(self, attempt: _Attempt, scope: anyio.CancelScope) -> None:
        attempt.error = CannotConnect("the request plane of this process was closed")
        has_ended = False
        try:
            with scope:
                if not scope.cancel_called:  # before it could begin
                    await self._try(attempt)
                    has_ended = True
        finally:
            is_wanted = self._attempt is attempt
            if is_wanted:
                self._attempt = None
            if is_wanted and has_ended and not self._is_closed:
                self._record(attempt)
            elif attempt.connection is not None:
                attempt.connection.abort()
            attempt.ended.set()

    async def _try(self, attempt: _Attempt) -> None:
        """Try the addresses in turn. If the first one, a path, is no longer there, the process may still be."""
        for address in self._destination.addresses:
            connection = CallerConnection(self._shared, self.existing.discard, self._on_lost)
            try:
                with anyio.fail_after(self._shared.options.connect_timeout_s):
                    await self._network.dial(address, connection)
                if not connection.is_closed:
                    self.existing.add(connection)
                await connection.settled()
            except OSError as error:  # a TimeoutError is one
                attempt.error = error if str(error) else CannotConnect("it took too long", cause=error)
                connection.abort()
                continue
            except BaseException:  # the plane was closed: nobody else may know of this connection yet
                connection.abort()
                raise
            if not connection.is_open:
                attempt.error = connection.reason
            elif not self._is_wanted(connection):
                attempt.error = CannotConnect("another process is there now")
                connection.abort()
            else:
                attempt.connection = connection
                return

    def _is_wanted(self, connection: CallerConnection) -> bool:
        """Return whether the process at the other end is the one that was announced, as far as both are named."""
        assert connection.other is not None, "the connection is open"
        wanted, found = self._destination.process, connection.other.process
        return not wanted or not found or wanted == found

    def _record(self, attempt: _Attempt) -> None:
        self._patience.dispose()
        self._ahead.leave(self)
        if attempt.connection is not None:
            self._current, self._opened_s, self._again_s = attempt.connection, self._clock(), 0.0
            self._changed(is_unreachable=False)
            return
        self._failure = attempt.error
        self._lengthen_backoff()
        self._again_s = self._retry_s = self._clock() + min(self._backoff_s, _REFUSES_S)
        self._changed(is_unreachable=True, why=attempt.error)
        self._plan(self._backoff_s)

    def _lengthen_backoff(self) -> None:
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S) or _BACKOFF_FIRST_S

    def _on_lost(self, connection: CallerConnection) -> None:
        """The connection is lost if it has been the current one, which is open."""
        if self._current is not connection:
            return
        self._current = None
        self.losses += 1
        if self._clock() - self._opened_s >= _LASTED_S:
            self._backoff_s = 0.0
            self._plan(0.0)
        else:
            self._lengthen_backoff()
            self._retry_s = self._clock() + min(self._backoff_s, _REFUSES_S)
            self._plan(self._backoff_s)
        self._changed(is_unreachable=False)
