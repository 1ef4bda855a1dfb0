"""The watch of a server: gone, dead, silent, started again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from engines.adapter import RequestAdapter
from engines.upstream import VllmUpstream
from engines.upstream.client import Address, Client
from engines.upstream.server_watch import HEALTH_S, ServerWatch
from engines.upstream.upstream import LOOK_S
from pipeline import Context
from pipeline.errors import BackendUnknown, CannotConnect, Disconnected, EngineShutdown, PenstockError, ResponseTimeout
from pipeline.protocols import FinishReason
from tests.engines.upstream.vllm_worlds import FakeVllm, fake_vllm, started
from tests.engines.upstream.worlds import URL, outputs, prompt, running


async def dies(server: FakeVllm) -> None:
    server.kill()


async def restarts(server: FakeVllm) -> None:
    server.kill()
    server.restart()


async def is_unhealthy(server: FakeVllm) -> None:
    server.is_healthy = False


async def fails(server: FakeVllm) -> None:
    server.health_status = 500


async def is_silent(server: FakeVllm) -> None:
    server.health_s = 1000.0


ENDS: list[tuple[Callable[[FakeVllm], Awaitable[Any]], type[PenstockError], float]] = [
    (dies, CannotConnect, 1.1),
    (restarts, EngineShutdown, 1.1),
    (is_unhealthy, EngineShutdown, 1.1),
    (fails, BackendUnknown, 3.1),
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
                with anyio.fail_after(60.0), pytest.raises(kind):
                    await engine.background()
                noticed_s.append(anyio.current_time())

            tasks.start_soon(background)
            await anyio.sleep(10.5)
            assert noticed_s == []
            await happens(server)
            happened_s[0] = anyio.current_time()
        assert noticed_s[0] - happened_s[0] <= within_s


async def test_a_request_that_finds_its_server_gone_ends_the_engine_at_once() -> None:
    async with fake_vllm(token_s=1.0) as server, started(server, health_every_s=1000.0) as engine:
        found: list[tuple[str, float]] = []

        async def background() -> None:
            with pytest.raises(CannotConnect):
                await engine.background()
            found.append(("background", anyio.current_time()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(background)
            await anyio.sleep(10.0)
            tasks.start_soon(_killed_in, server, 2.5)
            with pytest.raises(Disconnected):
                await outputs(engine)
            found.append(("request", anyio.current_time()))
        (first, first_s), (second, second_s) = found
        assert (first, second) == ("background", "request")
        assert second_s - first_s <= LOOK_S
        with pytest.raises(CannotConnect):
            await outputs(engine)  # nothing looks any more, so nothing is waited for


async def _killed_in(server: FakeVllm, delay_s: float) -> None:
    await anyio.sleep(delay_s)
    server.kill()


async def test_a_connection_that_breaks_at_a_healthy_server_costs_the_request_one_look() -> None:
    async with (
        fake_vllm(token_s=1.0) as server,
        started(server, health_every_s=1000.0) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(engine.background)
        await anyio.sleep(10.0)
        tasks.start_soon(_connections_cut_in, server, 2.5)
        began_s = anyio.current_time()
        with pytest.raises(Disconnected):
            await outputs(engine)
        assert anyio.current_time() - began_s == pytest.approx(2.5)
        assert len(server.requests("/health")) == 2
        assert await outputs(engine)
        tasks.cancel_scope.cancel()


async def _connections_cut_in(server: FakeVllm, delay_s: float) -> None:
    await anyio.sleep(delay_s)
    server.kill()
    server.is_up = True


class Resetting(FakeVllm):
    """Breaks each connection that its health is looked at by."""

    async def answer(self, line: Any, received: Any) -> None:
        if received.path == "/health":
            await line.wire.aclose()
        else:
            await super().answer(line, received)


async def test_looks_in_a_row_at_a_busy_server_count_as_one_failure() -> None:
    async with running(Resetting) as server, started(server, health_every_s=1.0) as engine:
        ended_s: list[float] = []

        async def background() -> None:
            with pytest.raises(Disconnected):
                await engine.background()
            ended_s.append(anyio.current_time())

        began_s = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(background)
            await anyio.sleep(0.1)
            watch = engine._watch
            assert watch is not None
            for _ in range(10):
                await watch.look_now()
            assert ended_s == []
        assert ended_s[0] - began_s == pytest.approx(2.0, abs=0.2)


async def test_a_stop_ends_the_wait_for_the_look() -> None:
    async with (
        fake_vllm(token_s=1.0) as server,
        started(server, health_every_s=1000.0) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(engine.background)
        await anyio.sleep(10.0)
        server.health_s = 30.0
        tasks.start_soon(_connections_cut_in, server, 2.5)
        request, found = Context(prompt()), list[Any]()

        async def read() -> None:
            async with await RequestAdapter(engine).generate(request) as stream:
                found.extend([item.data.finish_reason async for item in stream if item.data is not None])

        tasks.start_soon(read)
        await anyio.sleep(2.7)
        assert found == []
        request.stop()
        await anyio.sleep(0.05)
        assert found[-1] is FinishReason.CANCELLED
        tasks.cancel_scope.cancel()


async def test_slow_looks_with_others_between_do_not_end_the_engine() -> None:
    async with fake_vllm() as server, started(server) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        for _ in range(4):
            await anyio.sleep(2.5)
            server.health_s = 6.0
            await anyio.sleep(6.0)
            server.health_s = 0.0
            await anyio.sleep(10.0)
        assert await outputs(engine)
        tasks.cancel_scope.cancel()


async def test_a_server_without_a_health_page_is_watched_for_restarts() -> None:
    async def background(engine: VllmUpstream) -> None:
        with anyio.fail_after(60.0), pytest.raises(EngineShutdown, match="started again"):
            await engine.background()

    async with (
        fake_vllm(health_status=404) as server,
        started(server) as engine,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(background, engine)
        await anyio.sleep(5.5)
        await restarts(server)


async def test_adapters_that_come_and_go_are_seen_at_the_next_look() -> None:
    async with fake_vllm(adapters=("a",)) as server, started(server) as engine, anyio.create_task_group() as tasks:
        seen: list[tuple[str, ...]] = []
        engine.on_change = lambda facts: seen.append(facts.adapters)
        tasks.start_soon(engine.background)
        await anyio.sleep(5.5)
        assert (seen, engine.known.adapters) == ([], ("a",))
        server.adapters = ("a", "b")
        await anyio.sleep(1)
        server.model = "other"  # a list without the model, which is not believed
        await anyio.sleep(3)
        server.model, server.adapters = "tiny", ()
        await anyio.sleep(1)
        assert (seen, engine.known.adapters) == ([("a", "b"), ()], ())
        tasks.cancel_scope.cancel()


async def test_a_refresh_that_hangs_does_not_end_the_watch() -> None:
    refreshes: list[float] = []

    async def hang() -> None:
        refreshes.append(anyio.current_time())
        await anyio.sleep_forever()

    async def incarnation() -> str | None:
        return None

    async with fake_vllm() as server, anyio.create_task_group() as tasks:
        client = Client(Address.parse(URL), 60.0, server.transport)
        watch = ServerWatch(client, {}, None, incarnation, hang, 1.0)
        tasks.start_soon(watch.run)
        await anyio.sleep(3 * (HEALTH_S + 1.0))
        assert len(refreshes) == 3
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await client.aclose()


async def test_a_connection_lost_on_the_way_is_no_restart() -> None:
    async with fake_vllm() as server, started(server) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        await anyio.sleep(5.5)
        server.kill()
        server.is_up = True  # a proxy was started again: behind it is the same server
        await anyio.sleep(30.0)
        tasks.cancel_scope.cancel()


async def test_a_server_that_no_longer_shows_when_it_was_started_is_taken_for_the_same() -> None:
    async with fake_vllm() as server, started(server) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(engine.background)
        await anyio.sleep(5.5)
        server.pages["/metrics"] = b"nothing 1\n"
        server.kill()
        server.is_up = True
        await anyio.sleep(30.0)
        tasks.cancel_scope.cancel()


async def test_a_server_that_is_down_at_the_start_is_an_error_and_leaves_nothing() -> None:
    async with fake_vllm(is_up=False) as server:
        engine = VllmUpstream(URL, transport=server.transport)
        with pytest.raises(CannotConnect):
            await engine.start(1)
        await engine.cleanup()
        await engine.cleanup()
