"""Admission: which instances of an endpoint a graph may use.

    instances of the endpoint ─┬─► of workers whose cards agree ──► Added, Removed
    admit(ids) ────────────────┘

An instance is visible before its card is, and cards may turn out to disagree: until a worker is admitted no router sees
it, so that no request goes to one with another tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.network import Added, EndpointId, Instance, Removed, Runtime
from pipeline.rx import BehaviorSubject, CompositeDisposable, DisposableBase, Observable, ObserverBase

Change = Added[Instance] | Removed[Instance]


class Admission:
    """The instances that are admitted, of all that a runtime has. None is, at the beginning."""

    def __init__(self) -> None:
        self._ids: BehaviorSubject[frozenset[int]] = BehaviorSubject(frozenset())

    def admit(self, instance_ids: Collection[int]) -> None:
        """Admit these instances, and no others from now on."""
        if (ids := frozenset(instance_ids)) != self._ids.value:
            self._ids.on_next(ids)

    def instances(self, runtime: Runtime, endpoint: EndpointId) -> Observable[Change]:
        """Return the admitted instances of the endpoint as they are now, then every change, as `Discovery.watch`."""

        def subscribe(observer: ObserverBase[Change], scheduler: Any = None) -> DisposableBase:
            view = _View(observer)
            return CompositeDisposable(
                self._ids.subscribe(view.on_ids),
                runtime.discovery.watch(endpoint.path).subscribe(view.on_change, on_completed=observer.on_completed),
            )

        return Observable(subscribe)


class _View:
    """What one subscriber sees."""

    def __init__(self, observer: ObserverBase[Change]) -> None:
        self._observer = observer
        self._known: dict[int, Instance] = {}
        self._ids: frozenset[int] = frozenset()

    def on_ids(self, ids: frozenset[int]) -> None:
        before, self._ids = self._ids, ids
        for instance_id, instance in list(self._known.items()):
            if instance_id in before and instance_id not in ids:
                self._observer.on_next(Removed(instance))
            elif instance_id in ids and instance_id not in before:
                self._observer.on_next(Added(instance))

    def on_change(self, change: Change) -> None:
        instance_id = change.item.instance_id
        if isinstance(change, Added):
            self._known[instance_id] = change.item
        else:
            self._known.pop(instance_id, None)
        if instance_id in self._ids:
            self._observer.on_next(change)
