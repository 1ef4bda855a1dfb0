"""RouterPool: the workers a router may choose from, joined from instances, their cards, and who is left out now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pipeline import InvalidArgument
from pipeline.network import Added, Model, Removed, TaintsUpdated, Workers
from pipeline.protocols.runtime_config import ModelRuntimeConfig
from pipeline.rx import CompositeDisposable, Observable, ops

from .eligibility import WorkerPool, worker_ranks

_log = logging.getLogger(__name__)

Configs = Mapping[int, ModelRuntimeConfig]
Adapters = Mapping[str, AbstractSet[int]]
"""The workers that have an adapter loaded, by its name."""
Changed = Callable[[Sequence[int], Mapping[int, range]], None]
"""Hears of a change: the workers that are gone, also those that came back at once, and the ranks there are now."""

_PLAIN = ModelRuntimeConfig()


class RouterPool:
    """Follows a pool until it is closed. `changed` is called at once and whenever workers or ranks are others.

    `configs` are the workers' own settings by instance; a worker is not known before it has some. Without `configs`
    every instance counts as a plain one. `adapters` tell who has which adapter loaded. `routable` gives the instances
    that may be asked now (by default all), `overloaded` those that are busy. Settings that make no sense leave their
    worker out.
    """

    def __init__(
        self,
        workers: Workers[Any, Any],
        changed: Changed,
        *,
        configs: Observable[Configs] | None = None,
        adapters: Observable[Adapters] | None = None,
        routable: Callable[[], Sequence[int]] | None = None,
        overloaded: Callable[[], AbstractSet[int]] | None = None,
    ) -> None:
        self._workers = workers
        self._changed = changed
        self._routable = workers.instance_ids if routable is None else routable
        self._overloaded = overloaded
        self._configs: Configs | None = None if configs is None else {}
        self.adapters: Adapters = {}
        self._arrivals: dict[int, int] = {}
        self._seen: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())
        self._pool = WorkerPool({}, frozenset())
        self._following = CompositeDisposable(workers.changes().subscribe(lambda _: self._look()))
        if configs is not None:
            self._following.add(configs.subscribe(self._learn))
        if adapters is not None:
            self._following.add(adapters.subscribe(self._learn_adapters))

    def now(self) -> WorkerPool:
        """The workers of this moment; the same object until something changes."""
        routable = tuple(self._routable())
        overloaded = frozenset[int]() if self._overloaded is None else frozenset(self._overloaded())
        if (routable, overloaded) != self._seen:
            self._seen = (routable, overloaded)
            self._pool = WorkerPool(self._pool.configs, frozenset(routable), overloaded)
        return self._pool

    def close(self) -> None:
        """Follows no more."""
        self._following.dispose()

    def _learn(self, configs: Configs) -> None:
        self._configs = {worker_id: config for worker_id, config in configs.items() if _makes_sense(worker_id, config)}
        self._look()

    def _learn_adapters(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self._look()

    def _look(self) -> None:
        ids, configs = self._workers.instance_ids(), self._configs
        known = {i: _PLAIN if configs is None else configs[i] for i in ids if configs is None or i in configs}
        arrivals = {worker_id: self._workers.arrival(worker_id) for worker_id in known}
        gone = [i for i, arrival in self._arrivals.items() if arrivals.get(i) != arrival]
        self._arrivals = arrivals
        self._pool = WorkerPool(known, frozenset(self._seen[0]), self._seen[1])
        self._changed(gone, self._pool.ranks)


def _makes_sense(worker_id: int, config: ModelRuntimeConfig) -> bool:
    try:
        worker_ranks(config)
    except InvalidArgument as error:
        _log.warning("worker %s is left out: %s %s", worker_id, error.field, error)
        return False
    return True


def configs_of(models: Observable[Added[Model] | Removed[Model] | TaintsUpdated]) -> Observable[Configs]:
    """The settings in the cards that discovery knows of an endpoint: `discovery.watch_models(endpoint.path)`."""
    nothing: Configs = {}
    return models.pipe(ops.scan(with_model, nothing))


def with_model(configs: Configs, news: Added[Model] | Removed[Model] | TaintsUpdated) -> Configs:
    """The settings after the news; those given stay as they are. Cards of adapters say nothing of the worker."""
    if news.item.suffix is not None:
        return configs
    others = {worker_id: config for worker_id, config in configs.items() if worker_id != news.item.instance_id}
    return others if isinstance(news, Removed) else {**others, news.item.instance_id: news.item.card.runtime_config}


Loaded = Mapping[tuple[int, str], str]
"""The name of each adapter that a worker has, by the worker and the suffix of the adapter's card."""


def adapters_of(models: Observable[Added[Model] | Removed[Model] | TaintsUpdated]) -> Observable[Adapters]:
    """Who has which adapter loaded, by the cards that discovery knows of an endpoint, as for `configs_of`."""
    nothing: Loaded = {}
    loaded: Observable[Loaded] = models.pipe(ops.scan(with_adapter, nothing))
    return loaded.pipe(ops.distinct_until_changed()).pipe(ops.map(_by_name))


def with_adapter(loaded: Loaded, news: Added[Model] | Removed[Model] | TaintsUpdated) -> Loaded:
    """What is loaded after the news; what is given stays as it is. A card that names no adapter has its suffix's."""
    model = news.item
    if model.suffix is None:
        return loaded
    key = (model.instance_id, model.suffix)
    others = {other: name for other, name in loaded.items() if other != key}
    name = model.suffix if model.card.lora is None else model.card.lora.name
    return others if isinstance(news, Removed) else {**others, key: name}


def _by_name(loaded: Loaded) -> Adapters:
    holders: dict[str, set[int]] = {}
    for (worker_id, _), name in loaded.items():
        holders.setdefault(name, set()).add(worker_id)
    return holders
