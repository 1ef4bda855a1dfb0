"""Tasks and timers beside a request's own task, at the price of the loop's own.

On asyncio a task of an anyio group takes 3.3 KB, the group 1.2 KB and each wait for an `anyio.Event` 1.4 KB; a task of
asyncio takes 0.7 KB, and a server may hold ten thousand open streams. Only code of this folder and of the ASGI server
runs in these tasks: they end on their first cancellation, and their code handles its own errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeAlias

import anyio

from pipeline.loop import running_loop

Work: TypeAlias = Coroutine[Any, Any, None]

_log = logging.getLogger(__name__)

TIMER_ERROR_S = 1e-3
"""Timers of some loops are early by as much."""


class SideTask(Protocol):
    """A task that runs beside the one that started it."""

    def cancel(self) -> object:
        """Cancel the task; if it has not begun, it never does."""

    def done(self) -> bool:
        """Return whether the task has ended."""
        ...


def task_starter() -> Callable[[Work], SideTask]:
    """Return the function that starts tasks in the running loop; on asyncio in the context of the task that runs now.

    What starts them may be a callback of another connection.
    """
    create_task = getattr(running_loop(), "create_task", None)
    return _TrioTask if create_task is None else partial(create_task, context=copy_context())


async def end(task: SideTask) -> None:
    """Cancel the task and return once it has ended."""
    if task.done():
        return
    task.cancel()
    if isinstance(task, _TrioTask):
        with anyio.CancelScope(shield=True):
            await task.ended.wait()
    elif isinstance(task, asyncio.Future):
        await asyncio.wait((task,))


def call_soon(callback: Callable[[], object]) -> None:
    """Call `callback` in the next turn of this loop. An exception of it is logged."""
    soon = getattr(running_loop(), "call_soon", None)
    if soon is None:
        _TrioTask(_called_later(0.0, callback))
    else:
        soon(callback)


def call_later(delay_s: float, callback: Callable[[], object]) -> Callable[[], object]:
    """Call `callback` in this loop after that time; return a function that cancels the call.

    An exception of the callback is logged.
    """
    later = getattr(running_loop(), "call_later", None)
    if later is None:
        return _TrioTask(_called_later(delay_s, callback)).cancel
    cancel: Callable[[], object] = later(delay_s, callback).cancel
    return cancel


async def _called_later(delay_s: float, callback: Callable[[], object]) -> None:
    await anyio.sleep(delay_s)
    callback()


class _TrioTask:
    """A system task of trio: like a task of asyncio it belongs to the loop, and to no nursery of the caller."""

    def __init__(self, work: Work) -> None:
        import trio  # loaded already: its loop runs here

        self.ended = anyio.Event()
        self._scope = anyio.CancelScope()
        trio.lowlevel.spawn_system_task(self._run, work)

    def cancel(self) -> None:
        self._scope.cancel()

    def done(self) -> bool:
        return self.ended.is_set()

    async def _run(self, work: Work) -> None:
        try:
            with self._scope:
                await work
        except Exception:  # it would end the loop
            _log.exception("a task beside a request failed")
        finally:
            self.ended.set()
