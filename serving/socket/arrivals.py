"""Arrivals: how many requests begin in one turn of the loop.

    sixty heads in one turn ──► some begin ──► first tokens of these ──► ...
                                others wait ──► some begin ────────────► ...

What requests do until they are at their engines, they do step by step, all those of a turn side by side. If sixty that
come at once begin at once, the first has its first token when the last has been read, and so have all. A few at a time
have theirs after half of that, on average, and tokens of running requests wait for a few only.
"""

from __future__ import annotations

import asyncio
from collections import deque

TURN_BYTES = 128 * 1024
"""Bytes that may begin in a turn; the request that reaches them is still in it."""

REQUEST_BYTES = 8 * 1024
"""What a request counts besides its body: one without takes about as long as this many bytes of prompt do."""


class Arrivals:
    """Lets the requests of one loop begin in the order in which they came."""

    __slots__ = ("_is_due", "_left_bytes", "_waiting")

    def __init__(self) -> None:
        self._left_bytes = TURN_BYTES
        self._is_due = False
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def enter(self, body_bytes: int) -> asyncio.Future[None] | None:
        """Return None if a request with such a body may begin, or what is done once it may; it may be cancelled.

        Called in the task of the request, which awaits it: what is done before that holds up nobody.
        """
        size_bytes = REQUEST_BYTES + body_bytes
        if self._left_bytes > 0:
            self._begin(size_bytes)
            return None
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size_bytes))
        return turn

    def _begin(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due = False
        self._left_bytes = TURN_BYTES
        while self._waiting and self._left_bytes > 0:
            turn, size_bytes = self._waiting.popleft()
            if not turn.done():  # its request was cancelled
                turn.set_result(None)
                self._begin(size_bytes)
