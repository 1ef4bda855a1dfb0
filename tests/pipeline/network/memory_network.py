"""A network in memory, in virtual time: connections of it can be cut, become half-open, be delayed and be slow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import anyio

from pipeline.loop import call_soon, clock, running_loop
from pipeline.network.tcp import Address, Link, LinkHandler, Listener, Network
from pipeline.rx import AnyIOScheduler


class MemoryNetwork(Network):
    """Hosts that reach each other. Made in a loop; `scheduler` times what is under way, and must run as long."""

    def __init__(self, scheduler: AnyIOScheduler) -> None:
        self.scheduler = scheduler
        self.clock = clock()
        self._loop = running_loop()
        self.listeners: dict[Address, MemoryListener] = {}
        self._ports = count(1)
        self.delay_s = 0.0
        """How long bytes are under way, from now on."""
        self.bytes_per_s: float | None = None
        """How many bytes go through each direction of a connection, from now on."""
        self.chunk_bytes: int | None = None
        """How many bytes arrive at once, at most."""
        self.capacity_bytes = 64 * 1024
        """Bytes under way in a direction, above which no more output is taken."""
        self.is_reachable = True
        """Whether connections can be made; else an attempt waits for ever, as with a firewall between."""
        self.links: list[MemoryLink] = []
        """The ends of all connections, the caller's before the other's."""
        self.dialled = 0
        """How many attempts to connect there were."""

    async def dial(self, address: Address, handler: LinkHandler) -> None:
        self.dialled += 1
        await anyio.sleep(self.delay_s)
        if not self.is_reachable:
            await anyio.sleep_forever()
        if (listener := self.listeners.get(address)) is None:
            raise ConnectionRefusedError(f"nothing listens on {address}")
        near, far = MemoryLink(self, handler, str(address)), MemoryLink(self, listener.accept(), "a caller")
        near.other, far.other = far, near
        self.links += [near, far]
        far.handler.opened(far)
        near.handler.opened(near)

    async def listen(self, address: Address, accept: Callable[[], LinkHandler]) -> Listener:
        found = address if address.path else Address(address.host, address.port or next(self._ports))
        if found in self.listeners:
            raise OSError(f"{found} is taken")
        listener = self.listeners[found] = MemoryListener(self.listeners, found, accept)
        return listener

    def cut(self) -> None:
        """End the connections that are open now; both sides see it."""
        for link in list(self.links):
            link.end(ConnectionResetError("the network was cut"))

    def freeze(self) -> None:
        """Let neither bytes nor their end through any more, on the connections that are open now."""
        for link in self.links:
            link.is_frozen = True

    def soon(self, action: Callable[[], None]) -> None:
        """Run the action on the loop's next turn."""
        call_soon(self._loop, action)


class MemoryLink(Link):
    """One end of a connection."""

    other: MemoryLink

    def __init__(self, network: MemoryNetwork, handler: LinkHandler, peer: str) -> None:
        self._network = network
        self.handler = handler
        self.peer = peer
        self.is_frozen = False
        self.under_way_bytes = 0
        """Taken from this end's connection, and not yet arrived."""
        self._free_s = 0.0  # when what was sent last has left
        self._arrival_s = 0.0  # when what was sent last arrives
        self._is_due = self._is_closing = self._has_ended = False

    def ready(self) -> None:
        network = self._network
        if not (self._is_due or self._is_closing) and self.under_way_bytes <= network.capacity_bytes:
            self._is_due = True
            network.soon(self._pull)

    def close(self) -> None:
        if not self._is_closing:
            self._carry(self.handler.output())
            self._is_closing = True
            self._end_once_arrived()

    def abort(self) -> None:
        self._is_closing = True
        self._network.soon(lambda: self.end(None))
        if not self.is_frozen:
            self._network.soon(lambda: self.other.end(ConnectionResetError("reset by the other side")))

    def end(self, error: Exception | None) -> None:
        """The connection is gone for this end."""
        self._is_closing = True
        if not self._has_ended:
            self._has_ended = True
            self._network.links.remove(self)
            self.handler.lost(error)

    def _pull(self) -> None:
        self._is_due = False
        if not self._is_closing:
            self._carry(self.handler.output())

    def _carry(self, data: bytes) -> None:
        size = self._network.chunk_bytes or (4096 if self._network.bytes_per_s else len(data))
        for at in range(0, len(data), size or 1):
            self._send(data[at : at + size])

    def _send(self, data: bytes) -> None:
        network = self._network
        self.under_way_bytes += len(data)
        self._free_s = max(self._free_s, network.clock())
        if network.bytes_per_s is not None:
            self._free_s += len(data) / network.bytes_per_s
        self._at_arrival(network.delay_s, lambda: self._arrived(data))

    def _at_arrival(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run the action when what is sent now arrives, behind all that was sent before."""
        self._arrival_s = max(self._arrival_s, self._free_s + delay_s)
        scheduler = self._network.scheduler
        scheduler.schedule_absolute(self._arrival_s, lambda *_: action())

    def _arrived(self, data: bytes) -> None:
        if self.is_frozen:  # the bytes stay where they are
            return
        self.under_way_bytes -= len(data)
        if not self.other._has_ended:
            self.other.handler.received(data)
        self.ready()

    def _end_once_arrived(self) -> None:
        def both() -> None:
            if not self.is_frozen:
                self.other.end(None)
                self.end(None)

        self._at_arrival(self._network.delay_s, both)


class MemoryListener(Listener):
    """A place where connections are accepted."""

    def __init__(
        self, listeners: dict[Address, MemoryListener], address: Address, accept: Callable[[], LinkHandler]
    ) -> None:
        self._listeners, self.address, self.accept = listeners, address, accept

    async def close(self) -> None:
        if self._listeners.get(self.address) is self:
            del self._listeners[self.address]
