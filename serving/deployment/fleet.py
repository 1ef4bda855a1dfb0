"""Fleet: the workers of one graph, which can be ended and replaced while it runs.

fleet.workers, fleet.prefill_workers        by number; a replaced one keeps its number and has another id
die ──► cut at once, as a crash does        leave ──► in order        bring_back ──► a new one in its place
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from engines import DisaggregationMode, LLMEngine, Worker
from operators import Model
from pipeline import Disconnected
from pipeline.network import Runtime, withdraw_all

from .config import GraphConfig, HostOptions
from .engines import Deployment
from .kv_routing import event_log
from .routing import reads_loads


def hosted(
    engine: LLMEngine,
    config: GraphConfig,
    hosting: HostOptions,
    model: Model,
    runtime: Runtime,
    mode: DisaggregationMode,
) -> Worker:
    """Return a worker of a graph around an engine, not started."""
    return Worker(
        engine,
        config.worker_settings(model, mode),
        runtime=runtime,
        metrics=hosting.metrics,
        environment=hosting.environment,
        health=hosting.health,
        times=hosting.times,
        kv_event_log=event_log if config.needs_event_logs and not hosting.is_closed else None,
        tracer=hosting.tracer,
    )


class Fleet:
    """The workers of one graph; they are made and run in the block of `running`, on one loop."""

    def __init__(self, config: GraphConfig, hosting: HostOptions, model: Model, runtime: Runtime) -> None:
        self._config, self._hosting, self._model, self._runtime = config, hosting, model, runtime
        self._deployment: Deployment = config.deployment(config.modes[0])
        self._deployment.recorded = hosting.recorded
        self._deployment.horizon = hosting.horizon
        self._deployment.has_event_reader = config.needs_event_logs or not hosting.is_closed
        self._deployment.has_load_reader = reads_loads(config, hosting.environment) or not hosting.is_closed
        self._deployment.has_rate_reader = config.reads_rates or not hosting.is_closed
        self._deployment.report_loading = hosting.report_loading
        self._running: dict[Worker, None] = {}
        self.workers: list[Worker] = []
        self.prefill_workers: list[Worker] = []

    def worker_ids(self) -> set[int]:
        """Return the ids of all workers, those that prefill too."""
        return {worker.worker_id for worker in (*self.workers, *self.prefill_workers)}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Make all, start one after the other, and end all at the same time, as an end may take long."""
        config = self._config
        self.workers += [await self._made(config.modes[0]) for _ in range(config.workers)]
        self.prefill_workers += [await self._made(DisaggregationMode.PREFILL) for _ in range(config.prefill_workers)]
        why: tuple[Any, ...] = (None, None, None)
        try:
            workers_of_both = [*self.prefill_workers, *self.workers]
            for worker in workers_of_both:
                await self._start(worker)
            for worker in workers_of_both:
                if worker.failure is not None:  # while a later one started
                    raise worker.failure
            yield
        except BaseException as error:
            why = type(error), error, error.__traceback__
            raise
        finally:
            async with anyio.create_task_group() as tasks:
                for worker in self._running:
                    tasks.start_soon(worker.__aexit__, *why)

    async def finish(self, within_s: float) -> None:
        """Accept no new requests, and wait for those that run."""
        served = [worker.served for worker in self._running if worker.served is not None]
        await withdraw_all(served)
        with anyio.move_on_after(within_s):
            for one in served:
                await one.drained()

    async def die(self, worker: Worker) -> None:
        """End a worker as a crash does: it is unreachable at once, and its requests are lost."""
        if worker in self._running:
            worker.abort()
            del self._running[worker]
            crash = Disconnected(f"{worker} died")
            await worker.__aexit__(type(crash), crash, None)

    async def leave(self, worker: Worker) -> None:
        """End a worker in order: it gets no new requests and finishes those it has.

        It may die meanwhile. Cancelled, it is ended with the fleet.
        """
        if worker in self._running:
            if worker.served is not None:
                await worker.served.withdraw()
                await worker.served.drained()
            if worker in self._running:
                del self._running[worker]
                await worker.__aexit__(None, None, None)

    async def bring_back(self, pool: list[Worker], number: int) -> Worker:
        """Return a new worker with a new, empty engine, in the place of one that has ended.

        Cancelled while it starts, there is none, and its place is one that has ended.
        """
        mode = DisaggregationMode.PREFILL if pool is self.prefill_workers else self._config.modes[0]
        worker = pool[number] = await self._made(mode)
        await self._start(worker)
        return worker

    async def _made(self, mode: DisaggregationMode) -> Worker:
        self._deployment.mode = mode
        (engine,) = await self._config.make_engines(1, self._deployment)
        return hosted(engine, self._config, self._hosting, self._model, self._runtime, mode)

    async def _start(self, worker: Worker) -> None:
        await worker.__aenter__()
        self._running[worker] = None
