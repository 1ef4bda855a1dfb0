"""Calls of an engine under check: each runs in a task of its own, is bounded, and cannot take the kit with it.

An engine that leaves a cancel scope open in the task that reads it spoils the scopes of that task, and one that
swallows its cancellation never gives the task back. So the kit waits beside the call, in another task, and in the end
drops a call that goes on although it was cancelled.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import anyio
from anyio import CancelScope, create_task_group, move_on_after

from .failure import ConformanceFailure, failed, overdue
from .held import failure_of
from .watchdog import StoodStill, watchdog

T = TypeVar("T")

MOST_REFUSALS = 200
"""So often a call may go on waiting though it is cancelled, before it is dropped."""


class Dropped(Exception):
    """A call went on although it was cancelled again and again."""


async def bounded(name: str, what: str, act: Callable[[], Awaitable[T]], within_s: float, *, shield: bool = False) -> T:
    """Return what the call gives. Raise the failure of that name if it raises or takes longer.

    With `shield` it also runs while the kit itself is being cancelled.
    """
    call: Call[T] = Call(act)
    await run_beside(call, lambda: call.waited_for(what, within_s), shield=shield)
    if call.is_cancelled and not call.stood_still:
        raise overdue(name, what, within_s)
    return call.result(name, what)


async def run_beside(call: Call[Any], act: Callable[[], Awaitable[object]], *, shield: bool = False) -> None:
    """Run the call in a task of its own while something else is done, and cancel it then if it goes on.

    Raises the failure of a scope or task group that the call left open in its task.
    """
    try:
        with CancelScope(shield=shield):
            async with create_task_group() as tasks:
                tasks.start_soon(call.run)
                await act()
                if not call.is_over:
                    call.is_cancelled = True
                    tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # What a loop's library finds when a task ends with its scopes in disorder; a cancellation is never in a group.
        if (held := failure_of(group)) is None:
            raise
        if not call.is_dropped:  # which was left inside of them
            raise failed(held, "a task ended inside of it", cause=group) from group


class Call(Generic[T]):
    """One call of engine code, run in a task of its own."""

    def __init__(self, act: Callable[[], Awaitable[T]]) -> None:
        self._act = act
        self._value: Any = None
        self._error: BaseException | None = None
        self._news = anyio.Event()
        self.is_over = False
        self.is_cancelled = False
        """Set when its task is cancelled: from then on it is dropped if it does not end."""

    async def run(self) -> None:
        """Never raises but for a cancellation of its task."""
        try:
            self._value = await _leashed(self._awaited(), self)
        except anyio.get_cancelled_exc_class() as error:
            self._error = error
            if self.is_cancelled:
                raise
        except KeyboardInterrupt:  # of the person at the keyboard, not of the engine
            raise
        except BaseException as error:
            self._error = error
        finally:
            self.is_over = True
            self._news.set()

    async def waited_for(self, what: str, within_s: float) -> None:
        """Return when the call is over, or its time."""
        watch = watchdog.get()
        limit = nullcontext() if watch is None else watch.limit(what, within_s, self._news.set)
        try:
            with limit, move_on_after(within_s):
                await self._news.wait()
        except anyio.get_cancelled_exc_class():
            self.is_cancelled = not self.is_over
            raise

    async def _awaited(self) -> T:
        return await self._act()

    @property
    def is_dropped(self) -> bool:
        """Whether it went on although it was cancelled again and again."""
        return isinstance(self._error, Dropped)

    @property
    def stood_still(self) -> bool:
        """Whether it had to be ended inside of a turn."""
        return isinstance(self._error, StoodStill)

    def result(self, name: str, what: str) -> T:
        """Return what the call gave; raise the failure of that name, from what the call raised."""
        error = self._error
        if error is None:
            value: T = self._value
            return value
        if isinstance(error, ConformanceFailure):
            raise error
        held = "LoopBlocked" if self.stood_still else failure_of(error)
        raise failed(held or name, f"{what} raised {error!r}", cause=error) from error


@types.coroutine
def _leashed(awaitable: Any, call: Call[Any]) -> Generator[Any, Any, Any]:
    """Await it step by step. Raises Dropped once it has swallowed its cancellation too often."""
    steps, cancelled = awaitable.__await__(), anyio.get_cancelled_exc_class()
    step: Callable[[Any], Any] = steps.send
    given: Any = None
    refusals = 0
    while True:
        try:
            waits_for = step(given)
        except StopIteration as end:
            return end.value
        try:
            given, step = (yield waits_for), steps.send
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:  # as asyncio cancels; trio sends an outcome that raises
            given, step = error, steps.throw
        if call.is_cancelled and isinstance(getattr(given, "error", given), cancelled):
            refusals += 1
            if refusals > MOST_REFUSALS:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(steps))  # to collect it would raise in the engine again
                raise Dropped
