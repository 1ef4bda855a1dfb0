"""Faults: an operator that breaks the stream below it, at a chosen point."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
from attrs import frozen

from ..annotated import Annotated
from ..cancellation import until_killed
from ..context import Context
from ..engine import AsyncEngine
from ..errors import BackendUnknown, CannotConnect, Disconnected, PenstockError
from ..operator import PASSES_THROUGH, Operator
from ..stream import ResponseStream


@frozen
class Malformed:
    """Data that no stage understands."""


@frozen(kw_only=True)
class Fault:
    """The faults of one request; a fault that is None does not happen.

    A count is the number of items before the fault. `error` is the error of `error_after`.
    """

    fail_to_connect: bool = False
    """`generate` raises CannotConnect."""
    error_after: int | None = None
    """An error item, the last one."""
    disconnect_after: int | None = None
    """The read raises Disconnected."""
    stall_after: int | None = None
    """Nothing comes any more, and a stop does not help: only kill and close do."""
    malformed_after: int | None = None
    """One item that carries `Malformed` data, then the rest."""
    delay_s: float = 0.0
    """Before each item."""
    error: PenstockError = BackendUnknown("injected")


class Faults(Operator[Any, Any, Any, Any]):
    """Breaks requests that pass through it: `Faults(disconnect_after=3)`, see `Fault` for all kinds.

    `times` limits it to the first so many requests. A `plan` decides request by request instead: it is given the
    context and returns a Fault, or None for an undisturbed one.
    """

    declares = PASSES_THROUGH

    def __init__(
        self,
        *,
        times: int | None = None,
        plan: Callable[[Context[Any]], Fault | None] | None = None,
        **fault: Any,
    ) -> None:
        self._fault = Fault(**fault)
        self._plan = plan
        self._left = times

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        fault = self._choose(request)
        if fault is None:
            return await next.generate(request)
        if fault.fail_to_connect:
            raise CannotConnect("injected")
        stream = await next.generate(request)
        return ResponseStream(until_killed(_broken(stream, fault), request), request, stream)

    def _choose(self, request: Context[Any]) -> Fault | None:
        if self._plan is not None:
            return self._plan(request)
        if self._left is None:
            return self._fault
        self._left -= 1
        return self._fault if self._left >= 0 else None


async def _broken(stream: ResponseStream[Any], fault: Fault) -> AsyncGenerator[Any, None]:
    async with stream:
        count = 0
        while True:
            if count == fault.error_after:
                yield Annotated[Any].from_error(fault.error)
                return
            if count == fault.disconnect_after:
                raise Disconnected("injected")
            if count == fault.stall_after:
                await anyio.sleep_forever()
            if fault.delay_s:
                await anyio.sleep(fault.delay_s)
            if count == fault.malformed_after:
                yield Annotated(Malformed())
            try:
                item = await stream.__anext__()
            except StopAsyncIteration:
                return
            count += 1
            yield item
