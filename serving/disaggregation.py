"""The prefill side of a standard graph: a pool of its own, hung off the graph by PrefillRouter.

request ──► PrefillRouter ──► decode router ──► decode workers
                 └──► prefill router ──► prefill workers
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from attrs import evolve

from engines import DisaggregationMode
from operators import KvPrefill, PrefillRouter, PrefillSettings, PushPrefill
from operators.kv import configs_of
from operators.prefill import ConditionalDisaggregation, PrefillPool
from pipeline import link
from pipeline.network import EndpointId, Runtime
from pipeline.tracing import TracedEngine, Tracer, traced

from .config import GraphConfig
from .routing import Routing, routing_to

if TYPE_CHECKING:
    from pipeline.metrics import Metrics


@asynccontextmanager
async def prefill_stage(
    decode: Routing,
    config: GraphConfig,
    environment: Mapping[str, str],
    runtime: Runtime,
    metrics: Metrics | None,
    tracer: Tracer | None = None,
) -> AsyncIterator[PrefillRouter]:
    """The stage above the decode router, once all prefill workers are known; both pools are routed alike.

    Its end waits for prefills under way. Raises as `routing_to`.
    """
    endpoint = prefill_endpoint(decode.endpoint)
    async with routing_to(endpoint, config, environment, runtime, metrics, "prefill", tracer) as prefill:
        await prefill.workers.wait_for_instances(config.prefill_workers)
        pool = _pool(prefill, tracer)
        async with PrefillRouter(
            pool,
            prefill.workers.changes(),
            scheduler=runtime.scheduler,
            configs=configs_of(runtime.discovery.watch_models(endpoint.path)),
            settings=PrefillSettings(enforce_disagg=True) if config.enforce_disagg else None,
            conditional=_conditional(decode, config),
            rng=None if config.seed is None else Random(config.seed),
            tracer=tracer,
        ) as stage:
            yield stage


def _pool(prefill: Routing, tracer: Tracer | None) -> PrefillPool:
    """The prefill workers behind their router, whose stages are traced with a tracer."""
    if prefill.chooser is None:
        return PushPrefill(prefill.push, None if tracer is None else TracedEngine(prefill.push, tracer))
    graph = prefill.router if tracer is None else traced(link(prefill.router), tracer=tracer)
    return KvPrefill(prefill.chooser, graph)


def prefill_endpoint(endpoint: EndpointId) -> EndpointId:
    """Where the prefill workers are that belong to the workers at an endpoint."""
    return evolve(endpoint, component=DisaggregationMode.PREFILL.component)


def _conditional(decode: Routing, config: GraphConfig) -> ConditionalDisaggregation | None:
    """What decides which prompts are not worth a prefill; only the chooser of the router `kv` knows what is cached."""
    if decode.chooser is None or not config.kv_router.conditional_disagg_enabled:
        return None
    return ConditionalDisaggregation(config.kv_router, decode.chooser, decode.chooser.worker_configs)
