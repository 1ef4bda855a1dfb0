"""Availability: whether a program takes requests, and which it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import anyio

from pipeline import AnyContext

from .problems import Refusal


class Phase(StrEnum):
    """How far a program is in its life; only moves forward."""

    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"


class Availability:
    """Ready, then draining (nothing new, what runs may finish), then stopping (what still runs is killed)."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self._running: dict[int, AnyContext] = {}
        self._idle = anyio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return len(self._running)

    @contextmanager
    def admit(self, context: AnyContext) -> Iterator[None]:
        """Counts the request for as long as the block runs. Raises Refusal (503) unless ready."""
        self.check()
        key = id(context)
        self._running[key] = context
        try:
            yield
        finally:
            del self._running[key]
            if self.phase is not Phase.READY and not self._running:
                self._idle.set()

    def check(self) -> None:
        """Raises Refusal (503) unless ready."""
        if self.phase is not Phase.READY:
            raise Refusal(503, "Service is not ready")

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; returns once nothing runs, at the latest after `grace_s`, when what is left is killed."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING
        if self._running:
            with anyio.move_on_after(grace_s):
                await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """Kills what still runs."""
        self.phase = Phase.STOPPING
        for context in list(self._running.values()):
            context.kill()
