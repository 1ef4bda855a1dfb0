"""KV routers over scripted workers, and the requests that their tests route."""

from __future__ import annotations

from random import Random
from typing import Any

from operators.kv import KvRouter, KvRouterConfig, PromptBlocks, Reservation, RouteRequest, kv_router
from pipeline.network import Workers, static_workers
from pipeline.testing import ScriptedEngine

BLOCK = 4
"""KV block size of the workers, in tokens."""


def pool(*worker_ids: int) -> Workers[Any, Any]:
    """A fixed pool of workers whose answers are empty."""
    return static_workers({worker_id: ScriptedEngine([]) for worker_id in worker_ids})


def router_of(*worker_ids: int, config: dict[str, Any] | None = None, **parts: Any) -> KvRouter:
    """A router over `pool`, without KV events unless `config` switches them on; `parts` go to `kv_router`."""
    chosen = KvRouterConfig(**{"use_kv_events": False, **(config or {})})
    parts.setdefault("rng", Random(1))
    return kv_router(pool(*worker_ids), chosen, block_size_tokens=BLOCK, **parts)


def prompt(count: int = 8, *, first: int = 0, **rules: Any) -> RouteRequest:
    """A request whose prompt is so many tokens from `first` on; `rules` are fields of `RouteRequest`."""
    return RouteRequest(blocks=PromptBlocks(list(range(first, first + count)), BLOCK), **rules)


async def reserved(router: KvRouter, request: RouteRequest, request_id: str = "r", **given: Any) -> Reservation:
    """The reservation of a request; `given` are arguments of `KvRouter.reserve`."""
    return await router.reserve(request, request_id=request_id, **given)
