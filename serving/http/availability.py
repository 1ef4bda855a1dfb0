"""Availability: whether a program takes requests, and the requests that run."""

from __future__ import annotations

from enum import StrEnum
from types import TracebackType

import anyio

from pipeline import AnyContext

from .problems import Refusal


class Phase(StrEnum):
    """The phase of a program's life; it only moves forward."""

    READY = "ready"
    """Requests are taken."""
    DRAINING = "draining"
    """No new request is taken; those that run may finish."""
    STOPPING = "stopping"
    """Requests that still run are killed."""


class Availability:
    """The phase of a program and its running requests."""

    def __init__(self) -> None:
        self.phase = Phase.READY
        self._running: dict[int, AnyContext] = {}
        self._idle = anyio.Event()

    @property
    def in_flight(self) -> int:
        """Number of requests that run now."""
        return len(self._running)

    def admit(self, context: AnyContext) -> Admission:
        """Return a context manager that counts the request as running. Raise Refusal (503) unless ready."""
        self.check()
        return Admission(self, context)

    def _add(self, context: AnyContext) -> None:
        self._running[id(context)] = context

    def _remove(self, context: AnyContext) -> None:
        del self._running[id(context)]
        if self.phase is not Phase.READY and not self._running:
            self._idle.set()

    def check(self) -> None:
        """Raise Refusal (503) unless ready."""
        if self.phase is not Phase.READY:
            raise Refusal(503, "Service is not ready")

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; return once none runs. Requests that still run after `grace_s` are killed."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING
        if self._running:
            with anyio.move_on_after(grace_s):
                await self._idle.wait()
        self.stop()

    def stop(self) -> None:
        """Kill the requests that still run."""
        self.phase = Phase.STOPPING
        for context in list(self._running.values()):
            context.kill()


class Admission:
    """Counts one request as running while its block runs."""

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
