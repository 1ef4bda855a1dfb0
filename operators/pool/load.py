"""Worker load: what runs on each instance of a pool, by our own count and by its own reports.

    begin ──► +1 ──► release ──► -1  ┐
    reports of the event plane       ├──► WorkerLoad of each instance ──► pickers
    instances that come and go       ┘         └─ reports() ──► BusyWatch, InstanceHealth

Source: dynamo lib/runtime/src/component/client.rs, the occupancy; lib/llm/src/discovery/worker_monitor.rs, the loads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from attrs import astuple, define, field, frozen

from pipeline import ReleaseOnce
from pipeline.network import EndpointId, EventPlane, Members, Scope, Workers
from pipeline.protocols.kv import KV_METRICS_TOPIC, LOADS_EVERY_S, ActiveLoad
from pipeline.rx import AnyIOScheduler, CompositeDisposable, DisposableBase, Observable, ObserverBase, Subject, ops

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


MISSING_REPORTS = 3
"""After so many repeated reports that did not come, what a rank reported is not true any more."""
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
        reported = (report.active_decode_blocks, report.kv_used_blocks, report.active_prefill_tokens)
        known = astuple(self)
        return RankLoad(*(old if new is None else new for old, new in zip(known, reported, strict=True)))


_NO_RANKS: Mapping[int, RankLoad] = MappingProxyType({})


@define
class WorkerLoad:
    """The load of one stay of an instance."""

    in_flight: int = 0
    """This router's requests that have not ended there."""
    device_type: DeviceType | None = None
    ranks: Mapping[int, RankLoad] = _NO_RANKS
    """What its ranks report."""
    ages: dict[int, int] = field(factory=dict, eq=False, repr=False)
    """Of each rank that reported, how many times its report was to be repeated since."""

    def end(self) -> None:
        """Count one request less."""
        self.in_flight -= 1


def is_idle(ranks: Mapping[int, RankLoad]) -> bool:
    """Whether every rank that has reported is idle; False if none has reported."""
    reported = [[number for number in astuple(rank) if number is not None] for rank in ranks.values()]
    return bool(reported) and all(numbers and not any(numbers) for numbers in reported)


@frozen
class LoadReport:
    """What an instance reports after a report of one of its ranks."""

    instance_id: int
    dp_rank: int
    """The rank that reported."""
    ranks: Mapping[int, RankLoad]
    """All its ranks."""


class WorkerLoads:
    """The loads of the instances of one pool; several routers of a pool may share it.

    An instance that leaves is forgotten, also if it comes back at once: it begins with nothing in flight, and what
    was in flight on it before is not taken off. For one thread.
    """

    def __init__(self, workers: Workers[Any, Any]) -> None:
        self.workers = workers
        self._members = Members()
        """The instances as `_loads` has them."""
        self._loads: dict[int, WorkerLoad] = {}
        self._reports: Subject[LoadReport] = Subject()
        workers.follow(self._on_members)

    def current(self) -> Mapping[int, WorkerLoad]:
        """Return the load of each instance that is there. It changes with the next request: read it, do not keep it."""
        return self._loads

    def begin(self, instance_id: int) -> ReleaseOnce:
        """Count one request in flight there, until the result is released."""
        if (load := self._loads.get(instance_id)) is None:
            return UNCOUNTED
        load.in_flight += 1
        return ReleaseOnce(load.end)

    def follow(
        self,
        reports: Observable[ActiveLoad],
        *,
        elsewhere: Sequence[Workers[Any, Any]] = (),
        scheduler: AnyIOScheduler | None = None,
    ) -> DisposableBase:
        """Apply the reports of instances, until disposed.

        Reports of instances that are not there are ignored. `elsewhere` are other pools whose reports arrive by the
        same way: the reports of an instance id that is also there are ambiguous and dropped. With a scheduler, what a
        rank reported is forgotten once its worker has not repeated it for `MISSING_REPORTS` times.
        """
        following = reports.subscribe(lambda report: self._on_report(report, elsewhere))
        if scheduler is None:
            return following
        return CompositeDisposable(following, scheduler.schedule_periodic(LOADS_EVERY_S, lambda _: self._on_period()))

    def reports(self) -> Observable[LoadReport]:
        """Return what instances report from now on. A subscriber's exception is logged."""
        return log_errors(self._reports)

    def _on_report(self, report: ActiveLoad, elsewhere: Sequence[Workers[Any, Any]]) -> None:
        instance_id, dp_rank = report.worker_id, report.dp_rank
        if (load := self._loads.get(instance_id)) is None:
            return
        if any(instance_id in other.instance_ids() for other in elsewhere):
            if not load.ranks:
                return
            load.ranks = _NO_RANKS
            load.ages.clear()
        else:
            load.ages[dp_rank] = 0
            load.ranks = {**load.ranks, dp_rank: load.ranks.get(dp_rank, RankLoad()).updated(report)}
        self._reports.on_next(LoadReport(instance_id, dp_rank, load.ranks))

    def _on_period(self) -> None:
        """Forget the reports that are missing for too long."""
        for instance_id, load in list(self._loads.items()):
            for dp_rank in list(load.ages):
                load.ages[dp_rank] += 1
                if load.ages[dp_rank] > MISSING_REPORTS:
                    del load.ages[dp_rank]
                    load.ranks = {rank: known for rank, known in load.ranks.items() if rank != dp_rank}
                    self._reports.on_next(LoadReport(instance_id, dp_rank, load.ranks))

    def _on_members(self, members: Members) -> None:
        gone, new = members.gone_since(self._members), members.new_since(self._members)
        self._members = members
        for instance_id in gone:
            del self._loads[instance_id]
        self._loads.update({i: WorkerLoad(device_type=self.workers.device_type(i)) for i in new})


def load_reports(events: EventPlane, endpoint: str | EndpointId) -> Observable[ActiveLoad]:
    """Return the reports of the workers of the endpoint's component, from the event plane."""
    where = EndpointId.parse(endpoint)
    reports = events.subscribe(Scope(where.namespace, where.component), KV_METRICS_TOPIC, ActiveLoad)
    return reports.pipe(ops.map(attrgetter("payload")))
