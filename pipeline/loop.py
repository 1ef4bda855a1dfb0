"""Callbacks that return to their event loop, cheap ways to wake one task, and the loop's clock.

A request may be stopped from any thread (a signal handler, an engine's own thread), but its callbacks belong to one
event loop. A `LoopHandle` stores the loop that runs when it is made and runs callbacks there, on asyncio and on trio.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, cast
from weakref import WeakKeyDictionary

import anyio
from anyio import CancelScope, Event, NoEventLoopError, get_current_task
from anyio.abc import AsyncBackend
from anyio.lowlevel import current_token

_log = logging.getLogger(__name__)

_backend: type[AsyncBackend] | None = None
"""The async library of the loop found last. Most programs have one only."""


class LoopHandle:
    """The event loop and thread it was made in. Made outside of any loop, it runs callbacks directly."""

    __slots__ = ("_loop", "_thread")

    def __init__(self) -> None:
        self._loop, self._thread = running_loop(), get_ident()

    @property
    def is_here(self) -> bool:
        """Whether this is the loop's thread; True for one that was made outside of any loop."""
        return self._loop is None or get_ident() == self._thread

    def run(self, callback: Callable[[], object]) -> None:
        """Run the callback now if this is the loop's thread, else on the loop's next turn.

        An exception of the callback is raised here in the first case and logged in the second. A signal handler runs in
        the loop's thread, possibly while the loop sleeps: the loop is woken then, and on trio the callback runs on its
        next turn.
        """
        loop = self._loop
        if loop is None:
            callback()
        elif get_ident() != self._thread:
            call_soon(loop, callback)
        elif isinstance(loop, asyncio.AbstractEventLoop):
            # Outside of any task: a callback of the loop, or a signal handler while the loop sleeps. A task that the
            # callback makes ready would not wake a sleeping loop.
            if not getattr(loop, "is_awake", False) and asyncio.current_task(loop) is None:
                call_soon(loop, _nothing)
            callback()
        elif _is_in_trio_task():
            callback()
        else:
            # A signal handler in the middle of a turn: a task that is made ready now could be lost.
            call_soon(loop, callback)

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Run the callback as `call_soon` does."""
        call_soon(self._loop, callback)


def running_loop() -> Any:
    """Return the running event loop, as `call_soon` takes it; None if no loop runs.

    It is the native token of anyio's `current_token`, for a tenth of the time: anyio detects the async library at each
    call. If trio runs as the guest of another loop, either may be returned; both run in this thread.
    """
    global _backend
    if (loop := asyncio._get_running_loop()) is not None:
        return loop
    if _backend is not None:
        try:
            return _backend.current_token()
        except RuntimeError:  # both libraries: no loop of theirs runs here
            pass
    try:
        token = current_token()
    except NoEventLoopError:
        return None
    _backend = token.backend_class
    return token.native_token


def running_task() -> Any:
    """Return the task that runs in this thread, of asyncio or of trio; None outside of tasks.

    For asyncio in a fifth of the time of anyio's `get_current_task`, which describes it, too.
    """
    loop = asyncio._get_running_loop()
    if loop is not None and (task := asyncio.current_task(loop)) is not None:
        return task
    try:
        return get_current_task().id
    except RuntimeError:
        return None


def _loop_of_task() -> asyncio.AbstractEventLoop | None:
    """Return the loop of asyncio whose task runs now; None in a task of trio, also of a guest, and outside of tasks."""
    loop = asyncio._get_running_loop()
    return loop if loop is not None and asyncio.current_task(loop) is not None else None


def call_soon(loop: Any, callback: Callable[[], object]) -> None:
    """Run the callback on the loop's next turn, from any thread; now if `loop` is None or has finished.

    An exception of the callback is logged with its traceback and not raised.
    """
    if loop is not None:
        # An asyncio loop has the first, a trio token the second; both may be called from any thread.
        soon = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon
        try:
            soon(_run_logged, callback)
            return
        except RuntimeError:  # both libraries: that loop has finished
            pass
    _run_logged(callback)


def _run_logged(callback: Callable[[], object]) -> None:
    """Run the callback and log its exception, of whatever class.

    The loop serves every request, and one callback must not end it: trio would cancel all tasks for any exception
    (`TrioInternalError`), asyncio would stop for KeyboardInterrupt and SystemExit. A Ctrl-C is not lost by this: trio
    does not interrupt such a callback, and `asyncio.run` turns it into a cancellation.
    """
    try:
        callback()
    except BaseException:
        _log.exception("the callback %r failed", callback)


def _is_in_trio_task() -> bool:
    """Return whether a task of this thread's trio loop is running now."""
    try:
        get_current_task()
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    """Scheduled on a loop only to wake it."""


