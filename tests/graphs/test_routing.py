"""Each way of routing over mock workers: who gets a request, who is left out, in virtual time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from random import Random
from types import ModuleType
from typing import Any

import anyio
import pytest

from engines import GenerateContext
from engines.mocker import MockEngine
from operators import AllCoolingDown, BusyThresholds, WorkerLoad, least_loaded, power_of_two
from operators.kv import WorkerType
from pipeline import Context, EngineShutdown, InvalidArgument, ResponseTimeout, WorkerOverloaded
from pipeline.network import Runtime, Scope, static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.kv import KV_METRICS_TOPIC, ActiveLoad
from pipeline.protocols.openai import ChatCompletionRequest, ChatMessage, NvExt
from pipeline.testing import OpenStreams, ScriptedEngine, Stall, Wait
from serving.deployment import GraphConfig, HostOptions, OpenGraph, RouterName, hosted_graph, router_of, routing_to

pytestmark = pytest.mark.anyio

SEED = 3


class Member(MockEngine):
    """A mock worker that writes down whom it was asked by, and can break or have too much to do."""

    def __init__(self, asked: list[Member]) -> None:
        super().__init__(token_ids=range(ord("a"), ord("z") + 1))
        self.asked, self.is_broken, self.is_overloaded = asked, False, False

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.asked.append(self)
        if self.is_broken:
            raise EngineShutdown("out of order")
        if self.is_overloaded:
            raise WorkerOverloaded("too much to do")
        async with aclosing(super().generate(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk


class Pool:
    """A running graph over mock workers, which are known by their place in the order of their ids."""

    def __init__(self, opened: OpenGraph, asked: list[Member]) -> None:
        self.graph, self._asked = opened.graph, asked
        self.workers = sorted(opened.workers, key=lambda worker: worker.worker_id)
        self.members: list[Any] = [worker.engine for worker in self.workers]

    async def begin(self, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        """Who was asked, and the stream, which has its first item."""
        message = ChatMessage(role="user", content=text)
        request = ChatCompletionRequest(model="echo", messages=[message], max_tokens=1000, **fields)
        before = len(self._asked)
        stream = await self.graph.generate(Context(request))
        try:
            if (error := (await anext(stream)).extract_error()) is not None:
                raise error
        except BaseException:
            await stream.aclose()
            raise
        (asked,) = self._asked[before:]
        return self.members.index(asked), stream

    async def ask(self, text: str = "hi", **fields: Any) -> int:
        asked, stream = await self.begin(text, **fields)
        await stream.aclose()
        return asked

    async def ask_many(self, times: int = 25, text: str = "hi") -> set[int]:
        return {await self.ask(text) for _ in range(times)}


Open = Callable[..., Any]


@pytest.fixture
def open_pool(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a pool of that many workers with a router: `open_pool(router, workers=3, environment)`."""
    asked: list[Member] = []
    module = ModuleType("mock_members")
    vars(module)["join"] = lambda: Member(asked)
    monkeypatch.setitem(sys.modules, "mock_members", module)

    @asynccontextmanager
    async def opening(
        router: RouterName, workers: int = 3, environment: Mapping[str, str] | None = None
    ) -> AsyncIterator[Pool]:
        config = GraphConfig(engine="mock_members:join", workers=workers, router=router, seed=SEED, migration_limit=0)
        async with hosted_graph(config, HostOptions(environment or {})) as opened:
            yield Pool(opened, asked)

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
"""Who is to get the request of a turn; workers whose device is not known are one group."""

TURNS = 16
LONG = "a prompt of many blocks " * 20


def expected(router: RouterName) -> list[int]:
    """Who gets each request if those that went to the first worker end at once, and the others never."""
    rng, in_flight, asked = Random(SEED), Counter[int](), list[int]()
    for turn in range(TURNS):
        loads = {place: WorkerLoad(in_flight[place]) for place in PLACES}
        chosen = RULES[router](loads, turn, rng)
        in_flight[chosen] += chosen != 0
        asked.append(chosen)
    return asked


def test_the_rules_can_be_told_apart() -> None:
    assert len({tuple(expected(router)) for router in RULES}) == len(RULES) - 1


