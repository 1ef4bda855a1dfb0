"""A worker as a program: signals, and its deadline."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from engines import EchoEngine, EngineConfig, ShutdownTimes, Worker, WorkerState
from engines.worker.signals import OVERDUE
from pipeline import Unknown
from pipeline.errors import BackendUnknown

TIMES = ShutdownTimes(grace_s=2.0, timeout_s=10.0)
TERM, INT = int(signal.SIGTERM), int(signal.SIGINT)


class Slow(EchoEngine):
    """Takes these seconds for each step of its life; None: for ever."""

    def __init__(
        self, start_s: float | None = 0, drain_s: float | None = 0, cleanup_s: float | None = 0, fails: bool = False
    ) -> None:
        super().__init__()
        self.steps = {"start": start_s, "drain": drain_s, "cleanup": cleanup_s}
        self.fails = fails
        self.calls: list[str] = []

    async def start(self, worker_id: int) -> EngineConfig:
        await self._do("start")
        if self.fails:
            raise LookupError("broken")
        return EngineConfig(model="m")

    async def drain(self) -> None:
        await self._do("drain")

    async def cleanup(self) -> None:
        await self._do("cleanup")

    async def _do(self, step: str) -> None:
        self.calls.append(step)
        seconds = self.steps[step]
        await anyio.sleep(float("inf") if seconds is None else seconds)
        self.calls.append(f"{step}ed")


class Program:
    """A worker run with scripted signals and an exit that is only recorded."""

    def __init__(self, engine: Slow, *signals_at: tuple[float, int]) -> None:
        self.engine = engine
        self.exits: list[Any] = []
        self.is_listening = False
        self._signals_at = signals_at
        self.worker = Worker(engine, environment={}, times=TIMES, signals=self._signals, exit=self._exit)

    async def run(self) -> float:
        """Run the worker to its end; return the seconds it took."""
        began_s = anyio.current_time()
        await self.worker.run()
        assert not self.is_listening
        return anyio.current_time() - began_s

    def _exit(self, code: int) -> None:
        self.exits.append((anyio.current_time(), code))

    @contextmanager
    def _signals(self) -> Iterator[AsyncIterator[int]]:
        async def numbers() -> AsyncIterator[int]:
            for at_s, number in self._signals_at:
                if at_s:
                    await anyio.sleep_until(at_s)
                yield number
            await anyio.sleep_forever()

        self.is_listening = True
        yield numbers()
        self.is_listening = False


ORDERLY = ["start", "started", "drain", "drained", "cleanup", "cleanuped"]


@pytest.mark.parametrize("number", [TERM, INT])
async def test_a_signal_ends_the_worker_in_order(number: int) -> None:
    program = Program(Slow(start_s=1, drain_s=3, cleanup_s=1), (5, number))
    assert await program.run() == pytest.approx(5 + 2 + 3 + 1)
    assert (program.engine.calls, program.exits) == (ORDERLY, [])
    assert program.worker.state is WorkerState.STOPPED


async def test_a_signal_while_the_engine_starts_waits_for_the_start() -> None:
    program = Program(Slow(start_s=6), (1, TERM))
    assert await program.run() == pytest.approx(6)
    assert (program.engine.calls, program.exits) == (ORDERLY, [])
    assert program.worker.served is None


async def test_a_signal_before_the_start_means_no_start() -> None:
    program = Program(Slow(), (0, TERM))
    assert await program.run() == pytest.approx(0)
    assert (program.engine.calls, program.worker.state) == ([], WorkerState.STOPPED)


async def test_a_shutdown_before_the_start_means_no_start() -> None:
    program = Program(Slow())
    program.worker.shutdown()
    await program.run()
    assert (program.engine.calls, program.worker.state) == ([], WorkerState.STOPPED)


async def test_a_shutdown_ends_it_as_a_signal_does() -> None:
    program = Program(Slow())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(program.run)
        await anyio.sleep(3)
        program.worker.shutdown()
    assert (program.engine.calls, program.exits) == (ORDERLY, [])
    assert anyio.current_time() == pytest.approx(5)


@pytest.mark.parametrize(
    ("engine", "first_s", "calls"),
    [
        (lambda: Slow(start_s=None), 1, ["start", "cleanup", "cleanuped"]),
        (lambda: Slow(drain_s=None), 1, ["start", "started", "drain", "cleanup", "cleanuped"]),
        (lambda: Slow(), 3.5, ["start", "started", "cleanup", "cleanuped"]),
    ],
)
async def test_the_second_signal_ends_the_process_at_once(
    engine: Callable[[], Slow], first_s: float, calls: list[str]
) -> None:
    """If the exit returns, hanging steps are cancelled; in the last case the worker is in its grace period."""
    program = Program(engine(), (first_s, INT), (4, TERM))
    assert await program.run() == pytest.approx(4)
    assert program.exits == [(pytest.approx(4), 128 + TERM)]
    assert program.engine.calls == calls


@pytest.mark.parametrize(
    ("engine", "calls", "ends_s"),
    [
        (lambda: Slow(drain_s=None), ["start", "started", "drain", "cleanup", "cleanuped"], 13),
        (lambda: Slow(start_s=None), ["start", "cleanup", "cleanuped"], 13),
        (lambda: Slow(drain_s=9, cleanup_s=4), ORDERLY, 16),
        (lambda: Slow(cleanup_s=None), ORDERLY[:-1], 18),
    ],
)
async def test_an_end_that_takes_longer_than_its_time_ends_the_process(
    engine: Callable[[], Slow], calls: list[str], ends_s: float
) -> None:
    """The deadline is 2 s of grace plus 10 s after the signal at 1 s; if the exit returns, the worker still ends."""
    program = Program(engine(), (1, TERM))
    assert await program.run() == pytest.approx(ends_s)
    assert program.exits == [(pytest.approx(13), OVERDUE)]
    assert program.engine.calls == calls


async def test_what_the_engine_raises_is_raised_as_it_is() -> None:
    program = Program(Slow(fails=True))
    with pytest.raises(BackendUnknown, match="broken"):
        await program.run()
    assert program.engine.calls == ["start", "started", "cleanup", "cleanuped"]
    assert not program.is_listening


async def test_a_run_that_is_cancelled_cleans_up() -> None:
    program = Program(Slow(drain_s=1))
    with anyio.move_on_after(3) as scope:
        await program.run()
    assert scope.cancelled_caught
    assert (program.engine.calls, program.exits) == (ORDERLY, [])


async def test_signals_that_cannot_be_received_are_an_error_before_the_start() -> None:
    def signals() -> Any:
        raise ValueError("not in the main thread")

    engine = Slow()
    with pytest.raises(Unknown, match="not in the main thread"):
        await Worker(engine, environment={}, signals=signals).run()
    assert engine.calls == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_signals_of_the_process_are_received(number: signal.Signals) -> None:
    engine = Slow()
    worker = Worker(engine, environment={}, times=TIMES)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await anyio.sleep(1)
        assert worker.state is WorkerState.RUNNING
        signal.raise_signal(number)
    assert engine.calls == ORDERLY
