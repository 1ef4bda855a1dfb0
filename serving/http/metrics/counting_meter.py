"""CountingMeter: an OpenTelemetry meter whose sums and histograms are plain numbers, shown as Prometheus text.

    Metrics.recorder ──► bind ──► a number, or the counts of buckets ──► families, when the page is read

The SDK takes some 4 microseconds for each value that is recorded, and a request records 20 to 30: a tenth of what a
front end costs. Here a value of a bound series takes a tenth of that. The page shows what the SDK and its
exporter would. Gauges and everything that is observed stay with the SDK's meter: they are read, not recorded.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, Generic, TypeVar

from opentelemetry import metrics as otel
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.telemetry import sanitize_label, sanitize_name

_log = logging.getLogger(__name__)

SERIES_MAX = 2_000
"""Series of an instrument; what has other labels is counted together, as by the SDK."""
OVERFLOW = {"otel_metric_overflow": "true"}

UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "By": "bytes", "1": ""}
"""How the exporter writes units in names that do not end in them; others stay as they are."""

Attributes = Mapping[str, Any] | None
Series = TypeVar("Series", "Number", "BucketCounts")


class Number:
    """One series of a sum; it is shown once something was added. Any thread may add."""

    __slots__ = ("_is_monotonic", "_lock", "is_shown", "value")

    def __init__(self, lock: Lock, *, is_monotonic: bool) -> None:
        self._lock, self._is_monotonic = lock, is_monotonic
        self.value: float = 0
        self.is_shown = False

    def record(self, value: float) -> None:
        """Add a value; a negative one has no effect on what only grows."""
        if value < 0 and self._is_monotonic:
            _log.warning("a counter cannot go back: %r is ignored", value)
            return
        with self._lock:
            self.value += value
            self.is_shown = True


_TOGETHER = 256
"""Values of a histogram that are put into buckets in one go, which takes half of the time."""


class BucketCounts:
    """One series of a histogram; it is shown once it holds a value. Any thread may record."""

    __slots__ = ("_counts", "_lock", "_new", "_sum", "bounds")

    def __init__(self, bounds: Sequence[float], lock: Lock) -> None:
        self._lock = lock
        self.bounds = tuple(bounds)
        """Upper bounds of the buckets."""
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum: float = 0
        self._new: deque[tuple[float, int]] = deque()

    def record(self, value: float, times: int = 1) -> None:
        """Add a value `times` times; a negative one has no effect."""
        if value < 0:
            _log.warning("a histogram takes no negative value: %r is ignored", value)
            return
        new = self._new
        new.append((value, times))
        if len(new) >= _TOGETHER and not self._lock.locked():
            self._count_new()

    def _count_new(self) -> None:
        """Put the new values into their buckets."""
        new, bounds, counts = self._new, self.bounds, self._counts
        with self._lock:
            while new:
                value, times = new.popleft()
                counts[bisect_left(bounds, value)] += times
                self._sum += value * times

    @property
    def counts(self) -> list[int]:
        """Values by bucket; the last one is for those beyond all bounds."""
        self._count_new()
        return self._counts

    @property
    def sum(self) -> float:
        self._count_new()
        return self._sum

    @property
    def is_shown(self) -> bool:
        return any(self.counts)

    def buckets(self) -> list[tuple[str, int]]:
        """Return the bounds with the number of values up to each."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


class _Counted(ABC, Generic[Series]):
    """The series of one instrument, by their labels."""

    def __init__(self, name: str, unit: str, description: str, make: Callable[[Lock], Series]) -> None:
        self.name, self.unit, self.description = sanitize_name(name), UNITS.get(unit, unit), description
        self._make: Callable[[Lock], Series] = make
        self._lock = Lock()
        self._series: dict[tuple[tuple[str, Any], ...], Series] = {}

    def of(self, attributes: Attributes) -> Series:
        """Return the series with these labels."""
        labels = tuple(sorted((attributes or {}).items()))
        if (known := self._series.get(labels)) is None:
            with self._lock:
                if labels not in self._series and len(self._series) >= SERIES_MAX - 1:
                    labels = tuple(OVERFLOW.items())
                known = self._series.setdefault(labels, self._make(self._lock))
        return known

    def bind(self, labels: Mapping[str, str]) -> Callable[[float], object]:
        """Return the function that records a value of the series with these labels."""
        return self.of(labels).record

    def family(self) -> Metric | None:
        """Return what is to be shown; None if nothing was recorded so far."""
        shown = [(_shown(labels), each) for labels, each in list(self._series.items()) if each.is_shown]
        if not shown:
            return None
        names = sorted({name for labels, _ in shown for name in labels})
        return self._family(names, [([labels.get(name, "") for name in names], each) for labels, each in shown])

    @abstractmethod
    def _family(self, names: list[str], shown: list[tuple[list[str], Series]]) -> Metric:
        """Return the series by the values of these labels."""


