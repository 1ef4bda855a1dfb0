"""Each way of routing over mock workers: which worker gets a request, and which cools down, in virtual time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from random import Random
from types import ModuleType
from typing import Any, Protocol

import anyio
import pytest

from engines import GenerateContext
from engines.mocker import MockEngine
from operators import AllCoolingDown, BusyThresholds, least_loaded, power_of_two
from operators.kv import WorkerType
from operators.pool.load import WorkerLoad
from pipeline import Context, EngineShutdown, InvalidArgument, ResponseTimeout, WorkerOverloaded
from pipeline.network import Runtime, Scope, static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.kv import KV_METRICS_TOPIC, ActiveLoad
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, NvExt
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait
from serving.deployment import GraphConfig, HostOptions, OpenGraph, RouterName, hosted_graph, routing_to
from serving.deployment.routing import router_of

SEED = 3


class Member(MockEngine):
    """A mock worker that records its requests in a list of all workers, and can fail or be overloaded."""

    def __init__(self, chosen: list[Member]) -> None:
        super().__init__(token_ids=range(ord("a"), ord("z") + 1))
        self.chosen, self.is_broken, self.is_overloaded = chosen, False, False

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.chosen.append(self)
        if self.is_broken:
            raise EngineShutdown("out of order")
        if self.is_overloaded:
            raise WorkerOverloaded("too much to do")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


class Pool:
    """A running graph over mock workers, each identified by its place in the order of their ids."""

    def __init__(self, opened: OpenGraph, chosen: list[Member]) -> None:
        self.graph, self._chosen = opened.graph, chosen
        self.workers = sorted(opened.workers, key=lambda worker: worker.worker_id)
        self.members: list[Any] = [worker.engine for worker in self.workers]

    async def begin(self, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        """Send a chat; return the place of the worker that got it, and the stream behind its first item."""
        message = ChatMessage(role="user", content=text)
        request = ChatCompletionRequest(model="echo", messages=[message], max_tokens=1000, **fields)
        before = len(self._chosen)
        stream = await self.graph.generate(Context(request))
        try:
            if (error := (await anext(stream)).extract_error()) is not None:
                raise error
        except BaseException:
            await stream.aclose()
            raise
        (chosen,) = self._chosen[before:]
        return self.members.index(chosen), stream

    async def chosen(self, text: str = "hi", **fields: Any) -> int:
        """Send a chat and close its answer; return the place of the worker that got it."""
        place, stream = await self.begin(text, **fields)
        await stream.aclose()
        return place

    async def chosen_in(self, times: int = 25, text: str = "hi") -> set[int]:
        """The places of the workers that get so many chats, sent one after the other."""
        return {await self.chosen(text) for _ in range(times)}


class OpenPool(Protocol):
    """Opens a graph over this many workers with a router, and closes it with the block."""

    def __call__(
        self, router: RouterName, workers: int = 3, environment: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Pool]: ...


@pytest.fixture
def open_pool(monkeypatch: pytest.MonkeyPatch) -> OpenPool:
    chosen: list[Member] = []
    module = ModuleType("mock_members")
    vars(module)["join"] = lambda: Member(chosen)
    monkeypatch.setitem(sys.modules, "mock_members", module)

    @asynccontextmanager
    async def opening(
        router: RouterName, workers: int = 3, environment: Mapping[str, str] | None = None
    ) -> AsyncIterator[Pool]:
        config = GraphConfig(engine="mock_members:join", workers=workers, router=router, seed=SEED, migration_limit=0)
        async with hosted_graph(config, HostOptions(environment or {})) as opened:
            yield Pool(opened, chosen)

    return opening


Choose = Callable[[Mapping[int, WorkerLoad], int, Random], int]
PLACES = range(3)
RULES: dict[RouterName, Choose] = {
    "round-robin": lambda loads, turn, rng: turn % 3,
    "random": lambda loads, turn, rng: rng.choice(PLACES),
    "p2c": lambda loads, turn, rng: power_of_two(PLACES, loads, Context(None), rng),
    "least-loaded": lambda loads, turn, rng: least_loaded(PLACES, loads, Context(None), rng),
    "device-aware": lambda loads, turn, rng: least_loaded(PLACES, loads, Context(None), rng),
}
"""The place that gets the request of a turn; workers whose device is not known are one group."""

TURNS = 16
LONG = "a prompt of many blocks " * 20


def expected(router: RouterName) -> list[int]:
    """The place that gets each request if requests to the first worker end at once and all others never."""
    rng, in_flight, places = Random(SEED), Counter[int](), list[int]()
    for turn in range(TURNS):
        loads = {place: WorkerLoad(in_flight[place]) for place in PLACES}
        chosen = RULES[router](loads, turn, rng)
        in_flight[chosen] += chosen != 0
        places.append(chosen)
    return places


def test_the_rules_give_different_places() -> None:
    assert len({tuple(expected(router)) for router in RULES}) == len(RULES) - 1


@pytest.mark.parametrize("router", RULES)
async def test_each_router_follows_its_rule(router: RouterName, open_pool: OpenPool, open_streams: OpenStreams) -> None:
    """Random choices follow the seed."""
    places, running = [], []
    async with open_pool(router) as pool:
        for _ in range(TURNS):
            place, stream = await pool.begin()
            places.append(place)
            if place:
                running.append(stream)
            else:
                await stream.aclose()
        for stream in running:
            await stream.aclose()
    assert places == expected(router)


async def test_direct_goes_to_the_worker_that_the_request_names(open_pool: OpenPool, open_streams: OpenStreams) -> None:
    async with open_pool("direct") as pool:
        for place in (2, 0, 2, 1):
            named = NvExt(backend_instance_id=pool.workers[place].worker_id)
            assert await pool.chosen(nvext=named) == place
        with pytest.raises(InvalidArgument) as refused:
            await pool.chosen()
    assert refused.value.field == "routing.backend_instance_id"


async def test_device_aware_fills_both_kinds_by_the_ratio_of_the_environment() -> None:
    pool = static_workers({i: ScriptedEngine([i]) for i in (1, 2)}, device_types={1: "cpu", 2: "cuda"})
    router = router_of(pool, GraphConfig(router="device-aware"), {"DYN_ENCODER_CUDA_TO_CPU_RATIO": "3"})
    streams = [await router.generate(Context(None)) for _ in range(16)]
    load = router.loads.current()
    assert (load[1].in_flight, load[2].in_flight) == (4, 12)
    for stream in streams:
        await stream.aclose()


async def test_a_silent_worker_is_given_up_after_the_time_of_the_environment() -> None:
    environment = {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "3"}
    kinds: dict[WorkerType, float] = {"aggregated": 3, "prefill": 3, "decode": 5}
    for worker_type, limit_s in kinds.items():
        pool = static_workers({1: ScriptedEngine([1, Stall()])})
        router = router_of(pool, GraphConfig(), environment, worker_type)
        began_s = anyio.current_time()
        stream = await router.generate(Context(None))
        assert await anext(stream) == 1
        with pytest.raises(ResponseTimeout):
            await anext(stream)
        assert anyio.current_time() - began_s == pytest.approx(limit_s)
    router = router_of(static_workers({1: ScriptedEngine([Wait(1e6), 1])}), GraphConfig(), {})
    assert await (await router.generate(Context(None))).collect() == [1]


@pytest.mark.parametrize("router", list(RULES))
async def test_a_worker_that_fails_cools_down_and_comes_back(
    router: RouterName, open_pool: OpenPool, open_streams: OpenStreams
) -> None:
    environment = {"DYN_RUNTIME_INHIBITED_DURATION_SECS": "7"}
    async with open_pool(router, environment=environment) as pool:
        pool.members[1].is_broken = True
        with pytest.raises(EngineShutdown):
            await pool.chosen_in()
        broke_s = anyio.current_time()
        pool.members[1].is_broken = False
        assert await pool.chosen_in() == {0, 2}
        await anyio.sleep(broke_s + 6.9 - anyio.current_time())
        assert await pool.chosen_in(3) <= {0, 2}
        await anyio.sleep(broke_s + 7 - anyio.current_time())
        assert await pool.chosen_in() == {0, 1, 2}


async def test_when_all_workers_cool_down_the_error_has_the_seconds_until_the_first_is_back(
    open_pool: OpenPool, open_streams: OpenStreams
) -> None:
    async with open_pool("round-robin", 2) as pool:
        for member in pool.members:
            member.is_broken = True
            with pytest.raises(EngineShutdown):
                await pool.chosen()
            await anyio.sleep(1)
        with pytest.raises(AllCoolingDown) as refused:
            await pool.chosen()
        assert refused.value.retry_after_s == pytest.approx(5 - 2, abs=0.1)


@pytest.mark.parametrize("trouble", ["is_broken", "is_overloaded"])
async def test_the_kv_router_uses_another_worker_while_one_that_failed_or_refused_cools_down(
    open_pool: OpenPool, trouble: str
) -> None:
    """Although the whole prompt is cached there."""
    async with open_pool("kv", 2) as pool:
        holder = await pool.chosen(LONG)
        assert await pool.chosen_in(6, LONG) == {holder}
        setattr(pool.members[holder], trouble, True)
        with pytest.raises(EngineShutdown if trouble == "is_broken" else WorkerOverloaded):
            await pool.chosen(LONG)
        setattr(pool.members[holder], trouble, False)
        assert await pool.chosen_in(3, LONG) == {1 - holder}
        await anyio.sleep(10)
        assert holder in await pool.chosen_in(6, LONG)


async def test_with_thresholds_a_worker_that_refused_is_used_again_when_it_reports_that_it_is_not_busy() -> None:
    config = GraphConfig(busy=BusyThresholds(active_decode_blocks_threshold=0.5))
    async with Runtime.in_process() as runtime:
        endpoint = "ns/backend/generate"
        full: Any = ScriptedEngine([], fails=WorkerOverloaded("full"))
        served = await runtime.serve(endpoint, full, instance_id=1)
        async with routing_to(served.instance.endpoint_id, config, HostOptions(), runtime) as routing:
            await routing.workers.wait_for_instances(1)
            with pytest.raises(WorkerOverloaded):
                await routing.push.generate(Context(None))  # type: ignore[arg-type]
            assert list(routing.push.health.view.free) == []
            publisher = runtime.events.publisher(Scope("ns", "backend"), KV_METRICS_TOPIC)
            publisher.publish(ActiveLoad(1, kv_used_blocks=0))
            assert list(routing.push.health.view.free) == [1]
