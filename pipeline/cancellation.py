"""`until_killed`, `until_stopped` and `unless_killed`: a kill or stop cancels the wait for an item or a result.

Only a stage that waits for something outside the graph uses them (an engine's adapter, a receiver); all other stages
rely on their stream ending. A cancel scope for each item costs some 4 microseconds on asyncio. There the reading task
is cancelled instead, as by `asyncio.timeout`, for a tenth of that. This needs private names of anyio, to see what a
source shields; with an anyio without them, a cancel scope is used on asyncio too, and a warning is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from inspect import iscoroutine
from math import inf
from typing import Any, TypeVar

from anyio import CancelScope, current_effective_deadline
from anyio._backends import _asyncio as anyio_on_asyncio
from anyio.lowlevel import current_token

from .context import Context
from .control import Control
from .errors import BackendCancelled, Cancelled

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""On asyncio: seconds that a cancelled source may wait, to release what it holds, before it is cancelled again."""

_SHIELDED_S = 0.01
"""Seconds between two checks whether a wait is still shielded."""

_states: Any = getattr(anyio_on_asyncio, "_task_states", None)
"""Task -> its state with its cancel scopes. anyio has no public way to see what shields another task."""


def _sees_shields() -> bool:
    """Return whether this anyio has the private names that show a shield."""
    has_scope = hasattr(getattr(anyio_on_asyncio, "TaskState", None), "cancel_scope")
    return isinstance(_states, Mapping) and has_scope and hasattr(anyio_on_asyncio.CancelScope(), "_parent_scope")


_cuts_tasks = _sees_shields()
"""Whether asyncio tasks are cancelled directly. Where shields cannot be seen, a cancel scope is correct, and slower."""
if not _cuts_tasks:
    from importlib.metadata import version

    _log.warning(
        "anyio %s lacks private names that pipeline.cancellation reads: each item that is raced against a kill on "
        "asyncio costs a cancel scope now, some 4 microseconds; please report it to penstock",
        version("anyio"),
    )


def until_killed(items: AsyncIterator[T], context: Context[Any]) -> AsyncGenerator[T, None]:
    """Return the items until they end or the context is killed; a kill cancels the source's wait at once.

    A wait that the source shields by a cancel scope of its own is not cancelled. An item that was ready when the kill
    came is dropped. The source is closed on every way out, unless it was never read.

    On asyncio a source may raise CancelledError although the reading task is not cancelled, because something it
    waited for was. That becomes BackendCancelled.
    """
    native = isinstance(current_token().native_token, asyncio.AbstractEventLoop)
    return _in_task(items, context) if native and _cuts_tasks else _in_scope(items, context)


def until_stopped(items: AsyncIterator[T], context: Context[Any]) -> AsyncGenerator[T, None]:
    """Return the items until they end or the context is stopped or killed, as `until_killed` does for a kill."""
    native = isinstance(current_token().native_token, asyncio.AbstractEventLoop)
    ended: Any = _Stopped(context.control)
    return _in_task(items, ended) if native and _cuts_tasks else _in_scope(items, ended)


async def unless_killed(
    awaitable: Awaitable[T], context: Context[Any], message: str = "killed before there was an answer"
) -> T:
    """Return the result, unless the context is killed before; then cancel the wait at once and raise Cancelled.

    A request killed beforehand is not awaited at all. A result that was ready when the kill came is dropped, and closed
    if it has an `aclose`, as a stream has. What the awaitable shields by a cancel scope of its own is waited for; what
    it raises goes to the caller, on asyncio with BackendCancelled as in `until_killed`.
    """
    if context.is_killed:
        if iscoroutine(awaitable):
            awaitable.close()
        raise Cancelled(message)
    native = isinstance(current_token().native_token, asyncio.AbstractEventLoop)
    results = await (_one_in_task if native and _cuts_tasks else _one_in_scope)(awaitable, context)
    if not context.is_killed:
        return results.pop()
    for result in results:
        await _close(result)
    raise Cancelled(message)


class _Stopped:
    """Stands for a context whose stop counts as a kill."""

    __slots__ = ("_control", "control", "on_kill")

    def __init__(self, control: Control) -> None:
        self.control, self._control, self.on_kill = self, control, control.on_stop

    @property
    def is_killed(self) -> bool:
        return self._control.is_stopped


async def _in_task(items: AsyncIterator[T], context: Context[Any]) -> AsyncGenerator[T, None]:
    loop, control, read = asyncio.get_running_loop(), context.control, items.__anext__
    current_task, cut = asyncio.current_task, _ReadCanceller(loop)
    reader: Any = None
    state: Any = None
    forget = control.on_kill(cut)
    try:
        while not control.is_killed:
            if (task := current_task(loop)) is not reader or state is None:
                reader, state = task, _states.get(task)
            cut.outer = None if state is None else state.cancel_scope
            cut.cancelled_before = reader.cancelling()
            cut.task = reader
            item = await read()
            if control.is_killed:
                return
            cut.task = None
            yield item
    except StopAsyncIteration:
        return
    except asyncio.CancelledError as error:
        if control.is_killed and not cut.is_due_to_others:
            return
        if not reader.cancelling():
            raise BackendCancelled("what the source waited for was cancelled") from error
        raise
    finally:
        forget()
        cut.ends()
        await _close(items)


