"""KV routers of a standard graph over workers that outlive them: restarted, cancelled, and two side by side."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from engines import ShutdownTimes, Worker, WorkerConfig
from engines.mocker import MockEngine, MockEngineArgs
from operators import BusyThresholds
from operators.kv import KvRouterConfig
from operators.kv.operator import ROUTER_DECISION
from pipeline import AsyncEngine, Context, Unavailable
from pipeline.network import EndpointId, Runtime
from pipeline.network.inprocess import InProcessEventPlane
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import GraphConfig, HostOptions, RouterName, event_log, routing_to

WHERE = EndpointId.parse("dynamo/backend/generate")
BLOCK = 16
PROMPTS = [[family * 1000 + i for i in range(8 * BLOCK + 1)] for family in range(6)]
Router = AsyncEngine[Any, Any]


def hosted(runtime: Runtime) -> Worker:
    """A mock worker with an event log, which has not started."""
    return Worker(
        MockEngine(MockEngineArgs(block_size=BLOCK)),
        WorkerConfig(),
        runtime=runtime,
        environment={},
        times=ShutdownTimes(grace_s=0.0, timeout_s=5.0),
        kv_event_log=event_log,
    )


@asynccontextmanager
async def site() -> AsyncIterator[Runtime]:
    """A runtime with three mock workers that log their events."""
    async with Runtime.in_process(rng=Random(3)) as runtime, hosted(runtime), hosted(runtime), hosted(runtime):
        yield runtime


@asynccontextmanager
async def routed(runtime: Runtime, **settings: Any) -> AsyncIterator[Router]:
    """A router over these workers with these settings, until the block ends."""
    config = GraphConfig(engine="mocker", workers=3, router="kv", seed=3, kv_router=KvRouterConfig(**settings))
    async with routing_to(WHERE, config, HostOptions(), runtime) as routing:
        yield routing.router


async def begin(router: Router, prompt: list[int], tokens: int = 4) -> tuple[dict[str, Any], Any]:
    """Send a prompt; return the router's decision, and the stream behind it."""
    stop = StopConditions(max_tokens=tokens)
    request = PreprocessedRequest(prompt, stop_conditions=stop, annotations=[ROUTER_DECISION])
    stream = await router.generate(Context(request))
    decision = await anext(stream)
    return json.loads((decision.comment or [""])[0]), stream


async def decided(router: Router, prompt: list[int]) -> dict[str, Any]:
    """Send a prompt and read its answer to the end; return the router's decision."""
    decision, stream = await begin(router, prompt)
    for item in await stream.collect():
        assert item.extract_error() is None
    return decision


async def decisions_of(router: Router) -> list[tuple[int, float]]:
    """Send all prompts, one after the other; the worker and overlap, in blocks, of each."""
    decisions = [await decided(router, prompt) for prompt in PROMPTS]
    return [(decision["worker_id"], decision["overlap_blocks"]) for decision in decisions]


def loads(decision: dict[str, Any]) -> dict[int, int]:
    """The active blocks of each worker, as the router counted them for this decision."""
    return {one["rank"][0]: one["active_decode_blocks"] for one in decision["candidates"]}


def subscriptions(runtime: Runtime) -> int:
    """How many subscriptions the event plane has."""
    events = runtime.events
    assert isinstance(events, InProcessEventPlane)
    return events.subscriptions


async def test_a_router_waits_at_its_start_for_as_many_workers_as_its_settings_require() -> None:
    async with Runtime.in_process(rng=Random(3)) as runtime, hosted(runtime), anyio.create_task_group() as tasks:
        routers: list[Router] = []

        async def route() -> None:
            async with routed(runtime, min_initial_workers=2) as router:
                routers.append(router)
                await decided(router, PROMPTS[0])

        tasks.start_soon(route)
        await anyio.sleep(60)
        assert routers == []
        async with hosted(runtime):
            await anyio.sleep(60)
            assert len(routers) == 1


async def test_a_restarted_router_routes_as_the_one_before() -> None:
    async with site() as runtime:
        async with routed(runtime) as router:
            assert {overlap for _, overlap in await decisions_of(router)} == {0}
            before = await decisions_of(router)
        assert {overlap for _, overlap in before} == {8}
        assert len({worker_id for worker_id, _ in before}) == 3
        assert subscriptions(runtime) == 0
        async with routed(runtime) as router:
            await anyio.sleep(1)
            assert await decisions_of(router) == before


async def test_a_router_cancelled_amid_its_streams_leaves_nothing_and_the_next_one_learns_what_the_workers_hold() -> (
    None
):
    """The next one makes the same decisions as a router that ran all the time."""
    async with site() as runtime, routed(runtime) as witness:
        subscribed = subscriptions(runtime)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(route_for_ever, runtime, tasks)
            await anyio.sleep(1)
            assert subscriptions(runtime) > subscribed
            tasks.cancel_scope.cancel()
        assert subscriptions(runtime) == subscribed
        async with routed(runtime) as router:
            await anyio.sleep(1)
            for prompt in PROMPTS:
                seen = [(await decided(one, prompt))["candidates"] for one in (witness, router)]
                assert seen[0] == seen[1]
                assert 8 in [candidate["overlap_blocks"] for candidate in seen[0]]


async def route_for_ever(runtime: Runtime, tasks: TaskGroup) -> None:
    """Begin a long answer to each prompt, and keep the router until cancelled."""
    async with routed(runtime) as router:
        for prompt in PROMPTS:
            _, stream = await begin(router, prompt, 100_000)
            tasks.start_soon(stream.collect)
        await anyio.sleep_forever()


@pytest.mark.parametrize("in_sync", [True, False])
async def test_two_routers_at_once_see_what_both_have_in_flight_if_they_share_bookings(in_sync: bool) -> None:
    async with (
        site() as runtime,
        routed(runtime, router_replica_sync=in_sync) as one,
        routed(runtime, router_replica_sync=in_sync) as other,
    ):
        first, here = await begin(one, PROMPTS[0], 1000)
        second, there = await begin(other, PROMPTS[1], 1000)
        assert (loads(second)[first["worker_id"]] > 0) == in_sync
        assert (second["worker_id"] != first["worker_id"]) == in_sync, "the first of equals, drawn by the same seed"
        views = [loads(await decided(router, PROMPTS[2])) for router in (one, other)]
        assert views[0] == views[1] or not in_sync
        assert [sum(blocks > 0 for blocks in view.values()) for view in views] == ([2, 2] if in_sync else [1, 1])
        for stream in (here, there):
            await stream.aclose()
        views = [loads(await decided(router, PROMPTS[2])) for router in (one, other)]
        assert {blocks for view in views for blocks in view.values()} == {0}


@pytest.mark.parametrize("router", ["kv", "p2c"])
@pytest.mark.parametrize("threshold", [None, 0.9])
async def test_a_routing_that_ended_no_longer_follows_its_workers(router: RouterName, threshold: float | None) -> None:
    config = GraphConfig(
        engine="mocker", workers=3, router=router, busy=BusyThresholds(active_decode_blocks_threshold=threshold)
    )
    async with site() as runtime:
        async with routing_to(WHERE, config, HostOptions(), runtime) as routing:
            await routing.workers.wait_for_instances(3)
        with pytest.raises(Unavailable, match="was closed"):
            await routing.workers.wait_for_instances(1)
