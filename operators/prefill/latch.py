"""Latch: set once, waited for by a few; costs next to nothing where nobody waits."""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint


class Latch:
    """Closed until it is set. `set` may be called in a plain callback of the loop."""

    __slots__ = ("_event", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._event: anyio.Event | None = None

    def set(self) -> None:
        """Opens it, for good."""
        self.is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Returns when it is set."""
        if self.is_set:
            await checkpoint()
            return
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
