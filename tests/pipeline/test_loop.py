"""LoopHandle: callbacks brought back to their loop. Wakeup and Timer: cheap ways to wake one task. The clock."""

from __future__ import annotations

import asyncio
from socket import socketpair
from threading import Thread, get_ident
from time import sleep
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline.loop import LoopHandle, Timer, Wakeup, clock, running_task, time_held
from pipeline.testing import run_in_virtual_time


async def test_each_wakeup_wakes_the_waiting_task() -> None:
    wakeup, woken = Wakeup(), 0

    async def listen() -> None:
        nonlocal woken
        while woken < 3:
            await wakeup.wait()
            woken += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        for expected in (1, 2, 3):
            await anyio.wait_all_tasks_blocked()
            wakeup.wake()
            await anyio.wait_all_tasks_blocked()
            assert woken == expected


async def test_a_wakeup_without_a_waiting_task_is_lost() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    with anyio.move_on_after(1) as scope:
        await wakeup.wait()
    assert scope.cancelled_caught


async def _wait(wakeup: Wakeup) -> None:
    await wakeup.wait()


async def test_a_wait_can_be_cancelled_and_a_wakeup_after_it_does_no_harm() -> None:
    wakeup = Wakeup()
    with anyio.move_on_after(1):
        await wakeup.wait()
    wakeup.wake()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_wait, wakeup)
        await anyio.wait_all_tasks_blocked()
        wakeup.wake()


async def test_a_wakeup_and_a_cancellation_at_once_do_not_fail() -> None:
    wakeup = Wakeup()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_wait, wakeup)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        wakeup.wake()
        await checkpoint()


async def test_a_loop_handle_runs_a_callback_of_a_thread_in_its_loop_whichever_library_ran_last() -> None:
    handle, threads = LoopHandle(), list[int]()
    other = Thread(target=lambda: handle.run(lambda: threads.append(get_ident())))
    other.start()
    other.join()
    await anyio.wait_all_tasks_blocked()
    await checkpoint()
    assert threads == [get_ident()]


async def test_a_thread_without_a_loop_calls_back_at_once_while_a_loop_runs_elsewhere() -> None:
    LoopHandle()  # so that this loop is the one found last
    order: list[str] = []

    def elsewhere() -> None:
        LoopHandle().run_soon(lambda: order.append("called"))
        order.append("after")

    other = Thread(target=elsewhere)
    other.start()
    other.join()
    assert order == ["called", "after"]


async def test_an_alarm_wakes_at_its_time_again_and_again() -> None:
    timer, now = Timer(), clock()
    for deadline_s in (now() + 1.5, now() + 4.0):
        await timer.wait_until(deadline_s)
        assert now() == pytest.approx(deadline_s)


async def test_an_alarm_for_a_time_that_is_past_wakes_at_once() -> None:
    began_s = clock()()
    await Timer().wait_until(began_s - 1.0)
    assert clock()() == began_s


async def test_a_cancelled_alarm_can_be_set_again() -> None:
    timer, now = Timer(), clock()
    with anyio.move_on_after(1.0) as scope:
        await timer.wait_until(now() + 3600.0)
    assert scope.cancelled_caught
    began_s = now()
    await timer.wait_until(began_s + 2.0)
    assert now() == pytest.approx(began_s + 2.0)


async def test_a_timer_and_a_cancellation_at_once_do_not_fail() -> None:
    now = clock()
    deadline_s = now() + 1.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Timer().wait_until, deadline_s)
        await anyio.sleep_until(deadline_s)
        tasks.cancel_scope.cancel()


