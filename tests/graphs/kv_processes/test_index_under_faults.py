"""Workers that come and go, routers that miss events, at random: in the end each index is what the workers hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus
from attrs import define, field

from operators.kv import KvRouter
from pipeline import AsyncEngine
from pipeline.network.direct_events import DirectEventLimits
from tests.graphs.kv_processes.worlds import PROMPTS, Logs, held, is_known, routed, send, worker
from tests.pipeline.network.direct_events.worlds import Deployment, Process, deployment

IDS = (1, 2, 3)
LIMITS = DirectEventLimits(events=3, batch_events=1)


@define(eq=False)
class Host:
    """A process with one worker, and a router beside it, by which requests reach it whatever the network does."""

    process: Process
    router: KvRouter
    graph: AsyncEngine[Any, Any]
    ended: anyio.Event = field(factory=anyio.Event)
    gone: anyio.Event = field(factory=anyio.Event)


@define(eq=False)
class Site:
    """A deployment whose workers are ended and begun again under their ids."""

    made: Deployment
    front: KvRouter
    """A router in a process of its own."""
    rng: Random
    logs: Logs = field(factory=Logs)
    hosts: dict[int, Host] = field(factory=dict)

    @property
    def routers(self) -> list[KvRouter]:
        """All routers that are there."""
        return [self.front, *(host.router for host in self.hosts.values())]

    async def host(self, worker_id: int, *, task_status: TaskStatus[None]) -> None:
        """Have the worker until it is ended, in a process of its own."""
        async with (
            self.made.process(LIMITS) as process,
            worker(process, worker_id, self.logs),
            routed(process) as (router, graph),
        ):
            host = self.hosts[worker_id] = Host(process, router, graph)
            await anyio.sleep(1)
            task_status.started()
            await host.ended.wait()
        host.gone.set()

    async def end(self, worker_id: int) -> None:
        """End the worker; what it held is held no more."""
        host = self.hosts.pop(worker_id)
        host.ended.set()
        await host.gone.wait()
        self.logs.by_rank = {rank: log for rank, log in self.logs.by_rank.items() if rank.worker_id != worker_id}

    async def send(self) -> None:
        """Send a prompt to one of the workers."""
        worker_id = self.rng.choice(list(self.hosts))
        prompt = [token + 50 * self.rng.randrange(8) for token in self.rng.choice(PROMPTS)]
        await send(self.hosts[worker_id].graph, prompt, backend_instance_id=worker_id)

    def disturb(self, what: str) -> None:
        """Do something to the network."""
        faults = self.made.faults
        if what == "cut":
            faults.cut.add(self.rng.choice([host.process.number for host in self.hosts.values()]))
        if what in ("cut", "break"):
            faults.break_streams()
        elif what == "heal":
            faults.cut.clear()
        elif what == "hold":
            faults.held = faults.held or anyio.Event()
        elif what == "go" and faults.held is not None:
            faults.held.set()
            faults.held = None


@asynccontextmanager
async def site(seed: int) -> AsyncIterator[Site]:
    """Give a site with three workers that are seen."""
    async with deployment() as made, AsyncExitStack() as stack:
        router, _ = await stack.enter_async_context(routed(await stack.enter_async_context(made.process())))
        there = Site(made, router, Random(seed))
        async with anyio.create_task_group() as tasks:
            for worker_id in IDS:
                await tasks.start(there.host, worker_id)
            yield there
            for worker_id in list(there.hosts):
                await there.end(worker_id)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
async def test_each_index_is_what_the_workers_hold_whatever_was_lost(seed: int) -> None:
    async with site(seed) as there, anyio.create_task_group() as tasks:
        for _ in range(50):
            await there.send()
            if there.rng.random() < 0.4:
                there.disturb(there.rng.choice(["cut", "heal", "hold", "go", "break"]))
            if there.rng.random() < 0.1:
                worker_id = there.rng.choice(list(there.hosts))
                await there.end(worker_id)
                await tasks.start(there.host, worker_id)
        there.disturb("heal")
        there.disturb("go")
        await anyio.sleep(40)
        assert held(there.logs) > 0
        assert [is_known(router, there.logs) for router in there.routers] == [True] * 4
        for worker_id in list(there.hosts):
            await there.end(worker_id)
        await anyio.sleep(1)
        assert there.front.lookup.feed is not None
        assert there.front.lookup.feed.index.workers() == []
