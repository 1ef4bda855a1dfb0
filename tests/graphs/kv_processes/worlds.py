"""Mock workers and KV routers, each on a runtime of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import anyio
from attrs import define, field

from engines import ShutdownTimes, Worker, WorkerConfig
from engines.mocker import MockEngine, MockEngineArgs
from engines.publishing import KvEventLog
from operators import KvPushRouter, PushRouter
from operators.kv import (
    EventLog,
    KvRecovery,
    KvRouter,
    KvRouterConfig,
    WorkerRank,
    kv_events,
    kv_router,
    recovery_workers,
)
from operators.pool import InstanceHealth, cards_of
from pipeline import Annotated, AsyncEngine, Context
from pipeline.network import Runtime
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RoutingHints, StopConditions

WHERE = "dynamo/backend/generate"
BLOCK = 4
ARGS = MockEngineArgs(num_gpu_blocks=64, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=256)
PROMPTS = [[family * 1000 + i for i in range(24)] for family in range(6)]


@define(eq=False)
class Logs:
    """The event logs of all workers, by their ranks."""

    by_rank: dict[WorkerRank, EventLog] = field(factory=dict)

    def make(self, worker_id: int, dp_rank: int) -> KvEventLog:
        """Return a new log for a rank, which keeps 16 events."""
        rank = WorkerRank(worker_id, dp_rank)
        self.by_rank[rank] = EventLog(rank, kept_events=16)
        return self.by_rank[rank]


def worker(runtime: Runtime, worker_id: int, logs: Logs) -> Worker:
    """A mock worker of this process, which has not started."""
    return Worker(
        MockEngine(ARGS, model="m"),
        WorkerConfig(),
        runtime=runtime,
        worker_id=worker_id,
        environment={},
        times=ShutdownTimes(grace_s=0.0, timeout_s=5.0),
        kv_event_log=logs.make,
    )


@asynccontextmanager
async def routed(runtime: Runtime) -> AsyncIterator[tuple[KvRouter, AsyncEngine[Any, Any]]]:
    """A running KV router in this process, and the graph below it."""
    workers = runtime.workers(WHERE, Annotated[LLMEngineOutput])
    health = InstanceHealth(workers, cards=cards_of(runtime.discovery.watch_models(WHERE)))
    with KvRecovery(recovery_workers(runtime, WHERE), health) as recovery:
        config = KvRouterConfig(use_kv_events=True)
        router = kv_router(workers, config, block_size_tokens=BLOCK, health=health, recover=recovery, rng=Random(1))
        async with router:
            with router.follow(kv_events(runtime.events, WHERE)):
                yield router, KvPushRouter(router) >> PushRouter(workers)
    workers.close()


async def send(graph: AsyncEngine[Any, Any], prompt: list[int], **hints: Any) -> list[Any]:
    """Send a prompt with these routing hints; return the answer of four tokens."""
    stop = StopConditions(max_tokens=4)
    request = PreprocessedRequest(prompt, stop_conditions=stop, routing=RoutingHints(**hints))
    return await (await graph.generate(Context(request))).collect()


def is_known(router: KvRouter, logs: Logs) -> bool:
    """Whether the router's index has for every rank just the blocks that the rank holds."""
    assert router.lookup.feed is not None
    index = router.lookup.feed.index
    return router.lookup.feed.under_repair == [] and all(
        index.dump(rank) == log.index.dump(rank) for rank, log in logs.by_rank.items()
    )


def held(logs: Logs) -> int:
    """Return the number of blocks that the workers hold."""
    return sum(log.index.held_blocks(rank) for rank, log in logs.by_rank.items())


async def send_all(graph: AsyncEngine[Any, Any], *, first: int = 0) -> None:
    """Send six prompts at once."""
    async with anyio.create_task_group() as tasks:
        for prompt in PROMPTS:
            tasks.start_soon(send, graph, [token + first for token in prompt])
