"""LogLimit: warnings that others cause, at a bounded rate."""

from __future__ import annotations

import logging

from pipeline.loop import clock

EVERY_S = 10.0


class LogLimit:
    """Logs the first `lines` warnings in `every_s` seconds, and counts those beyond. For the loop's thread."""

    def __init__(self, log: logging.Logger, *, lines: int = 1, every_s: float = EVERY_S) -> None:
        self.suppressed = 0
        """Warnings left out since the last one that was logged."""
        self._log, self._lines, self._every_s = log, lines, every_s
        self._left, self._until_s = lines, float("-inf")

    def warning(self, text: str, *args: object) -> None:
        """Log the warning, or count it."""
        now_s = clock()()
        if now_s >= self._until_s:
            self._left, self._until_s = self._lines, now_s + self._every_s
        if not self._left:
            self.suppressed += 1
            return
        self._left -= 1
        more = f" ({self.suppressed} more such warnings were left out)" if self.suppressed else ""
        self.suppressed = 0
        self._log.warning(f"{text}{more}", *args)
