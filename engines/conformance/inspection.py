"""What can be seen of an engine from outside: what it holds over a `yield`, what it runs, how long it keeps the loop.

**Held over a yield.** The next item may be read by another task, or much later, or never. A lock or a scope that one
task has entered cannot be left by another, and a lock that is held meanwhile is held for every other request. CPython
keeps the `__exit__` of each entered block on the stack of the paused frame, where its collector finds it. Under an
interpreter that does not, nothing is found here, and the kit relies on what happens when another task reads on.

**Tasks and threads.** Idle threads of pools that belong to the loop, or that an engine keeps for its next request, are
not left over: they hold nothing. Their stacks show which they are: only a thread that works has frames of other files.

**Turns.** A blocked loop does not show on the loop's own clock: in virtual time nothing passes while an engine sleeps
in a blocking call, and in real time a slow answer looks the same. So every turn of every task that begins under the
kit's watch is measured by the wall clock, those of the engine's own tasks included. On a busy machine a turn may be
long without any fault: only what comes again at every try is reported.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from time import perf_counter
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any

import anyio
from anyio.lowlevel import checkpoint, current_token
from attrs import frozen

LOCK, CANCEL_SCOPE, TASK_GROUP = "LockHeldOverYield", "CancelScopeHeldOverYield", "TaskGroupHeldOverYield"

_LOOPS = ("anyio", "asyncio", "trio")
_KINDS = {
    **dict.fromkeys(("Lock", "StrictFIFOLock", "Condition", "CapacityLimiter"), LOCK),
    **dict.fromkeys(("CancelScope", "Timeout"), CANCEL_SCOPE),
    **dict.fromkeys(("TaskGroup", "NurseryManager"), TASK_GROUP),
}
"""Class of a loop's library -> the failure. A semaphore is no lock: any task may release it."""
_TEXTS = {
    "cancel scope": CANCEL_SCOPE,
    "nursery stack": TASK_GROUP,
    "not holding this lock": LOCK,
    "lock you don't own": LOCK,
    "isn't holding any of this capacitylimiter": LOCK,
}
"""What a loop's library raises when another task leaves such a block -> the failure."""

_EXITS = ("__exit__", "__aexit__")
_PAUSED = (AsyncGeneratorType, GeneratorType, CoroutineType)
_BOUND = (MethodType, BuiltinFunctionType)
_UNBOUND = (FunctionType, MethodDescriptorType, WrapperDescriptorType)
_CONTAINERS = (dict, list, tuple)
_DEPTH = 8


def held_by(paused: Any) -> Iterator[tuple[str, str]]:
    """The failures, each with the class of what is held, of a paused generator and those it reads from."""
    for manager in _entered(paused, 0):
        kind = type(manager)
        top = kind.__module__.partition(".")[0]
        if top in ("_thread", "threading"):
            if kind.__name__ in ("lock", "RLock", "_RLock", "Condition"):
                yield LOCK, f"threading.{kind.__name__}"
        elif top in _LOOPS and (failure := _KINDS.get(kind.__name__)) is not None:
            yield failure, f"{top}.{kind.__name__}"


def failure_in(error: BaseException | None) -> str | None:
    """The failure that shows in what a loop's library raises when another task reads on; None for any other error."""
    while isinstance(error, BaseExceptionGroup):
        error = next((inner for inner in error.exceptions if failure_in(inner)), None)
    if not isinstance(error, RuntimeError):
        return None
    text = str(error).lower()
    return next((failure for part, failure in _TEXTS.items() if part in text), None)


def _entered(paused: Any, depth: int) -> Iterator[Any]:
    """The context managers that are entered in a paused frame."""
    if depth > _DEPTH:
        return
    held = gc.get_referents(paused)
    unbound = [part for part in held if isinstance(part, _UNBOUND) and part.__name__ in _EXITS]
    for part in held:
        if isinstance(part, _BOUND) and part.__name__ in _EXITS:
            yield from _within(part.__self__, depth)
        elif isinstance(part, _PAUSED):
            yield from _entered(part, depth + 1)
        elif any(getattr(type(part), leave.__name__, None) is leave for leave in unbound):  # as later Pythons keep it
            yield from _within(part, depth)


def _within(manager: Any, depth: int) -> Iterator[Any]:
    """The manager, and what one that was made by `contextlib` has entered in its turn."""
    yield manager
    if type(manager).__module__ == "contextlib":
        yield from _in_parts(gc.get_referents(manager), depth + 1)


