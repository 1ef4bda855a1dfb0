"""Telemetry: the OpenTelemetry metrics of one program as Prometheus text.

The library records through `pipeline.telemetry` and configures nothing; this is the configuration. Nothing of it is
global, so each of several apps in one process shows only its own metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter, ObservableGauge
from opentelemetry.sdk.resources import Resource
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pipeline.telemetry import Instrument, Metrics

from .gauges import ModelGauges, WorkerGauges
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
        self.meter = meter = self._provider.get_meter("penstock")
        """For callers with instruments of their own: `Metrics(meter, rows=...)`."""
        self.metrics = Metrics(meter, prefix=prefix, environment=environment)
        """The app's own instruments."""
        self.component_metrics = Metrics(meter, family="component", environment=environment)
        """The instruments of this program's workers."""
        self.token_gaps = TokenGaps(self.metrics.buckets(_TOKEN_GAPS))
        self._series: dict[tuple[str, str, str], RequestSeries] = {}
        self._registry.register(_TokenGapsCollector(self.token_gaps, self.metrics.full_name(_TOKEN_GAPS)))
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
            known = self._series[labels] = RequestSeries(self.metrics, self.token_gaps.of(model), *labels)
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


class GapCounts:
    """The histogram of one model's gaps."""

    __slots__ = ("bounds_s", "counts", "sum_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.bounds_s = tuple(bounds_s)
        """Upper bounds of the buckets."""
        self.counts = [0] * (len(self.bounds_s) + 1)
        """Observations by bucket; the last one is for gaps beyond all bounds."""
        self.sum_s = 0.0

    def observe(self, gap_s: float, times: int) -> None:
        """Add one gap `times` times."""
        self.counts[bisect_left(self.bounds_s, gap_s)] += times
        self.sum_s += gap_s * times


class RequestSeries:
    """The series of requests for one model, by one endpoint and of one type, each bound to its labels.

    A request is recorded some fifteen times, with the same labels as the request before it.
    """

    def __init__(self, metrics: Metrics, gaps: GapCounts, model: str, endpoint: str, request_type: str) -> None:
        self.labels = {"model": model, "endpoint": endpoint, "request_type": request_type}
        """For metrics with labels besides these."""
        self.gaps = gaps
        """Time between tokens."""
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


class TokenGaps:
    """The histograms of the time between tokens, by model.

    An instrument of OpenTelemetry costs about 6 microseconds an observation, more than everything else that is done
    for a token here; this costs a tenth of that. The exporter reads it like any other metric.
    """

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._models: dict[str, GapCounts] = {}

    def of(self, model: str) -> GapCounts:
        """Return the histogram of one model."""
        if (known := self._models.get(model)) is None:
            known = self._models[model] = GapCounts(self._bounds_s)
        return known

    def all(self) -> Mapping[str, GapCounts]:
        """Return all histograms, by model."""
        return self._models


class _TokenGapsCollector(Collector):
    """The token gaps as a Prometheus histogram."""

    def __init__(self, gaps: TokenGaps, name: str) -> None:
        self._gaps = gaps
        self._name = name

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, "Between two tokens", labels=["model"])
        for model, counts in self._gaps.all().items():
            family.add_metric([model], _cumulative(counts), counts.sum_s)
        yield family


def _cumulative(counts: GapCounts) -> list[tuple[str, float]]:
    bounds = [*map(str, counts.bounds_s), "+Inf"]
    return list(zip(bounds, accumulate(counts.counts), strict=True))
