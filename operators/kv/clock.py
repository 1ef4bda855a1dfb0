"""LoopClock: the loop's time, also where anyio finds no loop."""

from __future__ import annotations

from collections.abc import Callable

from anyio.lowlevel import current_token


class LoopClock:
    """Seconds of the loop that ran when it was first asked.

    A reservation of a stream that was dropped is released in a plain callback, where `anyio.current_time` fails; the
    backend itself can be asked there. Without any loop, or before there is one, it is the time last told.
    """

    def __init__(self) -> None:
        self._read: Callable[[], float] | None = None
        self._last_s = 0.0

    def now_s(self) -> float:
        """The time; does not go back."""
        try:
            if self._read is None:
                self._read = current_token().backend_class.current_time
            if (now_s := self._read()) > self._last_s:
                self._last_s = now_s
        except RuntimeError:  # both backends: no loop runs here
            pass
        return self._last_s
