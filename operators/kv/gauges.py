"""RouterGauges: what is in flight and cached on each rank of a KV router and what waits in it, looked at when metrics
are read.

Nothing is kept between two looks, so a worker that was removed is not shown any more.

Source: dynamo lib/llm/src/kv_router/metrics.rs, WorkerLoadMetrics and RouterQueueMetrics. Other than there they are not
written at every change.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Self

from pipeline.protocols import worker_label
from pipeline.telemetry import Instrument, Metrics

from .metrics import shown_type
from .router import KvRouter
from .types import WorkerRank

Seen = Iterable[tuple[dict[str, str], float]]

_WORKER = ("worker_id", "dp_rank", "worker_type")
_QUEUE = ("model", "worker_type", "policy_class")
_RANK, _CLASS = ("decode_blocks", "prefill_tokens"), ("requests", "isl_tokens", "cached_tokens")
"""The figures of a RankLoad and of a QueueUsage that are shown."""

ROUTER_GAUGES = (
    Instrument("worker_active_decode_blocks", "observed", "", "KV blocks of the requests routed to a rank", _WORKER),
    Instrument("worker_active_prefill_tokens", "observed", "", "Prompt tokens a rank has still to compute", _WORKER),
    Instrument(
        *("worker_known_cached_blocks", "observed", ""),
        "KV blocks that the router knows on a rank: by its events, or approximately, by what was routed there",
        (*_WORKER, "index"),
    ),
    Instrument("router_queue_pending_requests", "observed", "", "Requests that wait in the router", _QUEUE),
    Instrument("router_queue_pending_isl_tokens", "observed", "", "Tokens of the prompts that wait", _QUEUE),
    Instrument(
        "router_queue_pending_cached_tokens", "observed", "", "Those of them that the best worker had cached", _QUEUE
    ),
)


class RouterGauges:
    """Shows the router until closed; a context manager. Close it before or with the router.

    Without a meter the globally configured one is used. The metrics may be read in any thread.
    """

    def __init__(self, router: KvRouter, meter: Any = None, *, model: str = "") -> None:
        self._router, self._model, self._type = router, model, shown_type(router.worker_type)
        metrics = Metrics(meter, rows=ROUTER_GAUGES)
        self._forget = [
            *(metrics.observe(f"worker_active_{figure}", partial(self._ranks, figure)) for figure in _RANK),
            metrics.observe("worker_known_cached_blocks", self._cached),
            *(metrics.observe(f"router_queue_pending_{figure}", partial(self._classes, figure)) for figure in _CLASS),
        ]

    def close(self) -> None:
        """Shows nothing more."""
        for forget in self._forget:
            forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ranks(self, figure: str) -> Seen:
        loads = self._router.loads
        for load in loads.sequences.loads(loads.clock()):
            yield self._labels(load.rank), getattr(load, figure)

    def _cached(self) -> Seen:
        for rank, kind, blocks in self._router.lookup.held_blocks():
            yield self._labels(rank) | {"index": kind}, blocks

    def _labels(self, rank: WorkerRank) -> dict[str, str]:
        return {
            "worker_id": worker_label(rank.worker_id),
            "dp_rank": str(rank.dp_rank),
            "worker_type": self._type,
        }

    def _classes(self, figure: str) -> Seen:
        for name, usage in self._router.queue.waiting_by_class().items():
            yield {"model": self._model, "worker_type": self._type, "policy_class": name}, getattr(usage, figure)
