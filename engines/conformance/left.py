"""What an engine leaves running: tasks and threads, after a request and after its cleanup.

Idle threads of pools that belong to the loop, or that an engine keeps for its next request, are not left over: they
hold nothing. Which they are shows on their stack, where only a thread that works has frames of other files.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import PurePath

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from ..llm import GenerateContext
from .answer import Trial
from .checks import gathered
from .failure import failed
from .stops import abort, not_observed, overrides_abort
from .turns import Turns

_TURNS = 20
"""Turns of the loop in which ending tasks end."""
_LOOK_S = 0.05
_SHORTEST_S, _LONGEST_S = 0.25, 1.0
"""How long a look at an engine at rest takes."""
_TOKENS, _SAMPLES = 12, 5
_FEW = 6
"""Turns that may be those of a timer, which the first request began."""
_CALLS = 6
"""Of a stack, those that are looked at."""
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
        return [thread for thread in found if not (_idles(thread) and (may_idle or _is_of_the_loop(thread)))]

    async def left(self, within_s: float, *, may_idle: bool) -> tuple[list[str], list[str]]:
        """The names of tasks and threads that are new, and still there after that time."""
        for _ in range(_TURNS):
            await checkpoint()
        for _ in range(max(1, round(within_s / _LOOK_S))):
            tasks, threads = self.new_tasks(), self.new_threads(may_idle=may_idle)
            if not tasks and not threads:
                break
            if threads:  # which get no time while virtual time passes
                threads[0].join(_LOOK_S / 2)
            await anyio.sleep(_LOOK_S / 2 if threads else _LOOK_S)
        return self.new_tasks(), [thread.name for thread in self.new_threads(may_idle=may_idle)]


def _idles(thread: threading.Thread) -> bool:
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


@frozen
class Rest:
    """What goes on while there is no request: turns of the loop, and where the threads are."""

    turns_per_s: float
    places: dict[threading.Thread, set[str]]

    @classmethod
    async def of(cls, trial: Trial) -> Rest:
        """Looks on for a while, at threads that were not there before the engine was made, too."""
        places: dict[threading.Thread, set[str]] = {}
        turns = trial.turns
        begun = turns.count
        for _ in range(_SAMPLES):
            for thread in set(threading.enumerate()) - trial.other_threads:
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
            if thread.is_alive() and not _idles(thread) and _place(thread) not in places:
                thread.join(_LOOK_S)  # in virtual time it would get none
                if _place(thread) not in places:
                    return False
        return True


def _place(thread: threading.Thread) -> str:
    return repr(stack_of(thread)[:_CALLS])


async def check_left_by_close(trial: Trial, rest: Rest, gap_s: float) -> None:
    """A request that is closed. Raises TasksLeftByStream, ThreadsLeftByStream and WorkLeftByStream."""
    await _expect_nothing_left(trial, rest, gap_s, "closed", lambda context: None)


async def check_left_by_stop(trial: Trial, rest: Rest, gap_s: float) -> None:
    """Requests that are killed or stopped. Raises the same, or AbortNotHeard if `abort` could have ended it."""
    await _expect_nothing_left(trial, rest, gap_s, "killed", GenerateContext.kill)
    await _expect_nothing_left(trial, rest, gap_s, "stopped", GenerateContext.stop_generating, reads_on=True)


async def _expect_nothing_left(
    trial: Trial,
    rest: Rest,
    gap_s: float,
    how: str,
    disturb: Callable[[GenerateContext], None],
    *,
    reads_on: bool = False,
) -> None:
    before = Running.now()
    async with trial.answer(long=True) as (answer, context):
        await answer.begin(trial.within_s)
        disturb(context)
        if context.is_stopped:
            await gathered([lambda: abort(trial, context)])  # what it raises is reported by another check
        if reads_on:
            await answer.drain(not_observed(trial), trial.deadline_s)
    tasks, threads = await before.left(trial.deadline_s, may_idle=True)
    is_heard = how == "closed" or not overrides_abort(trial.engine)
    if tasks:
        raise failed("TasksLeftByStream" if is_heard else "AbortNotHeard", f"{how}: {_named(tasks)}")
    if threads:
        raise failed("ThreadsLeftByStream" if is_heard else "AbortNotHeard", f"{how}: {_named(threads)}")
    if not await rest.is_back(trial.turns, gap_s, trial.deadline_s):
        raise failed("WorkLeftByStream" if is_heard else "AbortNotHeard", f"{how}, {trial.deadline_s:g} s later")


async def check_left_by_cleanup(before: Running, within_s: float) -> None:
    """Raises TasksLeftByCleanup and ThreadsLeftByCleanup."""
    tasks, threads = await before.left(within_s, may_idle=False)
    if tasks:
        raise failed("TasksLeftByCleanup", _named(tasks))
    if threads:
        raise failed("ThreadsLeftByCleanup", _named(threads))


def _named(names: Iterable[str]) -> str:
    first, *more = sorted(names)
    return f"{first} and {len(more)} more" if more else first
