"""Home: where a callback belongs. Bell: the cheap way to wake one task."""

from __future__ import annotations

from threading import Thread, get_ident

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline.loop import Bell, Home

pytestmark = pytest.mark.anyio


async def test_a_ring_wakes_the_task_that_waits_each_time() -> None:
    bell, woken = Bell(), 0

    async def listen() -> None:
        nonlocal woken
        while woken < 3:
            await bell.wait()
            woken += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        for expected in (1, 2, 3):
            await anyio.wait_all_tasks_blocked()
            bell.ring()
            await anyio.wait_all_tasks_blocked()
            assert woken == expected


async def test_a_ring_nobody_waits_for_is_lost() -> None:
    bell = Bell()
    bell.ring()
    with anyio.move_on_after(1) as scope:
        await bell.wait()
    assert scope.cancelled_caught


async def test_a_wait_can_be_cancelled_and_a_ring_after_it_harms_nobody() -> None:
    bell = Bell()
    with anyio.move_on_after(1):
        await bell.wait()
    bell.ring()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bell.wait)
        await anyio.wait_all_tasks_blocked()
        bell.ring()


async def test_a_ring_and_a_cancellation_at_once_do_not_fail() -> None:
    bell = Bell()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bell.wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        bell.ring()
        await checkpoint()


async def test_a_home_brings_a_callback_back_from_a_thread_whichever_library_ran_last() -> None:
    home, threads = Home(), list[int]()
    other = Thread(target=lambda: home.run(lambda: threads.append(get_ident())))
    other.start()
    other.join()
    await anyio.wait_all_tasks_blocked()
    await checkpoint()
    assert threads == [get_ident()]


async def test_a_thread_without_a_loop_calls_back_at_once_while_a_loop_runs_elsewhere() -> None:
    Home()  # so that this loop is the one that was asked for last
    order: list[str] = []

    def elsewhere() -> None:
        Home().run_soon(lambda: order.append("called"))
        order.append("after")

    other = Thread(target=elsewhere)
    other.start()
    other.join()
    assert order == ["called", "after"]
