"""Outgoing: the connections that this process makes, one to each other process.

    call ──► connect ──────────────► Peer ──► attempt ──► connection      made for the call
    keep ──► Kept ──► Ahead, in turn ─┘                                   made ahead of calls, again after a loss

A process that refuses is tried again after 0.05 s, then ever later, up to 5 s; at once after the loss of a connection
that had lasted. One whose connections end as soon as they are made has the same pauses. They are 0.5 s at most where it
is announced anew, or a request has no other worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from pipeline import CannotConnect, InvalidArgument
from pipeline.loop import clock
from pipeline.rx import Disposable, DisposableBase

from ..names import Instance
from ..requests import Connectivity, KeptConnection
from .caller import CallerConnection
from .connection import Connection
from .links import Address, Network
from .machine import machine_id
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


class Outgoing:
    """Connections by the addresses they go to."""

    def __init__(self, shared: Shared, network: Network) -> None:
        self._shared, self._network = shared, network
        self._peers: dict[tuple[Address, ...], Peer] = {}
        self._ahead = Ahead()
        self._sweep_at = 16
        self._machine = machine_id()
        self._is_closed = False

    def peer(self, instance: Instance) -> Peer:
        """Return the process that serves the instance. Raise CannotConnect if the instance has no address."""
        addresses = self._addresses(instance)
        if self._is_closed:
            raise CannotConnect("the request plane of this process is closed")
        if (peer := self._peers.get(addresses)) is None:
            if len(self._peers) >= self._sweep_at:
                self._peers = {key: known for key, known in self._peers.items() if not known.is_unused}
                self._sweep_at = max(16, 2 * len(self._peers))
            peer = self._peers[addresses] = Peer(self._shared, self._network, self._ahead, addresses)
        return peer

    def keep(self, instance: Instance, on_change: Callable[[], object]) -> KeptConnection:
        """Keep a connection to the process that serves the instance, as `RequestPlane.keep_connected`."""
        if self._is_closed:
            return _Unreachable()
        try:
            return Kept(self.peer(instance), on_change)
        except CannotConnect as error:
            _log.warning("%s, and gets no requests", error.message)
            return _Unreachable()

    def connections(self) -> list[Connection]:
        """Return the connections that exist."""
        return [connection for peer in self._peers.values() for connection in peer.existing]

    def close(self) -> list[Connection]:
        """Make no more connections. Return those that exist."""
        self._is_closed = True
        connections = self.connections()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()
        return connections

    def _addresses(self, instance: Instance) -> tuple[Address, ...]:
        """Return where the instance is reached, the best first."""
        transport = instance.transport
        found: list[Address] = []
        if (path := transport.get("unix")) and transport.get("host") == self._machine:
            found.append(Address(path=path))
        if tcp := transport.get("tcp"):
            try:
                found.append(Address.parse(tcp))
            except InvalidArgument as error:
                raise CannotConnect(f"{instance} has a wrong address: {error.message}", cause=error) from None
        if not found:
            raise CannotConnect(f"{instance} has no address of a TCP request plane")
        return tuple(found)


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


class _Unreachable(KeptConnection):
    """Of an instance without an address, and of all once the plane is closed."""

    @property
    def state(self) -> Connectivity:
        return "unreachable"

    @property
    def losses(self) -> int:
        return 0

    def close(self) -> None:
        pass


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

    def __init__(self, shared: Shared, network: Network, ahead: Ahead, addresses: tuple[Address, ...]) -> None:
        self._shared, self._network, self._ahead = shared, network, ahead
        self._addresses = addresses
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
        return " or ".join(map(str, self._addresses))

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
        for address in self._addresses:
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
            if connection.is_open:
                attempt.connection = connection
                return
            attempt.error = connection.reason

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
