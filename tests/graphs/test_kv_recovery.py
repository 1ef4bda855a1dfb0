"""KV routers that start, end and miss events over mock engines: their index matches what the engines hold."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from attrs import evolve

from engines import ShutdownTimes, Worker, WorkerConfig
from engines.mocker import MockEngine, MockEngineArgs
from engines.publishing import KvEventLog
from operators import KvPushRouter, PushRouter
from operators.kv import (
    EventLog,
    KvRecovery,
    KvRouter,
    KvRouterConfig,
    PromptBlocks,
    RouteRequest,
    WorkerRank,
    kv_events,
    kv_router,
    recovery_workers,
)
from operators.kv.events import Recover
from operators.pool import InstanceHealth, cards_of
from pipeline import AsyncEngine, Context
from pipeline.network import Event, Missed, Runtime, Scope
from pipeline.protocols import PreprocessedRequest, RoutingHints, StopConditions
from pipeline.protocols.kv import KV_EVENTS_TOPIC, KvEvent, KvStored, RecoveryReply, RouterEvent, StoredBlock
from pipeline.rx import Subject, ops

WHERE = "dynamo/backend/generate"
BLOCK = 4
ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=256)
PROMPTS = [[family * 1000 + i for i in range(24)] for family in range(6)]
IDS = (1, 2, 3)

Wrap = Callable[[KvRecovery], Recover]


class Site:
    """Mock engines hosted on one runtime, each with an event log."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.logs: dict[WorkerRank, EventLog] = {}
        """The log of each rank's current incarnation."""

    def log(self, worker_id: int, dp_rank: int) -> KvEventLog:
        """A new log for a rank, which keeps 16 events."""
        rank = WorkerRank(worker_id, dp_rank)
        self.logs[rank] = EventLog(rank, kept_events=16)
        return self.logs[rank]

    def worker(self, worker_id: int, args: MockEngineArgs = ARGS) -> Worker:
        """A worker that has not started."""
        return Worker(
            MockEngine(args, model="m"),
            WorkerConfig(),
            runtime=self.runtime,
            worker_id=worker_id,
            environment={},
            times=ShutdownTimes(grace_s=0.0, timeout_s=5.0),
            kv_event_log=self.log,
        )

    @asynccontextmanager
    async def router(
        self, wrap: Wrap = lambda recovery: recovery, lost: Callable[[Event[RouterEvent]], bool] = lambda _: False
    ) -> AsyncIterator[tuple[KvRouter, AsyncEngine[Any, Any]]]:
        """A running KV router, and the graph below it.

        Its recovery is what `wrap` returns; events for which `lost` is true do not reach it.
        """
        workers = self.runtime.workers(WHERE)
        health = InstanceHealth(workers, cards=cards_of(self.runtime.discovery.watch_models(WHERE)))

        def arrives(event: Event[RouterEvent] | Missed) -> bool:
            return isinstance(event, Missed) or not lost(event)

        events = kv_events(self.runtime.events, WHERE).pipe(ops.filter(arrives))
        with KvRecovery(recovery_workers(self.runtime, WHERE), health) as recovery:
            router = kv_router(
                workers,
                KvRouterConfig(use_kv_events=True),
                block_size_tokens=BLOCK,
                health=health,
                recover=wrap(recovery),
                rng=Random(1),
            )
            with router, router.follow(events):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(router.run)
                    yield router, KvPushRouter(router) >> PushRouter(workers)
                    tasks.cancel_scope.cancel()
        workers.close()

    def is_known_to(self, router: KvRouter) -> bool:
        """Whether the router's index has for every rank just the blocks that the rank holds."""
        assert router.lookup.feed is not None
        index = router.lookup.feed.index
        return all(index.dump(rank) == log.index.dump(rank) for rank, log in self.logs.items())


@asynccontextmanager
async def site(*worker_ids: int, args: MockEngineArgs = ARGS) -> AsyncIterator[Site]:
    """A site with these workers, which end with the block."""
    async with Runtime.in_process() as runtime, AsyncExitStack() as workers:
        made = Site(runtime)
        for worker_id in worker_ids:
            await workers.enter_async_context(made.worker(worker_id, args))
        yield made


async def send(graph: AsyncEngine[Any, Any], prompt: list[int], **hints: Any) -> None:
    """Send a prompt with these routing hints, and read its answer of four tokens."""
    stop = StopConditions(max_tokens=4)
    request = PreprocessedRequest(prompt, stop_conditions=stop, routing=RoutingHints(**hints))
    await (await graph.generate(Context(request))).collect()


async def send_all(graph: AsyncEngine[Any, Any], times: int = 1) -> None:
    """Send all prompts at once, each so many times."""
    async with anyio.create_task_group() as tasks:
        for prompt in PROMPTS * times:
            tasks.start_soon(send, graph, prompt)


def overlaps(router: KvRouter) -> list[dict[WorkerRank, float]]:
    """For each prompt, how many of its blocks each rank holds on the device."""
    return [dict(router.lookup.find(PromptBlocks(prompt, BLOCK), 0.0).device) for prompt in PROMPTS]


