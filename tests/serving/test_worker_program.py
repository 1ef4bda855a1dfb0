"""Workers of a runtime as programs: signals at every moment of their start. Real signals, in real time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import anyio
import pytest

from engines import EchoEngine
from engines.worker import ProcessWatch
from engines.worker.signals import SIGNALS
from pipeline.network import Runtime
from serving import worker_program
from serving.cli import commands
from serving.deployment import GraphConfig
from serving.frontend import Host
from serving.server import Interrupts, until_signalled
from serving.settings import ServerOptions
from serving.worker_program import host_announced_worker

BOTH_LOOPS = pytest.mark.parametrize("use_uvloop", [False, True] if find_spec("uvloop") else [False])
AFTER: list[Callable[[], object]] = []
"""Called once the engine has started."""
BEFORE: list[Callable[[], object]] = []
"""Called by the factory, which then returns without letting the loop run."""


class Noted(EchoEngine):
    starts = ends = 0

    async def start(self, worker_id: int) -> Any:
        Noted.starts += 1
        return await super().start(worker_id)

    async def background(self) -> None:
        await anyio.sleep(0.1)
        for each in AFTER:
            each()

    async def cleanup(self) -> None:
        Noted.ends += 1


def factory() -> EchoEngine:
    for each in BEFORE:
        each()
    return Noted()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    Noted.starts = Noted.ends = 0
    yield
    BEFORE.clear()
    AFTER.clear()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def host_of(watch: ProcessWatch) -> Host:
    options = commands["worker"].settle({}, {}).made(ServerOptions)
    return Host(
        GraphConfig(engine=f"{__name__}:factory"), {"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"}, watch, options
    )


def run(main: Callable[[Host], Any], use_uvloop: bool) -> list[int]:
    """Run the program to its end; return the exit codes of its watch."""
    codes: list[int] = []
    with ProcessWatch(5.0, exit=codes.append) as watch:

        async def bounded() -> None:
            with anyio.fail_after(10):
                await main(host_of(watch))

        anyio.run(bounded, backend_options={"use_uvloop": use_uvloop})
    return codes


@BOTH_LOOPS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_factory_blocks_the_loop_ends_the_program(
    number: signal.Signals, use_uvloop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []
    monkeypatch.setattr(Runtime, "serve", lambda *values, **_: served.append(values))
    BEFORE.append(lambda: os.kill(os.getpid(), number))
    assert run(host_announced_worker, use_uvloop) == []
    assert (Noted.starts, served) == (0, [])


@BOTH_LOOPS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_factory_and_the_run_ends_the_program_in_order(
    number: signal.Signals, use_uvloop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop receives none then; by default it would end the process, and this one with it."""

    def signalled(*values: Any) -> Any:
        os.kill(os.getpid(), number)
        return worker_of(*values)

    worker_of = worker_program._worker_of
    monkeypatch.setattr(worker_program, "_worker_of", signalled)
    assert run(host_announced_worker, use_uvloop) == []
    assert (Noted.starts, Noted.ends) == (0, 0)


@BOTH_LOOPS
def test_a_signal_before_anything_receives_signals_counts_as_the_first_one(use_uvloop: bool) -> None:
    """And one that comes later as the second."""
    seen: list[str] = []

    async def host(interrupts: Interrupts) -> None:
        interrupts.first, interrupts.second = (lambda: seen.append("first")), (lambda: seen.append("second"))
        await anyio.wait_all_tasks_blocked()
        assert seen == ["first"]
        os.kill(os.getpid(), signal.SIGTERM)
        with anyio.fail_after(5):
            while len(seen) < 2:  # noqa: ASYNC110 - it comes through a thread and a socket
                await anyio.sleep(0.01)

    async def main() -> None:
        watch.keep_listening()
        os.kill(os.getpid(), signal.SIGTERM)
        await until_signalled(host, watch)

    with ProcessWatch(60, second_s=60, exit=lambda code: seen.append(str(code))) as watch:
        anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    assert seen == ["first", "second"]


@BOTH_LOOPS
def test_one_signal_ends_a_worker_in_order(use_uvloop: bool) -> None:
    AFTER.append(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run(host_announced_worker, use_uvloop) == []
    assert (Noted.starts, Noted.ends) == (1, 1)
