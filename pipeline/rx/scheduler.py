"""A reactivex scheduler on anyio, so that operators that take time run on asyncio, on trio and in virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine
from datetime import datetime
from itertools import count
from threading import get_ident
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint, current_token
from reactivex.abc import DisposableBase, ScheduledAction
from reactivex.disposable import Disposable, SingleAssignmentDisposable
from reactivex.scheduler.periodicscheduler import PeriodicScheduler
from reactivex.typing import AbsoluteTime, RelativeTime

from ..errors import StreamClosed
from ..loop import LoopHandle, clock

State = TypeVar("State")
Work = Callable[[anyio.CancelScope], Coroutine[Any, Any, None]]

_SWEEP_TIMERS = 64
"""Timers below which disposed ones just stay until they are due."""


class AnyIOScheduler(PeriodicScheduler):
    """A reactivex scheduler on the running anyio loop, asyncio or trio, so that it also runs in virtual time.

    An async context manager: it owns a task group, and leaving it cancels everything scheduled and spawned. `now` is
    the loop's clock as a datetime (of its epoch, not of the calendar); a float is seconds of that clock. Every method
    may be called from any thread; actions run on the loop, those due at the same time in the order they were
    scheduled. After the exit, or before the entry, scheduling raises StreamClosed.

    What an action raises ends the `async with` block with an exception group, as an exception in a task does; wrap it
    in a `CatchScheduler` to handle such errors instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: TaskGroup | None = None
        self._timers: list[tuple[float, int, Callable[[], None], SingleAssignmentDisposable]] = []
        self._numbers = count()
        self._starting: list[tuple[Work, anyio.CancelScope]] = []
        self._sweep_at = _SWEEP_TIMERS
        self._changed = anyio.Event()

    async def __aenter__(self) -> Self:
        self._handle, self._token, self._thread = LoopHandle(), current_token(), get_ident()
        self._clock = clock()
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._run, self._tasks, name="AnyIOScheduler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        self._start_spawned(tasks)  # cancelled at once, but what they were given they release
        tasks.cancel_scope.cancel()
        try:
            if isinstance(error, Exception):  # the block's own: it goes on as it is, not inside a group
                await tasks.__aexit__(None, None, None)
                return None
            return await tasks.__aexit__(kind, error, trace)
        finally:
            for *_, disposable in self._timers:
                disposable.dispose()
            self._timers.clear()

    @property
    def now(self) -> datetime:
        """The loop's clock; another thread waits for the loop to answer."""
        return self.to_datetime(self.now_s)

    @property
    def now_s(self) -> float:
        """The same in seconds, for a tenth of the time."""
        if self._tasks is None:
            raise _not_running()
        if get_ident() == self._thread:
            return self._clock()
        return anyio.from_thread.run_sync(self._clock, token=self._token)

    def schedule(self, action: ScheduledAction[State], state: State | None = None) -> DisposableBase:
        """Run the action on the loop's next turn; disposing the result cancels it."""
        return self.schedule_relative(0.0, action, state)

    def schedule_relative(
        self, duetime: RelativeTime, action: ScheduledAction[State], state: State | None = None
    ) -> DisposableBase:
        """Run the action after this time, counted from when the loop receives it."""
        delay_s = max(0.0, self.to_seconds(duetime))
        return self._at(lambda: self._clock() + delay_s, action, state)

    def schedule_absolute(
        self, duetime: AbsoluteTime, action: ScheduledAction[State], state: State | None = None
    ) -> DisposableBase:
        """Run the action at that time of `now`, at once if it has passed."""
        due_s = self.to_seconds(duetime)
        return self._at(lambda: due_s, action, state)

    def spawn(self, work: Work) -> DisposableBase:
        """Run the async function as a task of this scheduler. Disposing the result, in any thread, cancels the scope
        the function is given and enters where it may be cut short."""
        if self._tasks is None:
            raise _not_running()
        scope, handle = self._token.backend_class.create_cancel_scope(), self._handle

        def enqueue() -> None:
            self._starting.append((work, scope))
            self._changed.set()

        handle.run(enqueue)
        return Disposable(lambda: handle.run(scope.cancel))

    def _at(
        self, due_s: Callable[[], float], action: ScheduledAction[State], state: State | None
    ) -> SingleAssignmentDisposable:
        if self._tasks is None:
            raise _not_running()
        disposable = SingleAssignmentDisposable()

        def invoke() -> None:
            disposable.disposable = self.invoke_action(action, state)

        self._handle.run(lambda: self._add(due_s(), invoke, disposable))
        return disposable

    def _add(self, due_s: float, invoke: Callable[[], None], disposable: SingleAssignmentDisposable) -> None:
        timers = self._timers
        if len(timers) >= self._sweep_at:
            # Disposed timers, such as those of `debounce`, must not wait in memory for a due time far ahead.
            timers[:] = [timer for timer in timers if not timer[-1].is_disposed]
            heapq.heapify(timers)
            self._sweep_at = max(_SWEEP_TIMERS, 2 * len(timers))
        heapq.heappush(timers, (due_s, next(self._numbers), invoke, disposable))
        if timers[0][0] == due_s:
            self._changed.set()

    def _start_spawned(self, tasks: TaskGroup) -> None:
        starting, self._starting = self._starting, []
        for work, scope in starting:
            tasks.start_soon(work, scope)

    async def _run(self, tasks: TaskGroup) -> None:
        while True:
            await self._first_due()
            self._start_spawned(tasks)
            horizon_s, newest = self._clock(), next(self._numbers)
            # What an action schedules waits for the next turn, so that actions without end leave room for others.
            while self._timers and self._timers[0][0] <= horizon_s and self._timers[0][1] < newest:
                *_, invoke, disposable = heapq.heappop(self._timers)
                if not disposable.is_disposed:
                    invoke()

    async def _first_due(self) -> None:
        """Wait until there is something to run or to start; always lets others run."""
        await checkpoint()
        while True:
            self._changed = anyio.Event()
            due_s = self._timers[0][0] if self._timers else float("inf")
            if self._starting or due_s <= self._clock():
                return
            with anyio.CancelScope(deadline=due_s):
                await self._changed.wait()


def _not_running() -> StreamClosed:
    return StreamClosed("this scheduler is not running: use it inside its `async with` block")
