"""Links: what carries the bytes of one connection, and the network that makes them.

    Connection  ──► link.ready()              there is output
    Connection  ◄── handler.output()  ◄── link, on the loop's next turn, once the socket takes more
    Connection  ◄── handler.received(data), handler.lost(error)

A link takes output when it can send it, so what a slow receiver has not taken stays with its connection, which counts
it. All calls are made in one loop and thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from attrs import frozen

from pipeline import InvalidArgument

HIGH_WATER_BYTES = 256 * 1024
"""Bytes handed to a socket and not yet sent, above which no more output is taken."""
ACCEPT_PAUSE_S = 0.1
"""Seconds after a connection that could not be accepted."""


@frozen
class Address:
    """Where a process listens: a host with a port, or the path of a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `host:port`; an IPv6 address stands in brackets. Raise InvalidArgument for any other text."""
        host, _, port = text.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 2**16:
            raise InvalidArgument(f"expected host:port, found {text!r}")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Link(ABC):
    """One open connection, without any notion of messages."""

    peer: str = ""
    """The other side, for messages."""

    @abstractmethod
    def ready(self) -> None:
        """There is output: call `handler.output` on the loop's next turn, once more can be sent. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Send the output there is now, then end the connection. `lost` follows."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection at once. `lost` follows, on a later turn."""


class LinkHandler(ABC):
    """What uses a link. Its methods do not wait and raise nothing."""

    @abstractmethod
    def opened(self, link: Link) -> None:
        """The link is there. Called once, before all others."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Take bytes of the other side, cut anywhere."""

    @abstractmethod
    def output(self) -> bytes:
        """Return all there is to be sent; nothing if there is none."""

    @abstractmethod
    def lost(self, error: Exception | None) -> None:
        """The link has ended, by either side. Called once, after all others."""


class Listener(ABC):
    """A place where connections are accepted, until it is closed."""

    address: Address
    """With the port that was found."""

    @abstractmethod
    async def close(self) -> None:
        """Accept no more. Accepted links stay."""


class Network(ABC):
    """Makes links."""

    @abstractmethod
    async def dial(self, address: Address, handler: LinkHandler) -> None:
        """Connect the handler. Raise OSError (an SSLError included) if that fails; then `opened` was not called."""

    @abstractmethod
    async def listen(self, address: Address, accept: Callable[[], LinkHandler]) -> Listener:
        """Call `accept` for each connection and hand it to the result. Raise OSError if the address is taken."""
