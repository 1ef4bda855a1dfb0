"""What `map`, `tap`, `prepend`, `holding` and `watched` make of a stream, and how that ends."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from pipeline import Context, Disconnected, ReleaseOnce, ResponseStream, Watch
from pipeline.testing import OpenStreams

Shape = Callable[[ResponseStream[int]], ResponseStream[int]]

SHAPES: dict[str, Shape] = {
    "map": lambda stream: stream.map(abs),
    "tap": lambda stream: stream.tap(abs),
    "prepend": lambda stream: stream.prepend(0),
    "holding": lambda stream: stream.holding(ReleaseOnce(int)),
    "watched": lambda stream: stream.watched(Watch(ReleaseOnce(int))),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def source(context: Context[Any], *items: int | Exception) -> ResponseStream[int]:
    """A stream of the items; it raises an item that is an exception."""

    async def generate() -> AsyncGenerator[int, None]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    return ResponseStream(generate(), context)


@each_shape
@pytest.mark.parametrize("read", [0, 1])
async def test_closing_closes_the_stream_below_read_or_unread(
    shape: Shape, read: int, open_streams: OpenStreams
) -> None:
    below = source(Context(None), 1, 2, 3)
    stream = shape(below)
    for _ in range(read):
        await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert not below.is_open
    assert not open_streams.open


@each_shape
async def test_an_error_of_the_stream_below_goes_to_the_reader_and_closes_all(
    shape: Shape, open_streams: OpenStreams
) -> None:
    stream = shape(source(Context(None), 1, Disconnected("gone")))
    with pytest.raises(Disconnected):
        await stream.collect()
    assert not open_streams.open


@each_shape
@pytest.mark.parametrize("read", [0, 1])
async def test_a_dropped_stream_releases_what_the_one_below_owns(shape: Shape, read: int) -> None:
    released: list[str] = []
    stream = shape(source(Context(None), 1, 2).holding(ReleaseOnce(released.append, "released")))
    for _ in range(read):
        await anext(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del stream
        gc.collect()
    for _ in range(20):  # a finaliser takes a turn for each stage
        await checkpoint()
    assert released == ["released"]


@each_shape
async def test_the_context_is_that_of_the_stream_below(shape: Shape) -> None:
    context = Context(None)
    async with shape(source(context)) as stream:
        assert stream.context is context


async def test_tap_is_called_with_each_item_before_its_reader_gets_it() -> None:
    seen: list[int] = []
    async with source(Context(None), 1, 2, 3).tap(seen.append) as stream:
        assert await anext(stream) == 1
        assert seen == [1]
        assert [item async for item in stream] == [2, 3]
    assert seen == [1, 2, 3]


async def test_what_tap_raises_ends_the_stream_and_closes_the_one_below(open_streams: OpenStreams) -> None:
    def refuse(item: int) -> None:
        raise ValueError(item)

    with pytest.raises(ValueError, match="1"):
        await source(Context(None), 1, 2).tap(refuse).collect()
    assert not open_streams.open


async def test_prepended_items_come_first_and_the_stream_below_is_read_after_them() -> None:
    seen: list[int] = []
    async with source(Context(None), 3, 4).tap(seen.append).prepend(1, 2) as stream:
        assert [await anext(stream), await anext(stream)] == [1, 2]
        assert seen == []
        assert [item async for item in stream] == [3, 4]


@pytest.mark.parametrize(("end", "left"), [("stop", [2, 3]), ("kill", [])])
async def test_a_stop_leaves_the_prepended_items_and_a_kill_takes_them(end: str, left: list[int]) -> None:
    context = Context(None)
    async with source(context, 3).prepend(1, 2) as stream:
        assert await anext(stream) == 1
        getattr(context, end)()
        assert [item async for item in stream] == left


@pytest.mark.parametrize("items", [[1], [1, Disconnected("gone")]])
async def test_what_is_held_is_released_after_the_stream_below_and_before_its_end_is_seen(items: list[Any]) -> None:
    below = source(Context(None), *items)
    was_open: list[bool] = []
    stream = below.holding(ReleaseOnce(lambda: was_open.append(below.is_open)))
    await anext(stream)
    assert was_open == []
    with pytest.raises((StopAsyncIteration, Disconnected)):
        await anext(stream)
    assert was_open == [False]
    await stream.aclose()
    assert was_open == [False]


@pytest.mark.parametrize("read", [0, 1])
@pytest.mark.parametrize("dropped", [False, True])
async def test_what_is_held_is_released_once_when_the_stream_is_closed_or_dropped(read: int, dropped: bool) -> None:
    released: list[str] = []
    stream = source(Context(None), 1, 2).holding(ReleaseOnce(released.append, "released"))
    for _ in range(read):
        await anext(stream)
    if dropped:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del stream
            gc.collect()
    else:
        await stream.aclose()
    for _ in range(20):
        await checkpoint()
    assert released == ["released"]


async def test_what_was_released_before_is_not_released_again() -> None:
    released: list[str] = []
    reservation = ReleaseOnce(released.append, "released")
    stream = source(Context(None), 1).holding(reservation)
    reservation.release()
    assert await stream.collect() == [1]
    assert released == ["released"]


async def test_what_a_release_raises_goes_to_the_reader(open_streams: OpenStreams) -> None:
    def fail() -> None:
        raise ValueError("release")

    with pytest.raises(ValueError, match="release"):
        await source(Context(None), 1).holding(ReleaseOnce(fail)).collect()
    assert not open_streams.open
