"""Telemetry: OpenTelemetry metrics of one program, shown as Prometheus text.

The library records through `pipeline.telemetry` and configures nothing; this is the configuration. Nothing of it is
global, so several apps in one process show only their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter, ObservableGauge
from opentelemetry.sdk.resources import Resource
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from pipeline.telemetry import Instrument, Metrics

from .model_gauges import ModelGauges
from .refusals import Refusals
from .token_gaps import GapCounts, TokenGaps
from .worker_gauges import WorkerGauges

_GAPS = "inter_token_latency_seconds"
_OPEN_CONNECTIONS = Instrument("open_connections", "observed", "", "Connections that clients have open", ())
_OBSERVED_SERIES = 1_000_000
"""How many series of an observed gauge there may be: the SDK counts those that have gone, too."""


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
        """For those who bring instruments of their own: `Metrics(meter, rows=...)`."""
        self.metrics = Metrics(meter, prefix=prefix, environment=environment)
        self.component_metrics = Metrics(meter, family="component", environment=environment)
        """For the workers of this program."""
        self._texts: list[Callable[[], str]] = []
        self.gaps = TokenGaps(self.metrics.buckets(_GAPS))
        self._registry.register(_Gaps(self.gaps, self.metrics.full_name(_GAPS)))
        self.workers = WorkerGauges(self.metrics, prefix)
        self.models = ModelGauges(self.metrics, prefix)
        """For programs that know the workers of their models."""
        self._connections: list[Callable[[], int]] = []
        shown = Metrics(meter, prefix=prefix, rows=[_OPEN_CONNECTIONS])
        shown.observe(_OPEN_CONNECTIONS.name, self._open_connections)
        self.refusals = Refusals(self.metrics)
        """For all who refuse by a limit, connections too."""

    def add_text(self, text: Callable[[], str]) -> None:
        """Shows metrics that somebody else counts, such as an engine's own, behind all others; given as they are."""
        self._texts.append(text)

    def count_connections(self, count: Callable[[], int]) -> None:
        """Show how many connections a server has open; several servers are summed."""
        self._connections.append(count)

    def text(self) -> bytes:
        """All metrics as they are now."""
        return generate_latest(self._registry) + "".join(text() for text in self._texts).encode()

    def _open_connections(self) -> Iterable[tuple[Mapping[str, str], float]]:
        return [({}, sum(count() for count in self._connections))] if self._connections else []


class _Gaps(Collector):
    """Shows the token gaps among the other metrics."""

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
