"""kv_router: the factory of KvRouter, and the settings that no router of this kind offers, all reported at once."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pipeline.network import Workers

from ..pool import PoolViews
from .config import KvRouterConfig, holding, raise_problems
from .events import Counted, Recover
from .load import EXPIRY_S, ReplicaSync
from .lookup import PrefixLookup
from .pool import RouterPool
from .queue import OVERLAP_REFRESH_AFTER, AdmissionController, DepthTier, PolicyProfile
from .reservation import LoadBook
from .router import KvRouter, PrefillDuration
from .selection import WorkerSelector, WorkerType
from .sessions import Sessions


def kv_router(
    workers: Workers[Any, Any],
    config: KvRouterConfig | None = None,
    *,
    block_size_tokens: int,
    health: PoolViews | None = None,
    recover: Recover | None = None,
    peers: ReplicaSync | None = None,
    rng: Random | None = None,
    worker_type: WorkerType = "aggregated",
    is_eagle: bool = False,
    profile: PolicyProfile | None = None,
    tiers: Sequence[DepthTier] = (),
    prefill_duration: PrefillDuration | None = None,
    on_event: Counted | None = None,
    expiry_s: float = EXPIRY_S,
    refresh_after_s: float | None = OVERLAP_REFRESH_AFTER.default,
    session_ttl_s: float | None = None,
) -> KvRouter:
    """Make a KvRouter of these workers; enter it with `async with`, which runs it and closes it.

    Pool: `health` has the workers' cards, with their settings and adapters, and which cool down or are busy, as
    `PushRouter.health`; by default there are no cards, and none cools down or is busy.
    Lookup: `block_size_tokens` is the workers' KV block size, `is_eagle` whether blocks look a token ahead; `recover`
    requests lost KV events from a worker, `on_event` counts events.
    Load: `peers` shares the load with replicas of the router, as `router_replica_sync` needs; `prefill_duration` is the
    model that `router_prefill_load_model` needs; a reservation that is not released in `expiry_s` seconds is given up.
    Queue: `profile` holds the classes, default one by the settings; `tiers` limit the depth; a request that waited for
    `refresh_after_s` seconds has its cached prefixes looked up again, None for never.
    Selection: `rng` decides between equal workers, give a seeded one to repeat a run; `worker_type` is what the workers
    do. Sessions that are idle for `session_ttl_s` seconds are forgotten; None keeps none.

    Raises InvalidArgument for what is missing and for settings that are not offered, all of it at once.
    """
    config = KvRouterConfig() if config is None else config
    check_router(config, block_size_tokens, prefill_duration=prefill_duration, profile=profile, peers=peers)
    pool = RouterPool(workers, health)
    loads = LoadBook(expiry_s=expiry_s, peers=peers)
    lookup = PrefixLookup(config, block_size_tokens, is_eagle=is_eagle, recover=recover, on_event=on_event)
    classes = profile or PolicyProfile.from_config(config)
    return KvRouter(
        pool,
        lookup,
        loads,
        AdmissionController(pool, loads, classes, tiers, refresh_after_s=refresh_after_s),
        WorkerSelector(config, rng or Random(), worker_type),
        config,
        sessions=None if session_ttl_s is None else Sessions(session_ttl_s, loads.clock),
        prefill_duration=prefill_duration,
    )


def check_router(
    config: KvRouterConfig, block_size_tokens: int, *, prefill_duration: object, profile: object, peers: object
) -> None:
    """Raise InvalidArgument that lists every problem; `field` names the first.

    The last three are what the router was given for `router_prefill_load_model`, `router_policy_config` and
    `router_replica_sync`, None for nothing. A setting that no router of this kind offers is refused, not ignored.
    """
    lacks_duration = config.router_prefill_load_model != "none" and prefill_duration is None
    lacks_profile = config.router_policy_config is not None and profile is None
    checks: list[tuple[bool, str, str]] = [
        (block_size_tokens < 1, "block_size_tokens", f"must be at least 1, got {block_size_tokens}"),
        (lacks_duration, "prefill_duration", "router_prefill_load_model needs it, and it can only be given in code"),
        (lacks_profile, "profile", "router_policy_config names a file whose profile is not given"),
        (config.router_replica_sync and peers is None, "peers", "router_replica_sync needs them"),
        (peers is not None and not config.router_replica_sync, "router_replica_sync", "is off, but peers are given"),
        (config.use_remote_indexer, "use_remote_indexer", "a remote index is not offered"),
        (config.serve_indexer, "serve_indexer", "serving the index is not offered"),
        (config.shared_cache_type != "none", "shared_cache_type", "a shared cache is not offered"),
        (config.shared_cache_multiplier > 0, "shared_cache_multiplier", "a shared cache is not offered"),
        (config.router_prefill_policy is not None, "router_prefill_policy", "named selections are not offered"),
        (config.router_decode_policy is not None, "router_decode_policy", "named selections are not offered"),
    ]
    raise_problems(holding(checks))
