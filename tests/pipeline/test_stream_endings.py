"""How a stream ends that has no generator of its own, or is dropped in a reference cycle."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from pipeline import Context, Disconnected, ReleaseOnce, ResponseStream
from pipeline.testing import OpenStreams


class Rows:
    """An async iterator that is no generator, and counts its closes."""

    def __init__(self, count: int = 3, error: Exception | None = None) -> None:
        self.left, self.error, self.closes = count, error, 0

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        await checkpoint()
        if self.left == 0:
            if self.error is not None:
                raise self.error
            raise StopAsyncIteration
        self.left -= 1
        return self.left

    async def aclose(self) -> None:
        self.closes += 1
        await checkpoint()


class Table:
    """An async iterable whose iterator is another object; both are to be closed."""

    def __init__(self) -> None:
        self.rows, self.closes = Rows(), 0

    def __aiter__(self) -> AsyncIterator[int]:
        return self.rows

    async def aclose(self) -> None:
        self.closes += 1


async def _turns() -> None:
    for _ in range(20):
        await checkpoint()


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of the warnings in the block; a recorded warning would keep the stream it is about alive."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: texts.append(str(message))
        yield texts


@pytest.mark.parametrize("read", [0, 1, 3, 4])
async def test_closing_closes_a_source_that_is_no_generator_once_also_unread(
    read: int, open_streams: OpenStreams
) -> None:
    """Unread, it stayed open."""
    rows = Rows()
    stream = ResponseStream(rows, Context(None))
    assert [await anext(stream, None) for _ in range(read)] == [2, 1, 0, None][:read]
    await stream.aclose()
    await stream.aclose()
    assert rows.closes == 1


@pytest.mark.parametrize("read", [0, 1, 3, 4])
async def test_dropping_closes_a_source_that_is_no_generator_once_also_unread(read: int) -> None:
    rows = Rows()
    stream = ResponseStream(rows, Context(None, id="lost"))
    for _ in range(read):
        await anext(stream, None)
    with warned() as texts:
        del stream
        await _turns()
    assert rows.closes == 1
    assert any("'lost' was dropped" in text for text in texts) == (read < 4)


async def test_a_source_that_is_no_generator_is_closed_once_when_it_fails() -> None:
    rows = Rows(1, Disconnected("gone"))
    async with ResponseStream(rows, Context(None)) as stream:
        assert await anext(stream) == 0
        with pytest.raises(Disconnected):
            await anext(stream)
    assert rows.closes == 1


@pytest.mark.parametrize("read", [0, 1])
async def test_an_iterable_and_the_iterator_it_gives_are_both_closed(read: int) -> None:
    table = Table()
    async with ResponseStream(table, Context(None)) as stream:
        for _ in range(read):
            await anext(stream)
    assert (table.closes, table.rows.closes) == (1, read)


@pytest.mark.parametrize("read", [0, 1, 3, 4])
@pytest.mark.parametrize("how", ["closed", "dropped"])
async def test_a_stream_of_another_stream_closes_it_also_unread(read: int, how: str) -> None:
    released: list[int] = []

    async def items() -> AsyncGenerator[int, None]:
        for item in (1, 2, 3):
            yield item

    inner = ResponseStream(items(), Context(None), ReleaseOnce(lambda: released.append(1)))
    stream = ResponseStream(inner, Context(None))
    assert [await anext(stream, None) for _ in range(read)] == [1, 2, 3, None][:read]
    with warned():
        if how == "closed":
            await stream.aclose()
        del stream
        await _turns()
    assert not inner.is_open
    assert inner._closed
    assert released == [1]


async def test_a_source_made_outside_of_a_loop_is_closed_in_it() -> None:
    hooks = sys.get_asyncgen_hooks()
    rows = Rows()
    sys.set_asyncgen_hooks(None, None)  # as where no loop runs
    try:
        stream = ResponseStream(rows, Context(None))
    finally:
        sys.set_asyncgen_hooks(*hooks)
    await stream.aclose()
    assert rows.closes == 1


async def _one() -> AsyncGenerator[int, None]:
    yield 1


def _stage(context: Context[Any]) -> ResponseStream[int]:
    return ResponseStream(_one(), context).map(abs)


SOURCES: dict[str, Callable[[Context[Any]], ResponseStream[int]]] = {
    "generator": lambda context: ResponseStream(_one(), context),
    "iterator": lambda context: ResponseStream(Rows(), context),
    "items": lambda context: ResponseStream.of([1], context),
    "stage": _stage,
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("read", [0, 1])
async def test_a_stream_dropped_in_a_reference_cycle_warns_and_releases(source: str, read: int) -> None:
    """Dropped unread, it did not warn."""
    released: list[int] = []
    cycle: dict[str, Any] = {"stream": SOURCES[source](Context(None, id="lost"))}
    cycle["stream"]._owned += (ReleaseOnce(lambda: released.append(1)),)
    cycle["itself"] = cycle
    for _ in range(read):
        await anext(cycle["stream"])
    with warned() as texts:
        del cycle
        gc.collect()
        await _turns()
    assert any("'lost' was dropped" in text for text in texts)
    assert released == [1]


@pytest.mark.parametrize("source", SOURCES)
async def test_a_stream_that_ended_or_was_closed_is_collected_with_its_cycle_in_silence(source: str) -> None:
    ended, closed = SOURCES[source](Context(None)), SOURCES[source](Context(None))
    assert [item async for item in ended]
    await closed.aclose()
    cycle: dict[str, Any] = {"streams": [ended, closed]}
    cycle["itself"] = cycle
    with warned() as texts:
        del cycle, ended, closed
        gc.collect()
        await _turns()
    assert texts == []
