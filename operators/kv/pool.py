"""RouterPool: the workers of a router, joined from the view of their pool and their cards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline import InvalidArgument
from pipeline.network import Added, Model, Removed, TaintsUpdated, Workers
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import CompositeDisposable, Observable, ops

from ..pool import InstanceHealth, PoolView, PoolViews
from .eligibility import Adapters, Candidates, Configs, WorkerPool, worker_ranks
from .request import RouteRequest

_log = logging.getLogger(__name__)

Changed = Callable[[Sequence[int], Mapping[int, range]], None]
"""Called with the workers that are gone, those that came back at once included, and the ranks there are now."""

_PLAIN = ModelRuntimeConfig()


class RouterPool:
    """The workers of one router, followed until it is closed.

    A worker without settings in `configs` is not part of the pool; without `configs` every instance is a plain one.
    Settings with an impossible range of ranks leave their worker out.
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        *,
        configs: Observable[Configs] | None = None,
        adapters: Observable[Adapters] | None = None,
        health: PoolViews | None = None,
    ) -> None:
        """Follow the instances.

        `configs` are the workers' own settings by instance, `adapters` the workers that have an adapter loaded.
        `health` has the views of the pool; without it no instance cools down or is busy.
        """
        self._workers = workers
        self._health: PoolViews = InstanceHealth(workers) if health is None else health
        self._view = PoolView()
        self._configs: Configs | None = None if configs is None else {}
        self.adapters: Adapters = {}
        self._incarnations: dict[int, int] = {}
        self._pool = WorkerPool({}, frozenset())
        self._on_change: Changed | None = None
        self._following = CompositeDisposable(self._health.changes().subscribe(self._on_view))
        if configs is not None:
            self._following.add(configs.subscribe(self._on_configs))
        if adapters is not None:
            self._following.add(adapters.subscribe(self._on_adapters))

    def follow(self, on_change: Changed) -> None:
        """Call `on_change` now and whenever workers or ranks change. One router follows a pool."""
        self._on_change = on_change
        on_change((), self._pool.ranks)

    def current(self) -> WorkerPool:
        """The workers of this moment; the same object until something changes."""
        if (view := self._health.view) is not self._view:
            self._on_view(view)
        return self._pool

    def candidates(self, request: RouteRequest) -> Candidates:
        """The ranks that may take the request now. Raises what `WorkerPool.candidates` raises."""
        pool = self.current()
        return pool.candidates(request.rules(pool, self.adapters))

    async def ready(self, workers: int) -> None:
        """Return when there are so many instances."""
        await self._workers.wait_for_instances(workers)

    def close(self) -> None:
        """Stop following the instances."""
        self._following.dispose()
        self._on_change = None

    def _on_view(self, view: PoolView) -> None:
        before, self._view = self._view, view
        if view.incarnations is not before.incarnations:
            self._update()
        elif view.routable != before.routable or view.overloaded != before.overloaded:
            self._pool = WorkerPool(self._pool.configs, frozenset(view.routable), view.overloaded)

    def _on_configs(self, configs: Configs) -> None:
        self._configs = {
            worker_id: config for worker_id, config in configs.items() if _has_valid_ranks(worker_id, config)
        }
        self._update()

    def _on_adapters(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._update()

    def _update(self) -> None:
        view, configs = self._view, self._configs
        known = {i: _PLAIN if configs is None else configs[i] for i in view.ids if configs is None or i in configs}
        incarnations = {worker_id: view.incarnations[worker_id] for worker_id in known}
        gone = [i for i, incarnation in self._incarnations.items() if incarnations.get(i) != incarnation]
        self._incarnations = incarnations
        self._pool = WorkerPool(known, frozenset(view.routable), view.overloaded)
        if self._on_change is not None:
            self._on_change(gone, self._pool.ranks)


def _has_valid_ranks(worker_id: int, config: ModelRuntimeConfig) -> bool:
    try:
        worker_ranks(config)
    except InvalidArgument as error:
        _log.warning("worker %s is left out: %s %s", worker_id, error.field, error)
        return False
    return True


def configs_of(models: Observable[Added[Model] | Removed[Model] | TaintsUpdated]) -> Observable[Configs]:
    """The settings in the cards that discovery knows of an endpoint: `discovery.watch_models(endpoint.path)`."""
    none_yet: Configs = {}
    return models.pipe(ops.scan(with_model, none_yet))


def with_model(configs: Configs, change: Added[Model] | Removed[Model] | TaintsUpdated) -> Configs:
    """Return the settings after a change of a card. Cards of adapters do not describe the worker."""
    if change.item.suffix is not None:
        return configs
    others = {worker_id: config for worker_id, config in configs.items() if worker_id != change.item.instance_id}
    return (
        others if isinstance(change, Removed) else {**others, change.item.instance_id: change.item.card.runtime_config}
    )


Loaded = Mapping[tuple[int, str], str]
"""The name of each adapter that a worker has, by the worker and the suffix of the adapter's card."""


def adapters_of(models: Observable[Added[Model] | Removed[Model] | TaintsUpdated]) -> Observable[Adapters]:
    """The workers that have each adapter loaded, by the cards that discovery knows of an endpoint."""
    none_yet: Loaded = {}
    loaded: Observable[Loaded] = models.pipe(ops.scan(with_adapter, none_yet))
    return loaded.pipe(ops.distinct_until_changed()).pipe(ops.map(_by_name))


def with_adapter(loaded: Loaded, change: Added[Model] | Removed[Model] | TaintsUpdated) -> Loaded:
    """Return the loaded adapters after a change of a card. A card without an adapter's name stands for its suffix."""
    model = change.item
    if model.suffix is None:
        return loaded
    key = (model.instance_id, model.suffix)
    others = {other: name for other, name in loaded.items() if other != key}
    name = model.suffix if model.card.lora is None else model.card.lora.name
    return others if isinstance(change, Removed) else {**others, key: name}


def _by_name(loaded: Loaded) -> Adapters:
    holders: dict[str, set[int]] = {}
    for (worker_id, _), name in loaded.items():
        holders.setdefault(name, set()).add(worker_id)
    return holders
