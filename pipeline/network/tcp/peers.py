"""Outgoing: the connections that this process makes, one to each other process."""

from __future__ import annotations

import anyio

from pipeline import CannotConnect, InvalidArgument
from pipeline.loop import clock
from pipeline.rx import Disposable, DisposableBase

from ..names import Instance
from .calls import CallerConnection
from .connection import Connection
from .links import Address, Network
from .machine import machine_id
from .shared import Shared

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 0.5
"""Seconds after a failed attempt in which calls fail without another; doubled at each."""


class Outgoing:
    """Connections by the addresses they go to."""

    def __init__(self, shared: Shared, network: Network) -> None:
        self._shared, self._network = shared, network
        self._peers: dict[tuple[Address, ...], Peer] = {}
        self._machine = machine_id()
        self._is_closed = False

    def peer(self, instance: Instance) -> Peer:
        """Return the process that serves the instance. Raise CannotConnect if the instance has no address."""
        addresses = self._addresses(instance)
        if self._is_closed:
            raise CannotConnect("the request plane of this process is closed")
        if (peer := self._peers.get(addresses)) is None:
            self._peers = {key: known for key, known in self._peers.items() if not known.is_unused}
            peer = self._peers[addresses] = Peer(self._shared, self._network, addresses)
        return peer

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


class _Attempt:
    """An attempt to connect, which any number of calls wait for."""

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.connection: CallerConnection | None = None
        self.error: Exception | None = None
        self.task: DisposableBase = Disposable()


class Peer:
    """Another process."""

    def __init__(self, shared: Shared, network: Network, addresses: tuple[Address, ...]) -> None:
        self._shared, self._network = shared, network
        self._addresses = addresses
        self._clock = clock()
        self._current: CallerConnection | None = None
        self.existing: set[Connection] = set()
        """Connections that are not closed, in use or not."""
        self._attempt: _Attempt | None = None
        self._failure: Exception | None = None
        self._backoff_s = 0.0
        self._again_s = 0.0

    def __str__(self) -> str:
        return " or ".join(map(str, self._addresses))

    @property
    def connection(self) -> CallerConnection | None:
        """The connection, if there is one for new calls."""
        current = self._current
        return current if current is not None and current.is_usable else None

    @property
    def is_unused(self) -> bool:
        """Whether nothing is known that a new record would not know."""
        return not self.existing and self._attempt is None and self._clock() >= self._again_s

    async def connect(self) -> CallerConnection:
        """Return the connection, made if there is none. Raise CannotConnect if that fails, or has just failed."""
        if (connection := self.connection) is not None:
            return connection
        if (attempt := self._attempt) is None:
            if self._clock() < self._again_s:
                raise self._refusal(self._failure)
            attempt = self._attempt = _Attempt()
            attempt.task = self._shared.scheduler.spawn(lambda scope: self._run(attempt, scope))
        await attempt.ended.wait()
        if attempt.connection is None:
            raise self._refusal(attempt.error)
        return attempt.connection

    def close(self) -> None:
        """End an attempt under way."""
        if self._attempt is not None:
            self._attempt.task.dispose()

    def _refusal(self, failure: Exception | None) -> CannotConnect:
        return CannotConnect(f"cannot connect to {self}: {failure}", cause=failure)

    async def _run(self, attempt: _Attempt, scope: anyio.CancelScope) -> None:
        attempt.error = CannotConnect("the request plane of this process was closed")
        try:
            with scope:
                await self._try(attempt)
        finally:
            self._attempt = None
            self._record(attempt)
            attempt.ended.set()

    async def _try(self, attempt: _Attempt) -> None:
        """Try the addresses in turn. If the first one, a path, is no longer there, the process may still be."""
        for address in self._addresses:
            connection = CallerConnection(self._shared, self._on_end)
            try:
                with anyio.fail_after(self._shared.options.connect_timeout_s):
                    await self._network.dial(address, connection)
            except OSError as error:  # a TimeoutError is one
                attempt.error = error if str(error) else CannotConnect("it took too long", cause=error)
                connection.abort()
                continue
            if not connection.is_closed:
                self.existing.add(connection)
            try:
                await connection.settled()
            except BaseException:  # the plane was closed: nobody else may know of this connection yet
                connection.abort()
                raise
            if connection.is_open:
                attempt.connection = connection
                return
            attempt.error = connection.reason

    def _record(self, attempt: _Attempt) -> None:
        if attempt.connection is not None:
            self._current, self._backoff_s, self._again_s = attempt.connection, 0.0, 0.0
            return
        self._failure = attempt.error
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S) or _BACKOFF_FIRST_S
        self._again_s = self._clock() + self._backoff_s

    def _on_end(self, connection: Connection) -> None:
        self.existing.discard(connection)
        if self._current is connection:
            self._current = None