async def _one_in_task(awaitable: Awaitable[T], context: Context[Any]) -> list[T]:
    """Return the result in a list, which is empty if a kill cancelled the wait."""
    loop = asyncio.get_running_loop()
    reader = asyncio.current_task(loop)
    assert reader is not None, "a coroutine runs in a task"
    state, cut = _states.get(reader), _ReadCanceller(loop)
    cut.outer = None if state is None else state.cancel_scope
    cut.cancelled_before = reader.cancelling()
    cut.task = reader
    forget = context.control.on_kill(cut)
    try:
        return [await awaitable]
    except asyncio.CancelledError as error:
        if context.is_killed and not cut.is_due_to_others:
            return []
        if not reader.cancelling():
            raise BackendCancelled("what the awaitable waited for was cancelled") from error
        raise
    finally:
        forget()
        cut.ends()


class _ReadCanceller:
    """Called on a kill: cancels the reading task, again if it goes on waiting, until it has left the read."""

    __slots__ = ("_again", "_looks", "_loop", "cancelled_before", "outer", "task", "times")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.task: asyncio.Task[Any] | None = None
        """The task that reads now."""
        self.cancelled_before = 0
        """The task's count of cancellation requests when it began to read."""
        self.outer: Any = None
        """The task's innermost cancel scope then: scopes inside it belong to the source."""
        self.times = 0
        self._loop = loop
        self._again: asyncio.Handle | None = None
        self._looks = 0

    def __call__(self) -> None:
        if self.task is None:
            return
        if self.task is asyncio.current_task(self._loop):
            # The task is running, so the cancellation could hit a later wait of its own.
            self._again = self._loop.call_soon(self)
        elif self._is_shielded():
            self._again = self._loop.call_later(_SHIELDED_S, self)
        elif self.is_cancelled_by_others and self._looks < 2:
            # A deadline of the source has just passed and ends on the next turn; or the task is ending already.
            self._again = self._loop.call_later(PATIENCE_S, self) if self._looks else self._loop.call_soon(self)
            self._looks += 1
        else:
            self.times += 1
            self.task.cancel()
            self._again = self._loop.call_later(PATIENCE_S, self)

    @property
    def is_due_to_others(self) -> bool:
        """Whether a cancellation raised by the read belongs to other code that has requested it."""
        # A cancelled scope around the reader raises again at its next wait, and would not recognise this error.
        return self.is_cancelled_by_others and (not self.times or current_effective_deadline() != -inf)

    @property
    def is_cancelled_by_others(self) -> bool:
        """Whether other code has requested the task's cancellation during the read."""
        return self.task is not None and self.task.cancelling() - self.times > self.cancelled_before

    def ends(self) -> None:
        """Withdraw the cancellation requests: the task has left the read."""
        if self._again is not None:
            self._again.cancel()
        if self.task is not None:
            for _ in range(self.times):
                self.task.uncancel()
        self.task = self.outer = None

    def _is_shielded(self) -> bool:
        state = _states.get(self.task)
        scope = None if state is None else state.cancel_scope
        while scope is not None and scope is not self.outer:
            if scope.shield:
                return True
            scope = scope._parent_scope
        return False


async def _in_scope(items: AsyncIterator[T], context: Context[Any]) -> AsyncGenerator[T, None]:
    scope: CancelScope | None = None

    def cut() -> None:
        if scope is not None:
            scope.cancel()

    forget = context.control.on_kill(cut)
    try:
        while not context.is_killed:
            with CancelScope() as scope:
                item = await items.__anext__()
            if context.is_killed:
                return
            # Bound: the scope swallows nothing unless we were killed.
            yield item  # pyright: ignore[reportPossiblyUnboundVariable, reportReturnType]
    except StopAsyncIteration:
        return
    except asyncio.CancelledError as error:  # on asyncio, where this stands in for `_in_task`
        reader = asyncio.current_task()
        if reader is None or reader.cancelling():
            raise
        raise BackendCancelled("what the source waited for was cancelled") from error
    finally:
        forget()
        await _close(items)


async def _one_in_scope(awaitable: Awaitable[T], context: Context[Any]) -> list[T]:
    results: list[T] = []
    try:
        with CancelScope() as scope:
            forget = context.control.on_kill(scope.cancel)
            try:
                results.append(await awaitable)
            finally:
                forget()
    except asyncio.CancelledError as error:  # on asyncio, where this stands in for `_one_in_task`
        reader = asyncio.current_task()
        if reader is None or reader.cancelling():
            raise
        raise BackendCancelled("what the awaitable waited for was cancelled") from error
    return results


async def _close(source: object) -> None:
    """Close an iterator, or a result that is dropped, if it can be closed."""
    if (aclose := getattr(source, "aclose", None)) is not None:
        await aclose()
