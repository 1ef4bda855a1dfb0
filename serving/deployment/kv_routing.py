"""The KV router of a standard graph, with what feeds it and the stage that uses it.

    instances, cards, busy, cooldown ───────────┐
    KV events, recovery from the workers, rates ┴► KvRouter ◄── KvPushRouter, right above the PushRouter of the pool

Its settings: those of the environment, a file over it, and an option over both; `router_policy_config` names the file
of policies.

Source: dynamo lib/llm/src/discovery/model_manager.rs, create_kv_router; lib/kv-router/src/scheduling/policy_config.rs,
RouterPolicyConfig. Other than there a file of policies whose name ends in `.toml` is read as TOML; all others are YAML.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from attrs import asdict, evolve, frozen

from operators import KvPushRouter, PushRouter
from operators.kv import (
    ACTIVE_REQUEST_EXPIRY,
    OVERLAP_REFRESH_AFTER,
    EventLog,
    KvRecovery,
    KvRouterConfig,
    PlacementRule,
    PolicyDocument,
    PolicyProfile,
    RouterGauges,
    RouterMetrics,
    WorkerRank,
    WorkerType,
    config_from_environment,
    kv_events,
    kv_router,
    rate_reports,
    recovery_workers,
    shared_bookings,
    shared_sessions,
)
from pipeline import InvalidArgument, Unavailable
from pipeline.network import EndpointId, Runtime, Workers
from pipeline.settings import Variable, whole

from ..settings_file import read_toml, read_yaml, wrong
from .config import GraphConfig, HostOptions

SESSION_TTL: Variable[float | None] = Variable(
    "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
    None,
    "Seconds that an idle session keeps its worker under the router kv.",
    whole(1, 10**9, unit=1.0),
)
_POLICIES = "router_policy_config"
"""The setting that names the file of policies."""
_DEFAULT = KvRouterConfig()
_COST_WEIGHTS = ("prefill_load_scale", "decode_active_request_weight")
"""What only the cost reads: where one of them is set, the cost is meant."""


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
    models = await runtime.discovery.models(pool.endpoint.path)
    if not models:
        raise Unavailable(f"no worker at {pool.endpoint} has published its card")
    card = models[0].card  # workers of one endpoint are alike in what counts here
    profile = policy_profile(config.kv_router.router_policy_config, card.display_name, config.kv_router)
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
    async with AsyncExitStack() as stack:
        recovery = stack.enter_context(KvRecovery(recovery_workers(runtime, pool.endpoint), pool.push.health))
        peers = None
        if settings.router_replica_sync:
            peers = await stack.enter_async_context(shared_bookings(runtime, pool.endpoint))
        router = kv_router(
            pool.workers,
            settings,
            block_size_tokens=card.kv_cache_block_size,
            health=pool.push.health,
            recover=recovery,
            peers=peers,
            profile=profile,
            rng=None if config.seed is None else Random(config.seed),
            worker_type=pool.worker_type,
            on_event=counted.event_applied,
            expiry_s=ACTIVE_REQUEST_EXPIRY.of(hosting.environment),
            refresh_after_s=OVERLAP_REFRESH_AFTER.of(hosting.environment),
            session_ttl_s=SESSION_TTL.of(hosting.environment),
        )
        events = kv_events(runtime.events, pool.endpoint)
        if config.reads_rates:
            router.follow_rates(rate_reports(runtime.events, pool.endpoint))
        async with router:
            with RouterGauges(router, meter, model=card.display_name), router.follow(events):
                if peers is not None and router.sessions is not None:
                    await stack.enter_async_context(
                        shared_sessions(runtime, pool.endpoint, router.sessions, router.pool.has_rank)
                    )
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


def kv_router_config(
    written: Path | Mapping[str, Any] | None,
    environment: Mapping[str, str],
    use_kv_events: bool | None = None,
    *,
    has_replicas: bool = False,
    placement: PlacementRule | None = None,
    varied: Collection[str] = (),
) -> KvRouterConfig:
    """Return the settings of the router from a file and the environment.

    Those of a TOML file at a path come before the environment's, those of a table of the program's own settings file
    after them; `use_kv_events`, where given, comes before both. With `has_replicas`, routers in other processes for
    the same workers, bookings are shared unless a setting switches that off. `placement` is the rule where no setting
    names one and none weighs the terms of the cost; without it that is the cost. `varied` are the settings that get
    their values later, as those of a sweep's runs do. The environment must make sense on its own.

    Raise InvalidArgument for a file that cannot be read or is not TOML, with `router_config` as the field; and for
    settings that are unknown, of the wrong kind, out of range or contradictory, all of them in one text that begins
    with the path, with the first one as the field.
    """
    defaults = {"router_replica_sync": True} if has_replicas else {}
    if isinstance(written, Path):
        values: dict[str, Any] = asdict(config_from_environment(environment, defaults))
        values |= (own := read_toml(written, "router_config"))
    else:
        own = dict(written or {})
        values = asdict(config_from_environment(environment, {**defaults, **own}))
    if use_kv_events is not None:
        values["use_kv_events"] = use_kv_events
    try:
        made = KvRouterConfig.from_plain(values)
    except InvalidArgument as error:
        if not isinstance(written, Path):
            raise
        raise wrong(written, str(error), error.field, error) from error
    is_named = "router_placement" in own or bool(environment.get("DYN_ROUTER_PLACEMENT", "").strip())
    is_cost_tuned = any(name in varied or getattr(made, name) != getattr(_DEFAULT, name) for name in _COST_WEIGHTS)
    return made if placement is None or is_named or is_cost_tuned else evolve(made, router_placement=placement)


def policy_document(path: str | Path) -> PolicyDocument:
    """Return all profiles of a file.

    Raise InvalidArgument, with `router_policy_config` as the field and the path, the place and what is wrong there in
    its text, for a file that cannot be read, is malformed, or has values that cannot be.
    """
    file = Path(path)
    read = read_toml if file.suffix.lower() == ".toml" else read_yaml
    plain = read(file, _POLICIES)
    try:
        return PolicyDocument.from_plain(plain)
    except InvalidArgument as error:
        place = f"{error.field}: " if error.field else ""
        raise wrong(file, f"{place}{error}", _POLICIES, error) from error


def policy_profile(path: str | Path | None, model_name: str | None, config: KvRouterConfig = _DEFAULT) -> PolicyProfile:
    """Return the profile for a model: its own in the file, else the file's for all, else that of the plain settings.

    They are never merged. Raise as `policy_document`.
    """
    otherwise = PolicyProfile.from_config(config)
    return otherwise if path is None else policy_document(path).profile_for(model_name, otherwise)
