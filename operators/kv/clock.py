"""LoopClock: the loop's time, also where anyio finds no loop."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.loop import clock


class LoopClock:
    """Seconds of the loop that ran at the first call.

    Without any loop, or before there is one, it is the time last returned.
    """

    def __init__(self) -> None:
        self._read: Callable[[], float] | None = None
        self._last_s = 0.0

    def now_s(self) -> float:
        """The time; does not go back."""
        try:
            if self._read is None:
                self._read = clock()
            if (now_s := self._read()) > self._last_s:
                self._last_s = now_s
        except RuntimeError:  # both backends: no loop runs here
            pass
        return self._last_s
