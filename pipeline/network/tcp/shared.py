"""Shared: what all connections of a request plane have in common."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from attrs import frozen

from pipeline import PenstockError
from pipeline.rx import AnyIOScheduler

from .options import TcpOptions

_log = logging.getLogger(__name__)

LINES_MAX = 10
"""Lines of log for faults in `PERIOD`; those beyond are counted."""
PERIOD = timedelta(seconds=10)


class FaultLog:
    """A line for each fault of another side, but not many: whatever reaches a port can cause them."""

    def __init__(self, scheduler: AnyIOScheduler) -> None:
        self._scheduler = scheduler
        self._began: datetime | None = None
        self._lines = self._left_out = 0

    def record(self, peer: str, fault: PenstockError) -> None:
        """Log the fault for which a connection is closed."""
        now = self._scheduler.now
        if self._began is None or now - self._began >= PERIOD:
            if self._left_out:
                _log.warning("%d more connections were closed for faults", self._left_out)
            self._began, self._lines, self._left_out = now, 0, 0
        if self._lines < LINES_MAX:
            self._lines += 1
            _log.warning("closing the connection with %s: %s", peer or "another process", fault.render())
        else:
            self._left_out += 1


@frozen
class Shared:
    """The means of a plane's connections."""

    scheduler: AnyIOScheduler
    """Runs calls and timers."""
    options: TcpOptions
    faults: FaultLog
