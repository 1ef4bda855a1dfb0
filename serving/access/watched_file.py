"""WatchedFiles: reload an object when one of its files changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

_log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
"""Seconds between two checks of the files. Polling needs no signal, and works on every file system."""

Stamp = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Calls `load` when a file has changed since the last call.

    `load` reads the files in a worker thread, and returns a function that the event loop calls to use the result. Its
    error is logged, and the former result stays in use until a file changes again. `what` names the object in the log.
    """

    def __init__(self, what: str, paths: Sequence[Path], load: Callable[[], Callable[[], object]]) -> None:
        self._what = what
        self._paths = paths
        self._load = load
        self._stamp = self._stamp_now()

    def _stamp_now(self) -> Stamp:
        return tuple(_stamp(path) for path in self._paths)

    async def check(self) -> None:
        """Reload the files if they have changed."""
        if (use := await anyio.to_thread.run_sync(self._changed, abandon_on_cancel=True)) is not None:
            use()

    def _changed(self) -> Callable[[], object] | None:
        stamp = self._stamp_now()  # taken before the files are read: a change meanwhile is found by the next check
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            use = self._load()
        except Exception as error:  # whatever is wrong with the files, the server keeps the former result
            _log.error("%s: not loaded again, the former ones stay in use: %s", self._what, error)
            return None
        _log.warning("%s: loaded again", self._what)
        return use


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file, links followed; None if the file cannot be read."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino


async def follow(watched: Iterable[WatchedFiles]) -> None:
    """Check all of them every `CHECK_EVERY_S` until cancelled; return at once if there are none."""
    all_of_them = list(watched)
    while all_of_them:
        await anyio.sleep(CHECK_EVERY_S)
        for each in all_of_them:
            await each.check()
