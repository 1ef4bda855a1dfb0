"""OpenFiles: logs that the process has no file descriptor left for a new connection.

uvloop closes such a connection silently; asyncio reports each attempt with a traceback, thousands of times. Here it is
one line a minute.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_AGAIN_S = 60.0
"""Seconds until it is logged again while it lasts."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


class OpenFiles:
    """The watch over one listening socket; `check` is called now and then."""

    def __init__(self, file: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._logged_s: float | None = None
        self._is_exhausted = False

    def check(self) -> None:
        """Duplicate and close a descriptor. Log an error if none is left, and a warning when there is one again."""
        try:
            os.close(os.dup(self._file))
        except OSError as error:
            self.record(error)
        else:
            if self._is_exhausted:
                _log.warning("new connections are taken again")
            self._is_exhausted = False

    def record(self, error: OSError) -> bool:
        """Record an error of the system. Return whether it means that no descriptor is left."""
        if error.errno not in _EXHAUSTED:
            return False
        self._is_exhausted = True
        now_s = self._clock()
        if self._logged_s is None or now_s - self._logged_s >= _AGAIN_S:
            self._logged_s = now_s
            _log.error("no new connections are taken: %s", _reason(error))
        return True

    def handler(self, before: Callable[[Any, dict[str, Any]], object] | None) -> Callable[[Any, dict[str, Any]], None]:
        """Return an exception handler for the event loop that handles only those of the listening socket."""

        def handle(loop: Any, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if "socket" in context and isinstance(error, OSError) and self.record(error):
                return
            if before is None:
                loop.default_exception_handler(context)
            else:
                before(loop, context)

        return handle


def _reason(error: OSError) -> str:
    if error.errno == errno.ENFILE:
        return "the system has as many files open as it can"
    return f"this process has as many files open as it may, {_limit()} (`ulimit -n` raises that)"


def _limit() -> int | str:
    try:
        import resource
    except ImportError:  # missing on Windows
        return "all"
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
