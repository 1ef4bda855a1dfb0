"""Gauges read when the metrics are: each worker's last request, and what the workers of each model have published.

Source: dynamo lib/llm/src/http/service/metrics.rs, WORKER_LAST_*, update_runtime_config_metrics and
update_mdc_metrics. Other than there, the gauges of a worker are set when a request is over, and the worker with the
oldest request is dropped beyond a bound; of workers that differ, the largest published figure counts, not the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pipeline.protocols import RequestTracker, worker_gauges
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.telemetry import Instrument, Metrics

RANKS_MAX = 4_096
"""Series of each worker gauge at most; each is one rank of one worker."""

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

_PUBLISHED: Mapping[str, tuple[str, Callable[[ModelDeploymentCard], int | None]]] = {
    "model_total_kv_blocks": ("KV blocks of a worker", lambda card: card.runtime_config.total_kv_blocks),
    "model_max_num_seqs": ("Sequences that a worker runs at a time", lambda card: card.runtime_config.max_num_seqs),
    "model_max_num_batched_tokens": (
        "Tokens that a worker computes in a pass",
        lambda card: card.runtime_config.max_num_batched_tokens,
    ),
    "model_context_length": ("Tokens of a prompt and its answer", lambda card: card.effective_context_length or None),
    "model_kv_cache_block_size": ("Tokens of a KV block", lambda card: card.kv_cache_block_size or None),
}
"""Gauges of a model's cards: name, help, figure of a card."""
_MIGRATION_LIMIT = "model_migration_limit"

MODEL_GAUGES = (
    *(Instrument(name, "observed", "", text, ("model",)) for name, (text, _) in _PUBLISHED.items()),
    Instrument(_MIGRATION_LIMIT, "observed", "", "Other workers a request may go on with", ("model",)),
)

Cards = Callable[[], Iterable[ModelDeploymentCard | None]]
"""Return the cards of the present workers, None for a worker without one."""


class WorkerGauges:
    """The last request of each rank of each worker. Any thread may read the metrics."""

    def __init__(self, metrics: Metrics, prefix: str | None = None) -> None:
        """Use the meter of `metrics`; `prefix` replaces that of all names."""
        gauges = Metrics(metrics.meter, prefix=prefix, rows=WORKER_GAUGES)
        self._series: dict[str, dict[tuple[str, ...], tuple[dict[str, str], float]]] = {}
        for row in WORKER_GAUGES:
            self._series[row.name] = {}
            gauges.observe(row.name, partial(self._observations, row.name))

    def record(self, tracker: RequestTracker) -> None:
        """Record a request that is over."""
        for name, labels, value in worker_gauges(tracker):
            series, key = self._series[name], tuple(labels.values())
            series.pop(key, None)
            series[key] = labels, value
            if len(series) > RANKS_MAX:
                del series[next(iter(series))]

    def _observations(self, name: str) -> Iterable[tuple[dict[str, str], float]]:
        return list(self._series[name].values())


class ModelGauges:
    """The models of a program. Any thread may read the metrics; a figure that no worker has published is left out."""

    def __init__(self, metrics: Metrics, prefix: str | None = None) -> None:
        """Use the meter of `metrics`; `prefix` replaces that of all names."""
        gauges = Metrics(metrics.meter, prefix=prefix, rows=MODEL_GAUGES)
        self._shown: list[tuple[Cards, int]] = []
        for name, (_, figure) in _PUBLISHED.items():
            gauges.observe(name, partial(self._largest, figure))
        gauges.observe(_MIGRATION_LIMIT, self._limits)

    def add(self, cards: Cards, migration_limit: int) -> None:
        """Add the workers with these cards; a request may move to `migration_limit` more workers."""
        self._shown.append((cards, migration_limit))

    def _largest(
        self, figure: Callable[[ModelDeploymentCard], int | None]
    ) -> Iterable[tuple[Mapping[str, str], float]]:
        found: dict[str, int] = {}
        for card, _ in self._cards():
            if (value := figure(card)) is not None:
                found[card.display_name] = max(value, found.get(card.display_name, value))
        return [({"model": model}, value) for model, value in found.items()]

    def _limits(self) -> Iterable[tuple[Mapping[str, str], float]]:
        limits = {card.display_name: limit for card, limit in self._cards()}
        return [({"model": model}, limit) for model, limit in limits.items()]

    def _cards(self) -> list[tuple[ModelDeploymentCard, int]]:
        return [(card, limit) for cards, limit in self._shown for card in list(cards()) if card is not None]