@pytest.mark.parametrize("router", RULES)
async def test_each_router_routes_as_its_name_says(
    router: RouterName, open_pool: Open, open_streams: OpenStreams
) -> None:
    """The seed holds for whatever it leaves to chance."""
    asked, running = [], []
    async with open_pool(router) as pool:
        for _ in range(TURNS):
            place, stream = await pool.begin()
            asked.append(place)
            if place:
                running.append(stream)
            else:
                await stream.aclose()
        for stream in running:
            await stream.aclose()
    assert asked == expected(router)


async def test_direct_goes_where_the_request_says(open_pool: Open, open_streams: OpenStreams) -> None:
    async with open_pool("direct") as pool:
        for place in (2, 0, 2, 1):
            named = NvExt(backend_instance_id=pool.workers[place].worker_id)
            assert await pool.ask(nvext=named) == place
        with pytest.raises(InvalidArgument) as refused:
            await pool.ask()
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
async def test_a_worker_that_breaks_is_left_out_and_comes_back(
    router: RouterName, open_pool: Open, open_streams: OpenStreams
) -> None:
    environment = {"DYN_RUNTIME_INHIBITED_DURATION_SECS": "7"}
    async with open_pool(router, environment=environment) as pool:
        pool.members[1].is_broken = True
        with pytest.raises(EngineShutdown):
            await pool.ask_many()
        broke_s = anyio.current_time()
        pool.members[1].is_broken = False
        assert await pool.ask_many() == {0, 2}
        await anyio.sleep(broke_s + 6.9 - anyio.current_time())
        assert await pool.ask_many(3) <= {0, 2}
        await anyio.sleep(broke_s + 7 - anyio.current_time())
        assert await pool.ask_many() == {0, 1, 2}


async def test_when_all_broke_a_moment_ago_the_first_to_be_back_says_when(
    open_pool: Open, open_streams: OpenStreams
) -> None:
    async with open_pool("round-robin", 2) as pool:
        for member in pool.members:
            member.is_broken = True
            with pytest.raises(EngineShutdown):
                await pool.ask()
            await anyio.sleep(1)
        with pytest.raises(AllCoolingDown) as refused:
            await pool.ask()
        assert refused.value.retry_after_s == pytest.approx(5 - 2, abs=0.1)


@pytest.mark.parametrize("trouble", ["is_broken", "is_overloaded"])
async def test_the_kv_router_asks_another_for_a_while_where_a_worker_failed_or_refused(
    open_pool: Open, trouble: str
) -> None:
    """Although the whole prompt is cached there."""
    async with open_pool("kv", 2) as pool:
        holder = await pool.ask(LONG)
        assert await pool.ask_many(6, LONG) == {holder}
        setattr(pool.members[holder], trouble, True)
        with pytest.raises(EngineShutdown if trouble == "is_broken" else WorkerOverloaded):
            await pool.ask(LONG)
        setattr(pool.members[holder], trouble, False)
        assert await pool.ask_many(3, LONG) == {1 - holder}
        await anyio.sleep(10)
        assert holder in await pool.ask_many(6, LONG)


async def test_with_thresholds_a_worker_that_refused_is_asked_again_when_it_reports_that_it_is_not_busy() -> None:
    config = GraphConfig(busy=BusyThresholds(active_decode_blocks_threshold=0.5))
    async with Runtime.in_process() as runtime:
        endpoint = "ns/backend/generate"
        full: Any = ScriptedEngine([], fails=WorkerOverloaded("full"))
        served = await runtime.serve(endpoint, full, instance_id=1)
        async with routing_to(served.instance.endpoint_id, config, {}, runtime) as routing:
            await routing.workers.wait_for_instances(1)
            with pytest.raises(WorkerOverloaded):
                await routing.push.generate(Context(None))  # type: ignore[arg-type]
            assert list(routing.push.health.free()) == []
            publisher = runtime.events.publisher(Scope("ns", "backend"), KV_METRICS_TOPIC)
            publisher.publish(ActiveLoad(1, kv_used_blocks=0))
            assert list(routing.push.health.free()) == [1]
