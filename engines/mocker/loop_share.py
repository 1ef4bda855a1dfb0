"""LoopShare: how many steps a rank that takes no time makes before other tasks have their turn of the loop.

    steps ── turns of the others, 0.2 ms ── steps for 0.2 ms ── turns of the others ── ...
             a first token, a few items: short               many items: long

An engine in a process of its own goes on while its tokens are read. So does a rank, for as long as the readers took for
what it gave them before; what it makes then waits for them together.

A request takes a turn of the loop to its engine, and its first token two more to the client. As long as turns are long,
a rank rests for three of them, so that these go past the tokens of other requests.
"""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any
from weakref import WeakKeyDictionary

from anyio.lowlevel import checkpoint

from pipeline.loop import running_loop, virtual_clocks

SHARE_MAX_S = 0.0005
"""The longest share of one rank, but for the step in which it ends, unless a quarter of the others' turns is longer."""

LONG_SHARE_MAX_S = 0.002
"""The longest share then, of a rank with hundreds of requests."""

SHARE_MAX_STEPS = 8
"""The most steps of one share. More save little of what an item costs, and keep first tokens waiting."""

FIRST_TURNS = 3
"""Turns of the loop that a first token takes: to its reader, to what sends it, to the socket."""

REST_TURNS = 3
"""Turns of the loop between two shares while others have much to do. Requests and first tokens go on in each of them,
and tokens of running requests, of which there are none without a step, in the first."""

QUIET_TURN_S = 0.0001
"""A turn of the others that is no longer ends the rest: hardly anything is under way."""


class _Loop:
    """What all ranks of one loop took."""

    __slots__ = ("__weakref__", "stepped_s", "turns")

    def __init__(self) -> None:
        self.stepped_s = 0.0
        self.turns = 0


_loops: WeakKeyDictionary[Any, _Loop] = WeakKeyDictionary()


class LoopShare:
    """The share of one rank in the loop that runs, in CPU time of its thread; `cpu_s` returns that.

    All ranks of a loop together get what the other tasks took. In virtual time each share is one step.
    """

    __slots__ = ("_began_s", "_cpu_s", "_ends_s", "_is_virtual", "_loop", "_most_steps", "_steps", "_turns")

    def __init__(self, cpu_s: Callable[[], float] = thread_time) -> None:
        running = running_loop()
        known = _loops.get(running)
        if known is None:
            known = _loops[running] = _Loop()
        self._loop = known
        self._cpu_s = cpu_s
        self._is_virtual = running in virtual_clocks
        self._began_s = self._ends_s = 0.0
        self._steps = self._turns = self._most_steps = 0

    def restart(self) -> None:
        """Called when the rank has waited: its next shares are one step, and then grow by one.

        What it makes may be a first token, which takes some turns of the loop to the client.
        """
        self._most_steps = 0

    async def step_done(self) -> None:
        """Called after each step. Let every other task have a turn once the share is spent."""
        if not self._most_steps:
            self._began_s = self._ends_s = self._cpu_s()
            self._steps = self._turns = 0
            self._most_steps = 1
        self._steps += 1
        if self._steps >= self._most_steps or self._cpu_s() >= self._ends_s:
            await self._yield_turn()

    async def _yield_turn(self) -> None:
        """Let the others have their turns, and measure the next share by them."""
        left_s = self._cpu_s()
        loop = self._loop
        loop.stepped_s += left_s - self._began_s
        loop.turns += 1
        stepped_s, turns = loop.stepped_s, loop.turns
        others_s = 0.0
        for _ in range(1 if self._is_virtual else REST_TURNS):
            await checkpoint()
            self._began_s = back_s = self._cpu_s()
            before_s, others_s = others_s, back_s - left_s - (loop.stepped_s - stepped_s)
            if others_s - before_s < QUIET_TURN_S:
                break
        self._steps = 0
        ranks = 1 + loop.turns - turns
        most_s = max(SHARE_MAX_S, min(others_s / 4, LONG_SHARE_MAX_S))
        self._ends_s = self._began_s + min(others_s / ranks, most_s)
        if self._most_steps < SHARE_MAX_STEPS and not self._is_virtual:
            self._turns += 1
            self._most_steps = max(1, self._turns - FIRST_TURNS + 1)
