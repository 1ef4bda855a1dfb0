"""Outbox: what this process has to send on its events' subjects, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock

import anyio
from attrs import frozen

from pipeline.loop import LoopHandle

BUFFER_EVENTS, BUFFER_BYTES = 2**16, 32 * 1024 * 1024
"""Events that wait to be sent; further ones are dropped."""


@frozen
class Frame:
    """An event as it is sent."""

    subject: str
    data: bytes


class Outbox:
    """See the module: events, and subjects whose subscription has to be made or ended."""

    def __init__(self) -> None:
        self.dropped = 0
        self._lock = RLock()
        self._waiting: deque[Frame | str] = deque()
        self._events = self._size_bytes = 0
        self._handle: LoopHandle | None = None
        self._is_closed = self._is_woken = False
        self._arrived = self._drained = anyio.Event()

    def open(self) -> None:
        """Begin to wake `next`. Called in the loop."""
        self._arrived, self._drained = anyio.Event(), anyio.Event()
        self._handle = LoopHandle()

    def close(self) -> None:
        """Drop what waits and what comes."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()

    def event(self, subject: str, numbered: Callable[[], bytes]) -> None:
        """Add an event, made under the lock so that events wait in the order of their numbers; from any thread."""
        with self._lock:
            frame = numbered()
            if self._is_closed or self._events >= BUFFER_EVENTS or self._size_bytes + len(frame) > BUFFER_BYTES:
                self.dropped += 1
                return
            self._events += 1
            self._size_bytes += len(frame)
            self._waiting.append(Frame(subject, frame))
            is_woken, self._is_woken = self._is_woken, True
        if not is_woken:
            self._wake()

    def changed(self, subject: str) -> None:
        """Add a subject that has its first subscriber here, or none any more. Called in the loop."""
        with self._lock:
            self._waiting.append(subject)
        self._wake()

    def next_nowait(self) -> Frame | str | None:
        """Remove and return the oldest entry, None if there is none."""
        with self._lock:
            if not self._waiting:
                self._is_woken = False
                self._drained.set()
                return None
            entry = self._waiting.popleft()
            if isinstance(entry, Frame):
                self._events -= 1
                self._size_bytes -= len(entry.data)
            return entry

    async def arrival(self) -> None:
        """Wait for an entry."""
        if not self._waiting:
            self._arrived = anyio.Event()
            if not self._waiting:
                await self._arrived.wait()

    async def emptied(self) -> None:
        """Wait until all that waits now has been removed."""
        if self._waiting:
            self._drained = anyio.Event()
            await self._drained.wait()

    def _wake(self) -> None:
        if self._handle is not None:
            self._handle.run(lambda: self._arrived.set())
