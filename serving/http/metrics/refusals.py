"""Refusals: what limits refused, as a metric and as messages that cannot fill a disk.

    refusals.note(problem, request_id, caller)      for each problem that is answered; any other is passed over

Any thread may call it, also code that knows connections only.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from threading import Lock

from attrs import define

from pipeline.errors import ExceededLimit
from pipeline.telemetry import Metrics

from ...log_format import with_fields
from ..problems import Problem

_log = logging.getLogger(__name__)

LOG_INTERVAL_S = 1.0
"""At least so long is between two messages of one limit."""
LIMITS_MAX = 128
"""Limits with a label and messages of their own: names may come from a worker."""
OTHER = "other"
"""The label of all others."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,63}")


@define
class _Said:
    """What was written of one limit: when, and how many were refused since."""

    at_s: float | None = None
    left_out: int = 0


class Refusals:
    """Counts each refusal by a limit in `refused_requests_total`, and logs the first of each limit in a second.

    The next message of the limit has how many were left out. `now_s` is a clock that only goes forward.
    """

    def __init__(self, metrics: Metrics, now_s: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._now_s = now_s
        self._said: dict[str, _Said] = {}
        self._lock = Lock()

    def note(self, problem: Problem, request_id: str | None = None, caller: str | None = None) -> None:
        """Count and perhaps log it, if a limit refused; `caller` is the client as limits per client know it."""
        if (exceeded := problem.exceeded) is None:
            return
        name = exceeded.name
        with self._lock:
            name = name if name in self._said or self._is_new_name(name) else OTHER
            said = self._said.setdefault(name, _Said())
            left_out = self._turn(said)
        self._metrics.add("refused_requests_total", 1, limit=name)
        if left_out is not None:
            _write(problem, exceeded, left_out, request_id, caller)

    def of_connection(self, problem: Problem, client: str) -> None:
        """`note` for code that knows connections, and no requests."""
        self.note(problem, None, client or None)

    def _is_new_name(self, name: str) -> bool:
        return len(self._said) < LIMITS_MAX and _NAME.fullmatch(name) is not None

    def _turn(self, said: _Said) -> int | None:
        """How many were left out before this one; None if it is left out itself."""
        now_s = self._now_s()
        if said.at_s is not None and now_s - said.at_s < LOG_INTERVAL_S:
            said.left_out += 1
            return None
        left_out, said.left_out, said.at_s = said.left_out, 0, now_s
        return left_out


def _write(
    problem: Problem, exceeded: ExceededLimit, left_out: int, request_id: str | None, caller: str | None
) -> None:
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
    text = "refused with %d by %s: %g, at most %g, from %s%s"
    place = (problem.status, exceeded.name, exceeded.value, exceeded.threshold, caller or "an unknown client", more)
    _log.warning(text, *place, extra=fields)
