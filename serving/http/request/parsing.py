"""Parser: a short body becomes a record at once, a long one in a worker thread."""

from __future__ import annotations

import time
from functools import partial
from typing import TypeVar

import anyio
from anyio import CapacityLimiter, from_thread
from anyio.lowlevel import RunVar

from pipeline import ResourceExhausted
from pipeline.errors import ExceededLimit
from pipeline.loop import time_held

from ..options import HttpOptions
from .body import Body
from .headers import parse

T = TypeVar("T")

_WORK_S, _REST_S = 0.002, 0.0002


class _Threads:
    """The threads of one loop, and the bytes of the bodies in them and before them."""

    def __init__(self, count: int) -> None:
        self.places = CapacityLimiter(count)
        self.size_bytes = 0


_threads: RunVar[_Threads] = RunVar("penstock.parser_threads")


class TooMuchToParse(ResourceExhausted):
    """The long bodies that wait for a thread hold as many bytes as they may. `retry_after_s` is when to try again."""

    retry_after_s = 1.0


async def parsed(body: Body, kind: type[T], options: HttpOptions) -> T:
    """Return the record in a body; see `parse` for what is raised.

    The parsing of a long body ends soon after its task is cancelled, which does not wait for that. Raise TooMuchToParse
    if those that are parsed or wait for that, which they do also when their clients have left, hold more than
    `max_body_bytes_in_flight`.
    """
    limits = options.limits
    work = partial(parse, body.content, kind, limits, options.request_limits)
    if body.is_short:
        return work()
    threads, size_bytes = _threads_of_loop(limits.parser_threads), len(body.content)
    if 0 < limits.max_body_bytes_in_flight < threads.size_bytes + size_bytes:
        name, limit = "max_body_bytes_in_flight", limits.max_body_bytes_in_flight
        raise TooMuchToParse(
            "too much waits to be parsed", exceeded=ExceededLimit(name, threads.size_bytes + size_bytes, limit)
        )
    threads.size_bytes += size_bytes
    try:
        run = partial(work, pause=_Pause())
        with time_held():
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=threads.places)
    finally:
        threads.size_bytes -= size_bytes


def _threads_of_loop(count: int) -> _Threads:
    try:
        return _threads.get()
    except LookupError:
        threads = _Threads(count)
        _threads.set(threads)
        return threads


class _Pause:
    """Called between pieces of work in a thread. Lets the loop's thread run every few milliseconds.

    Raise what ends the thread's work if the task that waits for it was cancelled.
    """

    def __init__(self) -> None:
        self._rests_at_s = 0.0

    def __call__(self) -> None:
        if time.monotonic() >= self._rests_at_s:
            from_thread.check_cancelled()
            time.sleep(_REST_S)  # Python would let the thread that waits run only after 5 ms
            self._rests_at_s = time.monotonic() + _WORK_S
