"""A stream of the request plane that its caller watches: called the same over sockets, where no generator is added."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from pipeline import Annotated, Context, Disconnected, ResponseStream
from pipeline.testing import Fail, OpenStreams, ScriptedEngine, Stall
from tests.pipeline.network.worlds import WHERE, WORLDS, Noted, WorldKind, eventually, two_runtimes

FIRST, SECOND = Annotated(1), Annotated(2)
EVENT = Annotated[Any](event="note", comment=["x"])
ERROR: Annotated[Any] = Annotated.from_error(Disconnected("in an item"))


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest) -> WorldKind:
    return cast(WorldKind, request.param)


@asynccontextmanager
async def streaming(
    world: WorldKind, request: Context[Any], *script: object
) -> AsyncIterator[tuple[ResponseStream[Annotated[int]], list[str]]]:
    """Give a watched stream of the script's items, and what its watch has seen so far."""
    seen: list[str] = []
    async with two_runtimes(world) as (worker, caller):
        served = await worker.serve(WHERE, ScriptedEngine(script), instance_id=1)
        workers = caller.workers(WHERE, Annotated[int])
        await workers.wait_for_instances()
        stream = await workers.engine(1).generate(request)
        yield stream.watched(Noted(seen)), seen
        await eventually(lambda: served.running == 0)


async def test_what_ends_by_itself_is_released_before_its_reader_knows(
    world: WorldKind, open_streams: OpenStreams
) -> None:
    async with streaming(world, Context(None), FIRST, EVENT, SECOND) as (stream, seen):
        assert [await anext(stream) for _ in range(3)] == [FIRST, EVENT, SECOND]
        assert seen == []
        assert await anext(stream, None) is None
        assert seen == ["released"]


async def test_an_error_item_is_released_and_then_reported_before_it_is_delivered(
    world: WorldKind, open_streams: OpenStreams
) -> None:
    async with streaming(world, Context(None), FIRST, ERROR) as (stream, seen):
        assert await anext(stream) == FIRST
        assert (await anext(stream)).is_error
        assert seen == ["released", "failed: in an item"]
        assert await stream.collect() == []
        assert seen == ["released", "failed: in an item"]


async def test_what_is_raised_is_reported_then_released(world: WorldKind, open_streams: OpenStreams) -> None:
    async with streaming(world, Context(None), FIRST, Fail(Disconnected("raised"))) as (stream, seen):
        assert await anext(stream) == FIRST
        with pytest.raises(Disconnected, match="raised"):
            await anext(stream)
        assert seen == ["failed: raised", "released"]


@pytest.mark.parametrize("read", [0, 1])
async def test_a_close_releases_and_is_no_failure(world: WorldKind, read: int, open_streams: OpenStreams) -> None:
    async with streaming(world, Context(None), FIRST, Stall()) as (stream, seen):
        for _ in range(read):
            await anext(stream)
        await stream.aclose()
        assert seen == ["released"]
        assert not stream.is_open


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stop_and_a_kill_release_and_are_no_failure(
    world: WorldKind, how: str, open_streams: OpenStreams
) -> None:
    request = Context(None)
    async with streaming(world, request, FIRST, Stall()) as (stream, seen):
        assert await anext(stream) == FIRST
        getattr(request, how)()
        assert await stream.collect() == []
        assert seen == ["released"]


async def test_two_watches_see_the_same(world: WorldKind, open_streams: OpenStreams) -> None:
    async with streaming(world, Context(None), FIRST, Fail(Disconnected("raised"))) as (stream, seen):
        also: list[str] = []
        twice = stream.watched(Noted(also))
        with pytest.raises(Disconnected, match="raised"):
            await twice.collect()
        assert seen == also == ["failed: raised", "released"]


async def test_a_stream_that_has_been_read_can_still_be_watched(world: WorldKind, open_streams: OpenStreams) -> None:
    async with two_runtimes(world) as (worker, caller):
        await worker.serve(WHERE, ScriptedEngine([FIRST, Fail(Disconnected("raised"))]), instance_id=1)
        workers = caller.workers(WHERE, Annotated[int])
        await workers.wait_for_instances()
        stream = await workers.engine(1).generate(Context(None))
        assert await anext(stream) == FIRST
        seen: list[str] = []
        watched = stream.watched(Noted(seen))
        with pytest.raises(Disconnected, match="raised"):
            await watched.collect()
        assert seen == ["failed: raised", "released"]
