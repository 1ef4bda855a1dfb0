"""Checks of what requests cost others: tasks, threads and work they leave behind, and turns that block the loop (L11).

A turn may be long because the machine was busy, the collector ran or a module was loaded. So a first long turn is only
the reason to look again, and the shortest of several tries counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import anyio
from attrs import frozen

from ..llm import GenerateContext
from .answer_checks import answered, gathered
from .answers import Trial
from .failures import failed
from .inspection import LONG_S, LOOK_S, Running, Turns, is_idle_in_pool, stack_of
from .stop_checks import abort, not_observed, overrides_abort

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
            if thread.is_alive() and not is_idle_in_pool(thread) and _place(thread) not in places:
                thread.join(LOOK_S)  # in virtual time it would get none
                if _place(thread) not in places:
                    return False
        return True


def _place(thread: threading.Thread) -> str:
    return repr(stack_of(thread)[:_CALLS])


async def check_left_by_close(trial: Trial, rest: Rest, gap_s: float) -> None:
    """A request that is closed. Raises TasksLeftByStream, ThreadsLeftByStream and WorkLeftByStream."""
    await _expect_nothing_left(trial, rest, gap_s, "closed", lambda context: None)


async def check_left_by_stop(trial: Trial, rest: Rest, gap_s: float) -> None:
    """Requests that are killed or stopped. Raises the same, or AbortIgnored if `abort` could have ended it."""
    await _expect_nothing_left(trial, rest, gap_s, "killed", lambda context: context.kill())
    await _expect_nothing_left(trial, rest, gap_s, "stopped", lambda context: context.stop(), reads_on=True)


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
        raise failed("TasksLeftByStream" if is_heard else "AbortIgnored", f"{how}: {_named(tasks)}")
    if threads:
        raise failed("ThreadsLeftByStream" if is_heard else "AbortIgnored", f"{how}: {_named(threads)}")
    if not await rest.is_back(trial.turns, gap_s, trial.deadline_s):
        raise failed("WorkLeftByStream" if is_heard else "AbortIgnored", f"{how}, {trial.deadline_s:g} s later")


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


_AT_ONCE_S = 0.25
"""A turn that long is a block by itself."""
_SURELY_S = 1.0
"""A turn that long need not be looked at more than twice: each look takes as long."""
_TRIES = 5
_SHARE = 0.75
"""Of the tokens, how many a long turn must come with."""


@frozen
class Look:
    """One answer: its tokens and the long turns beside it."""

    tokens: int
    long: tuple[float, ...]

    @classmethod
    def now(cls, turns: Turns, tokens: int) -> Look:
        """What was seen since the last look."""
        look = cls(tokens, tuple(turns.long))
        turns.clear()
        return look

    @property
    def longest_s(self) -> float:
        return max(self.long, default=0.0)

    @property
    def is_blocked(self) -> bool:
        return self.longest_s >= _AT_ONCE_S or len(self.long) >= max(1.0, _SHARE * self.tokens)


async def check_loop(trial: Trial, tokens: int) -> None:
    """Behind a first answer of so many tokens. Raises LoopBlocked."""
    looks = [Look.now(trial.turns, tokens)]
    while looks[-1].is_blocked:
        shortest = min(look.longest_s for look in looks)
        if len(looks) == (2 if shortest >= _SURELY_S else _TRIES):
            turns = min(len(look.long) for look in looks)
            detail = (
                f"{turns} turns of {LONG_S * 1000:g} ms or more at {tokens} tokens, the longest of {shortest:.3f} s"
            )
            raise failed("LoopBlocked", detail)
        answer = await answered(trial)
        looks.append(Look.now(trial.turns, answer.tokens))


async def check_loop_since(trial: Trial) -> None:
    """The turns since then, of requests that were disturbed. Raises LoopBlocked."""
    blocks = [seconds for seconds in trial.turns.long if seconds >= _AT_ONCE_S]
    if len(blocks) >= _TRIES:
        raise failed(
            "LoopBlocked", f"{len(blocks)} turns of {_AT_ONCE_S:g} s or more, the longest of {max(blocks):.3f} s"
        )
