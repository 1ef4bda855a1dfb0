"""KV routers over scripted workers, and the requests that their tests route."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

from attrs import evolve

from operators.kv import KvRouter, KvRouterConfig, PromptBlocks, RouteRequest, kv_router
from operators.kv.reservation import Reservation
from operators.pool import Adapters, Configs, PoolCards, PoolView
from pipeline.network import Members, Workers, static_workers
from pipeline.rx import BehaviorSubject, Observable
from pipeline.testing import ScriptedEngine

BLOCK = 4
"""KV block size of the workers, in tokens."""


def pool(*worker_ids: int) -> Workers[Any, Any]:
    """A fixed pool of workers whose answers are empty."""
    return static_workers({worker_id: ScriptedEngine([]) for worker_id in worker_ids})


class GivenHealth:
    """The views of a pool of these workers, as the test sets them."""

    def __init__(self, *worker_ids: int) -> None:
        self.views: BehaviorSubject[PoolView] = BehaviorSubject(PoolView())
        self.set(*worker_ids)

    @property
    def view(self) -> PoolView:
        return self.views.value

    def changes(self) -> Observable[PoolView]:
        return self.views

    def set(self, *worker_ids: int) -> None:
        """Make these the workers of the pool. One that has left before comes as another incarnation."""
        now = self.view
        stays = {i: now.incarnations.get(i, now.version) for i in worker_ids}
        self.views.on_next(now.with_members(Members.of(stays)))

    def publish(self, configs: Configs | None = None, adapters: Adapters | None = None) -> None:
        """Make these the settings in the workers' cards, and the workers that have adapters loaded."""
        self.views.on_next(self.view.with_cards(PoolCards(configs, adapters or {})))

    def left_out(self, *worker_ids: int) -> None:
        """Make these the workers that cool down, for ever."""
        self._evolve(cooling_down=dict.fromkeys(worker_ids, inf))

    def overloaded(self, *worker_ids: int) -> None:
        """Make these the workers that are busy."""
        self._evolve(busy=frozenset(worker_ids))

    def _evolve(self, **changes: Any) -> None:
        self.views.on_next(evolve(self.view, version=self.view.version + 1, **changes))


def published(configs: Configs, *others: int) -> GivenHealth:
    """The views of a pool of workers that have published these settings, and of others that have not."""
    health = GivenHealth(*configs, *others)
    health.publish(configs)
    return health


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
