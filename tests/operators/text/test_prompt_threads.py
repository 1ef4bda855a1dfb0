"""PromptThreads: long work beside the loop; a request that ends early does not wait, and leaves no thread behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Event, get_ident
from time import sleep
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from operators.text import PromptThreads, TooManyPrompts
from pipeline import Cancelled, Control
from pipeline.errors import ExceededLimit
from pipeline.protocols.limits import PromptWork
from pipeline.threads import GiveUp

PATIENCE_S = 20.0
"""Real seconds after which a thread that should have been ended fails its test."""


class Work:
    """Work in a thread that ends when the test lets it."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.ended = Event(), Event(), Event()
        self.was_given_up = False

    def __call__(self, give_up: GiveUp) -> str:
        self.begun.set()
        try:
            assert self.may_end.wait(PATIENCE_S)
            give_up()
        except Exception:
            self.was_given_up = True
            raise
        finally:
            self.ended.set()
        return "done"


async def happened(event: Event) -> None:
    """Waits for a thread, in real time."""
    assert await anyio.to_thread.run_sync(event.wait, PATIENCE_S)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await checkpoint()


async def quick(threads: PromptThreads) -> int:
    return await threads.run(lambda _: 7, Control())


Start = Callable[[Work, Control], object]


@asynccontextmanager
async def running(threads: PromptThreads, outcomes: list[Any]) -> AsyncIterator[Start]:
    """Runs work in tasks of its own; what it gives, or its error, is added to the outcomes."""

    async def run(work: Work, control: Control) -> None:
        try:
            outcomes.append(await threads.run(work, control))
        except Exception as error:
            outcomes.append(error)

    async with anyio.create_task_group() as tasks:
        yield lambda work, control: tasks.start_soon(run, work, control)


async def test_work_runs_in_another_thread_and_its_result_comes_back() -> None:
    assert await PromptThreads().run(lambda _: get_ident(), Control()) != get_ident()


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
async def test_an_error_of_any_kind_is_raised_as_it_came(error: BaseException) -> None:
    threads = PromptThreads(PromptWork(tokenizer_threads=1))

    def fail(_: GiveUp) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await threads.run(fail, Control())
    assert caught.value is error
    assert await quick(threads) == 7


@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_a_stop_or_a_kill_ends_the_wait_at_once_and_the_work_at_its_next_step(ending: str) -> None:
    threads, work, control = PromptThreads(PromptWork(tokenizer_threads=1)), Work(), Control()
    outcomes: list[Any] = []
    async with running(threads, outcomes) as start:
        start(work, control)
        await happened(work.begun)
        getattr(control, ending)()
        await turns()
        assert isinstance(outcomes[0], Cancelled)
        assert not work.ended.is_set(), "nothing has waited for the thread"
        work.may_end.set()
        await happened(work.ended)
    assert work.was_given_up
    assert await quick(threads) == 7, "its place is free again"


async def test_a_request_that_was_stopped_before_begins_nothing() -> None:
    control, work = Control(), Work()
    control.stop()
    with pytest.raises(Cancelled):
        await PromptThreads().run(work, control)
    assert not work.begun.is_set()


async def test_a_cancelled_task_leaves_its_work_and_the_thread_keeps_its_place_until_it_ends() -> None:
    threads = PromptThreads(PromptWork(tokenizer_threads=1))
    outcomes: list[Any] = []
    left, follower = Work(), Work()
    async with running(threads, outcomes) as start:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(threads.run, left, Control())
                await happened(left.begun)
                scope.cancel()
        start(follower, Control())
        await turns(20)
        assert not follower.begun.is_set(), "the one thread is still busy"
        left.may_end.set()
        await happened(follower.begun)
        follower.may_end.set()
    assert left.was_given_up
    assert outcomes == ["done"]


async def test_clients_that_connect_and_leave_never_have_more_threads_than_there_are() -> None:
    threads = PromptThreads(PromptWork(tokenizer_threads=2, max_waiting_prompts=3))
    outcomes: list[Any] = []
    works = [Work() for _ in range(40)]
    async with running(threads, outcomes) as start:
        for work in works:
            control = Control()
            start(work, control)
            await turns()
            if work in works[:2]:
                await happened(work.begun)
            control.kill()
            await turns()
        assert sum(work.begun.is_set() for work in works) == 2
        assert all(isinstance(outcome, Cancelled) for outcome in outcomes), "those that left have freed their turn"
        for work in works[:2]:
            work.may_end.set()
            await happened(work.ended)
    assert len(outcomes) == 40
    assert await quick(threads) == 7, "its place is free again"


async def test_more_work_than_may_wait_is_refused_as_an_overload_with_its_limit() -> None:
    threads = PromptThreads(PromptWork(tokenizer_threads=1, max_waiting_prompts=2))
    outcomes: list[Any] = []
    works = [Work() for _ in range(3)]
    async with running(threads, outcomes) as start:
        start(works[0], Control())
        await happened(works[0].begun)
        for work in works[1:]:
            work.may_end.set()
            start(work, Control())
        await turns()
        with pytest.raises(TooManyPrompts) as caught:
            await quick(threads)
        works[0].may_end.set()
    assert caught.value.exceeded == ExceededLimit("max_waiting_prompts", 3, 2)
    assert (caught.value.facts.status, caught.value.retry_after_s) == (529, 1.0)
    assert outcomes == ["done"] * 3


async def test_time_stands_still_while_work_runs_and_goes_on_once_nothing_waits_for_it() -> None:
    threads, work, control = PromptThreads(), Work(), Control()
    outcomes: list[Any] = []
    began_s, rang_s = anyio.current_time(), 0.0

    async def alarm() -> None:
        nonlocal rang_s
        await anyio.sleep(60)
        rang_s = anyio.current_time() - began_s

    async with running(threads, outcomes) as start, anyio.create_task_group() as tasks:
        tasks.start_soon(alarm)
        start(work, control)
        await happened(work.begun)
        await anyio.to_thread.run_sync(sleep, 0.05)
        assert (rang_s, anyio.current_time()) == (0.0, began_s)
        control.kill()
        await anyio.sleep(61)
        assert (rang_s, len(outcomes)) == (60.0, 1)
        work.may_end.set()


def test_one_object_serves_one_loop_after_the_other() -> None:
    threads = PromptThreads(PromptWork(tokenizer_threads=1))
    for backend in ("asyncio", "trio", "asyncio"):
        assert anyio.run(quick, threads, backend=backend) == 7
