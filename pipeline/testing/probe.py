"""Probe: an operator that counts what passes through it, and how each stream ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Any

from ..context import Context
from ..control import ReleaseOnce
from ..engine import AsyncEngine
from ..operator import PASSES_THROUGH, Operator
from ..stream import ResponseStream


class Ending(StrEnum):
    """How a stream ended, as its reader saw it."""

    REFUSED = "refused"  # there was no stream: `generate` raised
    ENDED = "ended"  # it ran out
    FAILED = "failed"  # a read raised
    CLOSED = "closed"  # its reader closed or dropped it, or was cancelled, before the end
    UNREAD = "unread"  # the same, before the first read


class Probe(Operator[Any, Any, Any, Any]):
    """Passes everything through and counts it.

    `open` streams now, `requests` and `items` so far, and the `endings` in order, one for each request.
    """

    declares = PASSES_THROUGH

    def __init__(self) -> None:
        self.requests = 0
        self.items = 0
        self.open = 0
        self.endings: list[Ending] = []

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        self.requests += 1
        try:
            stream = await next.generate(request)
        except BaseException:
            self.endings.append(Ending.REFUSED)
            raise
        self.open += 1
        unread = ReleaseOnce(lambda: self._ended(Ending.UNREAD))
        return ResponseStream(self._count(stream, unread), request, stream, unread)

    def _ended(self, ending: Ending) -> None:
        self.open -= 1
        self.endings.append(ending)

    async def _count(self, stream: ResponseStream[Any], unread: ReleaseOnce) -> AsyncGenerator[Any, None]:
        ending = Ending.ENDED
        try:
            async with stream:
                async for item in stream:
                    self.items += 1
                    yield item
        except Exception:
            ending = Ending.FAILED
            raise
        except BaseException:  # the generator is closed, or the reading task cancelled
            ending = Ending.CLOSED
            raise
        finally:
            if unread.cancel():
                self._ended(ending)
