"""OtherRouters: requests what each other router knows when it appears, and again when events of it may be lost.

    a router appears, or events of it may be lost ──► attempt ──► True: all that it had is known
                                                         │
                                                         └─► False, an error, or no end in time: again, ever later
    a router disappears ──► its attempt is cancelled, what was known of it is dropped

Each router has a task of its own, so that a slow one delays no other.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from attrs import define, field, frozen

from pipeline.network import EndpointWorkers, Members, Missed
from pipeline.rx import AnyIOScheduler, CompositeDisposable, Disposable, DisposableBase, Observable

_log = logging.getLogger(__name__)


@frozen
class RepairTimes:
    """How long an attempt may take, and when the next one is due."""

    timeout_s: float = 10.0
    """Seconds for one attempt."""
    first_delay_s: float = 0.1
    """Seconds before the second attempt; twice as long after each that failed, until the router is gone."""
    longest_delay_s: float = 10.0
    """The longest wait between attempts, in seconds."""


@define(eq=False)
class _Router:
    """Another router during one stay."""

    router_id: int
    due: anyio.Event
    """Set when its state is to be requested."""
    task: DisposableBase = field(factory=Disposable)


class OtherRouters:
    """The other routers as discovery has them, and a task for each that repairs what is known of it.

    workers: the endpoint at which each router answers under its router id; closed with this
    missed: the losses of the events by which routers follow each other
    router_id: our own, which is left out
    attempt: requests the state of a router and takes it in; returns whether nothing is missing now. An error counts as
        False. It is cancelled where the time is up or the router is gone; if that comes back at once, its next attempt
        may begin while the last one still ends.
    on_gone: called when a router is gone, also for one that has come back meanwhile, before its next attempt
    """

    def __init__(
        self,
        workers: EndpointWorkers[Any, Any],
        missed: Observable[Missed],
        router_id: int,
        attempt: Callable[[int], Awaitable[bool]],
        on_gone: Callable[[int], object] | None = None,
        times: RepairTimes | None = None,
    ) -> None:
        self._workers, self._missed, self._router_id = workers, missed, router_id
        self._attempt, self._on_gone, self._times = attempt, on_gone, times or RepairTimes()
        self._members = Members()
        self._routers: dict[int, _Router] = {}

    def follow(self, scheduler: AnyIOScheduler) -> DisposableBase:
        """Keep what is known true, in tasks of the scheduler, until disposed."""
        missed = self._missed.subscribe(self._on_missed)
        members = self._workers.follow(partial(self._on_members, scheduler))
        return CompositeDisposable(missed, members, Disposable(self._close))

    def _close(self) -> None:
        self._workers.close()
        for router in self._routers.values():
            router.task.dispose()

    def _on_missed(self, missed: Missed) -> None:
        for router in self._routers.values():
            if missed.publisher_id in (None, router.router_id):
                router.due.set()

    def _on_members(self, scheduler: AnyIOScheduler, members: Members) -> None:
        gone, new = members.gone_since(self._members), members.new_since(self._members)
        self._members = members
        for router_id in gone:
            if (router := self._routers.pop(router_id, None)) is not None:
                router.task.dispose()
                if self._on_gone is not None:
                    self._on_gone(router_id)
        for router_id in new:
            if router_id != self._router_id:
                self._routers[router_id] = router = _Router(router_id, anyio.Event())
                router.due.set()
                router.task = scheduler.spawn(partial(self._repair, router))

    async def _repair(self, router: _Router, scope: anyio.CancelScope) -> None:
        delay_s = self._times.first_delay_s
        with scope:
            while True:
                await router.due.wait()
                router.due = anyio.Event()
                if await self._one_attempt(router.router_id):
                    delay_s = self._times.first_delay_s
                    continue
                router.due.set()
                await anyio.sleep(delay_s)
                delay_s = min(2 * delay_s, self._times.longest_delay_s)

    async def _one_attempt(self, router_id: int) -> bool:
        why = f"no whole answer within {self._times.timeout_s:g} s"
        try:
            with anyio.move_on_after(self._times.timeout_s):
                if await self._attempt(router_id):
                    return True
                why = "more is due"
        except Exception as error:
            why = str(error)
        _log.info("%s: what router %d knows is requested again: %s", self._workers.name, router_id, why)
        return False
