"""What a kill spares of a source that waits, what it does not, and whose cancellation ends the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import Context, until_killed
from pipeline.cancellation import PATIENCE_S
from pipeline.errors import BackendCancelled
from tests.pipeline.cancelled_sources import Source, assert_not_being_cancelled, kill_soon


def is_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# -- what a kill spares


async def test_what_the_source_shields_is_not_cut_and_the_wait_behind_it_is() -> None:
    context = Context(None)
    done: list[str] = []

    async def items() -> AsyncIterator[int]:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3)
            done.append("shielded")
        await anyio.sleep_forever()
        yield 0

    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        assert [item async for item in until_killed(items(), context)] == []
        assert_not_being_cancelled()
    assert done == ["shielded"]
    assert 3 <= anyio.current_time() - began < 3.1


async def test_a_shield_around_the_reader_does_not_hold_a_kill_off() -> None:
    context, source = Context(None), Source()
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        items = until_killed(source.items(), context)
        assert await anext(items) == 0
        with anyio.CancelScope(shield=True):
            assert [item async for item in items] == []
    assert anyio.current_time() - began == pytest.approx(1)


async def test_a_shielded_release_under_way_is_not_cut() -> None:
    context = Context(None)
    ended: list[str] = []

    async def items() -> AsyncIterator[int]:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(5)
                ended.append("released")
        yield 0

    async def read() -> None:
        await anext(until_killed(items(), context))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context, 2.0)
        with anyio.move_on_after(1):
            await read()
    assert ended == ["released"]


async def test_on_asyncio_a_release_that_nothing_shields_has_some_time_too() -> None:
    if not is_asyncio():
        pytest.skip("trio cancels each further wait at once")
    for released_by, takes_s, is_released in (
        ("kill", PATIENCE_S * 0.9, True),
        ("kill", PATIENCE_S * 1.1, False),
        ("cancel", PATIENCE_S * 0.9, True),
        ("cancel", PATIENCE_S * 1.1, False),
    ):
        assert await _released(released_by, takes_s) is is_released


async def _released(by: str, takes_s: float) -> bool:
    """Whether a source comes to the end of its `finally`, ended by a kill, or by its reader's end and then a kill."""
    context = Context(None)
    ended: list[str] = []

    async def items() -> AsyncIterator[int]:
        try:
            await anyio.sleep_forever()
        finally:
            await anyio.sleep(takes_s)
            ended.append("released")
        yield 0

    async def read() -> None:
        async for _ in until_killed(items(), context):
            pass

    reader = asyncio.ensure_future(read())
    await anyio.wait_all_tasks_blocked()
    if by == "cancel":
        reader.cancel()
        await checkpoint()
    context.kill()
    await asyncio.wait([reader])
    assert reader.cancelled() is (by == "cancel")
    return bool(ended)


# -- what a kill does not spare


async def test_a_source_that_swallows_the_end_of_its_wait_and_waits_on_is_cut_again() -> None:
    context = Context(None)
    cuts: list[float] = []
    began = anyio.current_time()

    async def items() -> AsyncIterator[int]:
        for _ in range(3):
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                cuts.append(anyio.current_time() - began)
        await anyio.sleep_forever()
        yield 0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill_soon, context)
        assert [item async for item in until_killed(items(), context)] == []
        assert_not_being_cancelled()
        await anyio.sleep(10)
        assert_not_being_cancelled()
    assert len(cuts) == 3


async def test_a_deadline_of_the_source_that_passes_as_the_kill_comes_does_not_take_its_place() -> None:
    for turns in range(8):
        context = Context(None)

        async def items() -> AsyncIterator[int]:
            while True:
                with anyio.move_on_after(0):
                    await anyio.sleep_forever()
            yield 0

        async def kill_at(turns: int, context: Context[Any]) -> None:
            for _ in range(turns):
                await checkpoint()
            context.kill()

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_at, turns, context)
            assert [item async for item in until_killed(items(), context)] == []
            assert_not_being_cancelled()
        assert anyio.current_time() - began < PATIENCE_S


