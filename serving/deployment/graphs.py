"""The standard graphs, built from one config.

    Preprocess >> Migration >> Detokenize >> PushRouter ──► workers at one endpoint of an embedded runtime

With the router `kv` a KvPushRouter stands above the PushRouter, with prefill workers a PrefillRouter above the routers,
with busy thresholds a Rejection above all. A graph is opened as a context and closes all that it opened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from attrs import evolve, frozen

from engines import Worker
from operators import LoraAdapter, Model, PrefillRouter, Switch
from operators.kv import WorkerType
from pipeline import PenstockError, link
from pipeline.network import Runtime
from pipeline.telemetry import merged

from .config import GraphConfig
from .config import HostOptions as HostOptions
from .fleet import Fleet
from .routing import Routing, prefill_stage, routing_to
from .stages import StandardGraph, TokenGraph, line, token_line


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

    async def ended(self) -> None:
        """Return once every worker that answers has ended."""
        for worker in self.workers:
            await worker.wait()

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
        yield OpenGraph(*graphs_of(model, routing, config, hosting, prefill, fleet.worker_ids), fleet)
        await fleet.finish(runtime.graceful_timeout_s)


def graphs_of(
    model: Model,
    routing: Routing,
    config: GraphConfig,
    hosting: HostOptions,
    prefill: PrefillRouter | None,
    worker_ids: Callable[[], set[int]],
) -> tuple[StandardGraph, TokenGraph]:
    """Return the graph and its part below the text stages.

    With LoRA adapters each is a Switch between the model and these, which all workers have.
    """
    if not config.lora:
        return line(model, routing, config, hosting, prefill), token_line(routing, config, hosting, prefill)
    named: dict[str, LoraAdapter | None] = {model.name: None}
    named |= {name: LoraAdapter(name, worker_ids) for name in config.lora}
    texts: Switch[Any, Any] = Switch()
    tokens: Switch[Any, Any] = Switch()
    for name, adapter in named.items():
        texts.add(name, line(evolve(model, name=name), routing, config, hosting, prefill, adapter=adapter))
        tokens.add(name, token_line(routing, config, hosting, prefill, adapter))
    return link(texts), tokens
