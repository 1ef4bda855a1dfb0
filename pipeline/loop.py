"""Where a callback belongs: the event loop and thread it was made in.

Control crosses threads (a signal handler, an engine's own thread), loops do not. A `Home` remembers the loop that ran
when it was taken and brings a callback back to it, on asyncio and trio alike.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from anyio import NoEventLoopError
from anyio.lowlevel import current_token


class Home:
    """The loop and thread of the moment it was made; no loop at all counts as one."""

    __slots__ = ("_soon", "_thread")

    def __init__(self) -> None:
        self._thread = get_ident()
        self._soon: Callable[..., Any] | None = None
        try:
            native: Any = current_token().native_token
        except NoEventLoopError:
            return
        # An asyncio loop has the first, a trio token the second; both may be called from any thread.
        self._soon = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon

    def run(self, callback: Callable[[], object]) -> None:
        """Calls back at once in this thread, else on the loop's next turn."""
        if self._soon is None or get_ident() == self._thread:
            callback()
        else:
            self.run_soon(callback)

    def run_soon(self, callback: Callable[[], object]) -> None:
        """Calls back on the loop's next turn; at once where there is no loop, or none any more."""
        if self._soon is not None:
            try:
                self._soon(callback)
                return
            except RuntimeError:  # both libraries: that loop has finished
                pass
        callback()
