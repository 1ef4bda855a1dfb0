"""The same workers and requests in one process, and over several: the KV router makes the same choices."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from attrs import frozen

from engines import ShutdownTimes, Worker, WorkerConfig
from engines.mocker import MockEngine, MockEngineArgs
from operators.kv import KvRouterConfig
from operators.kv.operator import ROUTER_DECISION
from pipeline import AsyncEngine, Context
from pipeline.network import EndpointId, Runtime
from pipeline.protocols import PreprocessedRequest, StopConditions
from serving.deployment import GraphConfig, HostOptions, event_log, routing_to
from tests.pipeline.network.direct_events.worlds import deployment

WHERE = EndpointId.parse("dynamo/backend/generate")
BLOCK = 16
ARGS = MockEngineArgs(block_size=BLOCK, num_gpu_blocks=256)
CONVERSATIONS, TURNS = 9, 5
EVERY_S = 0.07
"""Seconds between two requests."""


@frozen
class Outcome:
    """What became of one request."""

    worker_id: int
    overlap_blocks: float
    cached_tokens: int
    token_ids: tuple[int, ...]


def worker(runtime: Runtime, worker_id: int) -> Worker:
    """A mock worker with an event log, which has not started."""
    return Worker(
        MockEngine(ARGS),
        WorkerConfig(),
        runtime=runtime,
        worker_id=worker_id,
        environment={},
        times=ShutdownTimes(grace_s=0.0, timeout_s=5.0),
        kv_event_log=event_log,
    )


@asynccontextmanager
async def routed(runtime: Runtime) -> AsyncIterator[AsyncEngine[Any, Any]]:
    """A KV router that shares its bookings, with what is below it."""
    settings = KvRouterConfig(router_replica_sync=True)
    config = GraphConfig(engine="mocker", workers=3, router="kv", seed=3, kv_router=settings)
    async with routing_to(WHERE, config, HostOptions(), runtime) as routing:
        yield routing.router


@asynccontextmanager
async def in_one_process(front_ends: int) -> AsyncIterator[list[AsyncEngine[Any, Any]]]:
    """Three workers and so many routers in one process."""
    async with Runtime.in_process(rng=Random(3)) as runtime, AsyncExitStack() as stack:
        for worker_id in (1, 2, 3):
            await stack.enter_async_context(worker(runtime, worker_id))
        yield [await stack.enter_async_context(routed(runtime)) for _ in range(front_ends)]


@asynccontextmanager
async def in_processes(front_ends: int, delay_s: float = 0.0) -> AsyncIterator[list[AsyncEngine[Any, Any]]]:
    """Three workers and so many routers, each in a process of its own, with TCP between them."""
    async with deployment(has_network=True) as made, AsyncExitStack() as stack:
        assert made.network is not None
        made.network.delay_s = delay_s
        for worker_id in (1, 2, 3):
            process = await stack.enter_async_context(made.process())
            await stack.enter_async_context(worker(process, worker_id))
        yield [
            await stack.enter_async_context(routed(await stack.enter_async_context(made.process())))
            for _ in range(front_ends)
        ]


async def outcomes(routers: Sequence[AsyncEngine[Any, Any]]) -> list[Outcome]:
    """Send the turns of some conversations, in turn through each router; a turn repeats all turns before it."""
    found: dict[int, Outcome] = {}

    async def send(number: int, prompt: list[int]) -> None:
        found[number] = await outcome(routers[number % len(routers)], prompt)

    await anyio.sleep(1)
    async with anyio.create_task_group() as tasks:
        for number in range(CONVERSATIONS * TURNS):
            turn, conversation = divmod(number, CONVERSATIONS)
            length = (turn + 1) * (3 + conversation) * BLOCK // 2 + 5
            tasks.start_soon(send, number, [1000 * conversation + token for token in range(length)])
            await anyio.sleep(EVERY_S)
    return [found[number] for number in sorted(found)]


async def outcome(router: AsyncEngine[Any, Any], prompt: list[int]) -> Outcome:
    """Send a prompt and read its answer."""
    stop = StopConditions(max_tokens=12, ignore_eos=True)
    request = PreprocessedRequest(prompt, stop_conditions=stop, annotations=[ROUTER_DECISION])
    first, *items = await (await router.generate(Context(request))).collect()
    decision = json.loads((first.comment or [""])[0])
    usage = items[-1].data.completion_usage
    tokens = tuple(token for item in items for token in item.data.token_ids)
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return Outcome(decision["worker_id"], decision["overlap_blocks"], cached, tokens)


def reuse(those: Sequence[Outcome]) -> int:
    """Return how many prompt tokens were found in a cache."""
    return sum(one.cached_tokens for one in those)


async def expected(front_ends: int) -> list[Outcome]:
    """The outcomes in one process."""
    async with in_one_process(front_ends) as routers:
        return await outcomes(routers)


@pytest.mark.parametrize("front_ends", [1, 2])
async def test_over_processes_the_choices_are_those_in_one(front_ends: int) -> None:
    """With two front ends each knows the other's bookings. Which of two equal workers is left to chance for each."""
    known = await expected(front_ends)
    assert {one.worker_id for one in known} == {1, 2, 3}
    assert reuse(known) > 1000
    async with in_processes(front_ends) as routers:
        found = await outcomes(routers)
    assert found == known


async def test_over_a_network_with_delays_the_same_is_answered_and_most_of_the_reuse_is_kept() -> None:
    """What is decided meanwhile is decided on less: events and bookings are 5 ms old, a step takes about 10."""
    known = await expected(2)
    async with in_processes(2, delay_s=0.005) as routers:
        found = await outcomes(routers)
    assert [one.token_ids for one in found] == [one.token_ids for one in known]
    assert reuse(found) > 0.8 * reuse(known)
