"""The metrics of a hosted engine: the times of its life cycle, and the load of each rank.

Names, units and labels stand in the table of `pipeline.telemetry.metrics`.
Source: dynamo lib/backend-common/src/metrics.rs and publisher.rs, SnapshotPublisher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from pipeline.protocols.kv import ActiveLoad

if TYPE_CHECKING:
    from pipeline.telemetry import Metrics

_log = logging.getLogger(__name__)

Step = Literal["model_load", "drain", "cleanup"]


@frozen
class ComponentSnapshot:
    """The load of one rank."""

    kv_used_blocks: int
    """KV blocks in use."""
    kv_total_blocks: int
    """KV blocks of the cache."""
    gpu_cache_usage: float
    """Share of the cache in use, from 0 to 1."""
    kv_cache_hit_rate: float | None = None
    """Share of prompt tokens found in the cache, from 0 to 1; None: unknown."""
    dp_rank: int = 0
    """The rank."""


class EngineMetrics:
    """Records the metrics of one hosted engine; without `metrics` nothing is recorded.

    `labels` are those of the worker; empty ones are left out.
    """

    def __init__(self, metrics: Metrics | None = None, labels: Mapping[str, str] | None = None) -> None:
        self._metrics = metrics
        self.labels = {name: text for name, text in (labels or {}).items() if text}

    def took(self, step: Step, seconds: float) -> None:
        """Record the duration of a step of the engine's life."""
        if self._metrics is not None:
            self._metrics.set(f"{step}_time_seconds", seconds, **self.labels)

    def seed(self, dp_ranks: Iterable[int]) -> None:
        """Record the ranks as empty, so that they are shown from the start."""
        for rank in dp_ranks:
            self._set("total_blocks", 0, rank)
            self._set("gpu_cache_usage_percent", 0.0, rank)

    def show(self, rank: int, snapshot: ComponentSnapshot) -> None:
        """Record the load of the rank; an unknown hit rate leaves the last one."""
        self._set("total_blocks", snapshot.kv_total_blocks, rank)
        self._set("gpu_cache_usage_percent", snapshot.gpu_cache_usage, rank)
        if snapshot.kv_cache_hit_rate is not None:
            self._set("kv_cache_hit_rate", snapshot.kv_cache_hit_rate, rank)

    def _set(self, name: str, value: float, rank: int) -> None:
        if self._metrics is not None:
            self._metrics.set(name, value, **self.labels, dp_rank=str(rank))


class SnapshotPublisher:
    """Records snapshots as metrics and publishes the load for routers. Does not wait and does not raise."""

    def __init__(
        self, worker_id: int, dp_ranks: Sequence[int], metrics: EngineMetrics, send: Callable[[ActiveLoad], object]
    ) -> None:
        self.dp_ranks = list(dp_ranks)
        self._worker_id, self._metrics, self._send = worker_id, metrics, send
        self._failed: set[int] = set()
        metrics.seed(self.dp_ranks)

    def publish(self, rank: int, snapshot: ComponentSnapshot) -> None:
        """Publish the load of a rank; a rank that was not named is ignored."""
        if rank not in self.dp_ranks:
            return
        self._metrics.show(rank, snapshot)
        try:
            self._send(ActiveLoad(self._worker_id, rank, kv_used_blocks=snapshot.kv_used_blocks))
        except Exception:
            level = logging.DEBUG if rank in self._failed else logging.WARNING
            self._failed.add(rank)
            _log.log(level, "the load of rank %d could not be published", rank, exc_info=True)


@frozen
class MetricsContext:
    """The facts for an engine's `setup_metrics`."""

    model: str
    component: str
    model_load_time_s: float
    metrics: EngineMetrics


@frozen
class MetricsBindings:
    """The metrics that an engine will publish."""

    dp_ranks: Sequence[int] = ()
    """The ranks of which it publishes snapshots."""
    on_publisher_ready: Callable[[SnapshotPublisher], None] | None = None
    """Called with the publisher of the snapshots, once, before serving."""
    native_text: Callable[[], str] | None = None
    """Returns the engine's own metrics as Prometheus text, shown among the others."""
