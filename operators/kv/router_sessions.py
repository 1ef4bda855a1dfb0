"""Sessions: SessionAffinity with the waiting done: who comes second waits until the first is placed."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeAlias

import anyio

from pipeline import Cancelled, Control

from .affinity import Bound, Busy, First, SessionAffinity
from .router_clock import LoopClock
from .worker_rank import WorkerRank

Entered: TypeAlias = Bound | First
"""A request inside its session: with a worker to go to, or the one that decides where it goes."""


class Sessions:
    """The sessions of one router, used in one loop. `run` belongs in a task; without it idle ones stay remembered."""

    def __init__(self, ttl_s: float, clock: LoopClock) -> None:
        self._affinity = SessionAffinity(ttl_s)
        self._clock = clock
        self._waiting: dict[str, list[anyio.Event]] = {}

    def peek(self, session_id: str) -> WorkerRank | None:
        """Where the session is bound; changes nothing."""
        return self._affinity.peek(session_id, self._clock.now_s())

    async def enter(self, session_id: str, request_id: str, control: Control) -> Entered:
        """Begins a request: bound, or the first, which must end with `bind` or `give_up`.

        Raises ResourceExhausted when there is no room for a new session, Cancelled on a stop while it waits.
        """
        while isinstance(entry := self._affinity.enter(session_id, self._clock.now_s()), Busy):
            if control.is_stopped:
                raise Cancelled(f"Request {request_id} was cancelled")
            await self._decided(session_id, control)
        return entry

    def bind(self, first: First, rank: WorkerRank) -> Bound:
        """The first request was dispatched there."""
        bound = self._affinity.bind(first, rank)
        self._wake(first.session_id)
        return bound

    def give_up(self, first: First) -> None:
        """The first request was not dispatched."""
        self._affinity.give_up(first)
        self._wake(first.session_id)

    def leave(self, bound: Bound) -> None:
        """The request is over. May be called in a plain callback."""
        self._affinity.leave(bound, self._clock.now_s())

    def invalidate(self, bound: Bound) -> None:
        """The worker is gone or failed the request: the session is free again."""
        self._affinity.invalidate(bound)

    def __len__(self) -> int:
        return len(self._affinity)

    async def run(self) -> None:
        """Forgets idle sessions, until cancelled."""
        while True:
            await anyio.sleep(self._affinity.reap_every_s)
            self._affinity.expire(self._clock.now_s())

    async def _decided(self, session_id: str, control: Control) -> None:
        """Returns when the session was decided, or on a stop."""
        event = anyio.Event()
        waiting = self._waiting.setdefault(session_id, [])
        waiting.append(event)
        forget = control.on_stop(event.set)
        try:
            await event.wait()
        finally:
            forget()
            with suppress(ValueError):  # woken: it is off the list
                waiting.remove(event)
            if not waiting and self._waiting.get(session_id) is waiting:
                del self._waiting[session_id]

    def _wake(self, session_id: str) -> None:
        waiting = self._waiting.pop(session_id, [])
        for event in waiting:
            event.set()
        waiting.clear()
