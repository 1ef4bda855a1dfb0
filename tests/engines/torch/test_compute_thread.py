"""ComputeThread: one thread, in order, and calls that may be given up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event, current_thread

import anyio
import pytest

from engines.torch.compute_thread import ComputeThread
from pipeline import EngineShutdown


@asynccontextmanager
async def computing() -> AsyncIterator[ComputeThread]:
    """A thread that is closed behind the block."""
    thread = ComputeThread("computes")
    try:
        yield thread
    finally:
        await thread.close()
        assert all(one.name != "computes" for one in threading.enumerate())


async def test_work_is_done_in_one_thread_in_the_order_it_came() -> None:
    done: list[int] = []

    async with computing() as thread:

        async def ask(number: int) -> None:
            assert await thread.run(lambda: current_thread().name) == "computes"
            await thread.run(lambda: done.append(number))

        for number in range(3):
            await ask(number)
        async with anyio.create_task_group() as tasks:
            for number in range(3, 6):
                tasks.start_soon(ask, number)
    assert done[:3] == [0, 1, 2]
    assert sorted(done) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
async def test_what_work_raises_is_raised_by_the_call_and_the_thread_goes_on(error: BaseException) -> None:
    def fails() -> None:
        raise error

    async with computing() as thread:
        with pytest.raises(type(error)):
            await thread.run(fails)
        assert await thread.run(lambda: 5) == 5


async def test_a_cancelled_call_returns_at_once_and_its_work_still_ends() -> None:
    may_end, ended = Event(), list[str]()

    def works() -> None:
        may_end.wait(10)
        ended.append("first")

    async with computing() as thread:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.run, works)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert ended == []
        may_end.set()
        await thread.run(lambda: ended.append("second"))
    assert ended == ["first", "second"]


async def test_closing_waits_for_the_work_there_is_and_takes_no_more() -> None:
    may_end, ended = Event(), list[int]()
    thread = ComputeThread("computes")

    def works() -> None:
        may_end.wait(10)
        ended.append(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.run, works)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(thread.close)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineShutdown):
            await thread.run(lambda: None)
        may_end.set()
    assert ended == [1]
    await thread.close()


async def test_a_virtual_clock_waits_for_the_thread() -> None:
    async with computing() as thread:
        with anyio.fail_after(0.001):
            assert await thread.run(lambda: Event().wait(0.05)) is False
