"""KV routers that share their bookings, over workers that do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from operators.kv import KvRouter, KvRouterConfig, kv_router
from operators.kv.load import ReplicaSync
from operators.kv.prompt import PromptBlocks
from operators.kv.request import RouteRequest
from operators.kv.reservation import Reservation
from pipeline.network import EventPlane, static_workers
from pipeline.testing import ScriptedEngine

BLOCK = 4
ENDPOINT = "ns/workers/generate"
WORKERS = (1, 2, 3)


def router_of(peers: ReplicaSync | None, worker_ids: Sequence[int] = WORKERS, **given: Any) -> KvRouter:
    """Return a router of these workers; `config` are its settings."""
    config = KvRouterConfig(router_replica_sync=peers is not None, overlap_score_credit=0.0, **given.pop("config", {}))
    pool = static_workers({worker_id: ScriptedEngine([]) for worker_id in worker_ids})
    return kv_router(pool, config, block_size_tokens=BLOCK, peers=peers, rng=Random(1), **given)


def pair(events: EventPlane, **given: Any) -> tuple[KvRouter, KvRouter]:
    """Return two routers that share their bookings by the event plane."""
    one, other = (router_of(ReplicaSync(events, ENDPOINT), **given) for _ in range(2))
    return one, other


def prompt(count: int = 8, *, first: int = 0, **given: Any) -> RouteRequest:
    """Return a request with so many tokens."""
    return RouteRequest(blocks=PromptBlocks(list(range(first, first + count)), BLOCK), **given)


async def placed(router: KvRouter, request: RouteRequest, request_id: str) -> Reservation:
    """Reserve a worker."""
    return await router.reserve(request, request_id=request_id)


def view(router: KvRouter, *, with_blocks: bool = True) -> list[tuple[int, ...]]:
    """Return what the router believes its workers have to do, with another prompt added."""
    return [
        (
            load.worker_id,
            load.potential_prefill_tokens,
            load.potential_decode_blocks if with_blocks else 0,
            load.active_requests,
        )
        for load in router.potential_loads(prompt().blocks)
    ]
