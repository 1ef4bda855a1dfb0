"""ProcessGroup: programs that run together: started in stages, restarted when they end, and ended in reverse order.

    start ──► ready ──► ended ──► wait, twice as long each time ──┐
      ▲                                                           │
      └───────────────────────────────────────────────────────────┘

A program that ends with a usage error before it was ready, some times in a row, ends the group: a change of its options
is needed. Every other end is followed by another start, an orderly one too: so a program that is stopped from outside
is replaced by a fresh one.
"""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import groupby

import anyio
from attrs import field, frozen

from pipeline import InvalidArgument

from ..retry import Retry

_log = logging.getLogger(__name__)

USAGE_EXIT = 2
"""Exit code of a program that cannot run with its options."""
USAGE_ERRORS_MAX = 3
"""Starts in a row that end with a usage error before the group is ended."""


@frozen
class Program:
    """One program of a group."""

    name: str
    """Shown in front of its lines."""
    command: Sequence[str]
    """The program and its arguments."""
    environment: Mapping[str, str] = field(factory=dict, repr=False)
    """All its variables."""
    stage: int = 0
    """Programs of a stage start after those of lower ones, and end before them."""
    is_awaited: bool = False
    """Whether higher stages start once it serves."""
    end_s: float = 60.0
    """Seconds that it has for an orderly end before it is killed."""
    sockets: Mapping[str, socket.socket] = field(factory=dict, repr=False)
    """Listening sockets that it inherits, by name."""
    probe: Callable[[], Awaitable[str]] | None = None
    """Returns, with a line for people, once the program serves. None: the program notifies the group itself."""
    arguments: Callable[[], Sequence[str]] = tuple
    """Returns further arguments at each start: what is known only once lower stages serve."""


@frozen
class ProgramState:
    """A program of a group at one moment."""

    name: str
    is_ready: bool
    """Whether it serves."""
    starts: int
    """How often it was started."""
    last_end: str
    """How it ended the last time; empty if it never did."""
    pid: int | None = None
    """Of the process; None while there is none."""


