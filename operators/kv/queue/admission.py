"""AdmissionController: which requests are placed at once and which wait for room, in an AdmissionQueue.

    admit ──room──► placed
      └──none──► queued ──drain: after every change of load, workers or time──► placed, or the error it met
      stop, kill or a cancelled task take it out again

Source: dynamo lib/kv-router/src/scheduling/queue.rs, SchedulerQueue. Other than there a request waits in its own task,
so one whose caller has gone is taken out then, not when its turn comes.

Rooms: which ranks each waiting request may use and which are free, as bits, so that one look compares two numbers.

    pool ──► Rooms: a bit for each rank ──────────► wanted(request)            once for each request and pool
    prompt tokens in flight ──────────────────────► free(class)                once for each look at the queue

A request may go where `wanted & free` is not 0: exactly where `PolicyClass.all_busy` is False for its ranks. A queue of
many partitions is looked at after each change of load, and nearly always none of its requests may go: 2,000 of them
with a choice of their own among 256 workers take 15 µs a look, and took 14 ms and more rank by rank
(`benchmarks.kv_queue`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
from attrs import define, field

from pipeline import Cancelled, Control, PenstockError, Unavailable
from pipeline.settings import Variable, number

from ..eligibility import Candidates, WorkerPool
from ..index import Overlap
from ..load import Column
from ..pool import RouterPool
from ..request import RouteRequest
from ..types import RequestSettings, WorkerRank
from .policy import DepthTier, PolicyClass, PolicyProfile, PromptSize, QueueUsage
from .queue import AdmissionQueue, Waiting

if TYPE_CHECKING:
    from ..reservation import LoadBook, Reservation

OVERLAP_REFRESH_AFTER: Variable[float] = Variable(
    "DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",
    10.0,
    "Seconds in the queue after which the overlap of a request is looked up again; 0: never.",
    number(),
)


REFUSED = 1
"""Wanted by requests that no rank may take: it is always free, because placing them raises what is wrong."""


class Rooms:
    """The ranks of one pool of workers. Make another one for another pool."""

    def __init__(self, pool: WorkerPool, classes: Sequence[PolicyClass]) -> None:
        self.ranks = tuple(WorkerRank(worker_id, rank) for worker_id, ranks in pool.ranks.items() for rank in ranks)
        self.pool = pool
        self._bits = {rank: 2 << position for position, rank in enumerate(self.ranks)}
        batched = [pool.configs[rank.worker_id].max_num_batched_tokens for rank in self.ranks]
        self._busy_above = [[one.busy_above(tokens) for tokens in batched] for one in classes]
        self._last: tuple[Sequence[WorkerRank], int] = (), 0

    def wanted(self, request: RouteRequest) -> int:
        """The ranks that may take the request; REFUSED if none may."""
        try:
            ranks = self.pool.candidates(request.rules(self.pool)).ranks
        except PenstockError:
            return REFUSED
        if ranks is not self._last[0]:  # those without rules of their own share one tuple
            bits = self._bits
            self._last = ranks, sum(bits[rank] for rank in ranks)
        return self._last[1]

    def free(self, class_index: int, prefill_tokens: Column) -> int:
        """The ranks that are not busy for a class with these prompt tokens in flight, and REFUSED."""
        free = REFUSED
        rows = zip(self._bits.values(), prefill_tokens, self._busy_above[class_index], strict=True)
        for bit, tokens, limit in rows:
            if tokens <= limit:
                free |= bit
        return free


@define
class Blocked:
    """No request could go at the last look: the ranks wanted by all that wait, by class, and the queue's version then.

    Until one of these ranks is free, or the queue or the pool has changed, the next look would find the same.
    """

    rooms: Rooms
    version: int
    wanted: dict[int, int] = field(factory=dict)

    def add(self, class_index: int, wanted: int) -> None:
        """Add a request that waits."""
        self.wanted[class_index] = self.wanted.get(class_index, 0) | wanted

    def lasts(self, rooms: Rooms, free: Mapping[int, int], version: int) -> bool:
        """Whether this is still so; `free` are the ranks that are free now for each class in which something waits."""
        if self.rooms is not rooms or self.version != version:
            return False
        return not any(self.wanted.get(class_index, 0) & ranks for class_index, ranks in free.items())


@define(eq=False)
class QueuedRequest:
    """A request on its way through the queue, and its outcome."""

    request_id: str
    request: RouteRequest
    settings: RequestSettings
    overlap: Overlap
    """The cached prefixes when it came."""
    size: Callable[[QueuedRequest], PromptSize]
    """Computes how large it is, only where a limit or an order needs it. Raises if no worker may take the request."""
    place: Callable[[QueuedRequest, bool], Reservation]
    """Books it on a worker; the flag is set if its cached prefixes must be looked up again."""
    placed: Reservation | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    settled: anyio.Event | None = field(default=None, init=False)
    """Set once it was placed, failed or stopped; None for a request that never waited."""
    candidates: Candidates | None = field(default=None, init=False)
    """The ranks that may take it, if they were looked up a moment ago; None once it waits."""
    rooms: Rooms | None = field(default=None, init=False)
    wanted: int = field(default=0, init=False)
    """The ranks that may take it, as bits of `rooms`."""

    def settle(self, placed: Reservation | None = None, error: Exception | None = None) -> None:
        self.placed, self.error = placed, error
        if self.settled is not None:
            self.settled.set()


class AdmissionController:
    """See the module. A request waits while all workers that may take it are busy, by the class it is of.

    `profile` holds the classes, `tiers` limits by depth. A request that waited longer than `refresh_after_s` has its
    cached prefixes looked up again; None or 0 for never.
    """

    def __init__(
        self,
        pool: RouterPool,
        loads: LoadBook,
        profile: PolicyProfile,
        tiers: Sequence[DepthTier] = (),
        *,
        refresh_after_s: float | None = OVERLAP_REFRESH_AFTER.default,
    ) -> None:
        self._queue: AdmissionQueue[QueuedRequest] = AdmissionQueue(profile, tiers)
        self._pool, self._loads, self._profile = pool, loads, profile
        self._rooms: Rooms | None = None
        self._blocked: Blocked | None = None
        self._refresh_after_s = refresh_after_s or None
        self._is_closed = False
        self._is_draining = False

    def __len__(self) -> int:
        """The number of requests that wait."""
        return self._queue.size

    def waiting_by_class(self) -> dict[str, QueueUsage]:
        """What waits in each class of the profile. May be called in any thread."""
        return {one.name: self._queue.usage(index) for index, one in enumerate(self._profile.classes)}

    async def admit(self, queued: QueuedRequest, control: Control | None) -> Reservation:
        """Place the request, at once or in its turn.

        Raises what placing raises, QueueRejected where no more may wait, Unavailable once this is closed, Cancelled if
        the request is stopped while it waits.
        """
        if self._is_closed:
            raise _closing()
        request, profile = queued.request, self._profile
        uncached_tokens = queued.size(queued).uncached_tokens if len(profile.floors) > 1 else 0
        class_index = profile.class_of(request.policy_class, uncached_tokens)
        if self._queue.must_queue(class_index, partial(self._is_full, class_index, queued)):
            queued.candidates = None
            return await self._wait(queued, class_index, control)
        return queued.place(queued, False)

    def _is_full(self, class_index: int, queued: QueuedRequest) -> bool:
        """Whether every rank that may take the request is busy; where none may, waiting would not help."""
        pool = self._pool.current()
        try:
            queued.candidates = pool.candidates(queued.request.rules(pool))
        except PenstockError:
            return False  # placing it raises the same error
        ranks, loads = queued.candidates.ranks, self._loads
        tokens = loads.sequences.each_prefill_tokens(ranks, loads.now_s())
        return self._profile.classes[class_index].all_busy(ranks, tokens, pool.configs)

    async def _wait(self, queued: QueuedRequest, class_index: int, control: Control | None) -> Reservation:
        request, size, queued.settled = queued.request, queued.size(queued), anyio.Event()
        waiting = self._queue.push(
            queued,
            size,
            class_index=class_index,
            workers=len(self._pool.current().ranks),
            arrival_s=self._loads.clock(),
            priority_jump_s=request.priority_jump_s,
            strict_priority=request.strict_priority,
            partition=request.partition,
        )
        if (blocked := self._blocked) is not None and blocked.version == self._queue.version - 1:
            # A queue that was blocked still is: one more waits, and no other has become able to go.
            blocked.version += 1
            blocked.add(class_index, blocked.rooms.wanted(request))
        return await self._outcome(waiting, queued.settled, control)

    def drain(self) -> None:
        """Place the requests that may go now, one by one, so that each sees the booking before it.

        Room that is made meanwhile, because a booking has listeners, is seen here and needs no second drain.
        """
        if self._is_draining or not self._queue.size:
            return
        self._is_draining = True
        try:
            while self._queue.size and (waiting := self._next()) is not None:
                self._settle(waiting)
        finally:
            self._is_draining = False

    def _next(self) -> Waiting[QueuedRequest] | None:
        """Take out the next that may go, None if none may."""
        pool, queue = self._pool.current(), self._queue
        if (rooms := self._rooms) is None or rooms.pool is not pool:
            rooms = self._rooms = Rooms(pool, self._profile.classes)
        tokens = self._loads.sequences.prefill_tokens(rooms.ranks, self._loads.now_s())
        free = {index: rooms.free(index, tokens) for index in queue.waiting_classes()}
        if self._blocked is not None and self._blocked.lasts(rooms, free, queue.version):
            return None
        blocked = Blocked(rooms, queue.version)

        def may_go(waiting: Waiting[QueuedRequest]) -> bool:
            queued, index = waiting.item, waiting.class_index
            if queued.rooms is not rooms:
                queued.rooms, queued.wanted = rooms, rooms.wanted(queued.request)
            blocked.add(index, queued.wanted)
            return queued.wanted & free[index] != 0

        waiting = queue.pop(may_go)
        self._blocked = blocked if waiting is None else None
        return waiting

    def close(self) -> None:
        """Ends the queue: all that wait, and all that come, get Unavailable."""
        self._is_closed = True
        for waiting in self._queue.close():
            waiting.item.settle(error=_closing())

    def _settle(self, waiting: Waiting[QueuedRequest]) -> None:
        """Place one that waited, or keep the error, and wake its task."""
        queued = waiting.item
        try:
            is_old = waiting.is_due_for_refresh(self._loads.clock(), self._refresh_after_s)
            queued.settle(queued.place(queued, is_old))
        except Exception as error:
            queued.settle(error=error)

    async def _outcome(
        self, waiting: Waiting[QueuedRequest], settled: anyio.Event, control: Control | None
    ) -> Reservation:
        queued = waiting.item
        forget = None if control is None else control.on_stop(settled.set)
        try:
            self.drain()  # its partition, or its class's turn, may be free
            await settled.wait()
        except BaseException:  # its caller has gone
            self._withdraw(waiting)
            if queued.placed is not None:
                queued.placed.release()
            raise
        finally:
            if forget is not None:
                forget()
        if queued.placed is not None:  # a reservation that exists wins over a stop
            return queued.placed
        if queued.error is not None:
            raise queued.error
        self._withdraw(waiting)
        raise Cancelled(f"Request {queued.request_id} was cancelled")

    def _withdraw(self, waiting: Waiting[QueuedRequest]) -> None:
        if self._queue.withdraw(waiting):
            self.drain()  # it may have held others up


def _closing() -> PenstockError:
    return Unavailable("the router is shutting down")
