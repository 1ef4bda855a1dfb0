"""WorkerGauges: what each worker's last request was like.

Source: dynamo lib/llm/src/http/service/metrics.rs, WORKER_LAST_*. Other than there they are set when a request is over,
and not without bound: the worker not heard of for longest goes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from pipeline.protocols import RequestTracker, worker_gauges
from pipeline.telemetry import Instrument, Metrics

_WORKER = ("worker_id", "dp_rank", "worker_type")

WORKER_GAUGES = (
    Instrument(
        "worker_last_time_to_first_token_seconds",
        "observed",
        "s",
        "From arrival to the first token of the worker's last request",
        _WORKER,
    ),
    Instrument("worker_last_input_sequence_tokens", "observed", "", "Tokens of its prompt", _WORKER),
    Instrument("worker_last_inter_token_latency_seconds", "observed", "s", "Mean time between its tokens", _WORKER),
)

RANKS_MAX = 4_096
"""How many series each gauge has at most."""


class WorkerGauges:
    """Shows the last request of each rank of each worker. The metrics may be read in any thread."""

    def __init__(self, metrics: Metrics, prefix: str | None = None) -> None:
        """With the meter of those metrics; `prefix` as there."""
        gauges = Metrics(metrics.meter, prefix=prefix, rows=WORKER_GAUGES)
        self._series: dict[str, dict[tuple[str, ...], tuple[dict[str, str], float]]] = {}
        for row in WORKER_GAUGES:
            self._series[row.name] = {}
            gauges.observe(row.name, partial(self._seen, row.name))

    def note(self, tracker: RequestTracker) -> None:
        """This request is over."""
        for name, labels, value in worker_gauges(tracker):
            series, key = self._series[name], tuple(labels.values())
            series.pop(key, None)
            series[key] = labels, value
            if len(series) > RANKS_MAX:
                del series[next(iter(series))]

    def _seen(self, name: str) -> Iterable[tuple[dict[str, str], float]]:
        return list(self._series[name].values())
