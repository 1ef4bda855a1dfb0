"""Admission: who goes at once and who waits for room, in an AdmissionQueue, with the waiting done here.

    admit ──room──► placed
      └──none──► parked ──drain: after every change of load, workers or time──► placed, or the error it met
      stop, kill or a cancelled task take it out again

Source: dynamo lib/kv-router/src/scheduling/queue.rs, SchedulerQueue. Other than there a request waits in its own task,
so one whose caller has gone is taken out then, not when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import anyio
from attrs import define, field

from pipeline import Cancelled, Control, PenstockError, Unavailable

from ..index import Overlap
from ..request import RouteRequest
from .policy import DepthTier, PolicyProfile, PromptSize, QueueUsage
from .queue import AdmissionQueue, Waiting
from .rooms import Blocked, RoomNow, Rooms


class Released(Protocol):
    """What placing gives: something to be released."""

    def release(self) -> object: ...


P = TypeVar("P", bound=Released)


@define(eq=False)
class Applicant(Generic[P]):
    """A request that asks to be placed, what was cached of it when it came, and what has come of it.

    `sized` says how large it is, for those that want to know: most go at once, whatever their size. It raises where
    nobody may take the request.
    """

    request_id: str
    request: RouteRequest
    sized: Callable[[], PromptSize]
    overlap: Overlap
    placed: P | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    told: anyio.Event | None = field(default=None, init=False)
    rooms: Rooms | None = field(default=None, init=False)
    wanted: int = field(default=0, init=False)
    """The ranks that may take it, as bits of `rooms`, once that was asked."""


class Admission(Generic[P]):
    """See the module. `place` books a request; `is_full(request, class)` says whether all its workers are busy, and
    `room_now` the same of all that wait: the room there is for the classes that are asked about.

    With `refresh_after_s` a request that waited longer has what is cached looked up again: `place` is told so.
    """

    def __init__(
        self,
        profile: PolicyProfile,
        tiers: Sequence[DepthTier],
        *,
        place: Callable[[Applicant[P], bool], P],
        is_full: Callable[[RouteRequest, int], bool],
        room_now: RoomNow,
        workers: Callable[[], int],
        now_s: Callable[[], float],
        refresh_after_s: float | None,
    ) -> None:
        self._queue: AdmissionQueue[Applicant[P]] = AdmissionQueue(profile, tiers)
        self._profile = profile
        self._place, self._is_full, self._workers, self._now_s = place, is_full, workers, now_s
        self._room_now = room_now
        self._blocked: Blocked | None = None
        self._refresh_after_s = refresh_after_s
        self._is_closed = False
        self._is_draining = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._queue)

    def waiting_by_class(self) -> dict[str, QueueUsage]:
        """What waits in each class of the profile. May be asked in any thread."""
        return {one.name: self._queue.usage(index) for index, one in enumerate(self._profile.classes)}

    async def admit(self, applicant: Applicant[P], control: Control | None) -> P:
        """Places the request, at once or in its turn.

        Raises what placing raises, QueueRejected where no more may wait, Unavailable once this is closed, Cancelled if
        the request is stopped while it waits.
        """
        if self._is_closed:
            raise _closing()
        request = applicant.request
        uncached_tokens = applicant.sized().uncached_tokens if len(self._profile.floors) > 1 else 0
        class_index = self._profile.class_of(request.policy_class, uncached_tokens)
        if not self._queue.must_park(class_index, lambda: self._is_full(request, class_index)):
            return self._place(applicant, False)
        size, applicant.told = applicant.sized(), anyio.Event()
        waiting = self._queue.park(
            applicant,
            size,
            class_index=class_index,
            workers=self._workers(),
            arrival_s=self._now_s(),
            priority_jump_s=request.priority_jump_s,
            strict_priority=request.strict_priority,
            lane=request.lane,
        )
        self._count_parked(waiting)
        return await self._outcome(waiting, applicant.told, control)

    def drain(self) -> None:
        """Place those that wait and may go now, one by one, so that each sees the booking before it.

        Room that is made meanwhile, because a booking has listeners, is seen here and needs no second drain.
        """
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while len(self._queue) and (waiting := self._next()) is not None:
                self._settle(waiting)
        finally:
            self._is_draining = False

    def _next(self) -> Waiting[Applicant[P]] | None:
        """Take out the next that may go, None if none may."""
        room = self._room_now(self._queue.waiting_classes())
        if self._blocked is not None and self._blocked.lasts(room, self._queue.version):
            return None
        rooms, free, blocked = room.rooms, room.free, Blocked(room.rooms, self._queue.version)

        def may_go(waiting: Waiting[Applicant[P]]) -> bool:
            applicant, index = waiting.item, waiting.class_index
            if applicant.rooms is not rooms:
                applicant.rooms, applicant.wanted = rooms, rooms.wanted(applicant.request)
            blocked.add(index, applicant.wanted)
            return applicant.wanted & free[index] != 0

        waiting = self._queue.pop(may_go)
        self._blocked = blocked if waiting is None else None
        return waiting

    def _count_parked(self, waiting: Waiting[Applicant[P]]) -> None:
        """Keep what is known of a blocked queue: one more waits, and no other has become able to go."""
        if (blocked := self._blocked) is not None and blocked.version == self._queue.version - 1:
            blocked.version += 1
            blocked.add(waiting.class_index, blocked.rooms.wanted(waiting.item.request))

    def close(self) -> None:
        """Ends the queue: all that wait, and all that come, get Unavailable."""
        self._is_closed = True
        for waiting in self._queue.close():
            waiting.item.error = _closing()
            _tell(waiting.item)

    def _settle(self, waiting: Waiting[Applicant[P]]) -> None:
        """Places one that waited, or notes why that failed, and tells it."""
        applicant = waiting.item
        try:
            is_old = waiting.is_due_for_refresh(self._now_s(), self._refresh_after_s)
            applicant.placed = self._place(applicant, is_old)
        except Exception as error:
            applicant.error = error
        _tell(applicant)

    async def _outcome(self, waiting: Waiting[Applicant[P]], told: anyio.Event, control: Control | None) -> P:
        applicant = waiting.item
        forget = None if control is None else control.on_stop(told.set)
        try:
            self.drain()  # its lane, or its class's turn, may be free
            await told.wait()
        except BaseException:  # its caller has gone
            self._withdraw(waiting)
            if applicant.placed is not None:
                applicant.placed.release()
            raise
        finally:
            if forget is not None:
                forget()
        if applicant.placed is not None:  # what is there wins over a stop
            return applicant.placed
        if applicant.error is not None:
            raise applicant.error
        self._withdraw(waiting)
        raise Cancelled(f"Request {applicant.request_id} was cancelled")

    def _withdraw(self, waiting: Waiting[Applicant[P]]) -> None:
        if self._queue.withdraw(waiting):
            self.drain()  # it may have held others up


def _tell(applicant: Applicant[P]) -> None:
    if applicant.told is not None:
        applicant.told.set()


def _closing() -> PenstockError:
    return Unavailable("the router is shutting down")