def _in_parts(parts: Iterable[Any], depth: int) -> Iterator[Any]:
    if depth > _DEPTH:
        return
    for part in parts:
        if isinstance(part, _PAUSED):
            yield from _entered(part, depth + 1)
        elif isinstance(part, _BOUND) and part.__name__ in _EXITS:
            yield from _within(part.__self__, depth + 1)
        elif isinstance(part, _CONTAINERS) or type(part).__name__ == "deque":
            yield from _in_parts(gc.get_referents(part), depth + 1)


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
    make: Any = before or (lambda loop, coro, **options: asyncio.Task(coro, loop=loop, **options))

    def make_timed(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        return make(loop, _Timed(coro, turns), **options)

    loop.set_task_factory(make_timed)
    try:
        yield
    finally:
        if loop.get_task_factory() is make_timed:
            loop.set_task_factory(before)


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


_TURNS = 20
"""Turns of the loop in which ending tasks end."""
LOOK_S = 0.05
_POOLS = {("futures", "thread.py"), ("_backends", "_asyncio.py"), ("_core", "_thread_cache.py")}
"""The ends of the files in which a thread of a pool waits for its next work."""
_WAITS = {("threading.py",), ("queue.py",)}
"""Those whose code it calls for that."""
_OF_THE_LOOP = ("AnyIO worker thread", "asyncio_", "Trio thread")
"""How the names of the loop's own threads begin."""


@frozen
class Running:
    """The tasks and threads at one moment."""

    tasks: frozenset[int]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> Running:
        tasks = frozenset(task.id for task in anyio.get_running_tasks())
        return cls(tasks, frozenset(threading.enumerate()))

    def new_tasks(self) -> list[str]:
        return [task.name or "a task" for task in anyio.get_running_tasks() if task.id not in self.tasks]

    def new_threads(self, *, may_idle: bool) -> list[threading.Thread]:
        """Those that have come since; `may_idle` leaves out all that wait in a pool, and else only the loop's."""
        found = [thread for thread in threading.enumerate() if thread not in self.threads and thread.is_alive()]
        return [thread for thread in found if not (is_idle_in_pool(thread) and (may_idle or _is_of_the_loop(thread)))]

    async def left(self, within_s: float, *, may_idle: bool) -> tuple[list[str], list[str]]:
        """The names of tasks and threads that are new, and still there after that time."""
        for _ in range(_TURNS):
            await checkpoint()
        for _ in range(max(1, round(within_s / LOOK_S))):
            tasks, threads = self.new_tasks(), self.new_threads(may_idle=may_idle)
            if not tasks and not threads:
                break
            if threads:  # which get no time while virtual time passes
                threads[0].join(LOOK_S / 2)
            await anyio.sleep(LOOK_S / 2 if threads else LOOK_S)
        return self.new_tasks(), [thread.name for thread in self.new_threads(may_idle=may_idle)]


def is_idle_in_pool(thread: threading.Thread) -> bool:
    """Whether the thread waits in a pool for its next work."""
    is_of_a_pool = False
    for path, _ in stack_of(thread):
        ends = {PurePath(path).parts[-length:] for length in (1, 2)}
        is_of_a_pool |= not ends.isdisjoint(_POOLS)
        if ends.isdisjoint(_POOLS | _WAITS):
            return False
    return is_of_a_pool


def _is_of_the_loop(thread: threading.Thread) -> bool:
    return thread.name.startswith(_OF_THE_LOOP) or type(thread).__name__ == "WorkerThread"


def stack_of(thread: threading.Thread) -> list[tuple[str, int]]:
    """The files and lines of its calls, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[tuple[str, int]] = []
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return calls


_SHORTEST_S, _LONGEST_S = 0.25, 1.0
"""How long a look at an engine at rest takes."""
_TOKENS, _SAMPLES = 12, 5
_FEW = 6
"""Turns that may be those of a timer, which the first request began."""
_CALLS = 6
"""Of a stack, those that are looked at."""


@frozen
class Rest:
    """What goes on while there is no request: turns of the loop, and where the threads are."""

    turns_per_s: float
    places: dict[threading.Thread, set[str]]

    @classmethod
    async def now(cls, turns: Turns, other_threads: frozenset[threading.Thread]) -> Rest:
        """Looks on for a while, at the turns and at all threads but those others."""
        places: dict[threading.Thread, set[str]] = {}
        begun = turns.count
        for _ in range(_SAMPLES):
            for thread in set(threading.enumerate()) - other_threads:
                places.setdefault(thread, set()).add(_place(thread))
            await anyio.sleep(_SHORTEST_S / _SAMPLES)
        return cls((turns.count - begun) / _SHORTEST_S, places)

    async def is_back(self, turns: Turns, gap_s: float, within_s: float) -> bool:
        """Whether it is about as quiet again within the time, for some gaps between two tokens."""
        window_s = min(_LONGEST_S, max(_SHORTEST_S, _TOKENS * gap_s))
        most = 1.5 * self.turns_per_s * window_s + _FEW
        for _ in range(max(1, round(within_s / window_s))):
            begun = turns.count
            await anyio.sleep(window_s)
            if turns.count - begun <= most and self._threads_are_back():
                return True
        return False

    def _threads_are_back(self) -> bool:
        for thread, places in self.places.items():
            if thread.is_alive() and not is_idle_in_pool(thread) and _place(thread) not in places:
                thread.join(LOOK_S)  # in virtual time it would get none
                if _place(thread) not in places:
                    return False
        return True


def _place(thread: threading.Thread) -> str:
    return repr(stack_of(thread)[:_CALLS])