def clock() -> Callable[[], float]:
    """Return the clock of the running loop: each call of it returns the loop's time in seconds.

    Take it once and keep it wherever time is read in a plain callback of the loop, such as the release after a dropped
    stream: `anyio.current_time` finds no loop there. It is also faster, because `anyio.current_time` detects the async
    library at each call: measured on asyncio, a tenth of the cost. Raise NoEventLoopError if no loop runs.
    """
    if (loop := _loop_of_task()) is not None:
        return loop.time
    token = current_token()
    return getattr(token.native_token, "time", None) or token.backend_class.current_time


def current_time() -> float:
    """Return the loop's time in seconds, as `anyio.current_time` does, in a task of asyncio for a third of the cost."""
    return anyio.current_time() if (loop := _loop_of_task()) is None else loop.time()


virtual_clocks: MutableMapping[Any, Callable[[int], None]] = WeakKeyDictionary()
"""Loop in virtual time -> function called with 1 when a thread begins work for it, and with -1 at its end."""


@contextmanager
def time_held() -> Iterator[None]:
    """Stop the virtual clock inside the block; a real clock is not affected.

    Used by a task that waits for a thread. A virtual clock jumps to the next deadline whenever all tasks wait, so it
    would pass every deadline before the thread has done anything.
    """
    hold = virtual_clocks.get(running_loop()) if virtual_clocks else None
    if hold is None:
        yield
        return
    hold(1)
    try:
        yield
    finally:
        hold(-1)


class Wakeup:
    """Wakes the one task that waits for it. All calls are made in one loop and thread.

    It replaces one `anyio.Event` for each wait, on asyncio at a third of the cost, for tasks that wait once an item. A
    wake-up while no task waits is lost: check the condition before each wait.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        loop: Any = _loop_of_task() or current_token().native_token
        self._loop: Any = loop if hasattr(loop, "create_future") else None
        self._waiting: Any = None

    def wake(self) -> None:
        """Wake the waiting task, if there is one."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if self._loop is None:
            waiting.set()
        elif not waiting.done():  # a cancelled wait has left it behind
            waiting.set_result(None)

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits; on trio also if its wait was cancelled."""
        waiting = self._waiting
        return waiting is not None and (self._loop is None or not waiting.done())

    def wait(self) -> Awaitable[None]:
        """Return at the next `wake`. Await it at once; on asyncio it is the bare future, without a frame of its own."""
        if self._loop is None:
            self._waiting = event = Event()
            return event.wait()
        self._waiting = future = self._loop.create_future()
        return cast("Awaitable[None]", future)


class Timer(Wakeup):
    """Wakes the one task that waits for a time. All calls are made in one loop and thread.

    It replaces `anyio.sleep_until`, on asyncio at half the cost, for tasks that sleep again and again. `wake` ends a
    wait early; without a waiting task it does nothing.
    """

    __slots__ = ("_order", "_virtual")

    def __init__(self) -> None:
        super().__init__()
        self._virtual: Any = self._loop if hasattr(self._loop, "call_at_rest") else None
        self._order: int = 0 if self._virtual is None else self._virtual.next_order()

    @property
    def is_exact(self) -> bool:
        """Whether time is virtual: waits end at their exact time and cost nothing, and `settle` has an effect.

        Then timers that are due at the same time wake their tasks in the order in which they were made.
        """
        return self._virtual is not None

    async def wait_until(self, deadline_s: float) -> None:
        """Return at that time of the loop's clock, now if it is past, or earlier at a `wake`."""
        if self._loop is None:
            with CancelScope(deadline=deadline_s):
                await self.wait()
            return
        self._waiting = future = self._loop.create_future()
        if self._virtual is None:
            timer = self._loop.call_at(deadline_s, _wake, future)
        else:
            timer = self._virtual.call_in_order(deadline_s, self._order, _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    async def settle(self, since_s: float | None = None) -> None:
        """Return once every other task due at this virtual moment has run; immediately in real time.

        Of several tasks that settle, the one with the oldest timer goes on first. `since_s` is when the moment began,
        by default now.
        """
        if self._virtual is not None:
            future = self._loop.create_future()
            self._virtual.call_at_rest(self._order, since_s, _wake, future)
            await future

    def stop_silently(self, times_s: Sequence[float]) -> None:
        """Let the virtual clock stop at these times, in order, as it would for waits of this timer; none: no longer.

        For a task that has run ahead, so that others read the same clock as if it had not.
        """
        if times_s:
            self._virtual.silent_times_s[self._order] = times_s
        else:
            self._virtual.silent_times_s.pop(self._order, None)

    def call_silently(self, time_s: float, call: Callable[[], float | None]) -> None:
        """Call at the end of the virtual moment at that time, and again when the call returns a time.

        For what a task that has run ahead would do there: it costs a tenth of a wait.
        """
        self._virtual.call_silently(time_s, self._order, call)

    def has_settled(self, time_s: float) -> bool:
        """Return whether a `settle` that began at that virtual time, which is past, would have returned by now."""
        return self._virtual is None or self._virtual.has_rested(time_s)


def _wake(future: Any) -> None:
    if not future.done():  # a cancelled wait has left it behind
        future.set_result(None)
