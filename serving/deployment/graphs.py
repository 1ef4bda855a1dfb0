"""The standard graphs, built from one config.

    Preprocess >> Migration >> Detokenize >> PushRouter ──► workers at one endpoint of an embedded runtime

With the router `kv` a KvPushRouter stands above the PushRouter, with prefill workers a PrefillRouter above the routers,
with busy thresholds a Rejection above all. A graph is opened as a context and closes all that it opened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from time import perf_counter, time_ns
from typing import Any

from attrs import frozen

from engines import Worker
from operators import Detokenize, Migration, Model, PrefillRouter, Preprocess
from operators.kv import WorkerType
from operators.migration import MigrationMetrics
from pipeline import Annotated, AsyncEngine, PenstockError, Segment, link
from pipeline.network import Runtime
from pipeline.protocols import BackendOutput, LLMEngineOutput, PreprocessedRequest
from pipeline.protocols.openai import ChatCompletionRequest, CompletionRequest
from pipeline.telemetry import merged, traced

from .config import METRICS_PREFIX, GraphConfig
from .config import HostOptions as HostOptions
from .fleet import Fleet
from .routing import Routing, prefill_stage, routing_to

StandardGraph = Segment[ChatCompletionRequest | CompletionRequest, Annotated[BackendOutput]]
"""OpenAI requests in, detokenized items out."""
TokenGraph = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]
"""Requests in tokens in, an engine's items out."""


@frozen
class OpenGraph:
    """A graph that runs, its part below the text stages, and the workers behind it."""

    graph: StandardGraph
    tokens: TokenGraph
    fleet: Fleet

    @property
    def workers(self) -> list[Worker]:
        """The workers that answer."""
        return self.fleet.workers

    @property
    def prefill_workers(self) -> list[Worker]:
        """The workers that prefill for them."""
        return self.fleet.prefill_workers

    @property
    def failure(self) -> PenstockError | None:
        """The failure of the first engine, once all have failed; None before."""
        failures = [worker.failure for worker in self.workers if worker.failure is not None]
        return failures[0] if len(failures) == len(self.workers) else None

    def native_metrics(self) -> str:
        """Return the engines' own metrics as Prometheus text, each family once."""
        return merged(worker.native_metrics() for worker in (*self.workers, *self.prefill_workers))


@asynccontextmanager
async def standard_graph(config: GraphConfig) -> AsyncIterator[StandardGraph]:
    """Give the graph of a config with all it needs running; the end of the block drains and closes it."""
    async with hosted_graph(config, HostOptions()) as opened:
        yield opened.graph


@asynccontextmanager
async def hosted_graph(config: GraphConfig, hosting: HostOptions) -> AsyncIterator[OpenGraph]:
    """Give the same with its workers. Raise the failure of one that does not start, once those before it have ended.

    The end of the block accepts no new requests, lets those that run finish in the time of the runtime, then ends all
    workers at once.
    """
    model = await config.loaded_model()
    rng = None if config.seed is None else Random(config.seed)
    async with Runtime.in_process(rng=rng, metrics=hosting.metrics) as runtime, AsyncExitStack() as stages:
        fleet = Fleet(config, hosting, model, runtime)
        await stages.enter_async_context(fleet.running())
        worker_type: WorkerType = "decode" if config.prefill_workers else "aggregated"
        where = fleet.workers[0].endpoint
        routing = await stages.enter_async_context(routing_to(where, config, hosting, runtime, worker_type))
        await routing.workers.wait_for_instances(config.workers)
        prefill = None
        if config.prefill_workers:
            prefill = await stages.enter_async_context(prefill_stage(routing, config, hosting, runtime))
        parts = (routing, config, hosting, prefill)
        yield OpenGraph(line(model, *parts), _linked(*parts), fleet)
        await fleet.finish(runtime.graceful_timeout_s)


def wall_ms() -> int:
    """Return the milliseconds since the epoch."""
    return time_ns() // 1_000_000


def line(
    model: Model, routing: Routing, config: GraphConfig, hosting: HostOptions, prefill: PrefillRouter | None = None
) -> StandardGraph:
    """Return the stages in order; with a tracer each one that takes time has a span."""
    preprocess = Preprocess(
        model,
        ignore_unsupported=config.ignore_unsupported,
        limits=config.request_limits,
        work=config.prompt_work,
        wall_ms=wall_ms,
        perf_s=perf_counter,
    )
    graph: StandardGraph = _linked(routing, config, hosting, prefill, preprocess, Detokenize(model))
    return graph if hosting.tracer is None else traced(graph, tracer=hosting.tracer)


def _linked(
    routing: Routing,
    config: GraphConfig,
    hosting: HostOptions,
    prefill: PrefillRouter | None,
    preprocess: Preprocess | None = None,
    detokenize: Detokenize | None = None,
) -> Segment[Any, Any]:
    """Return the stages that there are; without those of text, the graph of requests in tokens."""
    migration = None
    if config.migration_limit:
        meter = None if hosting.metrics is None else hosting.metrics.meter
        migration = Migration(
            config.migration_limit,
            max_seq_len_tokens=config.migration_max_seq_len_tokens,
            metrics=None if meter is None else MigrationMetrics(meter, prefix=METRICS_PREFIX.of(hosting.environment)),
            tracer=hosting.tracer,
        )
    stages = (routing.rejection, preprocess, migration, detokenize, prefill, routing.router)
    return link(*(stage for stage in stages if stage is not None))
