"""Outgoing: the connections that this process makes, one to each other process.

instance ──► Destination: addresses and process ──► Peer ──► connection
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pipeline import CannotConnect, InvalidArgument

from ..names import Instance
from ..requests import Connectivity, KeptConnection
from .connection import Connection
from .links import Address, Network
from .machine import machine_id
from .peer import Ahead, Destination, Kept, Peer
from .shared import Shared

_log = logging.getLogger(__name__)


class Outgoing:
    """Connections by where they go to."""

    def __init__(self, shared: Shared, network: Network) -> None:
        self._shared, self._network = shared, network
        self._peers: dict[Destination, Peer] = {}
        self._ahead = Ahead()
        self._sweep_at = 16
        self._machine = machine_id()
        self._is_closed = False

    def peer(self, instance: Instance) -> Peer:
        """Return the process that serves the instance. Raise CannotConnect if the instance has no address."""
        destination = self._destination(instance)
        if self._is_closed:
            raise CannotConnect("the request plane of this process is closed")
        if (peer := self._peers.get(destination)) is None:
            if len(self._peers) >= self._sweep_at:
                self._peers = {key: known for key, known in self._peers.items() if not known.is_unused}
                self._sweep_at = max(16, 2 * len(self._peers))
            peer = self._peers[destination] = Peer(self._shared, self._network, self._ahead, destination)
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

    def _destination(self, instance: Instance) -> Destination:
        """Return where the instance is reached, the best address first."""
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
        return Destination(tuple(found), transport.get("process", ""))


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
