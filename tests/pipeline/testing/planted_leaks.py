"""Tests with a stream left open, and others that leave none; run by a pytest of its own from test_open_streams.

Each test named `test_leak_*` must fail and each named `test_clean_*` must pass.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import AsyncEngine, Context, Disconnected, Operator, ResponseStream, Segment, function_engine
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Wait, virtual_time

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ITEMS = list(range(5))
KEPT: list[Any] = []


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return virtual_time(request.param)


@pytest.fixture(autouse=True)
def watched(open_streams: OpenStreams) -> None:
    """Every test here is watched."""


async def answer(*steps: Any) -> ResponseStream[Any]:
    return await ScriptedEngine(steps or ITEMS).generate(Context("request"))


async def read_some() -> ResponseStream[Any]:
    """A stream that was read twice and has more."""
    stream = await answer()
    assert [await anext(stream), await anext(stream)] == [0, 1]
    return stream


@function_engine
async def function(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


class Careless(Operator[Any, Any, Any, Any]):
    """Reads the next stage's stream and never closes it."""

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        return ResponseStream(self.items(await next.generate(request)), request)

    async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async for item in stream:
            yield item


# -- on the runner's loop


@pytest.mark.anyio
async def test_leak_kept_unread() -> None:
    KEPT.append(await answer())


@pytest.mark.anyio
async def test_leak_dropped_unread() -> None:
    await answer()


@pytest.mark.anyio
async def test_leak_kept_half_read() -> None:
    KEPT.append(await read_some())


@pytest.mark.anyio
async def test_leak_dropped_half_read() -> None:
    await read_some()


@pytest.mark.anyio
async def test_leak_dropped_and_collected_before_the_end() -> None:
    await read_some()
    for _ in range(5):
        gc.collect()
        await anyio.sleep(1)


@pytest.mark.anyio
async def test_leak_a_loop_left_by_break() -> None:
    async for _ in await answer():
        break


@pytest.mark.anyio
async def test_leak_all_items_read_but_not_the_end() -> None:
    stream = await answer()
    for _ in ITEMS:
        await anext(stream)


@pytest.mark.anyio
async def test_leak_in_a_task() -> None:
    async def read() -> None:
        await read_some()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)


@pytest.mark.anyio
async def test_leak_in_a_task_cancelled_between_reads() -> None:
    async def read() -> None:
        stream = await read_some()
        await anyio.sleep_forever()
        await stream.aclose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_leak_in_a_task_cancelled_during_a_read() -> None:
    stream = await answer(0, Wait(100), 1)

    async def read() -> None:
        async for _ in stream:
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_leak_in_a_task_that_outlives_the_test() -> None:
    async def read() -> None:
        async with await answer(0, Wait(1000), 1) as stream:
            async for _ in stream:
                pass

    if isinstance(anyio.lowlevel.current_token().native_token, asyncio.AbstractEventLoop):
        KEPT.append(asyncio.ensure_future(read()))
    else:
        trio.lowlevel.spawn_system_task(read)
    await anyio.wait_all_tasks_blocked()


@pytest.mark.anyio
async def test_leak_in_a_child_context() -> None:
    parent = Context("request")
    KEPT.append(parent)
    stream = await ScriptedEngine(ITEMS).generate(parent.child("request"))
    await anext(stream)


@pytest.mark.anyio
async def test_leak_of_a_stopped_request() -> None:
    stream = await read_some()
    stream.context.stop()
    KEPT.append(stream)


@pytest.mark.anyio
async def test_leak_of_a_killed_request() -> None:
    stream = await read_some()
    stream.context.kill()


@pytest.mark.anyio
async def test_leak_of_a_function_engine() -> None:
    await anext(await function.generate(Context(5)))


@pytest.mark.anyio
async def test_leak_of_a_map() -> None:
    stream = (await answer()).map(str)
    assert await anext(stream) == "0"
    KEPT.append(stream)


@pytest.mark.anyio
async def test_leak_of_a_dropped_map() -> None:
    stream = (await answer()).map(str)
    assert await anext(stream) == "0"


@pytest.mark.anyio
async def test_leak_below_a_closed_stream_of_a_graph() -> None:
    graph: Segment[Any, Any] = Careless() >> ScriptedEngine(ITEMS)
    async with await graph.generate(Context("request")) as stream:
        await anext(stream)


@pytest.mark.anyio
async def test_leak_of_a_graph() -> None:
    graph: Segment[Any, Any] = Careless() >> ScriptedEngine(ITEMS)
    stream = await graph.generate(Context("request"))
    await anext(stream)
    KEPT.append(stream)


@pytest.mark.anyio
async def test_leak_in_a_reference_cycle() -> None:
    stream = await read_some()
    cycle: list[Any] = [stream]
    cycle.append(cycle)


@pytest.mark.anyio
async def test_leak_unread_in_a_collected_reference_cycle() -> None:
    cycle: list[Any] = [await answer()]
    cycle.append(cycle)
    cycle = []
    gc.collect()
    await anyio.sleep(1)


@pytest.mark.anyio
async def test_leak_behind_an_error_of_the_reader() -> None:
    with suppress(KeyError):
        async for _ in await answer():
            raise KeyError


