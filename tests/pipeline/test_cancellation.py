"""Ending what a stream waits for: at once on a kill, and without a trace in the task that reads."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import Context, until_killed, until_stopped
from tests.pipeline.cancelled_sources import Source, assert_not_being_cancelled, kill_soon


async def test_a_kill_ends_the_wait_and_the_reader_goes_on() -> None:
    context, source = Context(None), Source()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        assert [item async for item in until_killed(source.items(), context)] == [0]
        assert_not_being_cancelled()
        await checkpoint()
        await anyio.sleep(1)
    assert source.ended in (["CancelledError"], ["Cancelled"])


async def test_a_kill_between_two_reads_drops_what_follows() -> None:
    context, source = Context(None), Source()
    items = until_killed(source.items(), context)
    assert await anext(items) == 0
    context.kill()
    assert [item async for item in items] == []
    assert source.ended == ["closed"]
    await anyio.sleep(1)
    assert_not_being_cancelled()


async def test_a_source_that_kills_its_own_request_is_cut_at_its_next_wait() -> None:
    context = Context(None)
    ended: list[str] = []

    async def items() -> AsyncIterator[int]:
        context.kill()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("cut")
        yield 0

    assert [item async for item in until_killed(items(), context)] == []
    assert ended == ["cut"]
    assert_not_being_cancelled()
    await anyio.sleep(1)


async def test_a_source_that_kills_its_own_request_and_yields_leaves_the_reader_alone() -> None:
    context = Context(None)

    async def items() -> AsyncIterator[int]:
        context.kill()
        yield 0

    assert [item async for item in until_killed(items(), context)] == []
    await anyio.sleep(1)
    assert_not_being_cancelled()


async def test_a_source_that_swallows_the_end_of_its_wait_is_closed_all_the_same() -> None:
    context = Context(None)
    ended: list[str] = []

    async def items() -> AsyncIterator[int]:
        try:
            with anyio.CancelScope():
                await anyio.sleep_forever()
        except BaseException:
            ended.append("cut")
        try:
            yield 0
        finally:
            ended.append("closed")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        assert [item async for item in until_killed(items(), context)] == []
        assert_not_being_cancelled()
        await anyio.sleep(1)
    assert ended == ["cut", "closed"]


async def test_a_source_that_fails_when_it_is_cut_fails() -> None:
    context = Context(None)

    async def items() -> AsyncIterator[int]:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("lost")
        yield 0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        with pytest.raises(OSError, match="lost"):
            await anext(until_killed(items(), context))
        assert_not_being_cancelled()
        await anyio.sleep(1)


@pytest.mark.parametrize("first", ["kill", "cancel"])
async def test_another_cancellation_of_the_reader_at_the_same_time_takes_effect(first: str) -> None:
    context, source = Context(None), Source()
    reached: list[object] = []

    async def read() -> None:
        async for item in until_killed(source.items(), context):
            reached.append(item)
        await checkpoint()
        reached.append("after")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        if first == "kill":
            context.kill()
            tasks.cancel_scope.cancel()
        else:
            tasks.cancel_scope.cancel()
            context.kill()
    assert reached == [0]


async def test_a_deadline_around_the_reader_holds() -> None:
    context, source = Context(None), Source()
    with anyio.move_on_after(5) as deadline:
        async for _ in until_killed(source.items(), context):
            pass
    assert deadline.cancelled_caught
    assert source.ended in (["CancelledError"], ["Cancelled"])
    assert_not_being_cancelled()


async def test_a_kill_from_another_thread_ends_the_wait() -> None:
    context, source = Context(None), Source()
    async with anyio.create_task_group() as tasks:

        async def kill() -> None:
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(context.kill)

        tasks.start_soon(kill)
        assert [item async for item in until_killed(source.items(), context)] == [0]
    assert_not_being_cancelled()


async def test_another_task_may_read_on_and_is_the_one_that_is_cut() -> None:
    context, source = Context(None), Source()
    read: list[object] = []
    items = until_killed(source.items(), context)
    assert await anext(items) == 0

    async def go_on() -> None:
        read.extend([item async for item in items])
        await anyio.sleep(1)
        read.append("went on")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on)
        await anyio.wait_all_tasks_blocked()
        context.kill()
    assert read == ["went on"]


async def test_a_stop_ends_the_wait_for_an_item_where_a_stop_counts() -> None:
    context, source = Context(None), Source()

    async def stop() -> None:
        await anyio.sleep(1)
        context.stop()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        assert [item async for item in until_stopped(source.items(), context)] == [0]
        assert_not_being_cancelled()
    assert source.ended in (["CancelledError"], ["Cancelled"])
    assert [item async for item in until_stopped(Source().items(), context)] == []
