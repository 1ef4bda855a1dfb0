"""The KV router of a standard graph, with what feeds it and the stage that uses it.

    instances, cards, busy, cooldown ────┐
    KV events, recovery from the workers ┴► KvRouter ◄── KvPushRouter, right above the PushRouter of the same pool

Source: dynamo lib/llm/src/discovery/model_manager.rs, create_kv_router.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from time import perf_counter
from typing import Any

from attrs import evolve, frozen

from operators import KvPushRouter, PushRouter
from operators.kv import (
    ACTIVE_REQUEST_EXPIRY,
    OVERLAP_REFRESH_AFTER,
    EventLog,
    KvRecovery,
    KvRouterConfig,
    PolicyProfile,
    ReplicaSync,
    RouterGauges,
    RouterMetrics,
    WorkerRank,
    WorkerType,
    kv_events,
    kv_router,
    recovery_workers,
)
from pipeline import Unavailable
from pipeline.network import EndpointId, Runtime, Workers
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.settings import Variable, whole

from .config import GraphConfig, HostOptions
from .settings import policy_profile

SESSION_TTL: Variable[float | None] = Variable(
    "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
    None,
    "Seconds that an idle session keeps its worker under the router kv.",
    whole(1, 10**9, unit=1.0),
)


@frozen
class KvPool:
    """The workers that a KV router selects from; the PushRouter below it knows which are healthy."""

    endpoint: EndpointId
    workers: Workers[Any, Any]
    push: PushRouter[Any, Any]
    worker_type: WorkerType = "aggregated"


@asynccontextmanager
async def kv_stage(
    pool: KvPool, config: GraphConfig, hosting: HostOptions, runtime: Runtime
) -> AsyncIterator[KvPushRouter]:
    """Give the stage above the PushRouter of the pool; its router follows the pool until the block ends.

    Wait until as many workers are there as the configuration wants at the start. Raise Unavailable if no worker
    has published its card yet, InvalidArgument for a policy file that is wrong, and as KvRouter does.
    """
    settings = _settings(config, pool.worker_type)
    card = await _first_card(pool.endpoint, runtime)
    profile = _profile(config, card.display_name)
    meter = None if hosting.metrics is None else hosting.metrics.meter
    counted = RouterMetrics(
        meter,
        namespace=pool.endpoint.namespace,
        component=pool.endpoint.component,
        router_id=f"{runtime.instance_id:x}",
        model=card.display_name,
        worker_type=pool.worker_type,
        policy_classes=[one.name for one in profile.classes],
        perf_s=perf_counter,
    )
    with KvRecovery(recovery_workers(runtime, pool.endpoint), pool.push.health) as recovery:
        router = kv_router(
            pool.workers,
            settings,
            block_size_tokens=card.kv_cache_block_size,
            health=pool.push.health,
            recover=recovery,
            peers=ReplicaSync(runtime.events, pool.endpoint) if settings.router_replica_sync else None,
            profile=profile,
            rng=None if config.seed is None else Random(config.seed),
            worker_type=pool.worker_type,
            on_event=counted.event_applied,
            expiry_s=ACTIVE_REQUEST_EXPIRY.of(hosting.environment),
            refresh_after_s=OVERLAP_REFRESH_AFTER.of(hosting.environment),
            session_ttl_s=SESSION_TTL.of(hosting.environment),
        )
        events = kv_events(runtime.events, pool.endpoint)
        async with router:
            with RouterGauges(router, meter, model=card.display_name), router.follow(events):
                await router.ready()
                yield KvPushRouter(router, metrics=counted, tracer=hosting.tracer)


def _settings(config: GraphConfig, worker_type: WorkerType) -> KvRouterConfig:
    """Return the settings for a pool; prefill workers hold no blocks for long, and may be fewer."""
    settings = config.kv_router
    if worker_type != "prefill":
        return settings
    wanted = min(settings.min_initial_workers, config.prefill_workers)
    return evolve(
        settings, min_initial_workers=wanted, router_track_active_blocks=False, router_track_output_blocks=False
    )


def event_log(worker_id: int, dp_rank: int) -> EventLog:
    """Return the log in which a worker keeps its events, for routers that missed some."""
    return EventLog(WorkerRank(worker_id, dp_rank))


def _profile(config: GraphConfig, model_name: str) -> PolicyProfile:
    settings = config.kv_router
    if settings.router_policy_config is None:
        return PolicyProfile.from_config(settings)
    return policy_profile(settings.router_policy_config, model_name, settings)


async def _first_card(endpoint: EndpointId, runtime: Runtime) -> ModelDeploymentCard:
    """Return the card of the first worker: workers of one endpoint are alike in what counts here."""
    models = await runtime.discovery.models(endpoint.path)
    if not models:
        raise Unavailable(f"no worker at {endpoint} has published its card")
    return models[0].card
