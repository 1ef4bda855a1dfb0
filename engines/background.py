"""Background: what a worker runs beside its requests: its canary, and calls of abort."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio

from pipeline.foreign import raise_if_ours

if TYPE_CHECKING:
    from pipeline.rx import AnyIOScheduler

_log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """Tasks of a runtime's scheduler, known so that they can be waited for. What they raise is logged.

    There is no task group here: workers of one runtime may then be opened and closed in any order, by any task.
    """

    def __init__(self, scheduler: AnyIOScheduler) -> None:
        self._scheduler = scheduler
        self._running: dict[object, Callable[[], None]] = {}
        self._ended = anyio.Event()

    def run(self, work: Work) -> Callable[[], None]:
        """Runs it soon; what is returned cancels it."""
        key = object()

        async def task(scope: anyio.CancelScope) -> None:
            try:
                with scope:
                    await work()
            except BaseException as error:
                raise_if_ours(error)
                _log.exception("a background task of a worker failed")
            finally:
                self._running.pop(key, None)
                self._ended.set()

        spawned = self._scheduler.spawn(task)
        self._running[key] = spawned.dispose
        return spawned.dispose

    async def idle(self) -> None:
        """Returns when nothing runs."""
        while self._running:
            if self._ended.is_set():
                self._ended = anyio.Event()
            await self._ended.wait()

    def end(self) -> None:
        """Cancels what runs."""
        for cancel in list(self._running.values()):
            cancel()
