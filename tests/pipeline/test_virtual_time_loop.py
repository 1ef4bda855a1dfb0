"""The asyncio loop in virtual time: exact times, and a fixed order of what happens at the same time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from signal import SIGUSR1
from socket import socketpair
from typing import Any

import pytest

from pipeline.loop import LoopHandle, Timer
from pipeline.testing import run_in_virtual_time


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    run_in_virtual_time(main, backend="asyncio")


def test_each_timer_runs_at_exactly_its_time() -> None:
    """Also after a jump whose length cannot be represented, and less than a nanosecond after another timer."""
    seen: list[float] = []
    times_s = [0.03, 0.1, 0.30000000000000004, 0.3, 0.3 + 5e-10, 1e6 + 0.1]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for time_s in times_s:
            loop.call_at(time_s, lambda: seen.append(loop.time()))
        await asyncio.sleep(2e6)

    in_virtual_time(main)
    assert seen == sorted(times_s)


def test_timers_of_the_same_time_run_in_the_order_of_their_creation() -> None:
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, seen.append, number)
            loop.call_at(2.0 - number / 100, seen.append, -number)
        await asyncio.sleep(1.0)

    in_virtual_time(main)
    assert seen == list(range(50))


def test_many_cancelled_timers_leave_the_others() -> None:
    seen: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers = [loop.call_at(1.0 + number, seen.append, number) for number in range(1000)]
        for number, timer in enumerate(timers):
            if number % 100:
                timer.cancel()
                timer.cancel()
        await asyncio.sleep(2000)
        assert loop.time() == 2000

    in_virtual_time(main)
    assert seen == list(range(0, 1000, 100))


def test_tasks_with_a_timer_wake_and_settle_in_the_order_of_their_timers() -> None:
    seen: list[str] = []

    async def task(name: str, timer: Timer, pauses: tuple[float, ...]) -> None:
        for until_s in pauses:
            await timer.wait_until(until_s)
        seen.append(f"{name} woken")
        await timer.settle()
        seen.append(f"{name} settled")

    async def main() -> None:
        first, second = Timer(), Timer()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(task("second", second, (1.0,)))
            tasks.create_task(task("first", first, (0.25, 0.5, 1.0)))

    in_virtual_time(main)
    assert seen == ["first woken", "second woken", "first settled", "second settled"]


@pytest.mark.parametrize(("at_s", "is_in_time"), [(1.0, True), (1.0 + 5e-10, True), (1.0 + 2e-9, False)])
def test_what_is_due_within_a_nanosecond_is_of_the_same_moment(at_s: float, is_in_time: bool) -> None:
    seen: list[str] = []

    async def main() -> None:
        loop, timer = asyncio.get_running_loop(), Timer()
        await timer.wait_until(1.0)
        loop.call_at(at_s, seen.append, "timer")
        await timer.settle()
        seen.append("settled")
        await asyncio.sleep(1.0)

    in_virtual_time(main)
    assert seen == (["timer", "settled"] if is_in_time else ["settled", "timer"])


def test_whether_a_moment_is_over_is_known_to_who_has_not_settled() -> None:
    """As a task that has run ahead needs it: during a moment it is not over, after the others have settled it is."""
    seen: list[tuple[float, bool]] = []

    async def main() -> None:
        loop, mine, other = asyncio.get_running_loop(), Timer(), Timer()

        def look() -> None:
            seen.append((loop.time(), mine.has_settled(1.0)))

        for at_s in (1.0, 1.0 + 5e-10, 2.0):
            loop.call_at(at_s, look)
        await other.wait_until(1.0)
        await other.settle()
        look()  # the moment is over, the clock stands still
        await asyncio.sleep(1.0)

    in_virtual_time(main)
    assert seen == [(1.0, False), (1.0 + 5e-10, False), (1.0 + 5e-10, True), (2.0, True)]


def test_the_clock_stops_at_silent_times_within_a_moment_as_for_a_timer() -> None:
    async def clock_when_settled(is_silent: bool) -> float:
        loop, ahead, other = asyncio.get_running_loop(), Timer(), Timer()
        times_s = [0.5, 1.0 + 4e-10, 1.5]
        if is_silent:
            ahead.stop_silently(times_s)
        else:
            for time_s in times_s:
                loop.call_at(time_s, lambda: None)
        await other.wait_until(1.0)
        await other.settle()
        settled_s = loop.time()
        await asyncio.sleep(3.0)
        ahead.stop_silently(())
        return settled_s

    settled_s = [run_in_virtual_time(clock_when_settled, is_silent, backend="asyncio") for is_silent in (False, True)]
    assert settled_s == [1.0 + 4e-10] * 2


def test_a_silent_call_is_made_at_the_end_of_its_moment_and_again_when_it_says() -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop, early, late = asyncio.get_running_loop(), Timer(), Timer()

        def call(name: str, *again_s: float) -> Callable[[], float | None]:
            left = list(again_s)

            def made() -> float | None:
                seen.append((name, loop.time()))
                return left.pop(0) if left else None

            return made

        def note() -> None:
            seen.append(("timer", loop.time()))

        late.call_silently(1.0, call("late", 1.5, 2.5))
        early.call_silently(1.0, call("early"))
        for at_s in (1.0, 1.0 + 5e-10, 2.0):
            loop.call_at(at_s, note)
        await asyncio.sleep(2.2)
        seen.append(("end", loop.time()))

    in_virtual_time(main)
    moment = [("timer", 1.0), ("timer", 1.0 + 5e-10), ("early", 1.0 + 5e-10), ("late", 1.0 + 5e-10)]
    assert seen == [*moment, ("late", 1.5), ("timer", 2.0), ("end", 2.2)]


def test_what_a_silent_call_wakes_runs_at_that_time() -> None:
    seen: list[float] = []

    async def main() -> None:
        loop, timer, woken = asyncio.get_running_loop(), Timer(), asyncio.Event()

        async def wait() -> None:
            await woken.wait()
            seen.append(loop.time())

        def call() -> None:
            woken.set()

        task = asyncio.create_task(wait())
        timer.call_silently(1.0, call)
        await asyncio.sleep(3.0)
        await task

    in_virtual_time(main)
    assert seen == [1.0]


def test_a_callback_of_its_own_does_not_wake_a_loop_that_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps only while it looks for sockets; a signal handler may call then."""
    seen: list[bool] = []

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        handle, wakes = LoopHandle(), list[object]()
        select = loop._selector.select

        def polled(timeout: float | None) -> Any:
            seen.append(loop.is_awake)
            return select(timeout)

        monkeypatch.setattr(loop._selector, "select", polled)
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: wakes.append(given))
        Timer().call_silently(1.0, lambda: handle.run(lambda: seen.append(loop.is_awake)))
        await asyncio.sleep(2.0)
        assert not wakes
        loop.is_awake = False
        Timer().call_silently(3.0, lambda: handle.run(lambda: None))
        await asyncio.sleep(2.0)
        assert len(wakes) == 1
        for _ in range(100):
            await asyncio.sleep(0)
        monkeypatch.undo()

    in_virtual_time(main)
    assert seen.count(True) == 1
    assert False in seen


