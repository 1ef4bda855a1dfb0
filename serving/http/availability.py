"""Availability: whether a program takes requests, and which it has."""

from __future__ import annotations

from enum import StrEnum
from types import TracebackType

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

    def admit(self, context: AnyContext) -> Admission:
        """Return what counts the request for as long as its block runs. Raises Refusal (503) unless ready."""
        self.check()
        return Admission(self, context)

    def _add(self, context: AnyContext) -> None:
        self._running[id(context)] = context

    def _remove(self, context: AnyContext) -> None:
        del self._running[id(context)]
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


class Admission:
    """One request that runs: a context that counts it."""

    __slots__ = ("_availability", "_context")

    def __init__(self, availability: Availability, context: AnyContext) -> None:
        self._availability = availability
        self._context = context

    def __enter__(self) -> None:
        self._availability._add(self._context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._availability._remove(self._context)
