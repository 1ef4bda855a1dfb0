"""RequestAdapter: a stream that is stopped, killed, closed or dropped ends in one of the few allowed ways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import GenerateContext
from engines.adapter import RequestAdapter
from pipeline import (
    Annotated,
    Cancelled,
    Context,
    Disconnected,
    InvalidArgument,
)
from pipeline.errors import BackendCancelled
from pipeline.protocols import (
    PreprocessedRequest,
)
from pipeline.testing import check_engine
from tests.engines.worlds import Chunk, EndsOnKill, FunctionEngine, answer, failure, request, scripted

# -- stop


async def test_an_engine_that_just_ends_after_a_stop_gets_its_cancelled_chunk() -> None:
    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        while not context.is_stopped:
            yield Chunk.token(1)

    caller = request()
    async with await RequestAdapter(FunctionEngine(generate)).generate(caller) as stream:
        await anext(stream)
        caller.stop()
        assert [item async for item in stream] == [Annotated(Chunk.cancelled())]


@pytest.mark.parametrize("raised", [Cancelled("given up"), BackendCancelled("given up")])
async def test_a_raised_cancellation_counts_as_cancelled_after_a_stop_only(raised: Exception) -> None:
    caller = request()
    async with await RequestAdapter(scripted(Chunk.token(1), raised)).generate(caller) as stream:
        await anext(stream)
        caller.stop()
        assert [item async for item in stream] == [Annotated(Chunk.cancelled())]
    assert isinstance(await failure(scripted(Chunk.token(1), raised)), type(raised))


@pytest.mark.parametrize("way", ["stop", "kill", "neither"])
async def test_an_engine_that_waits_for_something_of_its_own_that_is_cancelled_does_not_cancel_its_reader(
    way: str,
) -> None:
    """The engine's own `abort` or `cleanup` cancels the task that does a request's work, as on asyncio."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        pytest.skip("of asyncio")
    work = loop.create_future()

    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        yield Chunk.token(1)
        await work

    engine, caller = FunctionEngine(generate), request()
    async with await RequestAdapter(engine).generate(caller) as stream:
        await anext(stream)
        if way != "neither":
            getattr(caller, way)()
        loop.call_soon(work.cancel)
        rest = [item async for item in stream]
    if way == "stop":
        assert rest == [Annotated(Chunk.cancelled())]
    elif way == "kill":
        assert rest == []
    else:
        assert isinstance(rest[0].extract_error(), BackendCancelled)
    assert engine.open == 0
    await checkpoint()


async def test_an_error_after_a_stop_is_still_an_error() -> None:
    caller = request()
    caller.stop()
    assert isinstance(await failure(scripted(Disconnected("lost")), caller), Disconnected)


async def test_a_stop_beforehand_is_the_engines_to_see() -> None:
    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        yield Chunk.cancelled() if context.is_stopped else Chunk.stop()

    caller = request()
    caller.stop()
    assert await answer(FunctionEngine(generate), caller) == [Annotated(Chunk.cancelled())]


async def test_a_stop_after_the_end_changes_nothing() -> None:
    caller = request()
    async with await RequestAdapter(scripted(Chunk.stop(), None)).generate(caller) as stream:
        await anext(stream)
        caller.stop()
        assert [item async for item in stream] == []


# -- kill, close, drop


async def test_a_kill_ends_a_stream_whose_engine_waits() -> None:
    engine, caller = scripted(Chunk.token(1), None), request()
    items: list[Any] = []

    async def read() -> None:
        items.extend(await (await RequestAdapter(engine).generate(caller)).collect())

    with anyio.fail_after(1):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            caller.kill()
    assert items == [Annotated(Chunk.token(1))]
    assert engine.open == 0


async def test_after_a_kill_nothing_comes_not_even_an_error() -> None:
    for rest in ([Chunk.token(2), Chunk.stop()], [RuntimeError("killed")], []):
        for made in (scripted(Chunk.token(1), *rest), EndsOnKill(scripted(Chunk.token(1), *rest).function)):
            caller = request()
            async with await RequestAdapter(made).generate(caller) as stream:
                await anext(stream)
                caller.kill()
                assert [item async for item in stream] == []
            assert made.open == 0


