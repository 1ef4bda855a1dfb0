"""Pace: a source whose items are always ready yields to the event loop at intervals.

A ready item is delivered without a turn of the loop. A reader of many such items would keep every other task from
running, and neither a deadline nor a stop by another task would reach it. So the loop takes a turn before the next item
is read, after a number of items or an amount of time without one. The count is kept for each loop, not for each stream:
many short answers in a row block a loop as much as one long one. Beyond it each task may still begin one stream: of
many requests that come in one turn, the last ones would wait for another turn before they reach their engine.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain, repeat, starmap
from typing import Any, Generic, Self, TypeVar

from anyio import NoEventLoopError
from anyio.lowlevel import checkpoint

from .errors import StreamBusy
from .loop import clock, running_loop, running_task

T = TypeVar("T")

ITEMS_A_LOOK = 32
"""Items of a stream between two checks of the budget."""

LOOKS_MAX = 32
"""Checks by all streams of a loop, without a turn of that loop, that use up the budget: 1,024 items."""

TIME_MAX_S = 0.005
"""Seconds without a turn of the loop that use up the budget, too."""


class Pace(Generic[T]):
    """The reads of one source, with a turn of the loop before the next read if the budget is used up.

    `read` returns the awaitable of the next item. The turn is a checkpoint: a cancelled reader is cancelled there, and
    no item is lost, because none has been taken. Iterating over a pace never ends; each step is a group of reads.
    """

    __slots__ = ("_budget", "_read", "is_resting", "was_read")

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._budget: _Budget | None = None
        self.is_resting = False
        """Whether a reader is waiting for a turn of the loop."""
        self.was_read = False

    def reads(self) -> Iterator[Awaitable[T]]:
        """Return the awaitables, one for each read, without an end."""
        # Iterators of the standard library, no generator: they add a quarter of what a generator costs an item
        # (measured: 22 ns beside 90), and Python runs once in `ITEMS_A_LOOK` items.
        return chain.from_iterable(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Iterable[Awaitable[T]]:
        self.was_read = True
        if self.is_resting:
            return (_refuse(),)
        budget = self._budget
        if budget is None:
            budget = self._budget = _budget_here()
            if budget is not None and budget.is_used_up():
                return (self._read() if budget.lets_begin() else self._read_after_a_turn(budget),)
        elif budget.is_used_up():
            return (self._read_after_a_turn(budget),)
        return starmap(self._read, repeat((), ITEMS_A_LOOK))

    async def _read_after_a_turn(self, budget: _Budget) -> T:
        self.is_resting = True
        try:
            await checkpoint()
        finally:
            self.is_resting = False
        budget.begin()
        return await self._read()


class _Budget:
    """What the streams of one loop have read since its last turn."""

    __slots__ = ("_began_s", "_beginners", "_clock", "_is_running", "_looks", "_soon", "loop")

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        # An asyncio loop has the first, a trio token the second.
        self._soon: Callable[[Callable[[], None]], object] = getattr(loop, "call_soon", None) or loop.run_sync_soon
        self._clock = clock()
        self._is_running = False
        self._looks = 0
        self._began_s = 0.0
        self._beginners: set[Any] = set()
        """The tasks that have begun to read a stream since the budget was used up."""

    def begin(self) -> None:
        """Start counting: the loop has just taken a turn. Its next turn ends the count."""
        self._looks, self._began_s = 0, self._clock()
        self._is_running = True
        try:
            self._soon(self._turns)
        except RuntimeError:  # trio, once the run is over but for its finalisers
            self._is_running = False

    def is_used_up(self) -> bool:
        """Return whether a turn of the loop is due. Called before the next items are read."""
        if not self._is_running:
            self.begin()
            return False
        self._looks += 1
        return self._looks >= LOOKS_MAX or self._clock() - self._began_s >= TIME_MAX_S

    def lets_begin(self) -> bool:
        """Return whether the task that runs may begin to read a stream although the budget is used up."""
        task = running_task()
        if task is None or task in self._beginners:
            return False
        self._beginners.add(task)
        return True

    def _turns(self) -> None:
        self._is_running = False
        if self._beginners:
            self._beginners.clear()


class _Here(threading.local):
    budget: _Budget | None = None


_here = _Here()


def _budget_here() -> _Budget | None:
    """Return the budget of the loop that runs in this thread; None without one, or outside of its tasks."""
    loop = running_loop()
    if loop is None:
        return None
    budget = _here.budget
    if budget is None or budget.loop is not loop:
        try:
            budget = _here.budget = _Budget(loop)
        except NoEventLoopError:
            return None
    return budget


async def _refuse() -> Any:
    raise StreamBusy("another task is reading this stream")
