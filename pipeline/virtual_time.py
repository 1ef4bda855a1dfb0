"""Virtual time: waiting costs nothing, on trio and on asyncio.

Whenever every task waits, the clock jumps to the next deadline. The code under test is the production code; it only
has to take its time from anyio.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context
from math import inf, isinf
from typing import Any, Literal, TypeVar, TypeVarTuple

import anyio

from .loop import running_loop, virtual_clocks

T = TypeVar("T")
Args = TypeVarTuple("Args")
_BLIND_TURNS = 64
"""Turns in a row without polling the selector, before it is polled: a task may spin until a socket is ready."""

_SAME_MOMENT_S = 1e-9
"""asyncio runs timers that are this close together."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps for a timer: records how long it should have slept instead."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s = 0.0
        self.threads = 0
        """How many threads work for the loop; time stands still meanwhile."""

    def hold(self, more_threads: int) -> None:
        self.threads += more_threads

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:  # nothing but other threads or sockets to wait for, or no wait at all
            return super().select(timeout)
        if self.threads:
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.slept_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time, starting at 0."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _debug: bool

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._at_rest: list[asyncio.Handle] = []
        self._blind = 0
        super().__init__(self._jumping)
        virtual_clocks[self] = self._jumping.hold

    def time(self) -> float:
        return self._jumping.slept_s

    def _run_once(self) -> None:
        """One turn. As long as something is ready and no timer is due, time stands still: then neither timers nor, for
        some turns, the selector are looked at. It is what a turn of the base class does without them."""
        ready, timers = self._ready, self._scheduled
        if self._at_rest and not ready and not self._has_timer_now():
            ready.extend(self._at_rest)
            self._at_rest.clear()
        self._blind += 1
        has_timer = timers and timers[0].when() <= self._jumping.slept_s
        if not ready or has_timer or self._debug or self._blind > _BLIND_TURNS:
            self._blind = 0
            super()._run_once()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
            return
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _has_timer_now(self) -> bool:
        """Return whether a timer is due at this moment. One that was cancelled may lie before it."""
        timers, last_s = self._scheduled, self._jumping.slept_s + _SAME_MOMENT_S
        if not timers or timers[0].when() > last_s:
            return False
        return any(timer.when() <= last_s and not timer.cancelled() for timer in timers)

    def call_at_rest(self, callback: Callable[[*Args], object], *args: *Args) -> asyncio.Handle:
        """Call back before time goes on, once nothing else is ready to run at this moment."""
        handle = asyncio.Handle(callback, args, self)
        self._at_rest.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in any loop; only that a timer for the end of time is no deadline to jump towards."""
        if isinf(when):
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)


def virtual_time(backend: Literal["trio", "asyncio"] = "asyncio") -> tuple[str, dict[str, Any]]:
    """Return a backend with its options, clock at 0: for `anyio.run`, and for pytest's `anyio_backend` fixture.

    Take a new one for each run. Raise ModuleNotFoundError for "trio" if trio is not installed.
    """
    if backend == "asyncio":
        return backend, {"loop_factory": VirtualTimeLoop}
    try:
        from trio.testing import MockClock  # optional
    except ModuleNotFoundError as missing:
        text = "virtual time on trio needs trio, which penstock does not bring: pip install trio"
        raise ModuleNotFoundError(text, name=missing.name) from missing

    from trio.abc import Instrument

    clock = MockClock(autojump_threshold=0)
    threads = 0

    def hold(more: int) -> None:
        nonlocal threads
        threads += more
        clock.autojump_threshold = inf if threads else 0

    class Known(Instrument):
        """Makes the clock known to `pipeline.loop` once it is that of a loop."""

        def before_run(self) -> None:
            virtual_clocks[running_loop()] = hold

    return backend, {"clock": clock, "instruments": [Known()]}


def run_in_virtual_time(
    main: Callable[[*Args], Awaitable[T]], *args: *Args, backend: Literal["trio", "asyncio"] = "asyncio"
) -> T:
    """Run the async function to its end in virtual time and return its result."""
    name, options = virtual_time(backend)
    return anyio.run(main, *args, backend=name, backend_options=options)
