"""The watch of a process among other users of its signals; tests with real programs cover its purpose."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from engines.worker import ProcessWatch, signals
from engines.worker.signals import OVERDUE, SIGNALS, run_until_signalled
from pipeline import Control


class Exits:
    """An exit that is only recorded."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)

    def wait(self) -> list[int]:
        """Return the exit codes once there is one; without one, an empty list after 20 s."""
        until_s = time.monotonic() + 20
        while not self.codes and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.codes


@contextmanager
def wakeup_to_a_pipe() -> Iterator[tuple[int, int]]:
    """Another library's wakeup file descriptor."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        yield reader, writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that the handlers installed before receive. The watch may take its time to count each."""
    monkeypatch.setattr(signals, "_COUNTED_S", 60.0)
    numbers: list[int] = []
    before = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in SIGNALS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_other_handlers_get_every_signal_and_are_restored(received: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with wakeup_to_a_pipe() as (reader, writer):
        with ProcessWatch(60, exit=Exits()) as watch, watch.listening():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.1)
            assert os.read(reader, 10) == bytes([signal.SIGTERM])
        assert received == [signal.SIGTERM]
        assert [signal.getsignal(number) for number in SIGNALS] == handlers
        assert signal.set_wakeup_fd(writer) == writer


@pytest.mark.parametrize("last", SIGNALS)
def test_the_second_signal_ends_the_process_with_its_number(received: list[int], last: signal.Signals) -> None:
    exits = Exits()
    with ProcessWatch(60, exit=exits) as watch, watch.listening():
        signal.raise_signal(signal.SIGTERM)
        assert exits.codes == []
        signal.raise_signal(last)
        assert exits.wait() == [128 + last]


def test_a_second_signal_may_leave_time_for_an_end_in_order(received: list[int]) -> None:
    exits = Exits()
    with ProcessWatch(60, second_s=2, exit=exits) as watch, watch.listening():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)
        assert exits.codes == []
        assert exits.wait() == [128 + signal.SIGINT]
    assert received == [signal.SIGINT] * 3


def test_a_signal_counts_though_another_library_has_taken_the_wakeup(
    received: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_COUNTED_S", 0.5)
    exits = Exits()
    with ProcessWatch(60, exit=exits) as watch, watch.listening(), wakeup_to_a_pipe():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert exits.wait() == [128 + signal.SIGTERM]


def test_the_deadline_counts_from_the_first_request_to_end() -> None:
    exits = Exits()
    with ProcessWatch(0, exit=exits) as watch:
        time.sleep(0.1)
        assert exits.codes == []
        watch.begin_end()
        watch.begin_end()
        assert exits.wait() == [OVERDUE]


def test_a_watch_that_has_stopped_ends_nothing() -> None:
    exits = Exits()
    with ProcessWatch(60, exit=exits) as watch:
        watch.begin_end()
        assert watch._thread.is_alive()
    assert not watch._thread.is_alive()
    assert exits.codes == []


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays given to `faulthandler`, in seconds, after which it would end the process."""
    found: list[float] = []

    def later(after_s: float, **_: Any) -> None:
        found.append(after_s)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    return found


def test_a_watch_that_was_stopped_gives_nothing_a_deadline(deadlines: list[float]) -> None:
    with ProcessWatch(60) as watch:
        pass
    watch.begin_end()
    assert deadlines == []


@contextmanager
def no_signals() -> Iterator[AsyncIterator[int]]:
    async def wait() -> AsyncIterator[int]:
        await anyio.sleep_forever()
        yield 0

    yield wait()


async def test_a_stop_after_a_run_that_was_cancelled_reaches_no_watch(deadlines: list[float]) -> None:
    """The worker's deadline must not end a program that continues after its worker."""
    control = Control()
    with ProcessWatch(60) as watch:
        with anyio.move_on_after(1):
            await run_until_signalled(
                anyio.sleep_forever, control, no_signals, exit=Exits(), deadline_s=60, watch=watch
            )
        control.stop()
        assert deadlines == []


async def test_a_stop_during_a_run_gives_the_end_its_deadline(deadlines: list[float]) -> None:
    control = Control()

    async def host() -> None:
        control.stop()

    with ProcessWatch(60) as watch:
        await run_until_signalled(host, control, no_signals, exit=Exits(), deadline_s=60, watch=watch)
    assert len(deadlines) == 1


async def test_a_signal_that_came_before_a_run_ends_it_before_it_begins(deadlines: list[float]) -> None:
    control = Control()
    found: list[bool] = []

    async def host() -> None:
        found.append(control.is_stopped)

    with ProcessWatch(60) as watch:
        assert not watch.is_ending
        watch.begin_end()
        await run_until_signalled(host, control, no_signals, exit=Exits(), deadline_s=60, watch=watch)
    assert found == [True]
