"""WorkThreads: work beside the loop. How it ends early is tested with `PromptThreads`, which puts a limit before it."""

from __future__ import annotations

import gc
from threading import Event, get_ident
from weakref import WeakSet

import anyio
import pytest

from pipeline.threads import GiveUp, WorkThreads

REAL_S = 20.0
"""Real seconds after which a thread that should have ended fails its test."""


async def test_work_without_a_control_runs_in_another_thread() -> None:
    assert await WorkThreads(1).run(lambda _: get_ident()) != get_ident()


async def test_a_cancelled_task_ends_its_work_at_the_next_step() -> None:
    begun, ended = Event(), Event()

    def endless(give_up: GiveUp) -> None:
        begun.set()
        try:
            while True:
                give_up()
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(WorkThreads(1).run, endless)
        assert await anyio.to_thread.run_sync(begun.wait, REAL_S)
        tasks.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(ended.wait, REAL_S)


async def test_what_failed_is_let_go_without_a_garbage_collection() -> None:
    class Material:
        """Such as the bytes of a long body."""

    alive: WeakSet[Material] = WeakSet()

    def failing(_: GiveUp) -> None:
        material = Material()
        alive.add(material)
        raise ValueError("as it is")

    gc.disable()
    try:
        with pytest.raises(ValueError, match="as it is"):
            await WorkThreads(1).run(failing)
        await anyio.sleep(1)
        assert not alive
    finally:
        gc.enable()


async def test_what_waits_is_counted_once_no_thread_is_free() -> None:
    threads, may_end, begun = WorkThreads(1), Event(), Event()

    def work(_: GiveUp) -> None:
        begun.set()
        assert may_end.wait(REAL_S)

    assert threads.waiting() is None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(threads.run, work)
        assert await anyio.to_thread.run_sync(begun.wait, REAL_S)
        assert threads.waiting() == 0
        tasks.start_soon(threads.run, work)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert threads.waiting() == 1
        may_end.set()
    assert threads.waiting() is None
