"""Ways in which a reader ends a stream, for tests that draw them at random."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio

from pipeline import ResponseStream


async def later(act: Any, delay_s: float) -> None:
    """Call a function after so many seconds."""
    await anyio.sleep(delay_s)
    act()


async def read(stream: ResponseStream[Any], ending: str, after: int) -> None:
    """Read a stream and end it in this way, where that is the reader's to do, after so many items."""
    if ending == "drop":
        with suppress(StopAsyncIteration):
            for _ in range(after):
                with anyio.move_on_after(1):
                    await stream.__anext__()
        return
    async with stream:
        if ending == "unread":
            return
        with anyio.move_on_after(30):  # and then it is closed
            seen = 0
            async for _ in stream:
                seen += 1
                if seen >= after and ending in ("close", "again"):
                    return
