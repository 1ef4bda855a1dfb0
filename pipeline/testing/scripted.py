"""A scripted engine: emits items, waits and fails by its script, and counts its open streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import anyio
from attrs import frozen

from ..cancellation import until_killed
from ..context import Context
from ..control import ReleaseOnce
from ..engine import AsyncEngine
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
                    await _wait(step, request)
                else:
                    self.delivered += 1
                    yield step
        finally:
            closed.release()


async def _wait(step: Wait | Stall, request: Context[Any]) -> None:
    with anyio.move_on_after(step.seconds if isinstance(step, Wait) else None):
        await request.stopped()
