"""PoolView: the instances of a pool at one moment: incarnations, cards, which cool down, and which are busy.

    discovery.watch_models(endpoint.path) ──► cards_of ──► cards
    present ──► admitted: ids ──► not cooling down, reached: routable ──► not busy: free

A view never changes. Each of its `with_...` methods returns the view after one change, with the next version; or the
very same view if nothing changes. `InstanceHealth` reduces all changes of a pool with them and pushes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from attrs import evolve, frozen

from pipeline.network import Added, Ids, Members, Model, Reach, Removed, TaintsUpdated
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.rx import Observable, ops

_NONE: Mapping[int, float] = MappingProxyType({})
_NO_IDS: AbstractSet[int] = frozenset()


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


def _with_model(known: Mapping[str, Model], change: ModelNews) -> Mapping[str, Model]:
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


@frozen(eq=False)
class PoolView:
    """The instances of a pool at one moment.

    A cooldown belongs to the incarnation that was at fault: an instance that has left and come back starts clean. The
    collections are shared and must not be changed.
    """

    ids: Ids = ()
    """The instances that are present and this router's, sorted."""
    incarnations: Mapping[int, int] = MappingProxyType({})
    """The number of the present stay of each of them, see `Workers.incarnation`."""
    cards: PoolCards = PoolCards()
    """What their model cards publish."""
    cooling_down: Mapping[int, float] = _NONE
    """Those that cool down after a fault: when that ends, in seconds of the loop's clock."""
    refused: Mapping[int, float] = _NONE
    """Those that are busy because they refused a request: when that ends, in seconds of the loop's clock."""
    busy: AbstractSet[int] = _NO_IDS
    """The instances that are busy by their reports; also ids that are not present."""
    reach: Reach = Reach()
    """Which can be reached; also ids that are not present."""
    skips_cooling_down: bool = True
    """Whether instances that are not routable are not free; False where requests name their instance."""
    version: int = 0
    """Greater in each later view of a pool."""

    @cached_property
    def routable(self) -> Ids:
        """Those that are not cooling down and are connected, in the order of `ids`.

        If none is, those to which a connection is being made: their requests wait for it. Never those that cannot be
        reached.
        """
        ids = tuple(i for i in self.ids if i not in self.cooling_down) if self.cooling_down else self.ids
        unconnected, unreachable = self.reach.unconnected, self.reach.unreachable
        if not unconnected:
            return ids
        return tuple(i for i in ids if i not in unconnected) or tuple(i for i in ids if i not in unreachable)

    @cached_property
    def overloaded(self) -> AbstractSet[int]:
        """Those that are busy, by their reports or by a refusal."""
        if not self.refused and not self.busy:
            return _NO_IDS
        return frozenset(i for i in self.ids if i in self.busy or i in self.refused)

    @cached_property
    def free(self) -> Ids:
        """Those that a request may be sent to, in the order of `ids`."""
        ids = self.routable if self.skips_cooling_down else self.ids
        return tuple(i for i in ids if i not in self.overloaded) if self.overloaded else ids

    @cached_property
    def valid_until_s(self) -> float | None:
        """When the next cooldown or refusal ends, in seconds of the loop's clock; None if time changes nothing."""
        return min([*self.cooling_down.values(), *self.refused.values()], default=None)

    def with_members(self, members: Members, admits: Callable[[int], bool] | None = None) -> PoolView:
        """Return the view with these instances, less those that are not admitted."""
        ids = members.ids if admits is None else tuple(i for i in members.ids if admits(i))
        incarnations = {instance_id: members.incarnations[instance_id] for instance_id in ids}
        if incarnations == self.incarnations:
            return self
        kept = {i for i in ids if self.incarnations.get(i) == incarnations[i]}
        return self._next(
            ids=ids,
            incarnations=incarnations,
            cooling_down=_only(self.cooling_down, kept),
            refused=_only(self.refused, kept),
        )

    def with_reach(self, reach: Reach) -> PoolView:
        """Return the view with these instances reached."""
        return self if reach == self.reach else self._next(reach=reach)

    def with_cards(self, cards: PoolCards) -> PoolView:
        """Return the view with these cards."""
        return self if cards is self.cards else self._next(cards=cards)

    def with_cooldown(self, instance_id: int, incarnation: int, until_s: float) -> PoolView:
        """Return the view with that instance cooling down until then; unless it is another incarnation."""
        if self.incarnations.get(instance_id) != incarnation:
            return self
        return self._next(cooling_down={**self.cooling_down, instance_id: until_s})

    def with_refusal(self, instance_id: int, incarnation: int, until_s: float) -> PoolView:
        """Return the view with that instance busy until then; unless it is another incarnation."""
        if self.incarnations.get(instance_id) != incarnation:
            return self
        return self._next(refused={**self.refused, instance_id: until_s})

    def without_refusal(self, instance_id: int) -> PoolView:
        """Return the view in which a refusal of that instance no longer counts."""
        if instance_id not in self.refused:
            return self
        return self._next(refused=_only(self.refused, self.refused.keys() - {instance_id}))

    def with_busy(self, busy: AbstractSet[int]) -> PoolView:
        """Return the view with these instances busy by their reports."""
        return self if busy == self.busy else self._next(busy=frozenset(busy))

    def at(self, now_s: float) -> PoolView:
        """Return the view at that time, by which some cooldowns and refusals have ended."""
        if self.valid_until_s is None or now_s < self.valid_until_s:
            return self
        return self._next(
            cooling_down={i: until_s for i, until_s in self.cooling_down.items() if until_s > now_s},
            refused={i: until_s for i, until_s in self.refused.items() if until_s > now_s},
        )

    def _next(self, **changes: Any) -> PoolView:
        return evolve(self, version=self.version + 1, **changes)


class PoolViews(Protocol):
    """The views of a pool, as `InstanceHealth` has them."""

    @property
    def view(self) -> PoolView:
        """The pool now."""
        ...

    def changes(self) -> Observable[PoolView]:
        """Return the view now and after every change; the end of a cooldown is seen at the next one, or in `view`."""
        ...


def _only(ends_s: Mapping[int, float], ids: AbstractSet[int]) -> Mapping[int, float]:
    return {instance_id: end_s for instance_id, end_s in ends_s.items() if instance_id in ids}
