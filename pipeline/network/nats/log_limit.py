"""LogLimit: warnings that others cause, at a bounded rate."""

from __future__ import annotations

import logging

from pipeline.loop import clock

EVERY_S = 10.0


class LogLimit:
    """Logs the first warning, then at most one in `every_s` seconds. For the loop's thread."""

    def __init__(self, log: logging.Logger, every_s: float = EVERY_S) -> None:
        self.suppressed = 0
        """Warnings left out since the last one that was logged."""
        self._log, self._every_s = log, every_s
        self._next_s = float("-inf")

    def warning(self, text: str, *args: object) -> None:
        """Log the warning, or count it."""
        now_s = clock()()
        if now_s < self._next_s:
            self.suppressed += 1
            return
        self._next_s = now_s + self._every_s
        more = f" ({self.suppressed} more such warnings were left out)" if self.suppressed else ""
        self.suppressed = 0
        self._log.warning(f"{text}{more}", *args)
