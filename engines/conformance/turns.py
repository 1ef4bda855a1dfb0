"""How long each turn of a task keeps the loop, by the clock on the wall.

A blocked loop does not show on the loop's own clock: in virtual time nothing passes while an engine sleeps in a
blocking call, and in real time a slow answer looks the same. So the kit measures every turn of every task that begins
under its watch, those of the engine's own included. On a busy machine a turn may be long without any fault: what is
reported has to come again whenever it is tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from anyio.lowlevel import current_token

LONG_S = 0.0075
"""A turn that long at every token makes all other requests wait at every token."""


class Turns:
    """The turns so far: their number, and those that were long, in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.long: list[float] = []

    def add(self, seconds: float) -> None:
        self.count += 1
        if seconds >= LONG_S:
            self.long.append(seconds)

    def clear(self) -> None:
        self.long.clear()

    @property
    def longest_s(self) -> float:
        return max(self.long, default=0.0)


@contextmanager
def watch_turns() -> Iterator[Turns]:
    """Watch the tasks of this loop that begin inside the block; on trio also those that run already."""
    turns, loop = Turns(), current_token().native_token
    if isinstance(loop, asyncio.AbstractEventLoop):
        with _on_asyncio(loop, turns):
            yield turns
    else:
        with _on_trio(turns):
            yield turns


@contextmanager
def _on_asyncio(loop: asyncio.AbstractEventLoop, turns: Turns) -> Iterator[None]:
    before = loop.get_task_factory()
    make: Any = before or _make_task

    def make_timed(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        return make(loop, _Timed(coro, turns), **options)

    loop.set_task_factory(make_timed)
    try:
        yield
    finally:
        if loop.get_task_factory() is make_timed:
            loop.set_task_factory(before)


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coro, loop=loop, **options)


class _Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are timed."""

    def __init__(self, coro: Any, turns: Turns) -> None:
        self._coro, self._turns = coro, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coro, name)  # what shows its state and its name

    def __await__(self) -> Any:
        return self._coro.__await__()

    def send(self, value: Any) -> Any:
        return self._step(self._coro.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coro.throw, *error)

    def close(self) -> None:
        self._coro.close()

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        begun_s = perf_counter()
        try:
            return step(*given)
        finally:
            self._turns.add(perf_counter() - begun_s)


@contextmanager
def _on_trio(turns: Turns) -> Iterator[None]:
    import trio  # only where it runs already

    class Watch(trio.abc.Instrument):
        begun_s = 0.0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.begun_s = perf_counter()

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            turns.add(perf_counter() - self.begun_s)

    watch = Watch()
    trio.lowlevel.add_instrument(watch)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(watch)