def _shown(labels: Iterable[tuple[str, Any]]) -> dict[str, str]:
    known = {sanitize_label(name): value for name, value in labels}
    return {name: value if isinstance(value, str) else json.dumps(value, default=str) for name, value in known.items()}


class _Sum(_Counted[Number]):
    def __init__(self, name: str, unit: str, description: str, *, is_monotonic: bool) -> None:
        super().__init__(name, unit, description, lambda lock: Number(lock, is_monotonic=is_monotonic))
        self._kind = CounterMetricFamily if is_monotonic else GaugeMetricFamily

    def add(self, amount: float, attributes: Attributes = None, context: object = None) -> None:
        """See OpenTelemetry."""
        self.of(attributes).record(amount)

    def _family(self, names: list[str], shown: list[tuple[list[str], Number]]) -> Metric:
        family = self._kind(self.name, self.description, labels=names, unit=self.unit)
        for values, each in shown:
            family.add_metric(values, each.value)
        return family


class _Histogram(_Counted[BucketCounts]):
    def __init__(self, name: str, unit: str, description: str, bounds: Sequence[float]) -> None:
        super().__init__(name, unit, description, lambda lock: BucketCounts(bounds, lock))

    def record(self, amount: float, attributes: Attributes = None, context: object = None) -> None:
        """See OpenTelemetry."""
        self.of(attributes).record(amount)

    def _family(self, names: list[str], shown: list[tuple[list[str], BucketCounts]]) -> Metric:
        family = HistogramMetricFamily(self.name, self.description, labels=names, unit=self.unit)
        for values, each in shown:
            family.add_metric(values, each.buckets(), each.sum)
        return family


DEFAULT_BOUNDS = (0.0, 5.0, 10.0, 25.0, 50.0, 75.0, 100.0, 250.0, 500.0, 750.0, 1000.0, 2500.0, 5000.0, 7500.0, 10000.0)
"""The SDK's buckets, of histograms that name none."""


class CountingMeter(otel.Meter, Collector):
    """See the module. `observed` is the SDK's meter; register this beside its exporter."""

    def __init__(self, observed: otel.Meter) -> None:
        super().__init__(observed.name, observed.version, observed.schema_url)
        self._observed = observed
        self._made: dict[str, _Sum | _Histogram] = {}

    def collect(self) -> Iterable[Metric]:
        """Return all that was recorded, as metrics of Prometheus."""
        return [family for each in list(self._made.values()) if (family := each.family()) is not None]

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        return self._add(_Sum(name, unit, description, is_monotonic=True))

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> Any:
        return self._add(_Sum(name, unit, description, is_monotonic=False))

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> Any:
        bounds = explicit_bucket_boundaries_advisory
        return self._add(_Histogram(name, unit, description, DEFAULT_BOUNDS if bounds is None else bounds))

    def _add(self, made: _Sum | _Histogram) -> Any:
        """Return the instrument, or that which has the name already: its callers share the series."""
        known = self._made.setdefault(made.name, made)
        if type(known) is not type(made):
            raise ValueError(f"{made.name} is an instrument of another kind already")
        return known

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> Any:
        return self._observed.create_gauge(name, unit, description)

    def create_observable_counter(self, name: str, callbacks: Any = None, unit: str = "", description: str = "") -> Any:
        return self._observed.create_observable_counter(name, callbacks, unit, description)

    def create_observable_gauge(self, name: str, callbacks: Any = None, unit: str = "", description: str = "") -> Any:
        return self._observed.create_observable_gauge(name, callbacks, unit, description)

    def create_observable_up_down_counter(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        return self._observed.create_observable_up_down_counter(name, callbacks, unit, description)
