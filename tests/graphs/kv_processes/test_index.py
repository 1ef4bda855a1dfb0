"""KV routers in other processes than their workers: events, recovery and answers cross as bytes, with faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from attrs import define

from operators.kv import (
    KvRouter,
    PromptBlocks,
    RouteRequest,
)
from pipeline import AsyncEngine
from pipeline.network import Missed, Scope
from pipeline.network.direct_events import DirectEventLimits
from pipeline.protocols.kv import KV_EVENTS_TOPIC
from tests.graphs.kv_processes.worlds import BLOCK, PROMPTS, Logs, held, is_known, routed, send_all, worker
from tests.pipeline.network.direct_events.worlds import Deployment, Process, deployment


@define(eq=False)
class Site:
    """Two workers in a process of their own, and a router in another one."""

    made: Deployment
    workers: Process
    front: Process
    logs: Logs
    router: KvRouter
    graph: AsyncEngine[Any, Any]


@asynccontextmanager
async def site(limits: DirectEventLimits | None = None) -> AsyncIterator[Site]:
    """Give a site whose router has seen its workers."""
    logs = Logs()
    async with (
        deployment() as made,
        made.process(limits) as workers,
        made.process() as front,
        AsyncExitStack() as stack,
    ):
        for worker_id in (1, 2):
            await stack.enter_async_context(worker(workers, worker_id, logs))
        router, graph = await stack.enter_async_context(routed(front))
        await anyio.sleep(1)
        yield Site(made, workers, front, logs, router, graph)


async def test_the_index_follows_workers_of_another_process() -> None:
    async with site() as there:
        await send_all(there.graph)
        await anyio.sleep(0.1)
        assert is_known(there.router, there.logs)
        assert held(there.logs) >= 36
        overlap = there.router.lookup.find(PromptBlocks(PROMPTS[0], BLOCK), 0.0)
        assert max(overlap.device.values()) == 6


async def test_a_router_that_comes_late_has_the_index_of_the_one_before() -> None:
    async with site() as there, there.made.process() as other:
        await send_all(there.graph)
        async with routed(other) as (router, _):
            await anyio.sleep(1)
            assert is_known(router, there.logs)
            for prompt in PROMPTS:
                request = RouteRequest(blocks=PromptBlocks(prompt, BLOCK))
                assert router.advise(request).rank == there.router.advise(request).rank


async def test_what_was_lost_while_the_connection_was_broken_is_recovered_without_another_event() -> None:
    async with site() as there, routed(there.workers) as (_, graph):
        await send_all(there.graph)
        there.made.faults.cut.add(there.front.number)
        there.made.faults.break_streams()
        await send_all(graph, first=100)  # by a router beside the workers
        await anyio.sleep(20)
        assert not is_known(there.router, there.logs)
        there.made.faults.cut.clear()
        await anyio.sleep(6)
        assert is_known(there.router, there.logs)


async def test_a_worker_whose_first_events_are_lost_is_recovered_without_another_event() -> None:
    logs = Logs()
    async with deployment() as made, made.process() as here, made.process() as front, routed(front) as (router, _):
        made.faults.cut.add(front.number)
        async with worker(here, 1, logs), routed(here) as (_, graph):
            await send_all(graph)
            await anyio.sleep(60)
            assert held(logs) > 0
            assert not is_known(router, logs)
            made.faults.cut.clear()
            await anyio.sleep(6)
            assert is_known(router, logs)


async def test_a_loss_that_is_reported_of_all_publishers_has_all_workers_queried() -> None:
    """As a plane over a broker does after it was away."""
    async with site() as there:
        await send_all(there.graph)
        await anyio.sleep(1)
        feed = there.router.lookup.feed
        assert feed is not None
        for rank in there.logs.by_rank:
            feed.index.clear_rank(rank)
            feed._ranks[rank].forget()
        assert not is_known(there.router, there.logs)
        there.front.events.incoming._missed[Scope("dynamo", "backend"), KV_EVENTS_TOPIC].push(Missed())
        await anyio.sleep(1)
        assert is_known(there.router, there.logs)


async def test_what_a_slow_router_lost_is_recovered() -> None:
    async with site(DirectEventLimits(events=2, batch_events=1)) as there, routed(there.workers) as (_, graph):
        there.made.faults.held = anyio.Event()
        for first in range(0, 500, 100):
            await send_all(graph, first=first)
        there.made.faults.held.set()
        await anyio.sleep(5)
        assert is_known(there.router, there.logs)


@pytest.mark.parametrize("is_crash", [False, True])
async def test_a_worker_that_comes_back_in_another_process_holds_what_it_has_and_nothing_before(
    is_crash: bool,
) -> None:
    logs = Logs()
    async with deployment() as made, made.process() as front, routed(front) as (router, graph):
        for again in range(2):
            async with made.process() as here, worker(here, 1, logs):
                await anyio.sleep(1)
                assert is_known(router, logs)
                assert held(logs) == 0
                await send_all(graph, first=100 * again)
                await anyio.sleep(1)
                assert is_known(router, logs)
                assert held(logs) > 0
                if is_crash:
                    here.crash()
                    await anyio.sleep(11)
                    assert router.lookup.feed is not None
                    assert router.lookup.feed.index.workers() == []
