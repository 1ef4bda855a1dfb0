"""WorkThreads: long work in threads beside the event loop, ended early by a stop, a kill or a cancelled task.

    await threads.run(work, control) ──► a free thread, or a place in the queue

Without it, long work would be one pause for every stream of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from threading import Lock
from typing import Any, Generic, TypeVar, cast

from anyio import CancelScope, CapacityLimiter, to_thread

from .control import Control
from .errors import Cancelled
from .loop import call_soon, running_loop, time_held

T = TypeVar("T")

GiveUp = Callable[[], None]
"""Called by work now and then. It ends the work, by an exception of its own, once no task waits for the result."""


class WorkThreads:
    """Up to `count` threads at a time; further work waits in the order it came.

    One object may serve several loops; the count holds for each of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._places: tuple[Any, CapacityLimiter, CapacityLimiter] | None = None

    def waiting(self) -> int | None:
        """Return how much work waits for a thread in this loop, None while a thread is free."""
        places, _ = self._of_this_loop()
        return None if places.available_tokens > 0 else places.statistics().tasks_waiting

    async def run(self, work: Callable[[GiveUp], T], control: Control | None = None) -> T:
        """Call `work` in a thread and return its result, or raise its error of any kind.

        Raise Cancelled as soon as `control` is stopped or killed. A stop, a kill or a cancelled task does not wait for
        the thread, which keeps its place until the work has ended: at its next call of `GiveUp`.
        """
        places, unlimited = self._of_this_loop()
        job = _Job(work, places)
        with CancelScope() as scope:
            forget = None if control is None else control.on_stop(scope.cancel)
            try:
                with time_held():  # also for a place: a thread has it, perhaps one that no task waits for any more
                    await places.acquire_on_behalf_of(job)
                    job.has_place = True
                    await to_thread.run_sync(job.run, abandon_on_cancel=True, limiter=unlimited)
            finally:
                if forget is not None:
                    forget()
                job.leave()
        if scope.cancelled_caught:
            raise Cancelled("the request was stopped while a thread worked for it")
        return job.result()

    def _of_this_loop(self) -> tuple[CapacityLimiter, CapacityLimiter]:
        """Return the limiter of places, and one without a limit: anyio's own is shared with other users.

        anyio gives a thread's place back when the task that waits for it is cancelled, although the thread may still
        be busy; so places are counted here.
        """
        loop = running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = loop, CapacityLimiter(self._count), CapacityLimiter(inf)
        return self._places[1:]


class _GivenUp(Exception):
    """Ends work without a waiting task."""


class _Job(Generic[T]):
    """One piece of work. Its place is given back once: by the thread if that has begun, else by the task."""

    def __init__(self, work: Callable[[GiveUp], T], places: CapacityLimiter) -> None:
        self.has_place = False
        self._work, self._places, self._loop = work, places, running_loop()
        self._lock = Lock()
        self._has_begun = self._is_left = False
        self._outcome: tuple[T | None, BaseException | None] = None, None

    def run(self) -> None:
        """Called in the thread."""
        with self._lock:
            if self._is_left:
                return
            self._has_begun = True
        try:
            self._outcome = self._work(self._give_up), None
        except BaseException as error:  # raised in the task, which can distinguish our own exceptions from foreign ones
            self._outcome = None, error
        finally:
            call_soon(self._loop, self._release)

    def leave(self) -> None:
        """Called by the task when it no longer waits."""
        with self._lock:
            self._is_left = True
            is_free = self.has_place and not self._has_begun
        if is_free:
            self._release()

    def result(self) -> T:
        """Return or raise the outcome, once. It is not kept: an error has the frames that it was raised through."""
        (value, error), self._outcome = self._outcome, (None, None)
        if error is None:
            return cast("T", value)
        try:
            raise error
        finally:
            del error

    def _give_up(self) -> None:
        if self._is_left:
            raise _GivenUp

    def _release(self) -> None:
        self._places.release_on_behalf_of(self)
