"""Parser: a short body becomes a record at once, a long one in a worker thread."""

from __future__ import annotations

import time
from functools import partial
from typing import TypeVar

import anyio
from anyio import CapacityLimiter, from_thread
from anyio.lowlevel import RunVar

from .body import Body
from .options import HttpOptions
from .request import parse

T = TypeVar("T")

_WORK_S, _REST_S = 0.002, 0.0002

_threads: RunVar[CapacityLimiter] = RunVar("penstock.parser_threads")


async def parsed(body: Body, kind: type[T], options: HttpOptions) -> T:
    """Return the record in a body; see `parse` for what is raised.

    The parsing of a long body ends soon after its task is cancelled, which does not wait for that.
    """
    work = partial(parse, body.content, kind, options.limits, options.request_limits)
    if body.is_short:
        return work()
    try:
        threads = _threads.get()
    except LookupError:
        threads = CapacityLimiter(options.limits.parser_threads)
        _threads.set(threads)
    return await anyio.to_thread.run_sync(partial(work, pause=_Pause()), abandon_on_cancel=True, limiter=threads)


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
