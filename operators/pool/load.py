"""Worker load: what runs on each instance of a pool, by our own count and by its own reports.

    begin ──► +1 ──► release ──► -1  ┐
    reports of the event plane       ├──► WorkerLoad of each instance ──► pickers, news(), changes()
    instances that come and go       ┘

Source: dynamo lib/runtime/src/component/client.rs, the occupancy; lib/llm/src/discovery/worker_monitor.rs, the loads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from attrs import astuple, evolve, frozen

from pipeline import ReleaseOnce
from pipeline.network import EndpointId, Event, EventPlane, Members, Scope, Workers
from pipeline.protocols.kv import KV_METRICS_TOPIC, ActiveLoad
from pipeline.rx import CompositeDisposable, DisposableBase, Observable, ObserverBase, Subject, ops

T = TypeVar("T")

_log = logging.getLogger(__name__)


def log_errors(source: Observable[T]) -> Observable[T]:
    """Log a subscriber's exception instead of propagating it to the request that caused the change."""

    def subscribe(observer: ObserverBase[T], _: Any = None) -> DisposableBase:
        def on_next(item: T) -> None:
            try:
                observer.on_next(item)
            except Exception:
                _log.exception("a subscriber failed")

        return source.subscribe(on_next, observer.on_error, observer.on_completed)

    return Observable(subscribe)


DeviceType = Literal["cpu", "cuda"]


UNCOUNTED = ReleaseOnce(lambda: None)
"""Takes the place of a count where nothing is counted."""


@frozen
class RankLoad:
    """The load of one rank, each number as last reported; None if it was never reported."""

    active_decode_blocks: int | None = None
    kv_used_blocks: int | None = None
    active_prefill_tokens: int | None = None

    def updated(self, report: ActiveLoad) -> RankLoad:
        """Return the load after the report; what it leaves out stays."""
        return RankLoad(
            _newer(report.active_decode_blocks, self.active_decode_blocks),
            _newer(report.kv_used_blocks, self.kv_used_blocks),
            _newer(report.active_prefill_tokens, self.active_prefill_tokens),
        )


_NO_RANKS: Mapping[int, RankLoad] = MappingProxyType({})


@frozen
class WorkerLoad:
    """The load of one instance."""

    in_flight: int = 0
    """This router's requests that have not ended there."""
    device_type: DeviceType | None = None
    ranks: Mapping[int, RankLoad] = _NO_RANKS
    """What its ranks report."""


def is_idle(ranks: Mapping[int, RankLoad]) -> bool:
    """Whether every rank that has reported is idle; False if none has reported."""
    reported = [[number for number in astuple(rank) if number is not None] for rank in ranks.values()]
    return bool(reported) and all(numbers and not any(numbers) for numbers in reported)


@frozen
class LoadChange:
    """An instance has another load now."""

    instance_id: int
    load: WorkerLoad | None
    """None if the instance is gone."""
    dp_rank: int | None = None
    """The rank that reported, if a report was the cause."""


