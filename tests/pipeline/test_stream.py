"""ResponseStream: reading, ending, closing, dropping."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import Context, Disconnected, ReleaseOnce, ResponseStream, StreamClosed
from pipeline.errors import StreamBusy
from pipeline.testing import OpenStreams


class Source:
    """A generator that records when it began and ended."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.began = self.ended = False

    async def __call__(self) -> AsyncGenerator[Any, None]:
        self.began = True
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.ended = True


async def _turns() -> None:
    gc.collect()
    for _ in range(20):  # a finaliser takes a turn for each stage
        await checkpoint()


async def test_items_come_in_order_and_the_end_stays_the_end(open_streams: OpenStreams) -> None:
    stream = ResponseStream(Source(1, 2, 3)(), Context(None))
    assert [item async for item in stream] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert not stream.is_open


async def test_reading_may_be_interrupted_and_go_on() -> None:
    async with ResponseStream(Source(1, 2, 3)(), Context(None)) as stream:
        async for item in stream:
            assert item == 1
            break
        assert [item async for item in stream] == [2, 3]


async def test_any_async_iterable_makes_a_stream() -> None:
    class Plain:
        def __init__(self) -> None:
            self.left = 2

        def __aiter__(self) -> AsyncIterator[int]:
            return self

        async def __anext__(self) -> int:
            self.left -= 1
            if self.left < 0:
                raise StopAsyncIteration
            return self.left

    assert await ResponseStream(Plain(), Context(None)).collect() == [1, 0]


async def test_a_stream_of_items_that_are_there_ends_early_when_stopped() -> None:
    request = Context(None)
    async with ResponseStream.of([1, 2, 3], request) as stream:
        assert await anext(stream) == 1
        request.stop()
        assert [item async for item in stream] == []


@pytest.mark.parametrize("read", [0, 1, 3, 4])
async def test_closing_ends_the_source_and_all_that_is_owned(read: int, open_streams: OpenStreams) -> None:
    source, released = Source(1, 2, 3), []
    upstream = ResponseStream(source(), Context(None))

    async def stage() -> AsyncGenerator[int, None]:
        async with upstream:
            async for item in upstream:
                yield item

    stream = ResponseStream(stage(), Context(None), upstream, ReleaseOnce(lambda: released.append(1)))
    for _ in range(read):
        await anext(stream, None)
    await stream.aclose()
    await stream.aclose()
    assert source.ended == source.began == (read > 0)
    assert released == [1]
    assert not upstream.is_open


async def test_reading_after_a_close_is_an_error_of_ours() -> None:
    stream = ResponseStream(Source(1)(), Context(None))
    await stream.aclose()
    with pytest.raises(StreamClosed):
        await anext(stream)


async def test_closing_while_another_task_reads_is_refused_and_names_the_way() -> None:
    async def waiting() -> AsyncGenerator[int, None]:
        await anyio.sleep(5)
        yield 1

    stream = ResponseStream(waiting(), Context(None))
    async with stream, anyio.create_task_group() as tasks:
        tasks.start_soon(stream.collect)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(StreamBusy, match="stop or kill"):
            await stream.aclose()


async def test_an_error_in_the_source_ends_the_stream_and_closes_upstream(open_streams: OpenStreams) -> None:
    source = Source(1, Disconnected("gone"), 2)
    upstream = ResponseStream(source(), Context(None))
    stream = upstream.map(str)
    assert await anext(stream) == "1"
    with pytest.raises(Disconnected):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert source.ended
    assert not upstream.is_open


async def test_what_closing_raises_is_raised_after_everything_is_closed_the_first_with_the_others_as_notes() -> None:
    """It was the last."""
    released: list[str] = []

    async def stubborn() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise RuntimeError("cannot close")

    def fail() -> None:
        released.append("first")
        raise ValueError("cannot release")

    owned = [ReleaseOnce(fail), ReleaseOnce(lambda: released.append("second"))]
    stream = ResponseStream(stubborn(), Context(None), *owned)
    await anext(stream)
    with pytest.raises(RuntimeError, match="cannot close") as caught:
        await stream.aclose()
    (note,) = caught.value.__notes__
    assert "ValueError: cannot release" in note
    assert "in fail" in note  # its traceback
    assert released == ["first", "second"]


