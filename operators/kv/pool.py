"""RouterPool: the workers of a router, joined from the view of their pool and their cards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import anyio

from pipeline import InvalidArgument, Unavailable
from pipeline.network import Workers
from pipeline.protocols.card import ModelRuntimeConfig

from ..pool import Configs, InstanceHealth, PoolView, PoolViews
from .eligibility import Candidates, WorkerPool, worker_ranks
from .request import RouteRequest
from .types import WorkerRank

_log = logging.getLogger(__name__)

Changed = Callable[[Sequence[int], Mapping[int, range]], None]
"""Called with the workers that are gone, those that came back at once included, and the ranks there are now."""

_PLAIN = ModelRuntimeConfig()


class RouterPool:
    """The workers of one router, followed until it is closed.

    In a pool with cards a worker without settings in its card is left out, and one whose settings have an impossible
    range of ranks.
    """

    def __init__(self, workers: Workers[Any, Any], health: PoolViews | None = None) -> None:
        """Follow the views of the pool; without `health` there are no cards, and no instance cools down or is busy."""
        self._workers = workers
        self._health: PoolViews = InstanceHealth(workers) if health is None else health
        self._view = PoolView()
        self._configs: Configs | None = None
        self._incarnations: dict[int, int] = {}
        self._pool = WorkerPool({}, frozenset())
        self._on_change: Changed | None = None
        self._changed = anyio.Event()
        self._is_ended = False
        self._following = self._health.changes().subscribe(self._on_view, on_completed=self._end)

    def follow(self, on_change: Changed) -> None:
        """Call `on_change` now and whenever workers or ranks change. One router follows a pool."""
        self._on_change = on_change
        on_change((), self._pool.ranks)

    def current(self) -> WorkerPool:
        """The workers of this moment; the same object until something changes."""
        if (view := self._health.view) is not self._view:
            self._on_view(view)
        return self._pool

    @property
    def without_events(self) -> AbstractSet[int]:
        """The workers whose engines cache prefixes and publish no KV events, by their cards."""
        configs = self._pool.configs
        return frozenset(i for i, config in configs.items() if config.kv_event_publishing_enabled is False)

    @property
    def cards(self) -> Collection[ModelRuntimeConfig]:
        """The settings in the cards of the workers."""
        return self._pool.configs.values()

    def candidates(self, request: RouteRequest) -> Candidates:
        """The ranks that may take the request now. Raises what `WorkerPool.candidates` raises.

        If no worker can be reached, those that are there are tried again.
        """
        pool = self.current()
        if not self._view.routable:
            self._workers.retry_unreachable()
        return pool.candidates(request.rules(pool))

    def has_rank(self, rank: WorkerRank) -> bool:
        """Return whether the rank is of a worker that is there now."""
        return rank.dp_rank in self.current().ranks.get(rank.worker_id, ())

    async def ready(self, workers: int) -> None:
        """Return when so many workers are known; in a pool with cards that includes their cards.

        Raise Unavailable if this is closed before, or the pool ends.
        """
        while not self._is_ended:
            if len(self.current().ranks) >= workers:
                return
            await self._changed.wait()
        raise Unavailable(f"the router of {self._workers.name} was closed before it had {workers} workers")

    def close(self) -> None:
        """Stop following the instances."""
        self._following.dispose()
        self._on_change = None
        self._end()

    def _end(self) -> None:
        self._is_ended = True
        self._changed.set()

    def _on_view(self, view: PoolView) -> None:
        before, self._view = self._view, view
        if view.cards is not before.cards:
            self._configs = _valid(view.cards.configs)
            self._update()
        elif view.incarnations is not before.incarnations:
            self._update()
        elif view.routable != before.routable or view.overloaded != before.overloaded:
            self._pool = self._of_view(self._pool.configs)

    def _update(self) -> None:
        view, configs = self._view, self._configs
        known = {i: _PLAIN if configs is None else configs[i] for i in view.ids if configs is None or i in configs}
        incarnations = {worker_id: view.incarnations[worker_id] for worker_id in known}
        gone = [i for i, incarnation in self._incarnations.items() if incarnations.get(i) != incarnation]
        self._incarnations = incarnations
        self._pool = self._of_view(known)
        self._changed.set()
        self._changed = anyio.Event()
        if self._on_change is not None:
            self._on_change(gone, self._pool.ranks)

    def _of_view(self, configs: Configs) -> WorkerPool:
        view = self._view
        return WorkerPool(configs, frozenset(view.routable), view.overloaded, view.cards.adapters)


def _valid(configs: Configs | None) -> Configs | None:
    """Return the settings without those that have an impossible range of ranks; log each of these."""
    if configs is None:
        return None
    valid = {}
    for worker_id, config in configs.items():
        try:
            worker_ranks(config)
        except InvalidArgument as error:
            _log.warning("worker %s is left out: %s %s", worker_id, error.field, error)
        else:
            valid[worker_id] = config
    return valid
