"""Stages for tests: an engine that plays a script, an operator that counts what passes, and one that breaks it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from enum import StrEnum
from typing import Any

import anyio
from attrs import frozen

from ..annotated import Annotated
from ..cancellation import until_killed
from ..context import Context
from ..control import ReleaseOnce
from ..engine import AsyncEngine
from ..errors import BackendUnknown, CannotConnect, Disconnected, PenstockError
from ..operator import PASSES_THROUGH, Operator
from ..stream import ResponseStream


@frozen
class Wait:
    """A step that takes time; a stop ends it."""

    seconds: float


@frozen
class Stall:
    """A step that never ends by itself; a stop ends it."""


@frozen
class Fail:
    """A step that raises."""

    error: BaseException


Script = Sequence[Any]
"""Items, with `Wait`, `Stall` and `Fail` steps among them."""


class ScriptedEngine(AsyncEngine[Any, Any]):
    """Plays a script for each request, holding the engine contract.

    `script`: the steps, or a function of the payload that returns them. `fails`: an error that `generate` raises.
    Counts: `requests` in order, `delivered` items in all, `open` streams now, `started` streams in all.
    """

    def __init__(self, script: Script | Callable[[Any], Script], *, fails: BaseException | None = None) -> None:
        self._script = script
        self._fails = fails
        self.requests: list[Context[Any]] = []
        self.delivered = 0
        self.started = 0
        self.open = 0

    async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
        self.requests.append(request)
        if self._fails is not None:
            raise self._fails
        script = self._script(request.payload) if callable(self._script) else self._script
        self.started += 1
        self.open += 1
        closed = ReleaseOnce(self._closed)
        return ResponseStream(until_killed(self._play(script, request, closed), request), request, closed)

    def _closed(self) -> None:
        self.open -= 1

    async def _play(self, script: Script, request: Context[Any], closed: ReleaseOnce) -> AsyncGenerator[Any, None]:
        try:
            for step in script:
                if request.is_stopped:
                    return
                if isinstance(step, Fail):
                    raise step.error
                if isinstance(step, (Wait, Stall)):
                    with anyio.move_on_after(step.seconds if isinstance(step, Wait) else None):
                        await request.stopped()
                else:
                    self.delivered += 1
                    yield step
        finally:
            closed.release()


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