async def test_a_cancellation_while_closing_goes_before_an_error() -> None:
    async def failing() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise RuntimeError("cannot close")

    async def waiting() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            await anyio.sleep(5)

    upstream = ResponseStream(waiting(), Context(None))
    stream = ResponseStream(failing(), Context(None), upstream)
    await anext(upstream)
    await anext(stream)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await stream.aclose()
    assert scope.cancelled_caught
    assert not upstream.is_open


@pytest.mark.parametrize("read", [0, 1])
async def test_a_dropped_stream_warns_and_is_released_on_the_next_turn(read: int) -> None:
    source, released = Source(1, 2), []
    once = ReleaseOnce(lambda: released.append("released"))
    upstream = ResponseStream(source(), Context(None))

    async def stage(upstream: ResponseStream[int]) -> AsyncGenerator[int, None]:
        async with upstream:
            async for item in upstream:
                yield item

    stream = ResponseStream(stage(upstream), Context(None, id="lost"), upstream, once)
    for _ in range(read):
        await anext(stream)
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # Recorded as text: a recorded warning would keep the stream it is about alive.
        warnings.showwarning = lambda message, *_, **__: texts.append(str(message))
        del stream, upstream
        gc.collect()
        assert released == []  # not in the middle of whatever is being collected
        await _turns()
    assert released == ["released"]
    assert source.ended == (read > 0)
    assert any("'lost' was dropped" in text for text in texts)


async def test_a_stream_that_ended_may_be_dropped_in_silence(open_streams: OpenStreams) -> None:
    released: list[int] = []
    stream = ResponseStream(Source(1)(), Context(None), ReleaseOnce(lambda: released.append(1)))
    assert [item async for item in stream] == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del stream
        await _turns()
    assert released == [1]


async def test_iterating_a_stream_without_other_references_reads_it_whole(open_streams: OpenStreams) -> None:
    async def take() -> ResponseStream[int]:
        return ResponseStream(Source(1, 2, 3)(), Context(None))

    assert [item async for item in await take()] == [1, 2, 3]


async def test_cancelling_the_reader_closes_the_stream(open_streams: OpenStreams) -> None:
    ended: list[bool] = []

    async def waiting() -> AsyncGenerator[int, None]:
        try:
            await anyio.sleep_forever()
            yield 1
        finally:
            ended.append(True)

    with anyio.move_on_after(1):
        async with ResponseStream(waiting(), Context(None)) as stream:
            await anext(stream)
    assert ended == [True]


async def test_closing_works_inside_a_cancelled_scope(open_streams: OpenStreams) -> None:
    source = Source(1, 2)
    with anyio.CancelScope() as scope:
        async with ResponseStream(source(), Context(None)).map(str) as stream:
            await anext(stream)
            scope.cancel()
    assert source.ended


async def test_collect_closes_also_when_the_source_fails(open_streams: OpenStreams) -> None:
    with pytest.raises(Disconnected):
        await ResponseStream(Source(1, Disconnected("gone"))(), Context(None)).collect()


async def test_a_failing_map_ends_the_stream_and_closes_upstream(open_streams: OpenStreams) -> None:
    source = Source(1, 0, 2)
    stream = ResponseStream(source(), Context(None)).map(lambda n: 1 / n)
    assert await anext(stream) == 1
    with pytest.raises(ZeroDivisionError):
        await anext(stream)
    assert source.ended


def test_a_stream_made_wrongly_complains_once() -> None:
    with pytest.raises(TypeError):
        ResponseStream()  # type: ignore[call-arg]


def test_a_release_happens_once_and_a_cancelled_one_never() -> None:
    calls: list[int] = []
    once, cancelled = ReleaseOnce(lambda: calls.append(1)), ReleaseOnce(lambda: calls.append(2))
    once.release()
    once.release()
    assert once.is_released
    assert cancelled.cancel()
    assert not cancelled.cancel()
    cancelled.release()
    assert calls == [1]
