"""Calls of an engine under check: each runs in a task of its own, is bounded, and cannot take the kit with it.

An engine that leaves a cancel scope open in the task that reads it spoils the scopes of that task, and one that
swallows its cancellation never gives the task back. So the kit waits beside the call, in another task, and in the end
drops a call that goes on although it was cancelled.

The Watchdog bounds what the loop's own clock cannot: a blocking call keeps the loop from its timers, and in virtual
time polling without a pause keeps the clock from moving. A thread looks at the wall clock instead. It ends a wait by a
callback of the loop and, where the loop does not run that either, raises StoodStill inside the turn. Code that never
returns from a call into C cannot be ended so; where it hangs is logged.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from time import perf_counter
from types import FrameType
from typing import Any, Generic, TypeVar

import anyio
from anyio import CancelScope, create_task_group, move_on_after
from attrs import define

from pipeline.loop import LoopHandle

from .failures import ConformanceFailure, failed
from .inspection import failure_in

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
_GRACE_S = 1.0
"""How long the loop has for the callback, and how much later than the loop's own limit this one comes."""


class StoodStill(BaseException):
    """Raised inside a turn that has taken too long; no engine should catch it."""


@define(eq=False)
class _Wait:
    what: str
    due_s: float
    expire: Callable[[], None]
    is_called_back: bool = False


class Watchdog:
    """Watches one loop, from the thread it runs in, until it is closed."""

    def __init__(self) -> None:
        self._handle, self._loop_thread = LoopHandle(), threading.get_ident()
        self._waits: list[_Wait] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="conformance-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    @contextmanager
    def limit(self, what: str, within_s: float, expire: Callable[[], None]) -> Iterator[None]:
        """Call back `expire` if the block takes longer by the wall, and raise inside it if that does not end it."""
        wait = _Wait(what, perf_counter() + within_s + _GRACE_S, expire)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            now_s = perf_counter()
            for wait in [wait for wait in self._waits if wait.due_s <= now_s]:
                wait.due_s = now_s + _GRACE_S
                if wait.is_called_back:
                    self._raise_in_turn(wait)
                else:
                    wait.is_called_back = True
                    self._handle.run_soon(wait.expire)

    def _raise_in_turn(self, wait: _Wait) -> None:
        where = "".join(traceback.format_stack(sys._current_frames()[self._loop_thread], limit=5))
        _log.warning("the loop stands still; the kit waits for %s:\n%s", wait.what, where)
        if _is_in_turn(sys._current_frames().get(self._loop_thread)):
            set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
            set_error(ctypes.c_ulong(self._loop_thread), ctypes.py_object(StoodStill))


def _is_in_turn(frame: FrameType | None) -> bool:
    """Whether the thread is inside a call of the engine, and not in the kit or the loop itself."""
    while frame is not None:
        if frame.f_code.co_name == "_leashed":
            return True
        frame = frame.f_back
    return False


watchdog: ContextVar[Watchdog | None] = ContextVar("watchdog", default=None)
"""That of the run that this task belongs to."""


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
        raise failed(name, f"{what} took more than {within_s:g} s", after_s=within_s)
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
        if (held := failure_in(group)) is None:
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
        held = "LoopBlocked" if self.stood_still else failure_in(error)
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
