"""BusyWatch: which workers of a pool are busy, from what their ranks report.

    WorkerLoads.reports() ──► latch of the rank ──► is the worker busy ──► busy(), changes() ──► routers

A rank is busy if it fails one of the tests that are configured, a worker if all its known ranks are busy. The tests are
functions of values.

Source: dynamo lib/llm/src/discovery/worker_monitor.rs, WorkerLoadState and KvWorkerMonitor.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.network import Ids
from pipeline.protocols.card import ModelRuntimeConfig
from pipeline.protocols.limits import BusyThresholds
from pipeline.rx import BehaviorSubject, CompositeDisposable, Observable

from .load import LoadReport, RankLoad, WorkerLoad, WorkerLoads, log_errors
from .view import Configs, PoolCards

UNKNOWN_BATCHED_TOKENS = 10_000_000
"""The tokens of a batch, for a worker that does not publish its own."""


def latch(load: RankLoad, config: ModelRuntimeConfig, thresholds: BusyThresholds) -> bool | None:
    """Return the result of the decode test at a report of the rank, which holds until its next one.

    `load` has the report in it. True if one of the numbers of blocks is above the threshold, False if neither is, None
    without a threshold or a capacity.
    """
    fraction, total = thresholds.active_decode_blocks_threshold, config.total_kv_blocks
    if fraction is None or not total:
        return None
    most = fraction * total
    return (load.active_decode_blocks or 0) > most or (load.kv_used_blocks or 0) > most


def is_rank_busy(load: RankLoad, latched: bool | None, config: ModelRuntimeConfig, thresholds: BusyThresholds) -> bool:
    """Whether the rank fails one of the tests; without a latch the numbers as they are decide."""
    above = latch(load, config, thresholds)
    if above is not None and (above if latched is None else latched):
        return True
    tokens = load.active_prefill_tokens or 0
    most, fraction = thresholds.active_prefill_tokens_threshold, thresholds.active_prefill_tokens_threshold_frac
    if most is not None and tokens > most:
        return True
    batch_tokens = config.max_num_batched_tokens
    return fraction is not None and tokens > fraction * (
        UNKNOWN_BATCHED_TOKENS if batch_tokens is None else batch_tokens
    )


def is_worker_busy(
    ranks: Mapping[int, RankLoad],
    latches: Mapping[int, bool | None],
    config: ModelRuntimeConfig,
    thresholds: BusyThresholds,
) -> bool:
    """Whether every rank that has reported is busy; a worker that never reported is not."""
    return bool(ranks) and all(
        is_rank_busy(load, latches.get(dp_rank), config, thresholds) for dp_rank, load in ranks.items()
    )


_UNKNOWN = ModelRuntimeConfig()


class BusyWatch:
    """The workers that are busy. Begins when it is made, ends with `close`; then none is.

    Routers are given its `busy` and see the same set from their first request on. Without a threshold no worker is ever
    busy.

    loads: the reports, and the workers that are there
    thresholds: by default none
    cards: the model cards of the workers, now and after each change (see `cards_of`)
    """

    def __init__(
        self,
        loads: WorkerLoads,
        thresholds: BusyThresholds | None = None,
        cards: Observable[PoolCards] | None = None,
    ) -> None:
        self._loads = loads
        self.thresholds = BusyThresholds() if thresholds is None else thresholds
        """May be changed: that takes effect with the next report, or change of the cards."""
        self._configs: Configs = {}
        self._latches: dict[int, dict[int, bool | None]] = {}
        self._judged_by = self.thresholds
        self._changes: BehaviorSubject[frozenset[int]] = BehaviorSubject(frozenset())
        self._judge(loads.current())
        self._watching = CompositeDisposable(
            loads.reports().subscribe(self._on_report),
            loads.workers.changes().subscribe(self._on_members, on_completed=self._on_members),
        )
        if cards is not None:
            self._watching.add(cards.subscribe(self._on_cards))

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

    def _on_members(self, _: Ids = ()) -> None:
        """Forget the instances that are gone, or have come back since."""
        known = {instance_id for instance_id, load in self._loads.current().items() if load.ranks}
        self._latches = {instance_id: latched for instance_id, latched in self._latches.items() if instance_id in known}
        self._publish(self._changes.value & known)

    def _on_report(self, report: LoadReport) -> None:
        instance_id, rank = report.instance_id, report.ranks.get(report.dp_rank)
        if rank is not None:  # else its reports were dropped
            latched = latch(rank, self._config(instance_id), self.thresholds)
            self._latches.setdefault(instance_id, {})[report.dp_rank] = latched
        # After a change of the thresholds the first report decides about all workers anew.
        all_anew, loads = self._judged_by is not self.thresholds, self._loads.current()
        self._judge(loads if all_anew else {instance_id: loads[instance_id]})

    def _on_cards(self, cards: PoolCards) -> None:
        self._configs = cards.configs or {}
        self._judge(self._loads.current())

    def _judge(self, loads: Mapping[int, WorkerLoad]) -> None:
        """Decide anew about these workers; what was decided about others stays."""
        self._judged_by = self.thresholds
        found = frozenset(
            instance_id
            for instance_id, load in loads.items()
            if is_worker_busy(
                load.ranks, self._latches.get(instance_id, {}), self._config(instance_id), self.thresholds
            )
        )
        self._publish((self._changes.value - loads.keys()) | found)

    def _config(self, instance_id: int) -> ModelRuntimeConfig:
        return self._configs.get(instance_id, _UNKNOWN)

    def _publish(self, busy: frozenset[int]) -> None:
        if busy != self._changes.value:
            self._changes.on_next(busy)
