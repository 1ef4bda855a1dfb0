"""The engine of a worker reaches those of other workers, and only as long as they are there. In virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest
from attrs import define

from engines.peers import WorkerPeers
from engines.worker import Worker, WorkerConfig
from pipeline import AsyncEngine, CannotConnect, Context, EngineShutdown, InvalidArgument, function_engine
from pipeline.errors import Disconnected
from pipeline.network import EndpointId, Runtime
from tests.pipeline.network.worlds import watchers

from .worker.worlds import TIMES, ScriptedSteps


async def _count(request: int) -> AsyncIterator[int]:
    for number in range(request):
        yield number
        await anyio.sleep(1)


@define
class Two:
    """A worker that serves to its peers, and one that calls."""

    runtime: Runtime
    serves: WorkerPeers
    calls: WorkerPeers
    address: str = ""

    async def engine(self) -> AsyncEngine[int, int]:
        return await self.calls.engine(self.address, int)


@asynccontextmanager
async def two() -> AsyncIterator[Two]:
    async with Runtime.in_process(rng=Random(1)) as runtime:
        both = Two(
            runtime,
            WorkerPeers(runtime, EndpointId("ns", "prefill", "generate"), 1),
            WorkerPeers(runtime, EndpointId("ns", "decode", "generate"), 2),
        )
        both.address = await both.serves.serve(function_engine(_count))
        yield both
        await both.calls.withdraw()


async def test_a_peer_is_called_at_its_address() -> None:
    async with two() as both:
        assert both.calls.is_address(both.address)
        assert await (await (await both.engine()).generate(Context(3))).collect() == [0, 1, 2]


async def test_each_start_of_a_worker_has_another_address() -> None:
    async with two() as both:
        await both.serves.withdraw()
        both.serves.cut()
        assert await both.serves.serve(function_engine(_count)) != both.address


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", "ns/prefill/generate/1/0", "other/prefill/peers/1/0", "ns/p/peers/x/0"]
)
async def test_what_is_no_address_of_the_namespace_is_refused(text: str) -> None:
    async with two() as both:
        assert not both.calls.is_address(text)
        with pytest.raises(InvalidArgument, match="is no address of a peer"):
            await both.calls.engine(text, int)


async def test_a_peer_that_is_not_there_is_waited_for_and_then_cannot_be_reached() -> None:
    async with two() as both:
        await both.serves.withdraw()
        begun_s = anyio.current_time()
        with pytest.raises(CannotConnect):
            await (await both.engine()).generate(Context(1))
        assert anyio.current_time() - begun_s == pytest.approx(1)


async def test_a_peer_that_appears_meanwhile_is_reached() -> None:
    async with two() as both:
        await both.serves.withdraw()
        both.serves.cut()
        async with anyio.create_task_group() as tasks:

            async def serve_again() -> None:
                await anyio.sleep(0.5)
                await both.serves.serve(function_engine(_count))

            tasks.start_soon(serve_again)
            assert await (await (await both.engine()).generate(Context(1))).collect() == [0]


async def test_a_worker_that_has_ended_follows_no_peer_any_more() -> None:
    async with two() as both:
        await both.engine()
        await both.calls.withdraw()
        with pytest.raises(EngineShutdown):
            await both.engine()
        assert watchers(both.runtime) == 0


@pytest.mark.parametrize("how", ["cut", "abort"])
async def test_a_call_ends_with_its_peer(how: str) -> None:
    async with two() as both, await (await both.engine()).generate(Context(9)) as stream:
        assert await anext(stream) == 0
        getattr(both.serves, how)()
        with pytest.raises(Disconnected):
            await anext(stream)


async def test_an_engine_has_its_peers_before_it_starts_and_what_it_serves_ends_with_its_worker() -> None:
    class Serving(ScriptedSteps):
        address = ""

        async def setup_peers(self, peers: object) -> None:
            self.calls.append("setup_peers")
            assert isinstance(peers, WorkerPeers)
            self.address = await peers.serve(function_engine(_count))

    engine = Serving()
    async with Runtime.in_process(rng=Random(1)) as runtime:
        async with Worker(engine, WorkerConfig(namespace="ns"), runtime=runtime, times=TIMES, environment={}):
            assert len(await runtime.discovery.instances("ns/backend/peers")) == 1
        assert await runtime.discovery.instances() == []
    assert engine.calls[:2] == ["setup_peers", "start"]


async def test_a_worker_that_disappears_leaves_its_id_free_at_once_also_for_peers() -> None:
    class Serving(ScriptedSteps):
        async def setup_peers(self, peers: object) -> None:
            assert isinstance(peers, WorkerPeers)
            await peers.serve(function_engine(_count))

    def worker() -> Worker:
        return Worker(Serving(), config, runtime=runtime, times=TIMES, environment={}, worker_id=7)

    config = WorkerConfig(namespace="ns")
    async with Runtime.in_process(rng=Random(1)) as runtime, worker() as before:
        before.abort()
        async with worker():
            assert len(await runtime.discovery.instances("ns/backend/peers")) == 1
            assert len(await runtime.discovery.instances("ns/backend/generate")) == 1
            before.abort()
            assert len(await runtime.discovery.instances("ns/backend/peers")) == 1


async def test_a_start_that_fails_ends_what_was_served() -> None:
    class Failing(ScriptedSteps):
        async def setup_peers(self, peers: object) -> None:
            assert isinstance(peers, WorkerPeers)
            await peers.serve(function_engine(_count))
            raise LookupError("no device")

    engine = Failing()
    async with Runtime.in_process(rng=Random(1)) as runtime:
        with pytest.raises(Exception, match="no device"):
            async with Worker(engine, WorkerConfig(namespace="ns"), runtime=runtime, times=TIMES, environment={}):
                pass
        assert await runtime.discovery.instances() == []
    assert engine.calls == ["cleanup"]


async def test_components_that_are_followed_are_bounded() -> None:
    async with two() as both:
        for number in range(40):
            both.calls.is_address(f"ns/component{number}/peers/1/0")
            with anyio.move_on_after(0.01):
                await both.calls.engine(f"ns/component{number}/peers/1/0", int)
        assert len(both.calls._views) == 16
        assert await (await (await both.engine()).generate(Context(1))).collect() == [0]
