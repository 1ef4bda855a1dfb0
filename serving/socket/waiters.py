"""Waiters: tasks that wait for the next change of a state, at no cost while there are none."""

from __future__ import annotations

import asyncio


class Waiters:
    """An event that is never set: `wake` wakes the tasks that wait at that moment."""

    __slots__ = ("_futures",)

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] | None = None

    async def wait(self) -> None:
        """Return after the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._futures is None:
            self._futures = []
        futures = self._futures
        futures.append(future)
        try:
            await future
        finally:
            if future in futures:
                futures.remove(future)

    def wake(self) -> None:
        """Wake the waiting tasks; a task that is cancelled meanwhile is skipped."""
        futures, self._futures = self._futures, None
        for future in futures or ():
            if not future.done():
                future.set_result(None)
