"""TLS on a connection that has received its first bytes."""

from __future__ import annotations

import asyncio
from typing import Any

_TURNS_UNTIL_READY = 2
"""Turns of the loop until `start_tls` has set the new protocol, and that has its transport."""


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
