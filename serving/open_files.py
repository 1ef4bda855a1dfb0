"""OpenFiles: notices that the process has no file descriptor left for a new connection.

uvloop closes a connection it has no descriptor for, without any word; asyncio reports each attempt with a traceback,
thousands of times. Here it is one line, now and then.
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
"""After what time it is logged again while it goes on."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


class OpenFiles:
    """For one listening socket; `look` now and then."""

    def __init__(self, file: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._said_s: float | None = None
        self._is_exhausted = False

    def look(self) -> None:
        """Takes a descriptor and gives it back. Logs an error if there is none, and when there is one again."""
        try:
            os.close(os.dup(self._file))
        except OSError as error:
            self.found(error)
        else:
            if self._is_exhausted:
                _log.warning("new connections are taken again")
            self._is_exhausted = False

    def found(self, error: OSError) -> bool:
        """Takes an error of the system; return whether it means that there is no descriptor left."""
        if error.errno not in _EXHAUSTED:
            return False
        self._is_exhausted = True
        now_s = self._clock()
        if self._said_s is None or now_s - self._said_s >= _AGAIN_S:
            self._said_s = now_s
            _log.error("no new connections are taken: %s", _reason(error))
        return True

    def handler(self, before: Callable[[Any, dict[str, Any]], object] | None) -> Callable[[Any, dict[str, Any]], None]:
        """A handler of exceptions for the event loop that takes those of the listening socket, and no others."""

        def handle(loop: Any, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if "socket" in context and isinstance(error, OSError) and self.found(error):
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
    except ImportError:  # there is none on Windows
        return "all"
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
