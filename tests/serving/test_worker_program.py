"""Workers of a runtime as programs: signals at every moment of their start. Real signals, in real time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from engines import EchoEngine
from engines.worker import ProcessWatch
from engines.worker.signals import SIGNALS
from pipeline.network import Runtime
from serving.cli import commands
from serving.deployment import GraphConfig
from serving.frontend import Host
from serving.settings import ServerOptions
from serving.worker_program import host_announced_worker

BEFORE: list[Callable[[], object]] = []
"""Called by the factory, which then returns without letting the loop run."""


class Noted(EchoEngine):
    starts = 0

    async def start(self, worker_id: int) -> Any:
        Noted.starts += 1
        return await super().start(worker_id)


def factory() -> EchoEngine:
    for each in BEFORE:
        each()
    return Noted()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    Noted.starts = 0
    yield
    BEFORE.clear()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def host_of(watch: ProcessWatch) -> Host:
    options = commands["worker"].settle({}, {}).made(ServerOptions)
    return Host(GraphConfig(engine=f"{__name__}:factory"), {}, watch, options)


def run(main: Callable[[Host], Any]) -> list[int]:
    """Run the program to its end; return the exit codes of its watch."""
    codes: list[int] = []
    with ProcessWatch(5.0, exit=codes.append) as watch:

        async def bounded() -> None:
            with anyio.fail_after(10):
                await main(host_of(watch))

        anyio.run(bounded)
    return codes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_factory_blocks_the_loop_ends_the_program(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []
    monkeypatch.setattr(Runtime, "serve", lambda *values, **_: served.append(values))
    BEFORE.append(lambda: os.kill(os.getpid(), number))
    assert run(host_announced_worker) == []
    assert (Noted.starts, served) == (0, [])


def test_a_signal_between_the_factory_and_the_worker_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Runtime.serve

    async def signalled(self: Runtime, *values: Any, **fields: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return await serve(self, *values, **fields)

    monkeypatch.setattr(Runtime, "serve", signalled)
    assert run(host_announced_worker) == []
    assert Noted.starts == 0
