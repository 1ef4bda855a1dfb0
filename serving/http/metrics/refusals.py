"""Refusals: requests and connections that a limit refused, as a metric and as log messages that cannot fill a disk.

    refusals.report(problem, request_id, caller)      for every problem that is answered; it ignores all others

Any thread may call it, including code that knows only connections.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from threading import Lock

from attrs import define

from pipeline.telemetry import Metrics

from ...log_format import with_fields
from ...problems import Problem

_log = logging.getLogger(__name__)

LOG_INTERVAL_S = 1.0
"""Least time between two messages of one limit."""
LIMITS_MAX = 128
"""Limits with a label and messages of their own: a worker may send any name."""
OTHER = "other"
"""The label of all other limits."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")


@define
class _Logged:
    """The last message of one limit."""

    at_s: float | None = None
    """When it was written; None before the first one."""
    left_out: int = 0
    """Refusals since then without a message."""


class Refusals:
    """Counts each refusal by a limit in `refused_requests_total`, and logs the first of each limit in a second.

    The next message of the limit has the number of those left out.
    """

    def __init__(self, metrics: Metrics, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is a monotonic clock."""
        self._metrics = metrics
        self._now_s = now_s
        self._logged: dict[str, _Logged] = {}
        self._lock = Lock()

    def report(self, problem: Problem, request_id: str | None = None, caller: str | None = None) -> None:
        """Count the problem and perhaps log it, if a limit refused; `caller` is the client by its key or address."""
        if (exceeded := problem.exceeded) is None:
            return
        name = exceeded.name
        with self._lock:
            if name not in self._logged and (len(self._logged) >= LIMITS_MAX or _NAME.fullmatch(name) is None):
                name = OTHER
            left_out = self._next_message(self._logged.setdefault(name, _Logged()))
        self._metrics.add("refused_requests_total", 1, limit=name)
        if left_out is None:
            return
        fields = with_fields(
            request=request_id,
            caller=caller,
            status=problem.status,
            limit=exceeded.name,
            value=exceeded.value,
            threshold=exceeded.threshold,
            left_out=left_out or None,
        )
        more = f"; {left_out} more since the last message" if left_out else ""
        text = "refused with %d by %s: %.15g, at most %.15g, from %s%s"
        place = (problem.status, exceeded.name, exceeded.value, exceeded.threshold, caller or "an unknown client", more)
        _log.warning(text, *place, extra=fields)

    def report_connection(self, problem: Problem, client: str) -> None:
        """Report the problem of a connection without a request; `client` is its address, empty if unknown."""
        self.report(problem, None, client or None)

    def _next_message(self, logged: _Logged) -> int | None:
        """Return the number left out before this refusal, None if this one is left out itself."""
        now_s = self._now_s()
        if logged.at_s is not None and now_s - logged.at_s < LOG_INTERVAL_S:
            logged.left_out += 1
            return None
        left_out, logged.left_out, logged.at_s = logged.left_out, 0, now_s
        return left_out
