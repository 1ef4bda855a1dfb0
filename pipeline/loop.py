"""Where a callback belongs: the event loop and thread it was made in; and cheap ways to wake one task.

Control crosses threads (a signal handler, an engine's own thread), loops do not. A `Home` remembers the loop that ran
when it was taken and brings a callback back to it, on asyncio and trio alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from anyio import CancelScope, Event, NoEventLoopError, get_current_task, sleep_until
from anyio.abc import AsyncBackend
from anyio.lowlevel import current_token

_log = logging.getLogger(__name__)

_backend: type[AsyncBackend] | None = None
"""The library of the loop that was asked for last: a program mostly has one."""


class Home:
    """The loop and thread of the moment it was made; no loop at all counts as one."""

    __slots__ = ("_loop", "_thread")

    def __init__(self) -> None:
        self._loop, self._thread = running_loop(), get_ident()

    def run(self, callback: Callable[[], object]) -> None:
        """Call back at once in the loop's own thread, else on the loop's next turn.

        What the callback raises goes to the caller in the first case, and is logged in the second. A signal handler
        runs in the loop's thread, maybe while the loop sleeps: the loop is woken then, and on trio the callback waits
        for the loop's next turn.
        """
        loop = self._loop
        if loop is None:
            callback()
        elif get_ident() != self._thread:
            call_soon(loop, callback)
        elif isinstance(loop, asyncio.AbstractEventLoop):
            # Outside of any task: a callback of the loop, or a signal handler while the loop sleeps. What the callback
            # makes ready does not wake it.
            if asyncio.current_task(loop) is None:
                call_soon(loop, _nothing)
            callback()
        elif _is_in_trio_task():
            callback()
        else:
            # In the middle of a turn: a task that is made ready now could be forgotten.
            call_soon(loop, callback)

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Call back as `call_soon` does."""
        call_soon(self._loop, callback)


def running_loop() -> Any:
    """The loop that runs here, for `call_soon`; None without one.

    As anyio's `current_token`, which finds out anew each time which library it is, for a third of its time. Where trio
    is the guest of another loop it may be that one: both are of this thread, which is what counts for a callback.
    """
    global _backend
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


def call_soon(loop: Any, callback: Callable[[], object]) -> None:
    """Call back on the loop's next turn, from any thread; at once where there is no loop, or none any more.

    What the callback raises is logged with its traceback and goes no further.
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
    """Call back, and log what that raises.

    Also what is no Exception. The loop belongs to every request, and one callback must not end it: trio would cancel
    all tasks for any of them (`TrioInternalError`), asyncio would stop for KeyboardInterrupt and SystemExit. A Ctrl-C
    is not lost by that: it does not interrupt such a callback on trio, and `asyncio.run` turns it into a cancellation.
    """
    try:
        callback()
    except BaseException:
        _log.exception("the callback %r failed", callback)


def _is_in_trio_task() -> bool:
    """Return whether a task of the trio loop of this thread runs now."""
    try:
        get_current_task()
    except RuntimeError:
        return False
    return True


def _nothing() -> None:
    """What a loop is called with to wake it."""


def clock() -> Callable[[], float]:
    """Return the clock of the running loop: each call of it returns the loop's time in seconds.

    Take it once and keep it wherever time is read in a plain callback of the loop, such as the release after a dropped
    stream: `anyio.current_time` finds no loop there. It is also faster, because `anyio.current_time` detects the async
    library at each call: measured on asyncio, a tenth of the cost. Raise NoEventLoopError if no loop runs.
    """
    token = current_token()
    return getattr(token.native_token, "time", None) or token.backend_class.current_time


virtual_clocks: MutableMapping[Any, Callable[[int], None]] = WeakKeyDictionary()
"""Loop in virtual time -> what is called with 1 when a thread begins to work for it and with -1 when it has ended."""


@contextmanager
def time_held() -> Iterator[None]:
    """Keep virtual time from passing inside the block; real time is left alone.

    For a task that waits for a thread. A virtual clock jumps whenever all tasks wait, and would otherwise be past every
    deadline before the thread has done anything.
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


class Bell:
    """Wakes the one task that waits for it; made, rung and waited for in one loop and thread.

    What an `anyio.Event` of its own for each wait would do, on asyncio at a third of the cost: for those who wait once
    an item. A ring that nobody waits for is lost, so look before you wait.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        loop = current_token().native_token
        self._loop: Any = loop if hasattr(loop, "create_future") else None
        self._waiting: Any = None

    def ring(self) -> None:
        """Wakes the task that waits, if one does."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if self._loop is None:
            waiting.set()
        elif not waiting.done():  # a cancelled wait has left it behind
            waiting.set_result(None)

    async def wait(self) -> None:
        """Returns when it is rung."""
        if self._loop is None:
            self._waiting = event = Event()
            await event.wait()
        else:
            self._waiting = future = self._loop.create_future()
            await future


class Alarm:
    """Wakes the one task that waits for a time; made, rung and waited for in one loop.

    What `anyio.sleep_until` does, on asyncio at half the cost: for those who sleep again and again. A ring wakes before
    the time; one that nobody waits for is lost.
    """

    __slots__ = ("_loop", "_rest", "_timer", "_waiting")

    def __init__(self) -> None:
        loop = current_token().native_token
        self._loop: Any = loop if hasattr(loop, "call_at") else None
        self._rest: Any = getattr(loop, "call_at_rest", None)
        self._timer: Any = None
        self._waiting: Any = None

    @property
    def is_exact(self) -> bool:
        """Whether it wakes at the very time, for nothing: then the shortest wait is worth it, and `settle` waits."""
        return self._rest is not None

    async def wait(self, deadline_s: float) -> None:
        """Returns at that time of the loop's clock, or at once if it is past, or when it is rung before."""
        if self._loop is None:
            with CancelScope() as self._waiting:
                await sleep_until(deadline_s)
            return
        self._waiting = future = self._loop.create_future()
        self._timer = timer = self._loop.call_at(deadline_s, _wake, future)
        try:
            await future
        except BaseException:
            timer.cancel()
            raise

    def ring(self) -> None:
        """Wakes the task that waits, if one does."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        if self._loop is None:
            waiting.cancel()
        else:
            self._timer.cancel()
            _wake(waiting)

    async def settle(self) -> None:
        """Returns when all else that happens at this moment has; at once on a loop that cannot tell."""
        if self._rest is not None:
            future = self._loop.create_future()
            self._rest(_wake, future)
            await future


def _wake(future: Any) -> None:
    if not future.done():  # a cancelled wait has left it behind
        future.set_result(None)
