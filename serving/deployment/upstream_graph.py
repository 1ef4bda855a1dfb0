"""The graph in front of servers that run already, each kept in service by a supervisor of its own.

Switch ──► "llama" ──► its stages ──► PushRouter ──► workers, each a VllmUpstream of one server
       └─► "qwen"  ──► ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from engines import DisaggregationMode, Worker
from pipeline import InvalidArgument, PenstockError, link
from pipeline.errors import EngineShutdown
from pipeline.network import Runtime, withdraw_all
from pipeline.protocols import worker_label
from pipeline.telemetry import merged, with_labels

from .config import GraphConfig, HostOptions
from .fleet import hosted
from .graphs import OpenGraph, hosted_graph
from .model_pools import ModelPool, ModelPools
from .stages import StandardGraph, TokenGraph
from .supervisor import Retry, Supervisor
from .upstream_config import closed

if TYPE_CHECKING:
    from engines.upstream import ServerFacts, Upstream

TRY_S = 15.0
"""How long the start waits for servers that neither answer nor refuse; they are tried on."""
OPEN_S = 5.0
"""How long the start waits for the graphs of models whose servers are there."""


@frozen(eq=False)
class UpstreamGraph:
    """A graph that runs in front of servers, and the servers' supervisors."""

    graph: StandardGraph
    tokens: TokenGraph
    supervisors: list[Supervisor]
    """One for each server that answers."""
    prefill_supervisors: list[Supervisor]
    """One for each server that prefills."""

    @property
    def workers(self) -> list[Worker]:
        """The workers of the servers that are there now, and answer."""
        return [one.worker for one in self.supervisors if one.worker is not None]

    @property
    def prefill_workers(self) -> list[Worker]:
        """The workers of the servers that are there now, and prefill."""
        return [one.worker for one in self.prefill_supervisors if one.worker is not None]

    @property
    def failure(self) -> PenstockError | None:
        """None: a server that is down may come back."""
        return None

    async def ended(self) -> None:
        """Wait for ever, for the same reason."""
        await anyio.sleep_forever()

    def native_metrics(self) -> str:
        """Return which servers are there, and the engines' own metrics, as Prometheus text, each family once."""
        texts = [worker.native_metrics() for worker in (*self.workers, *self.prefill_workers)]
        roles = [("answer", self.supervisors), ("prefill", self.prefill_supervisors)]
        return merged([_ABOUT_UP, *(_up(one, role) for role, those in roles for one in those), *texts])

    async def finish(self, within_s: float) -> None:
        """Accept no new requests, and wait for those that run."""
        served = [one.served for one in (*self.workers, *self.prefill_workers) if one.served is not None]
        await withdraw_all(served)
        with anyio.move_on_after(within_s):
            for one in served:
                await one.drained()


_UP = "dynamo_frontend_upstream_up"
_ABOUT_UP = f"# HELP {_UP} Whether a server behind the graph is in service\n# TYPE {_UP} gauge\n"


def _up(supervisor: Supervisor, role: str) -> str:
    """Return the sample of one server."""
    worker = supervisor.worker
    worker_id = "" if worker is None else worker_label(worker.worker_id)
    labels = {"upstream": supervisor.name, "role": role, "worker_id": worker_id}
    return with_labels(f"{_UP} {worker is not None:d}\n", labels)


