"""The standard graphs, built from one config.

    Preprocess >> Migration >> Detokenize >> PushRouter ──► workers at one endpoint of an embedded runtime

With the router `kv` a KvPushRouter stands above the PushRouter, with prefill workers a PrefillRouter above the routers,
with busy thresholds a Rejection above all. A graph is opened as a context and closes all that it opened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

import anyio
from attrs import Factory, evolve, field, frozen

from engines import DisaggregationMode, ShutdownTimes, SystemHealth, Worker
from operators import Detokenize, Migration, MigrationMetrics, Model, PrefillRouter, Preprocess
from operators.kv import WorkerType
from pipeline import Annotated, PenstockError, Segment
from pipeline.network import Runtime
from pipeline.prometheus_text import merged
from pipeline.protocols import BackendOutput
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest

from .config import GraphConfig
from .disaggregation import prefill_stage
from .engines import Deployment
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
    """A graph that runs, and the workers behind it: those that answer, and those that prefill for them."""

    graph: StandardGraph
    workers: list[Worker]
    prefill_workers: list[Worker] = field(factory=list)

    @property
    def failure(self) -> PenstockError | None:
        """What ended its first engine, once none works any more."""
        failures = [worker.failure for worker in self.workers if worker.failure is not None]
        return failures[0] if len(failures) == len(self.workers) else None

    def native_metrics(self) -> str:
        """The engines' own metrics as Prometheus text, each family once whatever workers have it."""
        return merged(worker.native_metrics() for worker in (*self.workers, *self.prefill_workers))


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
    rng = None if config.seed is None else Random(config.seed)
    async with Runtime.in_process(rng=rng, metrics=hosting.metrics) as runtime, AsyncExitStack() as stages:
        workers, prefill_workers = _workers(config, hosting, model, runtime)
        all_workers = [*prefill_workers, *workers]
        await stages.enter_async_context(_running(all_workers))
        parts = (config, hosting.environment, runtime, hosting.metrics)
        worker_type: WorkerType = "decode" if prefill_workers else "aggregated"
        routing = await stages.enter_async_context(routing_to(workers[0].endpoint, *parts, worker_type))
        await routing.workers.wait_for_instances(config.workers)
        prefill = await stages.enter_async_context(prefill_stage(routing, *parts)) if prefill_workers else None
        yield OpenGraph(line(model, routing, config, hosting, prefill), workers, prefill_workers)
        await _finish(all_workers, runtime.graceful_timeout_s)


def _workers(
    config: GraphConfig, hosting: Hosting, model: Model, runtime: Runtime
) -> tuple[list[Worker], list[Worker]]:
    """Those that answer, and those that only prefill."""

    def hosted(count: int, deployment: Deployment) -> list[Worker]:
        return [
            Worker(
                engine,
                config.worker_settings(model, deployment.mode),
                runtime=runtime,
                metrics=hosting.metrics,
                environment=hosting.environment,
                health=hosting.health,
                times=hosting.times,
                kv_event_log=event_log if config.needs_event_logs else None,
            )
            for engine in config.make_engines(count, deployment)
        ]

    deployment = config.deployment(config.modes[-1])
    if not config.prefill_workers:
        return hosted(config.workers, deployment), []
    prefill_workers = hosted(config.prefill_workers, deployment)
    deployment.mode = DisaggregationMode.DECODE
    return hosted(config.workers, deployment), prefill_workers


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


def wall_ms() -> int:
    """Milliseconds since the epoch."""
    return time_ns() // 1_000_000


def line(
    model: Model,
    routing: Routing,
    config: GraphConfig,
    hosting: Hosting,
    prefill: PrefillRouter | None = None,
) -> StandardGraph:
    """The stages in order."""
    lenient = {"ignore_unsupported": True} if config.ignore_unsupported else {}  # a graph prints as it was written
    preprocess = Preprocess(model, wall_ms=wall_ms, perf_s=perf_counter, **lenient)
    routed = routing.router if prefill is None else prefill >> routing.router
    detokenized = Detokenize(model) >> routed
    if config.migration_limit:
        graph: StandardGraph = preprocess >> _migration(config, hosting) >> detokenized
    else:
        graph = preprocess >> detokenized
    return graph if routing.rejection is None else routing.rejection >> graph


def _migration(config: GraphConfig, hosting: Hosting) -> Migration:
    """Only what is not left to its defaults is said, for a graph prints it."""
    said: dict[str, Any] = {}
    if hosting.metrics is not None:
        said["metrics"] = MigrationMetrics(hosting.metrics.meter, prefix=hosting.environment.get("DYN_METRICS_PREFIX"))
    if config.migration_max_seq_len_tokens is not None:
        said["max_seq_len_tokens"] = config.migration_max_seq_len_tokens
    return Migration(config.migration_limit, **said)
