"""Programs that are only simulated, for the supervision of programs in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf

import anyio
from attrs import define, field

from serving.processes import Child, Program
from serving.retry import Retry

RETRY = Retry(first_s=1.0, longest_s=8.0, steady_s=100.0)


@define(eq=False)
class Life:
    """What a simulated program does from one start to its end."""

    ready_s: float = 1.0
    """Seconds until it serves; inf: it never does."""
    ends_s: float = inf
    """Seconds until it ends by itself."""
    code: int = 0
    """Exit code of that end."""
    stop_s: float = 1.0
    """Seconds that its orderly end takes; inf: it ignores the request."""
    lines: Sequence[str] = ()
    """What it prints."""
    fails: OSError | None = None
    """Why it cannot be started."""


@define(eq=False)
class FakeChild(Child):
    """A running one."""

    life: Life
    _code: int | None = None
    _changed: anyio.Event = field(factory=anyio.Event)
    _stop_at_s: float = inf
    signals: list[str] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._ends_at_s = anyio.current_time() + self.life.ends_s
        self._ready_at_s = anyio.current_time() + self.life.ready_s

    async def ready(self) -> str:
        await anyio.sleep_until(self._ready_at_s)
        return "Serving m"

    async def ended(self) -> int:
        while self._code is None:
            changed = self._changed
            until_s = min(self._ends_at_s, self._stop_at_s)
            with anyio.move_on_at(until_s):
                await changed.wait()
            if anyio.current_time() >= self._ends_at_s and self._code is None:
                self._code = self.life.code
            elif anyio.current_time() >= self._stop_at_s and self._code is None:
                self._code = 0
        return self._code

    def terminate(self) -> None:
        self.signals.append("terminate")
        self._stop_at_s = anyio.current_time() + self.life.stop_s
        self._wake()

    def kill(self) -> None:
        self.signals.append("kill")
        self._code = -9
        self._wake()

    def last_lines(self) -> list[str]:
        return list(self.life.lines)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class Machine:
    """Runs simulated programs, and records what happened as (second, program, what)."""

    def __init__(self, lives: Callable[[str, int], Life] = lambda name, start: Life()) -> None:
        """`lives` returns what a program does, by its name and the number of its start, from 0."""
        self._lives = lives
        self.events: list[tuple[float, str, str]] = []
        self.running: dict[str, FakeChild] = {}
        self._starts: dict[str, int] = {}
        self._begun_s = anyio.current_time()

    def note(self, name: str, what: str) -> None:
        self.events.append((round(anyio.current_time() - self._begun_s, 3), name, what))

    @asynccontextmanager
    async def start(self, program: Program) -> AsyncIterator[Child]:
        """As `StartProgram`."""
        number = self._starts[program.name] = self._starts.get(program.name, -1) + 1
        life = self._lives(program.name, number)
        self.note(program.name, "start")
        if life.fails is not None:
            raise life.fails
        child = self.running[program.name] = FakeChild(life)
        try:
            yield child
        finally:
            del self.running[program.name]
            self.note(program.name, "killed" if "kill" in child.signals else "gone")

    def times_of(self, name: str, what: str) -> list[float]:
        """Return when it happened."""
        return [at_s for at_s, program, happened in self.events if (program, happened) == (name, what)]