@asynccontextmanager
async def upstream_graph(
    config: GraphConfig, hosting: HostOptions, *, retry: Retry | None = None
) -> AsyncIterator[UpstreamGraph]:
    """Give the graph in front of the servers of `config.upstream`, once each was tried, after `TRY_S` at most.

    Those that are down are left out, and tried again. Raise InvalidArgument for settings that no graph can be opened
    with, such as a `model_path` where nothing is. The end of the block accepts no new requests, lets those that run
    finish in the time of the runtime, then ends all workers.
    """
    if config.model_path is not None and not config.model_path.exists():
        raise InvalidArgument(f"{config.model_path} does not exist", field="model_path")
    rng = None if config.seed is None else Random(config.seed)
    failure: Exception | None = None
    async with Runtime.in_process(rng=rng, metrics=hosting.metrics) as runtime, anyio.create_task_group() as tasks:
        try:
            pools = ModelPools(config, hosting, runtime, tasks)
            servers = Servers(config, hosting, runtime, pools)
            opened = servers.supervised(retry)
            for one in (*opened.prefill_supervisors, *opened.supervisors):
                tasks.start_soon(one.run)
            await _started(opened, pools)
            yield opened
            await opened.finish(runtime.graceful_timeout_s)
        except Exception as error:  # the block's own: it is raised as it is, not inside a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def open_graph(
    config: GraphConfig, hosting: HostOptions
) -> AbstractAsyncContextManager[OpenGraph] | AbstractAsyncContextManager[UpstreamGraph]:
    """Return what gives the graph of a config: in front of its servers, or of engines in this process."""
    return hosted_graph(config, hosting) if config.upstream is None else upstream_graph(config, hosting)


async def _started(opened: UpstreamGraph, pools: ModelPools) -> None:
    """Wait a while until each server was tried, and for the graphs of those that are there."""
    with anyio.move_on_after(TRY_S):
        for one in (*opened.prefill_supervisors, *opened.supervisors):
            await one.was_tried.wait()
    with anyio.move_on_after(OPEN_S):
        for pool in list(pools.pools.values()):
            await pool.settled()
    for pool in pools.pools.values():
        if pool.failure is not None:
            raise pool.failure


class Servers:
    """Makes the workers of servers."""

    def __init__(self, config: GraphConfig, hosting: HostOptions, runtime: Runtime, pools: ModelPools) -> None:
        assert config.upstream is not None
        self._upstream, self._config, self._hosting = config.upstream, config, hosting
        self._runtime, self._pools = runtime, pools
        self._connector = self._upstream.new_connector()

    def supervised(self, retry: Retry | None) -> UpstreamGraph:
        """Return the graph with a supervisor for each server; none of them runs yet."""
        answering: list[Supervisor] = []
        prefilling: list[Supervisor] = []
        for url, mode in self._upstream.servers():
            one = Supervisor(url, lambda url=url, mode=mode: self._serving(url, mode), retry)  # type: ignore[misc]
            (prefilling if mode is DisaggregationMode.PREFILL else answering).append(one)
        offers = self._pools.offers
        return UpstreamGraph(link(offers.switch), offers.tokens, answering, prefilling)

    @asynccontextmanager
    async def _serving(self, url: str, mode: DisaggregationMode) -> AsyncIterator[Worker]:
        """Give a worker of the server in service. Raise what the server's discovery raises."""
        engine, facts = await self._found(url, mode)
        try:
            text, may_prefill = self._upstream.text_of(engine), self._upstream.may_prefill(engine)
            pool = await self._pools.pool_of(facts, may_prefill=may_prefill, has_text=text is not None)
        except BaseException:
            await closed(engine)
            raise
        async with self._worker(engine, pool, mode) as worker:
            if engine.known.model != facts.model:
                raise EngineShutdown(f"{url} was started again with another model")
            with pool.joined(text), pool.adapters.of(url, engine, worker.worker_id, mode):
                pool.add(url, engine.known, mode)
                yield worker

    async def _found(self, url: str, mode: DisaggregationMode) -> tuple[Upstream, ServerFacts]:
        """Return the engine of a server that is there, and its facts. Raise what its discovery raises."""
        transport, needs_text = self._hosting.transports.get(url), self._pools.needs_server_text
        return await self._upstream.found(url, mode, self._connector, transport, needs_text)

    def _worker(self, engine: Upstream, pool: ModelPool, mode: DisaggregationMode) -> Worker:
        return hosted(engine, pool.config, self._hosting, pool.model, self._runtime, mode)
