"""The subject of a rule, requests for it, and means to see what it leaves open."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field, frozen

from ..context import Context
from ..engine import AsyncEngine
from ..errors import ContractViolation
from ..stream import ResponseStream
from .open_streams import OpenStreams, watch_streams

_SETTLE_TURNS = 20
"""Turns of the loop for finalisers and ending tasks."""
_SETTLE_LOOK_S = 0.02


@define
class Subject:
    """An engine under test, made anew for each rule by `make`."""

    make: Callable[[], Any]
    """Returns the engine, or an async context manager of it."""
    request: Any
    """A payload that the engine answers with several items."""
    expected: list[Any] | None = None
    """The items of an undisturbed answer. None: those of the first undisturbed run."""
    bad_request: Any = None
    """A payload that fails. None: the engine refuses no request."""
    within_s: float = 2.0
    """Seconds within which endings that need the engine must come."""
    slack_items: int = 16
    """Items that may still come after a stop."""
    open_count: Callable[[Any], int] | None = None
    """Returns how much the engine holds open, apart from tasks and streams."""
    answer_within_s: float = 60.0
    """Seconds an undisturbed answer may take."""
    settle_s: float = 0.0
    """Seconds that closed streams may take to end, beyond some turns of the loop."""
    compared: Callable[[list[Any]], Any] = list
    """Returns what of an answer's items is the same at each undisturbed run."""

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[AsyncEngine[Any, Any]]:
        made = self.make()
        async with made if isinstance(made, AbstractAsyncContextManager) else nullcontext(made) as engine:
            yield engine

    def new_request(self) -> Context[Any]:
        return Context(self.request)

    async def read(self, stream: ResponseStream[Any], count: int) -> list[Any]:
        """Return up to `count` items. Raise ContractViolation if they take too long."""
        items: list[Any] = []
        with within(self.answer_within_s, "an undisturbed answer"):
            while len(items) < count:
                try:
                    items.append(await stream.__anext__())
                except StopAsyncIteration:
                    break
        return items

    async def drain(self, stream: ResponseStream[Any]) -> list[Any]:
        """Return all items, without closing. Raise ContractViolation if the answer takes too long."""
        with within(self.answer_within_s, "an undisturbed answer"):
            return [item async for item in stream]
        raise AssertionError  # `within` raised


@frozen
class Watch:
    """Compares what a subject has open with the beginning of the watch."""

    engine: AsyncEngine[Any, Any]
    open_count: Callable[[Any], int] | None
    streams: OpenStreams
    settle_s: float = 0.0
    tasks_before: frozenset[int] = field(factory=lambda: _task_ids())

    async def expect_nothing_open(self, when: str, *, is_dropped: bool = False) -> None:
        """Raise ContractViolation if a stream, a task or a reservation is left after some turns of the loop.

        Unless the subject's own stream was dropped, each stream must have been closed, or read to its end: one that is
        just let go of is finalised in time, but stays open wherever something else still refers to it.
        """
        gc.collect(0)
        for _ in range(_SETTLE_TURNS):
            await checkpoint()
            if not self._left(is_dropped):
                return
        with anyio.move_on_after(self.settle_s):
            while self._left(is_dropped):  # noqa: ASYNC110  (there is no event for it)
                await anyio.sleep(_SETTLE_LOOK_S)
        if left := self._left(is_dropped):
            raise ContractViolation(f"{when}: {', '.join(left)} left open")

    def _left(self, is_dropped: bool) -> list[str]:
        left = []
        if streams := self.streams.open:
            left.append(f"{len(streams)} streams")
        elif not is_dropped:
            left += [f"{line} was never closed" for line in self.streams.unclosed]
        if tasks := _task_ids() - self.tasks_before:
            left.append(f"{len(tasks)} tasks")
        if self.open_count is not None and (held := self.open_count(self.engine)):
            left.append(f"{held} reservations")
        return left


@asynccontextmanager
async def watched(subject: Subject) -> AsyncIterator[tuple[AsyncEngine[Any, Any], Watch]]:
    """A fresh engine, and a watch over it."""
    with watch_streams() as streams:
        async with subject.engine() as engine:
            for _ in range(_SETTLE_TURNS):  # what the engine runs in the background has begun then
                await checkpoint()
            yield engine, Watch(engine, subject.open_count, streams, subject.settle_s)


def _task_ids() -> frozenset[int]:
    return frozenset(task.id for task in anyio.get_running_tasks())


@contextmanager
def within(seconds: float, what: str) -> Any:
    """Raise ContractViolation if the block takes longer."""
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise ContractViolation(f"{what} took more than {seconds:g} s")


@contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress warnings of dropped streams: checks drop some on purpose and report those that a stage drops."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "stream of request|Async generator", ResourceWarning)  # ours and trio's
        yield