class Child(ABC):
    """A program that was started."""

    pid: int | None = None
    """Of its process."""

    @abstractmethod
    async def ready(self) -> str:
        """Wait until it serves; return its own line about that. Wait for ever if it never does."""

    @abstractmethod
    async def ended(self) -> int:
        """Wait until it has ended; return its exit code, below zero the signal that ended it."""

    @abstractmethod
    def terminate(self) -> None:
        """Request an orderly end."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def last_lines(self) -> list[str]:
        """Return what it printed last."""


StartProgram = Callable[[Program], AbstractAsyncContextManager[Child]]
"""Starts a program, which is killed with the end of the block. Raises OSError if it cannot be started."""


class ProcessGroup:
    """See the module. `run` it once.

    `on_ready` is called with a program and its line each time that it serves.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        start: StartProgram,
        *,
        retry: Retry | None = None,
        on_ready: Callable[[Program, str], object] = lambda program, line: None,
    ) -> None:
        self._members = [_Member(program) for program in sorted(programs, key=lambda each: each.stage)]
        self._start, self._retry, self._on_ready = start, retry or Retry(), on_ready
        self._ending, self._killing = anyio.Event(), anyio.Event()
        self._failure: InvalidArgument | None = None

    def states(self) -> list[ProgramState]:
        """Return the state of each program, in the order of their starts."""
        return [
            ProgramState(one.program.name, one.is_ready, one.starts, one.last_end, one.pid) for one in self._members
        ]

    def end(self) -> None:
        """Begin the orderly end: stage by stage, the last one first."""
        self._ending.set()

    def kill(self) -> None:
        """End all programs at once."""
        self._killing.set()
        self._ending.set()

    async def run(self) -> None:
        """Start all programs and keep them running until `end` or `kill`; return when all have ended.

        Raise InvalidArgument, with what it printed, for a program that cannot run with its options. A cancellation
        kills all programs.
        """
        stages = [list(members) for _, members in groupby(self._members, lambda member: member.program.stage)]
        started: list[list[_Member]] = []
        async with anyio.create_task_group() as tasks:
            for stage in stages:
                if self._ending.is_set():
                    break
                started.append(stage)
                for member in stage:
                    tasks.start_soon(self._keep, member)
                if awaited := [member for member in stage if member.program.is_awaited]:
                    await self._all_ready(awaited)
            await self._ending.wait()
            for stage in reversed(started):
                for member in stage:
                    member.ending.set()
                for member in stage:
                    await member.gone.wait()
        if self._failure is not None:
            raise self._failure

    async def _all_ready(self, stage: Sequence[_Member]) -> None:
        """Wait until each was ready once, or the end has begun."""

        async def wait() -> None:
            for member in stage:
                await member.was_ready.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await self._ending.wait()
            tasks.cancel_scope.cancel()

    async def _keep(self, member: _Member) -> None:
        """Run the program again and again."""
        try:
            while not member.ending.is_set():
                wait_s = await self._run_once(member)
                if member.ending.is_set() or self._failure is not None:
                    break
                with anyio.move_on_after(wait_s):
                    await member.ending.wait()
        finally:
            member.gone.set()

    async def _run_once(self, member: _Member) -> float:
        """Run the program until it ends; return how long to wait before the next time."""
        program, lines = member.program, list[str]()
        begun_s: list[float] = []
        ended: int | OSError = 0
        member.starts += 1
        try:
            async with self._start(program) as child, anyio.create_task_group() as tasks:
                member.pid = child.pid
                tasks.start_soon(self._watch_ready, member, child, begun_s)
                tasks.start_soon(_end_when_set, member.ending, child, program.end_s)
                tasks.start_soon(_kill_when_set, self._killing, child)
                ended = await child.ended()
                lines = child.last_lines()
                tasks.cancel_scope.cancel()
        except OSError as error:
            ended = error
        member.is_ready, member.pid, member.last_end = False, None, _how(ended)
        served_s = anyio.current_time() - begun_s[0] if begun_s else 0.0
        is_usage_error = ended == USAGE_EXIT and not begun_s
        member.usage_errors = member.usage_errors + 1 if is_usage_error else 0
        if member.ending.is_set():
            return 0.0
        if member.usage_errors >= USAGE_ERRORS_MAX:
            self._fail(program, lines)
            return 0.0
        member.waited_s = self._retry.after(member.waited_s, served_s)
        _log.warning("%s %s; started again in %g s", program.name, member.last_end, member.waited_s)
        return member.waited_s

    async def _watch_ready(self, member: _Member, child: Child, begun_s: list[float]) -> None:
        line = await child.ready()
        begun_s.append(anyio.current_time())
        member.is_ready = True
        member.was_ready.set()
        self._on_ready(member.program, line)

    def _fail(self, program: Program, lines: Sequence[str]) -> None:
        """End the group with the last line of the program, which is about the option to change."""
        if self._failure is None:
            text = lines[-1].removeprefix("Error: ") if lines else "it printed nothing"
            self._failure = InvalidArgument(f"{program.name} cannot run: {text}")
        self._ending.set()


class _Member:
    """A program of a group, and what became of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.was_ready, self.ending, self.gone = anyio.Event(), anyio.Event(), anyio.Event()
        self.is_ready = False
        self.pid: int | None = None
        self.starts = self.usage_errors = 0
        self.last_end = ""
        self.waited_s = 0.0


async def _end_when_set(ending: anyio.Event, child: Child, end_s: float) -> None:
    await ending.wait()
    child.terminate()
    await anyio.sleep(end_s)
    _log.error("a program did not end within %g s and is killed", end_s)
    child.kill()


async def _kill_when_set(killing: anyio.Event, child: Child) -> None:
    await killing.wait()
    child.kill()


def _how(ended: int | OSError) -> str:
    """Return how a program ended, by its exit code, or why it was not started."""
    if isinstance(ended, OSError):
        return f"cannot be started: {ended}"
    if ended < 0:
        return f"was ended by signal {-ended}"
    return "ended" if ended == 0 else f"ended with exit code {ended}"
