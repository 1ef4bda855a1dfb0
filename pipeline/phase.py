"""A RequestTracker on the running event loop's clock.

The tracker itself is data and knows no event loop; what waits in its phase barrier is an anyio semaphore, which any
task may release (a lock only its owner), because the permit is handed to the task that prefills.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from .protocols import RequestTracker


def _one_permit() -> anyio.Semaphore:
    return anyio.Semaphore(1, max_value=1, fast_acquire=True)


def track_request(wall_ms: Callable[[], int]) -> RequestTracker:
    """A tracker whose request is received now; `wall_ms` gives milliseconds since the epoch."""
    return RequestTracker(anyio.current_time, wall_ms, _one_permit)
