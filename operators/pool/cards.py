"""PoolCards: what the model cards of a pool's workers publish.

discovery.watch_models(endpoint.path) ──► cards_of ──► InstanceHealth, BusyWatch
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from attrs import frozen

from pipeline.network import Added, Model, Removed, TaintsUpdated
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import Observable, ops

ModelNews = Added[Model] | Removed[Model] | TaintsUpdated
Configs = Mapping[int, ModelRuntimeConfig]
"""The settings of workers, by instance."""
Adapters = Mapping[str, AbstractSet[int]]
"""The workers that have an adapter loaded, by its name."""


@frozen
class PoolCards:
    """The cards of a pool at one moment, also of instances that are not present."""

    configs: Configs | None = None
    """The settings in each worker's card. None for a pool without cards, all of whose workers have default settings."""
    adapters: Adapters = MappingProxyType({})
    """The adapters that workers have loaded. A card without an adapter's name stands for its suffix."""


def cards_of(models: Observable[ModelNews]) -> Observable[PoolCards]:
    """Return the cards of an endpoint now and after each change, from `discovery.watch_models(endpoint.path)`."""
    none_yet: Mapping[str, Model] = {}
    known: Observable[Mapping[str, Model]] = models.pipe(ops.scan(_with_model, none_yet), ops.start_with(none_yet))
    return known.pipe(ops.map(_cards), ops.distinct_until_changed())


def _with_model(
    known: Mapping[str, Model], change: Added[Model] | Removed[Model] | TaintsUpdated
) -> Mapping[str, Model]:
    changed = {**known, change.item.key: change.item}
    if isinstance(change, Removed):
        del changed[change.item.key]
    return changed


def _cards(known: Mapping[str, Model]) -> PoolCards:
    """Return what these cards have in them. Cards of adapters do not describe the worker."""
    configs: dict[int, ModelRuntimeConfig] = {}
    adapters: dict[str, set[int]] = {}
    for model in known.values():
        if model.suffix is None:
            configs[model.instance_id] = model.card.runtime_config
        else:
            name = model.suffix if model.card.lora is None else model.card.lora.name
            adapters.setdefault(name, set()).add(model.instance_id)
    return PoolCards(configs, adapters)
