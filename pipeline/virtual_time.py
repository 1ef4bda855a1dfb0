"""Virtual time: waiting costs nothing, on trio and on asyncio.

Whenever every task waits, the clock jumps to the next deadline. The code under test is the production code; it only
has to take its time from anyio.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from heapq import heapify, heappop, heappush
from math import inf, isinf, nextafter
from operator import itemgetter
from typing import Any, Literal, TypeVar, TypeVarTuple

import anyio

from .loop import running_loop, virtual_clocks

T = TypeVar("T")
Args = TypeVarTuple("Args")
_BLIND_TURNS = 64
"""Turns in a row without polling the selector, before it is polled: a task may spin until a socket is ready."""

_OWN_SOCKETS = 1
"""A loop's own sockets: where there are no others, the selector is not polled each time the clock jumps. What brings a
thread is ready without it, and signals come within `_BLIND_TURNS`."""

_SAME_MOMENT_S = 1e-9
"""Times this close are one moment: a clock in seconds does not represent each millisecond exactly."""

_CANCELLED_KEPT = 100
"""Cancelled timers stay until their time; beyond this number, and half of all timers, they are removed."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time, starting at 0.

    Each timer runs at exactly its time. Timers of the same time run in their order: that of their creation, or the
    fixed one of a `Timer`, which is that of the `Timer`'s creation.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool
    _selector: selectors.BaseSelector
    _process_events: Callable[[Any], None]
    _check_closed: Callable[[], None]

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled_timers = 0
        self._orders = itertools.count()
        self._at_rest: list[tuple[int, float, asyncio.Handle]] = []
        self._rested_before_s = 0.0
        self.silent_times_s: dict[int, Sequence[float]] = {}
        """Times at which nothing happens, in order, and yet the clock stops as for a timer: what a task that has run
        ahead would do then. By the order of the task's timer."""
        self._silent_calls: list[tuple[float, int, int, Callable[[], float | None]]] = []
        self.is_awake = True
        """Whether it runs, and does not sleep until a socket is ready."""
        self._threads = 0
        self._blind = 0
        super().__init__()
        virtual_clocks[self] = self._hold

    def time(self) -> float:
        return self._now_s

    def close(self) -> None:
        super().close()
        self._timers.clear()
        self._at_rest.clear()
        self._silent_calls.clear()

    def _hold(self, more_threads: int) -> None:
        """Count the threads that work for the loop; time stands still meanwhile."""
        self._threads += more_threads

    def _run_once(self) -> None:
        """One turn. As long as something is ready time stands still, and for some turns the selector is not polled."""
        ready, timers = self._ready, self._timers
        self._blind += 1
        if timers and timers[0][0] <= self._now_s:
            self._take_timers()
        if self._stopping or self._blind > _BLIND_TURNS:
            self._poll(0)
        elif not ready:
            self._go_on()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _go_on(self) -> None:
        """Nothing is ready: run what waits for the end of this moment, else go on to the next timer."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            self._cancelled_timers -= 1
            heappop(timers)
        next_s = timers[0][0] if timers else inf
        while self._at_rest:
            silent_s = min(next_s, self._next_silent_s()) if self.silent_times_s else next_s
            if self._take_rested(silent_s):
                self._has_rested_before(min(next_s, nextafter(self._now_s + _SAME_MOMENT_S, inf)))
                return
            if silent_s == next_s:
                break
            self._now_s = silent_s
        if self._silent_calls and self._call_silently(next_s):
            return
        if self._threads or not timers:
            self._poll(None)
        elif len(self._selector.get_map()) == _OWN_SOCKETS or not self._poll(0):
            self._has_rested_before(next_s)
            self._now_s = next_s
            self._take_timers()

    def _call_silently(self, next_s: float) -> bool:
        """Make the silent calls of moments that end before this time; return True once one made anything ready."""
        calls = self._silent_calls
        while calls and calls[0][0] + _SAME_MOMENT_S < next_s:
            time_s, order, _, call = heappop(calls)
            self._now_s = max(self._now_s, time_s)
            self._has_rested_before(self._now_s)
            if (again_s := call()) is not None:
                self.call_silently(again_s, order, call)
            if self._ready:
                return True
        return False

    def _has_rested_before(self, time_s: float) -> None:
        """Callbacks at rest since a moment that ends before this time have run, or would have."""
        if time_s > self._rested_before_s:
            self._rested_before_s = time_s

    def _poll(self, timeout: float | None) -> bool:
        """Make ready what sockets and other threads bring; return whether anything is ready."""
        self._blind = 0
        self.is_awake = False
        try:
            found = self._selector.select(timeout)
        finally:
            self.is_awake = True
        self._process_events(found)
        return bool(self._ready)

    def _take_timers(self) -> None:
        """Make the timers of this time ready, in their order."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= self._now_s:
            handle = heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            if handle._cancelled:
                self._cancelled_timers -= 1
            else:
                ready.append(handle)

    def _next_silent_s(self) -> float:
        """Return the first of the silent times after now."""
        now_s, first_s = self._now_s, inf
        for times_s in self.silent_times_s.values():
            at = bisect_right(times_s, now_s)
            if at < len(times_s) and times_s[at] < first_s:
                first_s = times_s[at]
        return first_s

    def _take_rested(self, next_s: float) -> bool:
        """Make ready what waits for the end of its moment, if the next timer is later; return whether there was any."""
        at_rest = self._at_rest
        if len(at_rest) == 1:  # as nearly always
            if at_rest[0][1] + _SAME_MOMENT_S >= next_s:
                return False
            self._ready.append(at_rest.pop()[2])
            return True
        later = [one for one in at_rest if one[1] + _SAME_MOMENT_S >= next_s]
        rested = [one for one in at_rest if one[1] + _SAME_MOMENT_S < next_s]
        at_rest[:] = later
        self._ready.extend(handle for _, _, handle in sorted(rested, key=itemgetter(0)))
        return bool(rested)

    def next_order(self) -> int:
        """Return the place of the next timer among those of the same time."""
        return next(self._orders)

    def call_at_rest(
        self, order: int, since_s: float | None, callback: Callable[[*Args], object], *args: *Args
    ) -> asyncio.Handle:
        """Call back before time goes on, once nothing else is ready to run at this moment; the lowest order first.

        The moment began at `since_s`, by default now.
        """
        handle = asyncio.Handle(callback, args, self)
        self._at_rest.append((order, self._now_s if since_s is None else since_s, handle))
        return handle

    def call_silently(self, time_s: float, order: int, call: Callable[[], float | None]) -> None:
        """Call at the end of the moment at that time, before time goes on; the lowest order first.

        It is a function, not a task: the call costs a tenth of a timer. It returns when it is to be called again, or
        None.
        """
        heappush(self._silent_calls, (time_s, order, next(self._orders), call))

    def has_rested(self, time_s: float) -> bool:
        """Return whether a callback that was to run at rest since that time, which is past, would have run by now."""
        return time_s + _SAME_MOMENT_S < self._rested_before_s

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As in any loop; only that a timer for the end of time is no deadline to jump towards."""
        return self._call_at(when, next(self._orders), callback, args, context)

    def call_in_order(
        self, when: float, order: int, callback: Callable[[*Args], object], *args: *Args
    ) -> asyncio.TimerHandle:
        """As `call_at`, with this order among timers of the same time."""
        return self._call_at(when, order, callback, args, None)

    def _call_at(
        self, when: float, order: int, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        self._check_closed()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not isinf(when):
            handle._scheduled = True  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            heappush(self._timers, (when, order, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by a timer that is cancelled."""
        if not handle._scheduled:  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            return
        self._cancelled_timers += 1
        timers = self._timers
        if self._cancelled_timers > _CANCELLED_KEPT and 2 * self._cancelled_timers > len(timers):
            # The handle that is being cancelled does not show it yet.
            timers[:] = [one for one in timers if not (one[2].cancelled() or one[2] is handle)]
            heapify(timers)
            self._cancelled_timers = 0


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