def test_settle_returns_after_all_else_of_the_moment_and_before_time_passes() -> None:
    order: list[str] = []

    async def settles(at_s: float) -> None:
        timer = Timer()
        await timer.wait_until(at_s)
        await timer.settle()
        order.append(f"settled at {clock()():g}")

    async def takes_its_turns(at_s: float, turns: int) -> None:
        await anyio.sleep_until(at_s)
        for _ in range(turns):
            await checkpoint()
        order.append("done")

    async def main() -> None:
        assert Timer().is_exact
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(settles, 1.0)
            tasks.start_soon(takes_its_turns, 1.0, 20)
            tasks.start_soon(takes_its_turns, 1.5, 0)
            with anyio.CancelScope(deadline=0.5):
                await Timer().wait_until(9.0)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await Timer().settle()

    run_in_virtual_time(main, backend="asyncio")
    assert order == ["done", "settled at 1", "done"]


def test_a_cancelled_timer_does_not_make_settle_late() -> None:
    order: list[str] = []

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + 1.0, order.append, "later")
        loop.call_at(loop.time(), order.append, "never").cancel()
        loop.call_at(loop.time(), order.append, "now")
        await Timer().settle()
        return loop.time()

    assert run_in_virtual_time(main, backend="asyncio") == 0.0
    assert order == ["now"]

    async def cancelled_alone() -> float:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + 1.0, order.append, "later")
        loop.call_at(loop.time(), order.append, "never").cancel()
        await Timer().settle()
        return loop.time()

    assert run_in_virtual_time(cancelled_alone, backend="asyncio") == 0.0


def test_in_real_time_settle_returns_at_once() -> None:
    async def main() -> bool:
        timer = Timer()
        await timer.settle()
        return timer.is_exact

    assert not anyio.run(main, backend="asyncio")


async def test_the_clock_of_the_loop_is_that_of_anyio() -> None:
    now = clock()
    assert now() == pytest.approx(anyio.current_time(), abs=0.1)
    await anyio.sleep(1.0)
    assert now() == pytest.approx(anyio.current_time(), abs=0.1)


async def test_a_deadline_that_is_now_comes_although_a_task_never_waits() -> None:
    async def spin() -> None:
        while True:
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(spin)
        with anyio.move_on_after(0) as scope:
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        tasks.cancel_scope.cancel()


async def test_virtual_time_polls_sockets_although_a_task_never_waits() -> None:
    ours, theirs = socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"now")
        has_heard = False

        async def listen() -> None:
            nonlocal has_heard
            await anyio.wait_readable(ours)
            has_heard = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            for _ in range(1000):
                await checkpoint()
            assert has_heard
            tasks.cancel_scope.cancel()


async def test_a_wakeup_ends_a_timer_early_and_leaves_its_next_wait_alone() -> None:
    timer, began_s = Timer(), anyio.current_time()
    timer.wake()  # no task waits
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(timer.wait_until, began_s + 10)
        await anyio.wait_all_tasks_blocked()
        timer.wake()
    assert anyio.current_time() == began_s
    await timer.wait_until(began_s + 10)
    assert anyio.current_time() == pytest.approx(began_s + 10)


async def test_virtual_time_takes_calls_of_another_thread_while_it_waits() -> None:
    """A thread comes back by the loop's own means, whatever the clock does meanwhile."""
    assert await anyio.to_thread.run_sync(get_ident) != get_ident()


async def test_virtual_time_stands_still_while_a_task_waits_for_a_thread_that_works_for_it() -> None:
    rang: list[float] = []

    async def ring() -> None:
        await anyio.sleep(5)
        rang.append(anyio.current_time())

    began_s = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ring)
        with time_held():
            await anyio.to_thread.run_sync(sleep, 0.05)
        assert (rang, anyio.current_time()) == ([], began_s)
    assert rang == [began_s + 5]


async def test_the_running_task_is_the_same_in_a_task_and_another_one_in_another() -> None:
    found: list[Any] = []

    async def look() -> None:
        one = running_task()
        await checkpoint()
        assert running_task() == one
        found.append(one)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(look)
    assert len({*found, running_task()}) == 4


def test_no_task_runs_outside_of_a_loop() -> None:
    assert running_task() is None
