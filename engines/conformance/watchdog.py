"""A time limit that holds where the loop's own does not: in a turn that does not end, and where its clock stands still.

An engine that waits in a blocking call keeps the loop from its timers, and in virtual time one that polls without a
pause keeps the clock from moving. So a thread looks at the clock on the wall. It ends a wait by a callback of the loop
and, where the loop does not come to that either, raises StoodStill inside the turn. Code that never comes back from a
call into C cannot be ended so; where it hangs is logged.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from types import FrameType

from attrs import define

from pipeline.loop import LoopHandle

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
