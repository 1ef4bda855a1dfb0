"""The watch of a server: gone, dead, silent, started again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from engines.upstream import VllmUpstream
from pipeline.errors import CannotConnect, EngineShutdown, PenstockError, ResponseTimeout
from tests.engines.upstream.worlds import URL, FakeVllm, fake_vllm, outputs, started


async def dies(server: FakeVllm) -> None:
    server.kill()


async def restarts(server: FakeVllm) -> None:
    server.kill()
    server.restart()


async def is_unhealthy(server: FakeVllm) -> None:
    server.is_healthy = False


async def is_silent(server: FakeVllm) -> None:
    server.health_s = 1000.0


ENDS: list[tuple[Callable[[FakeVllm], Awaitable[Any]], type[PenstockError], float]] = [
    (dies, CannotConnect, 1.1),
    (restarts, EngineShutdown, 1.1),
    (is_unhealthy, EngineShutdown, 1.1),
    (is_silent, ResponseTimeout, 20.0),
]


@pytest.mark.parametrize(("happens", "kind", "within_s"), ENDS, ids=[one[0].__name__ for one in ENDS])
async def test_the_background_ends_the_engine_of_a_server_that(
    happens: Callable[[FakeVllm], Awaitable[Any]], kind: type[PenstockError], within_s: float
) -> None:
    async with fake_vllm() as server, started(server) as engine:
        happened_s, noticed_s = [0.0], list[float]()
        async with anyio.create_task_group() as tasks:

            async def background() -> None:
                with pytest.raises(kind):
                    await engine.background()
                noticed_s.append(anyio.current_time())

            tasks.start_soon(background)
            await anyio.sleep(10.5)
            assert noticed_s == []
            await happens(server)
            happened_s[0] = anyio.current_time()
        assert noticed_s[0] - happened_s[0] <= within_s


async def test_one_slow_look_does_not_end_the_engine() -> None:
    async with fake_vllm() as server, started(server) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        await anyio.sleep(2.5)
        server.health_s = 6.0
        await anyio.sleep(6.0)
        server.health_s = 0.0
        await anyio.sleep(60.0)
        assert await outputs(engine)
        tasks.cancel_scope.cancel()


async def test_a_server_without_a_health_page_is_watched_for_restarts() -> None:
    async def background(engine: VllmUpstream) -> None:
        with pytest.raises(EngineShutdown, match="started again"):
            await engine.background()

    async with (
        fake_vllm(health_status=404) as server,
        started(server) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(background, engine)
        await anyio.sleep(5.5)
        await restarts(server)


async def test_a_connection_lost_on_the_way_is_no_restart() -> None:
    async with fake_vllm() as server, started(server) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        await anyio.sleep(5.5)
        server.kill()
        server.is_up = True  # a proxy was started again: behind it is the same server
        await anyio.sleep(30.0)
        tasks.cancel_scope.cancel()


async def test_a_server_that_is_down_at_the_start_is_an_error_and_leaves_nothing() -> None:
    async with fake_vllm(is_up=False) as server:
        engine = VllmUpstream(URL, transport=server.transport)
        with pytest.raises(CannotConnect):
            await engine.start(1)
        await engine.cleanup()
        await engine.cleanup()
