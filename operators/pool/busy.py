"""BusyWatch: which workers of a pool are busy, from what their ranks report.

    WorkerLoads.news() ──► latch of the rank ──► is the worker busy ──► busy(), changes() ──► routers

A rank is busy if it fails one of the tests that are configured, a worker if all its known ranks are busy. The tests are
functions of values.

Source: dynamo lib/llm/src/discovery/worker_monitor.rs, WorkerLoadState and KvWorkerMonitor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from attrs import frozen

from pipeline.network import Added, Model, Removed, TaintsUpdated
from pipeline.protocols.limits import BusyThresholds
from pipeline.rx import BehaviorSubject, CompositeDisposable, Observable, ops

from .load import LoadChange, RankLoad, WorkerLoad, WorkerLoads, log_errors

UNKNOWN_BATCHED_TOKENS = 10_000_000
"""The tokens of a batch, for a worker that does not publish its own."""


@frozen
class Capacity:
    """What each rank of a worker can hold; None if the worker does not publish it."""

    total_kv_blocks: int | None = None
    max_num_batched_tokens: int | None = None


def latch(load: RankLoad, capacity: Capacity, thresholds: BusyThresholds) -> bool | None:
    """Return the result of the decode test at a report of the rank, which holds until its next one.

    `load` has the report in it. True if one of the numbers of blocks is above the threshold, False if neither is, None
    without a threshold or a capacity.
    """
    fraction, total = thresholds.active_decode_blocks_threshold, capacity.total_kv_blocks
    if fraction is None or not total:
        return None
    most = fraction * total
    return (load.active_decode_blocks or 0) > most or (load.kv_used_blocks or 0) > most


def is_rank_busy(load: RankLoad, latched: bool | None, capacity: Capacity, thresholds: BusyThresholds) -> bool:
    """Whether the rank fails one of the tests; without a latch the numbers as they are decide."""
    above = latch(load, capacity, thresholds)
    if above is not None and (above if latched is None else latched):
        return True
    tokens = load.active_prefill_tokens or 0
    most, fraction = thresholds.active_prefill_tokens_threshold, thresholds.active_prefill_tokens_threshold_frac
    if most is not None and tokens > most:
        return True
    batch_tokens = capacity.max_num_batched_tokens
    return fraction is not None and tokens > fraction * (
        UNKNOWN_BATCHED_TOKENS if batch_tokens is None else batch_tokens
    )


def is_worker_busy(
    ranks: Mapping[int, RankLoad], latches: Mapping[int, bool | None], capacity: Capacity, thresholds: BusyThresholds
) -> bool:
    """Whether every rank that has reported is busy; a worker that never reported is not."""
    return bool(ranks) and all(
        is_rank_busy(load, latches.get(dp_rank), capacity, thresholds) for dp_rank, load in ranks.items()
    )


_UNKNOWN = Capacity()


class BusyWatch:
    """The workers that are busy. Begins when it is made, ends with `close` or as a context manager; then none is.

    Routers are given its `busy` and see the same set from their first request on. Without a threshold no worker is ever
    busy.

    loads: the reports, and the workers that are there
    thresholds: by default none
    capacities: those of the workers by id, now and after each change (see `capacities_of`)
    """

    def __init__(
        self,
        loads: WorkerLoads,
        thresholds: BusyThresholds | None = None,
        capacities: Observable[Mapping[int, Capacity]] | None = None,
    ) -> None:
        self._loads = loads
        self._thresholds = BusyThresholds() if thresholds is None else thresholds
        self._capacities: Mapping[int, Capacity] = {}
        self._latches: dict[int, dict[int, bool | None]] = {}
        self._judged_by = self._thresholds
        self._changes: BehaviorSubject[frozenset[int]] = BehaviorSubject(frozenset())
        self._judge(loads.current())
        self._watching = CompositeDisposable(loads.news().subscribe(self._on_change))
        if capacities is not None:
            self._watching.add(capacities.subscribe(self._on_capacities))

    @property
    def thresholds(self) -> BusyThresholds:
        return self._thresholds

    @thresholds.setter
    def thresholds(self, thresholds: BusyThresholds) -> None:
        """Take effect with the next report, or change of a capacity."""
        self._thresholds = thresholds

    def busy(self) -> frozenset[int]:
        """Return the workers that are busy now."""
        return self._changes.value

    def changes(self) -> Observable[frozenset[int]]:
        """Return `busy` now and after each change; completes when this is closed."""
        return log_errors(self._changes)

    def close(self) -> None:
        """Stop watching; does nothing the second time."""
        if not self._watching.is_disposed:
            self._watching.dispose()
            self._changes.on_next(frozenset())
            self._changes.on_completed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_change(self, change: LoadChange) -> None:
        load, instance_id = change.load, change.instance_id
        if load is None:
            self._latches.pop(instance_id, None)
            self._publish(self._changes.value - {instance_id})
        elif change.dp_rank is not None:
            self._latch(instance_id, change.dp_rank, load)
            # After a change of the thresholds the first report decides about all workers anew.
            all_anew = self._judged_by is not self._thresholds
            self._judge(self._loads.current() if all_anew else {instance_id: load})

    def _on_capacities(self, capacities: Mapping[int, Capacity]) -> None:
        self._capacities = capacities
        self._judge(self._loads.current())

    def _latch(self, instance_id: int, dp_rank: int, load: WorkerLoad) -> None:
        rank = load.ranks.get(dp_rank)
        if rank is not None:  # else the reports of the worker were dropped
            latched = latch(rank, self._capacity(instance_id), self._thresholds)
            self._latches.setdefault(instance_id, {})[dp_rank] = latched

    def _judge(self, loads: Mapping[int, WorkerLoad]) -> None:
        """Decide anew about these workers; what was decided about others stays."""
        self._judged_by = self._thresholds
        found = frozenset(
            instance_id
            for instance_id, load in loads.items()
            if is_worker_busy(
                load.ranks, self._latches.get(instance_id, {}), self._capacity(instance_id), self._thresholds
            )
        )
        self._publish((self._changes.value - loads.keys()) | found)

    def _capacity(self, instance_id: int) -> Capacity:
        return self._capacities.get(instance_id, _UNKNOWN)

    def _publish(self, busy: frozenset[int]) -> None:
        if busy != self._changes.value:
            self._changes.on_next(busy)


ModelNews = Added[Model] | Removed[Model] | TaintsUpdated


def capacities_of(models: Observable[ModelNews]) -> Observable[Mapping[int, Capacity]]:
    """Return the capacities in the cards of an endpoint's workers, from `discovery.watch_models(endpoint.path)`."""
    nothing: Mapping[int, Capacity] = {}
    return models.pipe(ops.scan(with_model, nothing))


def with_model(capacities: Mapping[int, Capacity], news: ModelNews) -> Mapping[int, Capacity]:
    """Return the capacities after the change; the mapping given stays as it is. Cards of adapters have none."""
    instance_id, settings = news.item.instance_id, news.item.card.runtime_config
    if news.item.suffix is not None or isinstance(news, TaintsUpdated):
        return capacities
    others = {worker_id: capacity for worker_id, capacity in capacities.items() if worker_id != instance_id}
    if isinstance(news, Removed):
        return others
    return {**others, instance_id: Capacity(settings.total_kv_blocks, settings.max_num_batched_tokens)}
