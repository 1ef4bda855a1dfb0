"""The reactivex scheduler on anyio."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from pipeline import StreamClosed
from pipeline.rx import AnyIOScheduler, BehaviorSubject, CatchScheduler, Subject, ops


async def test_actions_run_at_their_time_in_order() -> None:
    seen: list[tuple[str, float]] = []
    start = anyio.current_time()

    def note(_: Any, name: Any) -> None:
        seen.append((name, round(anyio.current_time() - start, 6)))

    async with AnyIOScheduler() as scheduler:
        scheduler.schedule_relative(5.0, note, "second")
        scheduler.schedule_relative(timedelta(seconds=1), note, "first")
        scheduler.schedule_absolute(scheduler.now + timedelta(seconds=7), note, "third")
        scheduler.schedule_absolute(start + 7.5, note, "fourth")
        scheduler.schedule(note, "at once")
        scheduler.schedule_relative(-3.0, note, "also at once")
        await anyio.sleep(8)
    assert seen == [
        ("at once", 0),
        ("also at once", 0),
        ("first", 1),
        ("second", 5),
        ("third", 7),
        ("fourth", 7.5),
    ]


async def test_now_is_the_loops_clock_in_every_thread() -> None:
    async with AnyIOScheduler() as scheduler:
        await anyio.sleep(90)
        expected = datetime.fromtimestamp(anyio.current_time(), tz=UTC)
        assert scheduler.now == expected
        assert scheduler.now_s == expected.timestamp()
        assert await anyio.to_thread.run_sync(lambda: scheduler.now) == expected


async def test_actions_due_together_run_in_the_order_they_were_scheduled() -> None:
    seen: list[Any] = []
    async with AnyIOScheduler() as scheduler:
        for number in range(200):
            scheduler.schedule_relative(1.0, lambda _, n: seen.append(n), number)
        await anyio.sleep(1.5)
    assert seen == list(range(200))


async def test_a_disposed_action_does_not_run() -> None:
    seen: list[str] = []
    async with AnyIOScheduler() as scheduler:
        later = scheduler.schedule_relative(1.0, lambda *_: seen.append("later"))
        soon = scheduler.schedule(lambda *_: seen.append("soon"))
        later.dispose()
        soon.dispose()
        await anyio.sleep(2)
    assert seen == []


async def test_disposed_actions_do_not_pile_up() -> None:
    async with AnyIOScheduler() as scheduler:
        for _ in range(1000):
            scheduler.schedule_relative(3600.0, lambda *_: None).dispose()
        assert len(scheduler._timers) <= 64


async def test_leaving_cancels_what_is_scheduled() -> None:
    seen: list[str] = []
    async with AnyIOScheduler() as scheduler:
        action = scheduler.schedule_relative(1.0, lambda *_: seen.append("ran"))
    await anyio.sleep(2)
    assert seen == []
    action.dispose()
    with pytest.raises(StreamClosed):
        scheduler.schedule(lambda *_: None)
    with pytest.raises(StreamClosed):
        scheduler.now  # noqa: B018


async def test_a_periodic_action_runs_until_it_is_disposed() -> None:
    counts: list[Any] = []

    def count(state: Any) -> Any:
        counts.append(state)
        return state + 1

    async with AnyIOScheduler() as scheduler:
        periodic = scheduler.schedule_periodic(10.0, count, 0)
        await anyio.sleep(35)
        periodic.dispose()
        await anyio.sleep(35)
    assert counts == [0, 1, 2]


async def test_timed_operators_run_in_virtual_time() -> None:
    seen: list[int] = []
    async with AnyIOScheduler() as scheduler:
        source = Subject[int]()
        subscription = source.pipe(ops.debounce(2.0, scheduler=scheduler)).subscribe(seen.append)
        for item in range(3):
            source.on_next(item)
            await anyio.sleep(1)
        await anyio.sleep(3)
        subscription.dispose()
    assert seen == [2]


async def test_another_thread_may_schedule_and_dispose() -> None:
    ran = anyio.Event()
    seen: list[str] = []
    async with AnyIOScheduler() as scheduler:

        def elsewhere() -> None:
            scheduler.schedule_relative(60.0, lambda *_: seen.append("cancelled")).dispose()
            scheduler.schedule_relative(30.0, lambda *_: ran.set())

        thread = Thread(target=elsewhere)  # joined at once: the clock must not jump while it works
        thread.start()
        thread.join()
        await ran.wait()
        await anyio.sleep(60)
    assert seen == []


async def test_actions_without_end_let_others_run() -> None:
    rounds = 0

    def again(scheduler: Any, _: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return scheduler.schedule(again)

    async with AnyIOScheduler() as scheduler:
        scheduler.schedule(again)
        for _ in range(10):
            await checkpoint()
    assert 2 <= rounds <= 100


async def test_an_actions_error_leaves_the_block() -> None:
    def fail(*_: Any) -> None:
        raise LookupError("broken")

    with pytest.RaisesGroup(LookupError):
        async with AnyIOScheduler() as scheduler:
            scheduler.schedule(fail)
            await anyio.sleep_forever()


async def test_the_blocks_own_error_comes_out_as_it_is() -> None:
    with pytest.raises(LookupError):
        async with AnyIOScheduler():
            raise LookupError("the block's")


async def test_a_catch_scheduler_handles_an_actions_error() -> None:
    errors: list[Exception] = []

    def fail(*_: Any) -> None:
        raise LookupError("broken")

    def handle(error: Exception) -> bool:
        errors.append(error)
        return True

    async with AnyIOScheduler() as scheduler:
        CatchScheduler(scheduler, handle).schedule(fail)
        await anyio.sleep(1)
    assert [str(error) for error in errors] == ["broken"]


@pytest.mark.parametrize("here", [True, False])
async def test_a_task_spawned_in_any_thread_ends_when_disposed_in_any(here: bool) -> None:
    states = BehaviorSubject("new")

    async def work(scope: anyio.CancelScope) -> None:
        states.on_next("running")
        with scope:
            await anyio.sleep_forever()
        states.on_next("ended")

    async with AnyIOScheduler() as scheduler:
        task = scheduler.spawn(work) if here else await anyio.to_thread.run_sync(scheduler.spawn, work)
        await anyio.sleep(1)
        assert states.value == "running"
        await anyio.to_thread.run_sync(task.dispose)
        await anyio.sleep(1)
        assert states.value == "ended"
    with pytest.raises(StreamClosed):
        scheduler.spawn(work)