async def test_a_kill_while_the_engine_sets_up_is_cancelled() -> None:
    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await anyio.sleep_forever()

    caller = request()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_kill_later, caller)
        with anyio.fail_after(5), pytest.raises(Cancelled):
            await RequestAdapter(FunctionEngine(set_up)).generate(caller)
    with pytest.raises(Cancelled):
        await RequestAdapter(FunctionEngine(set_up)).generate(caller)


async def test_a_set_up_that_waits_for_something_that_is_cancelled_does_not_cancel_its_caller() -> None:
    try:
        work = asyncio.get_running_loop().create_future()
    except RuntimeError:
        pytest.skip("of asyncio")
    work.cancel()

    async def set_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
        await work

    with pytest.raises(BackendCancelled):
        await RequestAdapter(FunctionEngine(set_up)).generate(request())
    await checkpoint()


async def _kill_later(caller: Context[Any]) -> None:
    await anyio.sleep(1)
    caller.kill()


async def test_closing_ends_the_engines_generator() -> None:
    for items in (0, 1, 2):
        engine = scripted(*[Chunk.token(1)] * 5)
        async with await RequestAdapter(engine).generate(request()) as stream:
            for _ in range(items):
                await anext(stream)
            assert engine.open == (items > 0)
        assert engine.open == 0


@pytest.mark.parametrize("made", [FunctionEngine, EndsOnKill])
async def test_what_closing_the_engines_generator_raises_is_logged(
    made: type[FunctionEngine], caplog: pytest.LogCaptureFixture
) -> None:
    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
        try:
            yield Chunk.token(1)
            yield Chunk.stop()
            await anyio.sleep_forever()
        finally:
            raise RuntimeError("was not done")

    caplog.set_level(logging.ERROR)
    assert [item.data for item in await answer(made(generate))] == [Chunk.token(1), Chunk.stop()]
    async with await RequestAdapter(made(generate)).generate(request()) as stream:
        await anext(stream)
    assert [record.exc_info and str(record.exc_info[1]) for record in caplog.records] == ["was not done"] * 2


# -- the engine contract


async def _counts(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
    if not request.token_ids:
        raise InvalidArgument("no prompt")
    for n in range(60):
        if context.is_stopped:
            yield Chunk.cancelled()
            return
        await anyio.sleep(0.01)
        yield Chunk.token(n)
    yield Chunk.stop()


async def _ignores_kill(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
    """Checks for a stop only, and ignores a kill."""
    if not request.token_ids:
        raise KeyError("prompt")
    for n in range(60):
        if context.is_stopped and not context.is_killed:
            return
        await anyio.sleep(1.0 if n % 8 == 7 else 0.0)
        yield Chunk.token(n)
    yield Chunk.stop()


async def _sets_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
    await checkpoint()
    if not request.token_ids:
        raise InvalidArgument("no prompt")
    return _counts(request, context)


async def _notices_kill(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
    if not request.token_ids:
        raise InvalidArgument("no prompt")
    for n in range(60):
        with anyio.move_on_after(0.01):
            await context.stopped()
        if context.is_stopped:
            yield Chunk.cancelled()
            return
        yield Chunk.token(n)
    yield Chunk.stop()


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: FunctionEngine(_counts),
        lambda: FunctionEngine(_ignores_kill),
        lambda: FunctionEngine(_sets_up),
        lambda: EndsOnKill(_notices_kill),
    ],
    ids=["counts", "ignores kill", "sets up", "notices kill"],
)
async def test_the_engine_contract_holds_whatever_the_engine_does(
    make: Callable[[], FunctionEngine], details: bool
) -> None:
    await check_engine(
        lambda: RequestAdapter(make(), details=details),
        request=PreprocessedRequest([1]),
        bad_request=PreprocessedRequest([]),
        open_count=lambda adapter: getattr(adapter, "engine").open,  # noqa: B009
    )
