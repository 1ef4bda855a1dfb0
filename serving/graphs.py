"""The standard graphs, built from one config.

    Preprocess >> Detokenize >> PushRouter ──► workers at one endpoint of an embedded runtime, an engine in each

With the router `kv` a KvPushRouter stands above the PushRouter, with busy thresholds a Rejection above all. A graph is
opened as a context and closes all that it opened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
from attrs import Factory, evolve, field, frozen

from engines import ShutdownTimes, SystemHealth, Worker, WorkerConfig
from operators import Detokenize, Model, Preprocess
from pipeline import Annotated, PenstockError, Segment
from pipeline.network import EndpointId, Runtime
from pipeline.prometheus_text import merged
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

from .config import GraphConfig
from .kv_routing import event_log
from .routing import Routing, routing_to

if TYPE_CHECKING:
    from pipeline.metrics import Metrics

StandardGraph = Segment[ChatCompletionRequest | CompletionRequest, Annotated[BackendOutput]]
"""OpenAI requests in, detokenized items out."""


@frozen
class Hosting:
    """How the workers of a graph are hosted.

    `environment` is where workers and the router find their settings; `metrics` are of the component family. `times`
    are those of each worker's end; by default the environment's without a grace period, for in one process nobody has
    to hear first that it is gone.
    """

    environment: Mapping[str, str] = field(factory=dict)
    metrics: Metrics | None = None
    health: SystemHealth | None = None
    times: ShutdownTimes = field(default=Factory(lambda self: _without_grace(self.environment), takes_self=True))


def _without_grace(environment: Mapping[str, str]) -> ShutdownTimes:
    return evolve(ShutdownTimes.from_environment(environment), grace_s=0.0)


@frozen
class OpenGraph:
    """A graph that runs, and the workers behind it."""

    graph: StandardGraph
    workers: list[Worker]

    @property
    def failure(self) -> PenstockError | None:
        """What ended its first engine, once none works any more."""
        failures = [worker.failure for worker in self.workers if worker.failure is not None]
        return failures[0] if len(failures) == len(self.workers) else None

    def native_metrics(self) -> str:
        """The engines' own metrics as Prometheus text, each family once whatever workers have it."""
        return merged(worker.native_metrics() for worker in self.workers)


@asynccontextmanager
async def standard_graph(config: GraphConfig) -> AsyncIterator[StandardGraph]:
    """The graph of a config with all it needs running; leaving the block drains and closes it."""
    async with hosted_graph(config, Hosting()) as opened:
        yield opened.graph


@asynccontextmanager
async def hosted_graph(config: GraphConfig, hosting: Hosting) -> AsyncIterator[OpenGraph]:
    """The same with its workers. Raises what keeps one from starting, once those before it have ended.

    Leaving takes nothing new, lets what runs finish in the time the runtime gives, then ends the workers, all at once.
    """
    model = config.load_model()
    endpoint = EndpointId(config.worker.namespace, config.worker.component, config.worker.endpoint)
    rng = None if config.seed is None else Random(config.seed)
    async with Runtime.in_process(rng=rng, metrics=hosting.metrics) as runtime:
        hosted = _workers(config, hosting, config.worker_settings(model), runtime)
        routing_to_them = routing_to(endpoint, config, hosting.environment, runtime, hosting.metrics)
        async with _running(hosted), routing_to_them as routing:
            await routing.workers.wait_for_instances(config.workers)
            yield OpenGraph(line(model, routing, config), hosted)
            await _finish(hosted, runtime.graceful_timeout_s)


def _workers(config: GraphConfig, hosting: Hosting, settings: WorkerConfig, runtime: Runtime) -> list[Worker]:
    return [
        Worker(
            engine,
            settings,
            runtime=runtime,
            metrics=hosting.metrics,
            environment=hosting.environment,
            health=hosting.health,
            times=hosting.times,
            kv_event_log=event_log if config.needs_event_logs else None,
        )
        for engine in config.make_engines(config.workers)
    ]


@asynccontextmanager
async def _running(workers: Sequence[Worker]) -> AsyncIterator[None]:
    """Starts one after the other, and ends all at the same time: each may have a grace period and take its time."""
    entered: list[Worker] = []
    why: tuple[Any, ...] = (None, None, None)
    try:
        for worker in workers:
            await worker.__aenter__()
            entered.append(worker)
        for worker in workers:
            if worker.failure is not None:  # while a later one started
                raise worker.failure
        yield
    except BaseException as error:
        why = type(error), error, error.__traceback__
        raise
    finally:
        async with anyio.create_task_group() as tasks:
            for worker in entered:
                tasks.start_soon(worker.__aexit__, *why)


async def _finish(workers: Sequence[Worker], within_s: float) -> None:
    """Takes nothing new, and waits for what runs."""
    served = [worker.served for worker in workers if worker.served is not None]
    for one in served:
        await one.withdraw()
    with anyio.move_on_after(within_s):
        for one in served:
            await one.drained()


def line(model: Model, routing: Routing, config: GraphConfig) -> StandardGraph:
    """The stages in order."""
    preprocess = Preprocess(model, ignore_unsupported=True) if config.ignore_unsupported else Preprocess(model)
    graph: StandardGraph = preprocess >> Detokenize(model) >> routing.router
    return graph if routing.rejection is None else routing.rejection >> graph
