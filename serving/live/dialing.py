"""Making connections to an address, and keeping those that may be used again."""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import ByteStream

from pipeline.errors import CannotConnect, ConnectionTimeout

from .address import Address
from .connection import Connection

Dial = Callable[[], Awaitable[ByteStream]]

IDLE_S = 4.0
"""How long a connection is kept for another request: less than servers do, which is 5 s for the most common."""


def dialing(address: Address, timeout_s: float = 10.0) -> Dial:
    """What makes a connection there, with TLS for https; it sends every byte at once.

    It raises CannotConnect with what the system says, ConnectionTimeout after `timeout_s`.
    """
    context = ssl.create_default_context() if address.is_secure else None

    async def dial() -> ByteStream:
        try:
            with anyio.fail_after(timeout_s):
                if context is None:
                    return await anyio.connect_tcp(address.host, address.port)
                return await anyio.connect_tcp(
                    address.host, address.port, ssl_context=context, tls_standard_compatible=False
                )
        except TimeoutError as error:
            raise ConnectionTimeout(f"{address} took no connection within {timeout_s:g} s") from error
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise CannotConnect(f"no connection to {address}: {_reason(error)}") from error

    return dial


class Connections:
    """As many connections as are asked for at once; those that fell free serve again, the last one first."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._free: list[Connection] = []
        self._is_closed = False
        self.in_use = 0

    async def take(self, *, fresh: bool = False) -> Connection:
        """One for a single request; a `fresh` one is new. `give_back` takes it again. Raises as `dialing` says."""
        while self._free and not fresh:
            connection = self._free.pop()
            if connection.idle_since_s > anyio.current_time() - IDLE_S:
                self.in_use += 1
                return connection
            await connection.aclose()
        connection = Connection(await self._dial())
        self.in_use += 1
        return connection

    async def give_back(self, connection: Connection) -> None:
        """Keeps it, or closes it where it is of no more use."""
        self.in_use -= 1
        if connection.may_go_on and not self._is_closed:
            connection.idle_since_s = anyio.current_time()
            self._free.append(connection)
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        """Closes those that are free; those in use are closed when they are given back."""
        self._is_closed = True
        free, self._free = self._free, []
        for connection in free:
            await connection.aclose()


def _reason(error: BaseException) -> str:
    """What the system said first, which anyio puts into a group below an error of its own."""
    inner: BaseException | None = error
    while inner is not None:
        error = inner
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    if not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    # Those of names have numbers of their own, below zero; a loop words the others differently.
    is_system = error.errno is not None and error.errno > 0
    return os.strerror(error.errno or 0) if is_system else error.strerror or str(error)