class WorkerLoads:
    """The loads of the instances of one pool; several routers of a pool may share it.

    An instance that leaves is forgotten, also if it comes back at once: it begins with nothing in flight, and what
    was in flight on it before is not taken off. For one thread.
    """

    def __init__(self, workers: Workers[Any, Any]) -> None:
        self._workers = workers
        self._members = Members()
        """The instances as `_loads` has them."""
        self._loads: dict[int, WorkerLoad] = {}
        self._changes: Subject[LoadChange] = Subject()
        self._reports: Subject[LoadChange] = Subject()
        self._due: deque[Callable[[], None]] = deque()
        self._is_publishing = False
        workers.follow(self._on_members)

    def current(self) -> Mapping[int, WorkerLoad]:
        """Return the load of each instance that is there. It changes with the next request: read it, do not keep it."""
        return self._loads

    def begin(self, instance_id: int) -> ReleaseOnce:
        """Count one request in flight there, until the result is released."""
        load = self._loads.get(instance_id)
        if load is None:
            return UNCOUNTED
        incarnation = self._members.incarnations[instance_id]
        self._set(instance_id, WorkerLoad(load.in_flight + 1, load.device_type, load.ranks))
        return ReleaseOnce(self._ended, instance_id, incarnation)

    def follow(self, reports: Observable[ActiveLoad], *, elsewhere: Sequence[Workers[Any, Any]] = ()) -> DisposableBase:
        """Apply the reports of instances, until disposed.

        Reports of instances that are not there are ignored. `elsewhere` are other pools whose reports arrive by the
        same way: the reports of an instance id that is also there are ambiguous and dropped.
        """
        return reports.subscribe(lambda report: self._on_report(report, elsewhere))

    def news(self) -> Observable[LoadChange]:
        """Return every change from now on; completes when the pool is closed. A subscriber's exception is logged."""

        def subscribe(observer: ObserverBase[LoadChange], _: Any = None) -> DisposableBase:
            def complete() -> None:
                self._in_turn(observer.on_completed)

            changes = log_errors(self._changes).subscribe(observer.on_next)
            # Keeps a closed pool running.
            return CompositeDisposable(changes, self._workers.changes().subscribe(on_completed=complete))

        return Observable(subscribe)

    def reports(self) -> Observable[LoadChange]:
        """Return the changes from now on that a report has caused; does not keep a closed pool running."""
        return log_errors(self._reports)

    def changes(self) -> Observable[Mapping[int, WorkerLoad]]:
        """Return the loads of all instances now and after every change; completes when the pool is closed."""

        def subscribe(observer: ObserverBase[Mapping[int, WorkerLoad]], scheduler: Any = None) -> DisposableBase:
            now: Mapping[int, WorkerLoad] = dict(self.current())
            snapshots = self.news().pipe(ops.scan(with_change, now), ops.start_with(now))
            return snapshots.subscribe(observer, scheduler=scheduler)

        return Observable(subscribe)

    def _on_report(self, report: ActiveLoad, elsewhere: Sequence[Workers[Any, Any]]) -> None:
        instance_id = report.worker_id
        if (load := self._loads.get(instance_id)) is None:
            return
        if any(instance_id in other.instance_ids() for other in elsewhere):
            if load.ranks:
                self._set(instance_id, evolve(load, ranks=_NO_RANKS), report.dp_rank)
            return
        rank = load.ranks.get(report.dp_rank, RankLoad()).updated(report)
        self._set(instance_id, evolve(load, ranks={**load.ranks, report.dp_rank: rank}), report.dp_rank)

    def _ended(self, instance_id: int, incarnation: int) -> None:
        if self._members.incarnations.get(instance_id) != incarnation:
            return
        load = self._loads[instance_id]
        self._set(instance_id, WorkerLoad(load.in_flight - 1, load.device_type, load.ranks))

    def _set(self, instance_id: int, load: WorkerLoad, dp_rank: int | None = None) -> None:
        self._loads[instance_id] = load
        if self._changes.observers or (dp_rank is not None and self._reports.observers):
            self._publish(LoadChange(instance_id, load, dp_rank))

    def _publish(self, change: LoadChange) -> None:
        self._in_turn(lambda: self._deliver(change))

    def _deliver(self, change: LoadChange) -> None:
        if change.dp_rank is not None:
            self._reports.on_next(change)
        self._changes.on_next(change)

    def _in_turn(self, step: Callable[[], None]) -> None:
        """Take the step after those under way: a change that a subscriber causes is published after its cause."""
        self._due.append(step)
        if self._is_publishing:
            return
        self._is_publishing = True
        try:
            while self._due:
                self._due.popleft()()
        finally:
            self._is_publishing = False

    def _on_members(self, members: Members) -> None:
        gone, new = members.gone_since(self._members), members.new_since(self._members)
        self._members = members
        for instance_id in gone:
            del self._loads[instance_id]
        self._loads.update({i: WorkerLoad(device_type=self._workers.device_type(i)) for i in new})
        if self._changes.observers:
            changes = [LoadChange(i, None) for i in gone] + [LoadChange(i, self._loads[i]) for i in new]
            for change in changes:
                self._publish(change)


def with_change(loads: Mapping[int, WorkerLoad], change: LoadChange) -> Mapping[int, WorkerLoad]:
    """Return the loads after the change; the mapping given stays as it is."""
    others = {instance_id: load for instance_id, load in loads.items() if instance_id != change.instance_id}
    return others if change.load is None else {**others, change.instance_id: change.load}


def load_reports(events: EventPlane, endpoint: str | EndpointId) -> Observable[ActiveLoad]:
    """Return the reports of the workers of the endpoint's component, from the event plane."""
    where = EndpointId.parse(endpoint)
    reports = events.subscribe(Scope(where.namespace, where.component), KV_METRICS_TOPIC, ActiveLoad)
    return reports.pipe(ops.map(_payload))


def _newer(reported: int | None, known: int | None) -> int | None:
    return known if reported is None else reported


def _payload(event: Event[ActiveLoad]) -> ActiveLoad:
    return event.payload
