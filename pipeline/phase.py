"""A RequestTracker on the running event loop's clock, and where a request has it.

The tracker itself is data and knows no event loop; what waits in its phase barrier is an anyio semaphore, which any
task may release (a lock only its owner), because the permit is handed to the task that prefills.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from .context import AnyContext
from .protocols import RequestTracker

TRACKER = "request_tracker"
"""Registry entry where a request's tracker is left, for those above the stage that makes it."""


def _one_permit() -> anyio.Semaphore:
    return anyio.Semaphore(1, max_value=1, fast_acquire=True)


def track_request(wall_ms: Callable[[], int]) -> RequestTracker:
    """A tracker whose request is received now; `wall_ms` gives milliseconds since the epoch."""
    return RequestTracker(anyio.current_time, wall_ms, _one_permit)


def tracker_of(request: AnyContext) -> RequestTracker | None:
    """The tracker a stage has left in the request's registry; None if there is none."""
    return request.registry.get_optional(TRACKER, RequestTracker)