def test_a_signal_is_handled_although_nothing_waits_for_sockets() -> None:
    async def main() -> None:
        loop, seen = asyncio.get_running_loop(), list[float]()
        loop.add_signal_handler(SIGUSR1, lambda: seen.append(loop.time()))
        try:
            os.kill(os.getpid(), SIGUSR1)
            for _ in range(200):
                await asyncio.sleep(1.0)
        finally:
            loop.remove_signal_handler(SIGUSR1)
        assert len(seen) == 1
        assert seen[0] <= 70.0

    in_virtual_time(main)


def test_what_a_socket_brings_comes_before_the_clock_jumps() -> None:
    async def main() -> None:
        loop, (near, far), came_s = asyncio.get_running_loop(), socketpair(), list[float]()
        with near, far:
            near.setblocking(False)
            for expected_s in range(5):
                far.send(b"x")
                assert await loop.sock_recv(near, 1) == b"x"
                assert loop.time() == expected_s
                reading = asyncio.create_task(loop.sock_recv(near, 1))
                reading.add_done_callback(lambda _: came_s.append(loop.time()))
                await asyncio.sleep(0)
                far.send(b"y")
                await asyncio.sleep(1.0)
                assert reading.result() == b"y"
            assert came_s == [0.0, 1.0, 2.0, 3.0, 4.0]

    in_virtual_time(main)