@pytest.mark.anyio
async def test_leak_whose_generator_is_closed_by_shutdown_asyncgens(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    KEPT.append(await read_some())
    if anyio_backend[0] == "asyncio":
        await asyncio.get_running_loop().shutdown_asyncgens()


@pytest.mark.anyio
async def test_leak_by_a_second_reader() -> None:
    stream = await answer(0, Wait(5), 1, 2)
    await anext(stream)

    async def read() -> None:
        await anext(stream)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError):
            await anext(stream)


@pytest.fixture
async def leaking(anyio_backend: tuple[str, dict[str, Any]]) -> ResponseStream[Any]:
    return await read_some()


@pytest.mark.anyio
async def test_leak_in_a_fixture(leaking: ResponseStream[Any]) -> None:
    assert await anext(leaking) == 2


@pytest.mark.anyio
@settings(max_examples=3, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(min_value=1, max_value=3))
async def test_leak_in_an_example(count: int) -> None:
    stream = await answer()
    for _ in range(count):
        await anext(stream)
    KEPT.append(stream)


# -- on a loop of the test's own


def test_leak_on_a_loop_of_its_own(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    async def main() -> None:
        KEPT.append(await read_some())

    anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_leak_dropped_on_a_loop_of_its_own(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    anyio.run(read_some, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_leak_in_a_task_that_its_loop_cancels() -> None:
    async def read() -> None:
        async for _ in await answer(0, Wait(1000), 1):
            pass

    async def main() -> None:
        KEPT.append(asyncio.ensure_future(read()))
        await anyio.wait_all_tasks_blocked()

    asyncio.run(main())


# -- nothing left


@pytest.mark.anyio
async def test_clean_without_a_stream() -> None:
    await anyio.sleep(1)


@pytest.mark.anyio
async def test_clean_closed() -> None:
    KEPT.append(stream := await read_some())
    await stream.aclose()


@pytest.mark.anyio
async def test_clean_closed_unread() -> None:
    async with await answer():
        pass


@pytest.mark.anyio
async def test_clean_closed_by_collect() -> None:
    KEPT.append(stream := await answer())
    assert await stream.collect() == ITEMS


@pytest.mark.anyio
async def test_clean_read_to_the_end_and_kept() -> None:
    KEPT.append(stream := await answer())
    assert [item async for item in stream] == ITEMS


@pytest.mark.anyio
async def test_clean_read_to_the_end_and_dropped() -> None:
    assert [item async for item in await answer()] == ITEMS


@pytest.mark.anyio
async def test_clean_read_to_its_error() -> None:
    KEPT.append(stream := await answer(0, Fail(Disconnected("broken"))))
    with pytest.raises(Disconnected):
        [item async for item in stream]


@pytest.mark.anyio
async def test_clean_read_to_its_end_behind_a_stop() -> None:
    KEPT.append(stream := await read_some())
    stream.context.stop()
    assert [item async for item in stream] == []


@pytest.mark.anyio
async def test_clean_closed_behind_a_kill() -> None:
    async with await read_some() as stream:
        stream.context.kill()


@pytest.mark.anyio
async def test_clean_closed_though_the_reader_was_cancelled() -> None:
    with anyio.move_on_after(1):
        async with await answer(0, Wait(100), 1) as stream:
            async for _ in stream:
                pass


@pytest.mark.anyio
async def test_clean_closed_by_another_task_in_a_child_context() -> None:
    stream = await ScriptedEngine(ITEMS).generate(Context("request").child("request"))

    async def read() -> None:
        async with stream:
            await anext(stream)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)


@pytest.mark.anyio
async def test_clean_map_of_a_map() -> None:
    async with (await answer()).map(str).map(int) as stream:
        assert await anext(stream) == 0


@pytest.mark.anyio
async def test_clean_graph() -> None:
    class Careful(Careless):
        async def items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
            async with stream:
                async for item in stream:
                    yield item

    graph: Segment[Any, Any] = Careful() >> ScriptedEngine(ITEMS)
    async with await graph.generate(Context("request")) as stream:
        assert await anext(stream) == 0


@pytest.mark.anyio
async def test_clean_operator_that_reads_to_the_end() -> None:
    graph: Segment[Any, Any] = Careless() >> ScriptedEngine(ITEMS)
    assert await (await graph.generate(Context("request"))).collect() == ITEMS


@pytest.fixture
async def closing(
    anyio_backend: tuple[str, dict[str, Any]], open_streams: OpenStreams
) -> AsyncIterator[ResponseStream[Any]]:
    async with await answer() as stream:
        yield stream


@pytest.mark.anyio
async def test_clean_closed_by_its_fixture(closing: ResponseStream[Any]) -> None:
    assert await anext(closing) == 0


@pytest.mark.anyio
@settings(max_examples=3, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(min_value=1, max_value=3))
async def test_clean_examples(count: int) -> None:
    async with await answer() as stream:
        for _ in range(count):
            await anext(stream)


def test_clean_on_a_loop_of_its_own(anyio_backend: tuple[str, dict[str, Any]]) -> None:
    async def main() -> None:
        async with await read_some() as stream:
            KEPT.append(stream)

    anyio.run(main, backend=anyio_backend[0], backend_options=anyio_backend[1])


def test_clean_without_any_loop() -> None:
    assert True
