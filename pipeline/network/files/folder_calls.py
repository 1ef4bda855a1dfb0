"""Calls of blocking functions on a folder: in one thread, bounded, with the errors of the project."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio

from pipeline import Unavailable
from pipeline.loop import clock
from pipeline.threads import WorkThreads

from .folder import Busy

T = TypeVar("T")

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
"""Seconds after which a folder that does not answer, or stays locked, counts as unreachable."""
_LOCK_RETRY_S = 0.02
_LOG_INTERVAL_S = 60.0


class FolderCalls:
    """Runs one function at a time, in the order of the calls.

    A network file system that hangs keeps one thread, not one for each call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = WorkThreads(1)

    async def run(self, work: Callable[[], T]) -> T:
        """Return what the function returns; while it finds the folder locked, call it again.

        Raise Unavailable if that takes too long, or for an OSError.
        """
        with anyio.move_on_after(CALL_TIMEOUT_S):
            while True:
                try:
                    return await self._threads.run(lambda _: work())
                except Busy:
                    await anyio.sleep(_LOCK_RETRY_S)
                except OSError as error:
                    raise Unavailable(f"the folder {self._path} cannot be used: {self._reason(error)}") from error
        raise Unavailable(f"the folder {self._path} did not answer within {CALL_TIMEOUT_S:g} s")

    def _reason(self, error: OSError) -> str:
        """Return what the system says, without its number, and which file of the folder it says it of."""
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            return "it is no folder, or stands below a file"
        found = error.strerror or str(error)
        if error.filename is None or (name := Path(os.fsdecode(error.filename))) == self._path:
            return found
        return f"{found}: {name.relative_to(self._path) if name.is_relative_to(self._path) else name}"


class FolderOutage:
    """Logs that a folder cannot be used: at once, then once a minute, and once when it can be used again."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._clock = clock()
        self._logged_s: float | None = None

    def failed(self, error: Exception) -> None:
        """Called after each failure."""
        if self._logged_s is None or self._clock() - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = self._clock()
            is_known = isinstance(error, Unavailable)
            _log.warning("%s: %s", self._what, error, exc_info=None if is_known else error)

    def ended(self) -> None:
        """Called after each success."""
        if self._logged_s is not None:
            self._logged_s = None
            _log.warning("%s: it works again", self._what)
