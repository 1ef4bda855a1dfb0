"""Fairness: a source whose items are always ready lets other tasks run, and cancellations, stops and kills come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import define

from pipeline import AsyncEngine, Context, Operator, ResponseStream, function_engine, map_response, until_killed
from pipeline import pace as pace_module
from pipeline.errors import StreamBusy
from pipeline.pace import ITEMS_A_LOOK, LOOKS_MAX
from pipeline.testing import OpenStreams

BUDGET_ITEMS = ITEMS_A_LOOK * LOOKS_MAX
ITEMS = 20 * BUDGET_ITEMS


async def _ready(count: int) -> AsyncGenerator[int, None]:
    for i in range(count):
        yield i


class PlainGenerator(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream(_ready(request.payload), request)


class ReadyItems(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream.of(range(request.payload), request)


class NoGenerator(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream(_Iterator(request.payload), request)


class UntilKilled(AsyncEngine[int, int]):
    async def generate(self, request: Context[int]) -> ResponseStream[int]:
        return ResponseStream(until_killed(_ready(request.payload), request), request)


class _Iterator:
    def __init__(self, count: int) -> None:
        self.items = iter(range(count))

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        for item in self.items:
            return item
        raise StopAsyncIteration


@function_engine
async def function(count: int) -> AsyncIterator[int]:
    for i in range(count):
        yield i


class Passes(Operator[Any, Any, Any, Any]):
    """An operator as users write them."""

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self._items(stream), request, stream)

    async def _items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                yield item


class KeepsFew(Operator[Any, Any, Any, Any]):
    """Gives one of many items, so that its reader seldom gets one."""

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        stream = await next.generate(request)
        return ResponseStream(self._items(stream), request, stream)

    async def _items(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
        async with stream:
            async for item in stream:
                if item % 10_000 == 0:
                    yield item


SOURCES: dict[str, AsyncEngine[int, int]] = {
    "function": function,
    "plain generator": PlainGenerator(),
    "ready items": ReadyItems(),
    "no generator": NoGenerator(),
    "until killed": UntilKilled(),
}
STAGES: dict[str, Callable[[AsyncEngine[int, int]], AsyncEngine[int, int]]] = {
    "alone": lambda source: source,
    "through operators": lambda source: Passes() >> map_response(abs) >> Passes() >> source,
    "through a filter": lambda source: KeepsFew() >> source,
}


@define
class Turns:
    """The turns of the loop that another task has had."""

    count: int = 0

    async def run(self) -> None:
        while True:
            await checkpoint()
            self.count += 1


@asynccontextmanager
async def another_task() -> AsyncIterator[Turns]:
    """Give the turns of a task that runs until the block ends."""
    turns = Turns()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns.run)
        yield turns
        tasks.cancel_scope.cancel()


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> AsyncEngine[int, int]:
    return SOURCES[request.param]


@pytest.mark.parametrize("stages", STAGES)
async def test_a_source_that_is_always_ready_lets_other_tasks_run(
    source: AsyncEngine[int, int], stages: str, open_streams: OpenStreams
) -> None:
    """No other task ran before the last item was read."""
    async with another_task() as turns, await STAGES[stages](source).generate(Context(ITEMS)) as stream:
        got = [item async for item in stream]
    assert got == (list(range(ITEMS)) if stages != "through a filter" else list(range(0, ITEMS, 10_000)))
    assert turns.count >= ITEMS // BUDGET_ITEMS - 2


async def test_each_of_many_tasks_begins_to_read_in_the_turn_in_which_it_runs(anyio_backend_name: str) -> None:
    """Tasks behind the first ones of a turn waited for another turn before they sent their request."""
    turns, begun_in = Turns(), list[int]()

    @function_engine
    async def engine(_: int) -> AsyncIterator[int]:
        begun_in.append(turns.count)
        yield 0
        yield 1

    async def read() -> None:
        await checkpoint()
        assert await (await engine.generate(Context(1))).collect() == [0, 1]

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as readers:
            for _ in range(5 * LOOKS_MAX):
                readers.start_soon(read)
            tasks.start_soon(turns.run)
        tasks.cancel_scope.cancel()
    assert len(begun_in) == 5 * LOOKS_MAX
    # On trio the order within a turn is any: some tasks run before the one that counts, and some after it.
    assert max(begun_in) - min(begun_in) <= (anyio_backend_name == "trio")


async def test_a_task_that_begins_many_streams_lets_other_tasks_run() -> None:
    """Once the budget is used up a task may begin one stream, not one after the other."""
    async with another_task() as turns:
        for _ in range(100 * LOOKS_MAX):
            async with await function.generate(Context(1)) as stream:
                assert await anext(stream) == 0
    assert turns.count >= 50


async def test_many_short_answers_in_a_row_let_other_tasks_run() -> None:
    async with another_task() as turns:
        for _ in range(10 * LOOKS_MAX):
            assert await (await function.generate(Context(1))).collect() == [0]
    assert turns.count >= 8


@pytest.mark.parametrize("stages", ["alone", "through operators"])
async def test_a_cancellation_by_another_task_comes_in_time_and_releases_everything(
    source: AsyncEngine[int, int], stages: str, open_streams: OpenStreams
) -> None:
    read = 0
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_after_a_turn, scope.cancel)
            async with await STAGES[stages](source).generate(Context(ITEMS)) as stream:
                async for _ in stream:
                    read += 1
    assert scope.cancelled_caught
    assert read < 4 * BUDGET_ITEMS


async def _after_a_turn(verb: Callable[[], object]) -> None:
    await checkpoint()
    verb()


@pytest.mark.parametrize("verb", ["stop", "kill"])
async def test_a_stop_or_kill_by_another_task_comes_in_time_and_ends_the_stream(
    verb: str, open_streams: OpenStreams
) -> None:
    @function_engine
    async def looks(count: int, context: Context[int]) -> AsyncIterator[int]:
        for i in range(count):
            if context.is_stopped:
                return
            yield i

    for engine in (looks, Passes() >> looks, ReadyItems(), Passes() >> ReadyItems()):
        request, got = Context(ITEMS), list[int]()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_after_a_turn, getattr(request, verb))
            async with await engine.generate(request) as stream:
                async for item in stream:
                    assert not request.is_stopped  # nothing is delivered after the turn in which it came
                    got.append(item)
        assert got == list(range(len(got)))
        assert len(got) < 4 * BUDGET_ITEMS


async def test_a_kill_by_another_task_ends_a_function_engine_that_never_looks(open_streams: OpenStreams) -> None:
    request, got = Context(ITEMS), 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_after_a_turn, request.kill)
        async with await (Passes() >> function).generate(request) as stream:
            async for _ in stream:
                got += 1
    assert got < 4 * BUDGET_ITEMS


async def test_a_cancelled_turn_loses_no_item(source: AsyncEngine[int, int]) -> None:
    """The turn comes before the next item is taken, so the next read gets it."""
    got, cancelled = list[int](), 0
    async with await source.generate(Context(ITEMS)) as stream:
        while not got or got[-1] < ITEMS - 1:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_after_a_turn, scope.cancel)
                    while not got or got[-1] < ITEMS - 1:
                        got.append(await anext(stream))
            cancelled += scope.cancelled_caught
    assert got == list(range(ITEMS))
    assert cancelled > 3


async def test_during_the_turn_a_close_and_a_second_reader_are_refused() -> None:
    stream, refused = ResponseStream(_ready(ITEMS), Context(None)), list[str]()

    async def disturb() -> None:
        await checkpoint()
        for verb in (stream.aclose, stream.__anext__):
            with pytest.raises(StreamBusy):
                await verb()
            refused.append(verb.__name__)

    async with stream, anyio.create_task_group() as tasks:
        tasks.start_soon(disturb)
        assert [item async for item in stream] == list(range(ITEMS))
    assert refused == ["aclose", "__next__"]


async def test_a_source_that_waits_takes_no_turn_more(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    async def counted() -> None:
        nonlocal taken
        taken += 1
        await checkpoint()

    async def waiting() -> AsyncGenerator[int, None]:
        for i in range(20 * BUDGET_ITEMS):
            if i % (BUDGET_ITEMS // 2) == 0:
                await anyio.sleep(0.02)
            yield i

    monkeypatch.setattr(pace_module, "checkpoint", counted)
    async with ResponseStream(waiting(), Context(None)) as stream:
        async for _ in stream:
            pass
    assert taken == 0
    async with ResponseStream(_ready(20 * BUDGET_ITEMS), Context(None)) as stream:
        async for _ in stream:
            pass
    assert 18 <= taken <= 22


async def test_items_that_take_long_to_make_let_other_tasks_run_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, turns_at = 0.0, list[int]()

    async def slow() -> AsyncGenerator[int, None]:
        nonlocal now_s
        for i in range(50 * ITEMS_A_LOOK):
            now_s += 0.001  # as if it computed
            yield i

    async def another() -> None:
        while True:
            await checkpoint()
            turns_at.append(read)

    monkeypatch.setattr(pace_module, "clock", lambda: lambda: now_s)
    read = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(another)
        async with ResponseStream(slow(), Context(None)) as stream:
            async for _ in stream:
                read += 1
        tasks.cancel_scope.cancel()
    gaps = [later - before for before, later in zip([0, *turns_at], [*turns_at, read], strict=True)]
    assert max(gaps) <= 4 * ITEMS_A_LOOK  # trio shuffles the tasks of a turn: two slices may meet


def test_each_thread_with_a_loop_has_its_own_budget() -> None:
    counts: dict[str, int] = {}

    async def main(backend: str) -> None:
        async with another_task() as turns, await function.generate(Context(ITEMS)) as stream:
            async for _ in stream:
                pass
        counts[backend] = turns.count

    threads = [Thread(target=anyio.run, args=(main, name), kwargs={"backend": name}) for name in ("asyncio", "trio")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(counts["asyncio"], counts["trio"]) >= ITEMS // BUDGET_ITEMS - 2


def test_a_stream_can_be_read_without_a_loop() -> None:
    stream, got = ResponseStream(_ready(3 * BUDGET_ITEMS), Context(None)), list[int]()

    async def read() -> None:
        got.extend([item async for item in stream])

    with pytest.raises(StopIteration):
        read().send(None)
    assert got == list(range(3 * BUDGET_ITEMS))


@pytest.mark.parametrize(
    ("backend", "options"), [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})], ids=str
)
def test_a_deadline_is_noticed_although_the_source_is_always_ready(backend: str, options: dict[str, bool]) -> None:
    """In real time, since virtual time stands still while a task is ready."""
    if options:
        pytest.importorskip("uvloop")

    async def main() -> tuple[bool, float]:
        began_s = anyio.current_time()
        with anyio.move_on_after(0.05) as scope:
            async with await (Passes() >> map_response(abs) >> function).generate(Context(100_000_000)) as stream:
                async for _ in stream:
                    pass
        return scope.cancelled_caught, anyio.current_time() - began_s

    was_cancelled, took_s = anyio.run(main, backend=backend, backend_options=options)
    assert was_cancelled
    assert took_s < 20  # all of them would take minutes