def choices(router: KvRouter) -> list[WorkerRank]:
    """The rank that each prompt would go to."""
    return [router.advise(RouteRequest(blocks=PromptBlocks(prompt, BLOCK))).rank for prompt in PROMPTS]


@pytest.mark.parametrize("args", [ARGS, MockEngineArgs(num_gpu_blocks=64, block_size=BLOCK, dp_size=2)])
async def test_a_new_router_recovers_the_index_and_routes_as_the_one_before(args: MockEngineArgs) -> None:
    async with site(*IDS, args=args) as deployed:
        async with deployed.router() as (router, graph):
            await send_all(graph)
            before = overlaps(router), choices(router)
            assert all(overlap for overlap in before[0])
            assert len(set(before[1])) > 1
        async with deployed.router() as (router, graph):
            await anyio.sleep(1)
            assert (overlaps(router), choices(router)) == before
            assert deployed.is_known_to(router)
            for prompt in PROMPTS:
                await send(graph, prompt)
            assert overlaps(router) == before[0], "each prompt went to the worker that held it"


async def test_a_worker_that_restarts_under_its_id_holds_nothing_in_the_index() -> None:
    async with site(2) as deployed, deployed.router() as (router, graph):
        async with deployed.worker(1):
            await send_all(graph, times=2)
            assert any(WorkerRank(1) in overlap for overlap in overlaps(router))
        assert not any(WorkerRank(1) in overlap for overlap in overlaps(router))
        async with deployed.worker(1):
            await anyio.sleep(1)
            assert not any(WorkerRank(1) in overlap for overlap in overlaps(router))
            await send_all(graph, times=2)
            assert any(WorkerRank(1) in overlap for overlap in overlaps(router))
            await anyio.sleep(5)
            assert deployed.is_known_to(router)


async def test_a_late_event_of_an_earlier_incarnation_suppresses_no_later_event() -> None:
    late: list[Event[RouterEvent]] = []
    again: Subject[Event[RouterEvent]] = Subject()
    async with site(2) as deployed:
        deployed.runtime.events.subscribe(Scope("dynamo", "backend"), KV_EVENTS_TOPIC, RouterEvent).subscribe(
            late.append
        )
        async with deployed.worker(1), deployed.router() as (_, graph):
            await send_all(graph, times=2)
        former, block = (
            [event for event in late if event.payload.worker_id == 1][-1],
            KvStored(None, [StoredBlock(1, 1)]),
        )
        straggler = evolve(former, payload=RouterEvent(1, KvEvent(former.payload.event.event_id + 2000, block)))
        async with deployed.worker(1), deployed.router() as (router, graph):
            with router.follow(again):
                await send_all(graph)
                again.on_next(straggler)
                await anyio.sleep(1)
                assert router.lookup.feed is not None
                assert router.lookup.feed.under_repair == []
                await send_all(graph, times=2)
                assert deployed.is_known_to(router)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_events_lost_on_the_way_are_repaired(seed: int) -> None:
    """The last event of each worker arrives: a loss is noticed by the next event only."""
    random, is_lossy = Random(seed), True

    def lost(_: object) -> bool:
        return is_lossy and random.random() < 0.4

    async with site(*IDS) as deployed, deployed.router(lost=lost) as (router, graph):
        await send_all(graph, times=3)
        is_lossy = False
        for worker_id in IDS:
            await send(graph, [9000 + worker_id] * 8, backend_instance_id=worker_id)
        await anyio.sleep(20)
        assert router.lookup.feed is not None
        assert router.lookup.feed.under_repair == []
        assert deployed.is_known_to(router)


async def test_a_worker_that_dies_during_its_recovery_leaves_nothing() -> None:
    async def late(recovery: KvRecovery, rank: WorkerRank, start: int | None) -> RecoveryReply | None:
        await anyio.sleep(1)
        return await recovery(rank, start)

    def slow(recovery: KvRecovery) -> Recover:
        return lambda rank, start: late(recovery, rank, start)

    async with site(2) as deployed, deployed.worker(1) as worker:
        async with deployed.router() as (_, graph):
            await send_all(graph, times=2)
        async with deployed.router(slow) as (router, graph):
            assert router.lookup.feed is not None
            await anyio.sleep(0.5)
            assert worker.served is not None
            for served in [s for s in deployed.runtime.served.values() if s.instance_id == 1]:
                served.abort()
            await anyio.sleep(10)
            assert router.lookup.feed.index.workers() == [2]
            assert router.lookup.feed.under_repair == []
            await send_all(graph)


async def test_events_published_during_a_recovery_are_all_in_the_index_after_it() -> None:
    async with site(*IDS) as deployed, deployed.router() as (_, graph), anyio.create_task_group() as tasks:
        await send_all(graph, times=2)
        tasks.start_soon(send_all, graph, 8)
        for delay_s in (0.001, 0.01, 0.1):
            await anyio.sleep(delay_s)
            async with deployed.router() as (router, _):
                await anyio.sleep(0.01)
                assert router.lookup.feed is not None
                assert router.lookup.feed.under_repair == []
                assert deployed.is_known_to(router)
