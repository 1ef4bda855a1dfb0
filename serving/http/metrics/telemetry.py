"""Telemetry: the OpenTelemetry metrics of one program as Prometheus text.

The library records through `pipeline.telemetry` and configures nothing; this is the configuration. Nothing of it is
global, so each of several apps in one process shows only its own metrics.

Source: dynamo lib/llm/src/http/service/metrics.rs, WORKER_LAST_*, update_runtime_config_metrics and
update_mdc_metrics. Other than there, the gauges of a worker are set when a request is over, and the worker with the
oldest request is dropped beyond a bound; of workers that differ, the largest published figure counts, not the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter, ObservableGauge
from opentelemetry.sdk.resources import Resource
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pipeline.protocols import RequestTracker, worker_gauges
from pipeline.protocols.card import ModelDeploymentCard
from pipeline.telemetry import Instrument, Metrics

from .counting_meter import CountingMeter
from .refusals import Refusals

_TOKEN_GAPS = "inter_token_latency_seconds"
_OPEN_CONNECTIONS = Instrument("open_connections", "observed", "", "Connections that clients have open", ())
_OBSERVED_SERIES = 1_000_000
"""Series of an observed gauge at most: the SDK also counts the series that are gone."""


class Telemetry:
    """The metrics of one app, and their text."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, *, prefix: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        """`prefix` replaces that of all names, `environment` may change buckets: see `pipeline.telemetry`."""
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(
            disable_target_info=True,
            scope_info_enabled=False,
            registry=self._registry,
            cardinality_limits={ObservableGauge: _OBSERVED_SERIES, ObservableCounter: _OBSERVED_SERIES},
        )
        self._provider = MeterProvider([reader], Resource.get_empty(), shutdown_on_exit=False)
        self.meter = meter = CountingMeter(self._provider.get_meter("penstock"))
        """For callers with instruments of their own: `Metrics(meter, rows=...)`."""
        self.metrics = Metrics(meter, prefix=prefix, environment=environment)
        """The app's own instruments."""
        self.component_metrics = Metrics(meter, family="component", environment=environment)
        """The instruments of this program's workers."""
        self._registry.register(meter)
        self._series: dict[tuple[str, str, str], RequestSeries] = {}
        self.workers = WorkerGauges(self.metrics, prefix)
        self.models = ModelGauges(self.metrics, prefix)
        """For programs that know the workers of their models."""
        self.refusals = Refusals(self.metrics)
        """For all code that refuses by a limit, including that of connections."""
        self._texts: list[Callable[[], str]] = []
        self._connections: list[Callable[[], int]] = []
        Metrics(meter, prefix=prefix, rows=[_OPEN_CONNECTIONS]).observe(_OPEN_CONNECTIONS.name, self._open_connections)

    def series_of(self, model: str, endpoint: str, request_type: str) -> RequestSeries:
        """Return what requests with these labels are counted in."""
        labels = model, endpoint, request_type
        if (known := self._series.get(labels)) is None:
            known = self._series[labels] = RequestSeries(self.metrics, *labels)
        return known

    def add_text(self, text: Callable[[], str]) -> None:
        """Append metrics that other code counts, such as an engine's own; their text is passed on unchanged."""
        self._texts.append(text)

    def count_connections(self, count: Callable[[], int]) -> None:
        """Add a server's number of open connections; several servers are summed."""
        self._connections.append(count)

    def text(self) -> bytes:
        """Return all metrics as they are now."""
        return generate_latest(self._registry) + "".join(text() for text in self._texts).encode()

    def _open_connections(self) -> Iterable[tuple[Mapping[str, str], float]]:
        return [({}, sum(count() for count in self._connections))] if self._connections else []


class RequestSeries:
    """The series of requests for one model, by one endpoint and of one type, each bound to its labels.

    A request is recorded some fifteen times, with the same labels as the request before it.
    """

    def __init__(self, metrics: Metrics, model: str, endpoint: str, request_type: str) -> None:
        self.labels = {"model": model, "endpoint": endpoint, "request_type": request_type}
        """For metrics with labels besides these."""
        self.gaps_s: Callable[[float, int], object] = cast(Any, metrics.recorder(_TOKEN_GAPS, model=model))
        """Records the time between tokens, so many times."""
        self.started = metrics.recorder("requests_started_total", **self.labels)
        self.inflight = metrics.recorder("inflight_requests", model=model)
        self.queued = metrics.recorder("queued_requests", model=model)
        self.active = metrics.recorder("active_requests", model=model)
        self.duration_s = metrics.recorder("request_duration_seconds", model=model)
        self.first_token_s = metrics.recorder("time_to_first_token_seconds", model=model)
        self.input_tokens = metrics.recorder("input_sequence_tokens", model=model)
        self.cached_tokens = metrics.recorder("cached_tokens", model=model)
        self.output_tokens = metrics.recorder("output_sequence_tokens", model=model)
        self.all_output_tokens = metrics.recorder("output_tokens_total", model=model)
        self._at_s = 0.0

    def at(self, now_s: float) -> float:
        """Return the time as one object for all requests that are recorded at it.

        Of what a request keeps between two tokens, nothing is in the processor's cache at the second one.
        """
        if now_s != self._at_s:
            self._at_s = now_s
        return self._at_s


# -- gauges that are read when the metrics are

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
