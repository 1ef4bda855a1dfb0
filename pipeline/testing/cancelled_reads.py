"""Reading in a task that is cancelled, while the cancellations that the stream swallows are counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any

from anyio import CancelScope, get_cancelled_exc_class
from anyio.lowlevel import checkpoint

from ..context import Context
from ..engine import AsyncEngine
from ..errors import ContractViolation
from ..stream import ResponseStream

_MOST_SWALLOWED = 2
"""Cancellations that may get lost: an item may have come as its read was cancelled."""
_MOST_REFUSALS = 200
"""So often one read may be cancelled before its request is killed, which ends one that would go on for good."""


async def read_until_cancelled(engine: AsyncEngine[Any, Any], request: Context[Any], scope: CancelScope) -> None:
    """Read all items in a scope that is cancelled meanwhile. Raise ContractViolation if reads swallow that."""
    reads = _Reads(request, scope)
    try:
        async with await engine.generate(request) as stream:
            await reads.drain(stream)
    finally:
        if reads.swallowed > _MOST_SWALLOWED:
            raise ContractViolation("reads went on whenever they were cancelled")


class _Reads:
    def __init__(self, request: Context[Any], scope: CancelScope) -> None:
        self._request, self._scope = request, scope
        self._cancellation = get_cancelled_exc_class()
        self.swallowed = 0
        """Cancellations of reads that returned or went on."""

    async def drain(self, stream: ResponseStream[Any]) -> None:
        """Read on where a read has swallowed its cancellation; elsewhere a cancellation takes effect here, too."""
        while True:
            before = self.swallowed
            try:
                await self._counted(stream.__anext__)
            except StopAsyncIteration:
                return
            if self.swallowed == before:
                await checkpoint()
            elif self.swallowed > _MOST_SWALLOWED:
                return

    @coroutine
    def _counted(self, read: Callable[[], Awaitable[Any]]) -> Generator[Any, Any, None]:
        """Await a read step by step; add its cancellations to those that were swallowed unless it ends by one."""
        steps, refusals = _awaited(read).__await__(), 0
        step: Callable[[Any], Any] = steps.send
        given: Any = None
        while True:
            try:
                waits_for = step(given)
            except self._cancellation:
                raise
            except BaseException as end:
                self.swallowed += refusals
                if isinstance(end, StopIteration):
                    return
                raise
            try:
                given, step = (yield waits_for), steps.send
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:  # as asyncio cancels; trio sends an outcome that raises
                given, step = error, steps.throw
            if self._scope.cancel_called and isinstance(getattr(given, "error", given), self._cancellation):
                refusals += 1
                if refusals == _MOST_REFUSALS:
                    self._request.kill()


async def _awaited(read: Callable[[], Awaitable[Any]]) -> None:
    await read()
