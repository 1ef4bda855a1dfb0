"""A stream through synchronous reactivex operators."""

from __future__ import annotations

from functools import partial
from operator import add, floordiv
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import AsyncEngine, Context, Disconnected, Operator, ResponseStream, StreamClosed
from pipeline.rx import Disposable, Observable, ops
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, check_operator


async def answer(*script: Any) -> tuple[ScriptedEngine, ResponseStream[Any]]:
    engine: ScriptedEngine = ScriptedEngine(script)
    return engine, await engine.generate(Context(None))


class WithoutFives(Operator[Any, Any, Any, Any]):
    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        return (await next.generate(request)).rx(ops.filter(lambda item: item != 5), ops.scan(lambda _, item: item))


async def test_an_operator_made_of_rx_holds_the_contract() -> None:
    items = list(range(64))
    await check_operator(WithoutFives, request=None, items=items, expected=[item for item in items if item != 5])


async def test_demand_reaches_the_engine(open_streams: OpenStreams) -> None:
    engine, stream = await answer(*range(9))
    async with stream.rx(ops.map(str)) as items:
        assert [await items.__anext__(), await items.__anext__()] == ["0", "1"]
        assert engine.delivered == 2


async def test_all_that_came_out_is_handed_on_before_the_next_pull(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, 2)
    async with stream.rx(ops.flat_map(three_times)) as items:
        seen = [(await items.__anext__(), engine.delivered) for _ in range(6)]
    assert seen == [(1, 1), (1, 1), (1, 1), (2, 2), (2, 2), (2, 2)]


def three_times(item: Any) -> Observable[Any]:
    def subscribe(observer: Any, _: Any = None) -> Disposable:
        for _ in range(3):
            observer.on_next(item)
        observer.on_completed()
        return Disposable()

    return Observable(subscribe)


async def test_the_end_flushes_operators(open_streams: OpenStreams) -> None:
    _, stream = await answer(*range(5))
    assert await stream.rx(ops.buffer_with_count(2)).collect() == [[0, 1], [2, 3], [4]]


async def test_output_before_the_first_pull_comes_first(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1)
    async with stream.rx(ops.start_with(0)) as items:
        assert await items.__anext__() == 0
        assert engine.delivered == 0
        assert [item async for item in items] == [1]


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_early_completion_closes_upstream(count: int, open_streams: OpenStreams) -> None:
    engine, stream = await answer(*range(9))
    items = stream.rx(ops.take(count))
    assert [item async for item in items] == list(range(count))
    assert engine.open == 0
    assert engine.delivered == count


async def test_an_upstream_error_comes_after_the_items_before_it(open_streams: OpenStreams) -> None:
    error = Disconnected("lost")
    _, stream = await answer(1, Fail(error))
    async with stream.rx(ops.map(str)) as items:
        assert await items.__anext__() == "1"
        with pytest.raises(Disconnected) as caught:
            await items.__anext__()
    assert caught.value is error


async def test_operators_may_handle_an_upstream_error(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, Fail(Disconnected("lost")))
    assert await stream.rx(ops.catch(three_times("instead"))).collect() == [1, "instead", "instead", "instead"]
    assert engine.open == 0


@pytest.mark.parametrize("count", [0, 1, 6, 7, 9])
async def test_any_number_of_operators_may_follow_one_another(count: int, open_streams: OpenStreams) -> None:
    _, stream = await answer(0, 1)
    more: list[Any] = [ops.map(partial(add, 1)) for _ in range(count)]
    assert await stream.rx(*more).collect() == [count, count + 1]


async def test_an_operators_own_error_is_raised_and_closes_upstream(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1, 0, 2)
    items = stream.rx(ops.map(partial(floordiv, 1)))
    assert await items.__anext__() == 1
    with pytest.raises(ZeroDivisionError):
        await items.__anext__()
    assert engine.open == 0


async def test_an_error_that_operators_let_through_unguarded_is_raised_too(open_streams: OpenStreams) -> None:
    engine, stream = await answer(1)

    def broken(_: Observable[Any]) -> Observable[Any]:
        raise LookupError("no such operator")

    with pytest.raises(LookupError):
        await stream.rx(broken).collect()
    assert engine.open == 0


async def test_operators_that_never_end_do_not_outlive_their_stream(open_streams: OpenStreams) -> None:
    _, stream = await answer(1, 2)
    assert await stream.rx(ops.concat(Observable[Any]()), ops.map(str)).collect() == ["1", "2"]


async def test_operators_are_disposed_on_close(open_streams: OpenStreams) -> None:
    disposed: list[str] = []
    engine, stream = await answer(1, 2)
    items = stream.rx(ops.finally_action(lambda: disposed.append("yes")))
    assert await items.__anext__() == 1
    assert disposed == []
    await items.aclose()
    assert disposed == ["yes"]
    assert engine.open == 0
    with pytest.raises(StreamClosed):
        await items.__anext__()


async def test_a_stream_never_read_closes_its_upstream_and_subscribes_nothing(open_streams: OpenStreams) -> None:
    subscribed: list[str] = []
    engine, stream = await answer(1)
    items = stream.rx(ops.do_action(on_completed=lambda: subscribed.append("completed")))
    await items.aclose()
    assert engine.open == 0
    assert subscribed == []


async def test_after_a_kill_flushed_items_are_not_handed_on(open_streams: OpenStreams) -> None:
    _, stream = await answer(*range(9))
    async with stream.rx(ops.buffer_with_count(2)) as items:
        assert await items.__anext__() == [0, 1]
        stream.context.kill()
        assert [item async for item in items] == []


async def test_after_a_stop_flushed_items_are_handed_on(open_streams: OpenStreams) -> None:
    _, stream = await answer(*range(9))
    async with stream.rx(ops.map(str), ops.buffer_with_count(2)) as items:
        assert await items.__anext__() == ["0", "1"]
        stream.context.stop()
        assert [item async for item in items] == []


@given(st.lists(st.integers()), st.integers(1, 5))
async def test_the_result_is_what_reactivex_gives(items: list[int], size: int) -> None:
    expected = [items[i : i + size] for i in range(0, len(items), size)]
    _, stream = await answer(*items)
    assert await stream.rx(ops.buffer_with_count(size)).collect() == expected