async def test_a_native_deadline_of_the_source_that_passes_as_the_kill_comes_does_not_take_its_place() -> None:
    if not is_asyncio():
        pytest.skip("of asyncio")
    for turns in range(8):
        context = Context(None)

        async def items() -> AsyncIterator[int]:
            while True:
                try:
                    async with asyncio.timeout(0):
                        await asyncio.sleep(60)
                except TimeoutError:
                    pass
            yield 0

        async def kill_at(turns: int, context: Context[Any]) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            context.kill()

        began = anyio.current_time()
        killer = asyncio.ensure_future(kill_at(turns, context))
        assert [item async for item in until_killed(items(), context)] == []
        await killer
        assert_not_being_cancelled()
        assert anyio.current_time() - began < PATIENCE_S


async def test_races_inside_one_another_end_together() -> None:
    for same in (True, False):
        context, source = Context(None), Source()
        inside = context if same else context.child(None)

        async def items(inside: Context[Any] = inside, source: Source = source) -> AsyncIterator[int]:
            async with aclosing(until_killed(source.items(), inside)) as inner:
                async for item in inner:
                    yield item
            await anyio.sleep_forever()

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_soon, context)
            assert [item async for item in until_killed(items(), context)] == [0]
            assert_not_being_cancelled()
        assert anyio.current_time() - began < 1.1
        assert source.ended in (["CancelledError"], ["Cancelled"])


# -- whose cancellation it is


async def test_a_reader_that_was_cancelled_before_it_reads_goes_on_after_a_kill() -> None:
    context, source = Context(None), Source()
    reached: list[str] = []

    async def read() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                async for _ in until_killed(source.items(), context):
                    pass
                await anyio.sleep(1)
                reached.append("after")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await kill_soon(context)
    assert reached == ["after"]


async def test_a_scope_cancelled_with_the_kill_is_left_as_any_cancelled_scope() -> None:
    """The source waits once more when it is cut, as a task group does, and swallows what comes second."""
    context = Context(None)

    async def items() -> AsyncIterator[int]:
        try:
            await anyio.sleep_forever()
        except BaseException:
            with suppress(BaseException):
                await anyio.sleep_forever()
            raise
        yield 0

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def both() -> None:
                await anyio.wait_all_tasks_blocked()
                context.kill()
                scope.cancel()

            tasks.start_soon(both)
            async for _ in until_killed(items(), context):
                pass
            await checkpoint()
    assert scope.cancelled_caught
    await checkpoint()
    assert_not_being_cancelled()


@pytest.mark.parametrize("is_killed", [False, True])
async def test_something_of_the_source_that_is_cancelled_does_not_cancel_the_reader(is_killed: bool) -> None:
    if not is_asyncio():
        pytest.skip("trio has no cancellation that is an awaited thing's result")
    context, loop = Context(None), asyncio.get_running_loop()
    work = loop.create_future()

    async def items() -> AsyncIterator[int]:
        await work
        yield 0

    if is_killed:
        loop.call_soon(context.kill)
    loop.call_soon(work.cancel)
    if is_killed:
        assert [item async for item in until_killed(items(), context)] == []
    else:
        with pytest.raises(BackendCancelled) as caught:
            await anext(until_killed(items(), context))
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    await checkpoint()
    assert_not_being_cancelled()


def test_a_kill_is_raced_on_uvloop_too() -> None:
    pytest.importorskip("uvloop")

    async def run() -> None:
        context, source = Context(None), Source()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_soon, context, 0.001)
            assert [item async for item in until_killed(source.items(), context)] == [0]
            assert_not_being_cancelled()
            await anyio.sleep(0.001)
        assert source.ended == ["CancelledError"]

    anyio.run(run, backend_options={"use_uvloop": True})
