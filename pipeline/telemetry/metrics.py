"""Metrics: name, unit, labels and buckets of every instrument, in one table, and recording by those names.

    metrics = Metrics(meter)                                   # a family's instruments, made when first used
    metrics.add("requests_total", 1, model="m", endpoint="chat_completions", ...)
    metrics.record("time_to_first_token_seconds", 0.12, model="m")
    own = Metrics(meter, prefix="my_router", rows=[Instrument("waiting", "observed", "", "Waiting", ("pool",))])
    forget = own.observe("waiting", lambda: [({"pool": "a"}, len(queue))])   # read on demand

It uses only the API of OpenTelemetry; the program configures the SDK.
Source: dynamo lib/llm/src/http/service/metrics.rs, lib/runtime/src/metrics.
"""

from __future__ import annotations

import decimal
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from attrs import define, field, frozen
from opentelemetry import metrics as otel

from ..errors import InvalidArgument

_log = logging.getLogger(__name__)

Kind = Literal["counter", "up_down", "gauge", "observed", "histogram"]
Family = Literal["frontend", "component"]
Look = Callable[[], Iterable[tuple[Mapping[str, str], float]]]
"""Gives the values of this moment, each with its labels."""

_ADDED_TO: tuple[Kind, ...] = ("counter", "up_down")
_SET: tuple[Kind, ...] = ("gauge",)
_RECORDED: tuple[Kind, ...] = ("histogram",)

PREFIXES: dict[Family, str] = {"frontend": "dynamo_frontend", "component": "dynamo_component"}
_MAX_BUCKETS = 512
_TWO_DIGITS = decimal.Context(prec=2, rounding=decimal.ROUND_HALF_UP)


@frozen
class Buckets:
    """Bounds that grow evenly on a logarithmic scale, the first one 0."""

    min: float
    max: float
    count: int

    def bounds(self) -> tuple[float, ...]:
        """0, then `min * (max/min) ** (i / (count-1))` rounded to two digits, halves up, without duplicates."""
        if self.count < 2:
            return (0.0,) * self.count
        growth = self.max / self.min
        steps = (self.min * growth ** (i / (self.count - 1)) for i in range(1, self.count))
        return tuple(dict.fromkeys([0.0, *(float(_TWO_DIGITS.create_decimal_from_float(step)) for step in steps)]))

    def overridden(self, name: str, environment: Mapping[str, str]) -> Buckets:
        """Return the buckets as `DYN_METRICS_<NAME>_MIN`, `_MAX` and `_COUNT` set them; unchanged if invalid."""
        variable = f"DYN_METRICS_{name.upper()}_"
        try:
            low = float(environment.get(f"{variable}MIN", self.min))
            high = float(environment.get(f"{variable}MAX", self.max))
            count = int(environment.get(f"{variable}COUNT", self.count))
        except ValueError:
            return self
        sensible = 0 < low < high and math.isfinite(high / low) and 0 <= count <= _MAX_BUCKETS
        return Buckets(low, high, count) if sensible else self


@frozen
class Instrument:
    """One row of the table.

    A counter is added to, or looked at where something else counts; an up_down is moved both ways, a gauge set, an
    observed gauge looked at, and into a histogram values are put. A histogram's `buckets` may also be its bounds
    themselves. `optional` labels may be left out.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...]
    buckets: Buckets | tuple[float, ...] = ()
    optional: tuple[str, ...] = ()

    def bounds(self, environment: Mapping[str, str]) -> tuple[float, ...]:
        """Return the upper bounds of a histogram's buckets, the last one, infinity, left out."""
        if isinstance(self.buckets, Buckets):
            return self.buckets.overridden(self.name, environment).bounds()
        return self.buckets

    def check_labels(self, labels: Mapping[str, str]) -> None:
        """Raise ValueError for an unknown label, and if one is missing that may not be left out."""
        known = frozenset(self.labels)
        if not known.difference(self.optional) <= labels.keys() <= known:
            raise ValueError(f"{self.name} has the labels {sorted(known)}, not {sorted(labels)}")


_MODEL = ("model",)
_REQUEST = ("model", "endpoint", "request_type")
_VERDICT = (*_REQUEST, "status", "error_type")
_INSTANCE = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")
_DURATION = Buckets(1, 512, 10)
_INPUT = Buckets(50, 128_000, 12)


def _counter(name: str, description: str, labels: tuple[str, ...]) -> Instrument:
    return Instrument(name, "counter", "", description, labels)


def _histogram(
    name: str, unit: str, description: str, labels: tuple[str, ...], buckets: Buckets | tuple[float, ...]
) -> Instrument:
    return Instrument(name, "histogram", unit, description, labels, buckets)


def _worker_gauge(name: str, unit: str, description: str, *labels: str) -> Instrument:
    """Return a gauge of a worker's engine, with the model under both of its names where they are known."""
    names = (*_INSTANCE, "model", "model_name", *labels)
    return Instrument(name, "gauge", unit, description, names, optional=("model", "model_name"))


TABLE: dict[Family, tuple[Instrument, ...]] = {
    "frontend": (
        _counter("requests_started_total", "Requests that came in", _REQUEST),
        _counter("requests_total", "Requests that ended, by verdict", _VERDICT),
        Instrument("inflight_requests", "up_down", "", "Requests between arrival and end", _MODEL),
        Instrument("active_requests", "up_down", "", "Requests whose answer has begun", _MODEL),
        Instrument("queued_requests", "up_down", "", "Requests whose answer has not begun", _MODEL),
        Instrument("disconnected_clients", "up_down", "", "Clients that left before their answer ended", ()),
        _histogram("request_duration_seconds", "s", "From arrival to end", _MODEL, _DURATION),
        _histogram("input_sequence_tokens", "", "Tokens of a prompt", _MODEL, _INPUT),
        _histogram("output_sequence_tokens", "", "Tokens of an answer", _MODEL, Buckets(50, 32_000, 10)),
        _counter("output_tokens_total", "Tokens of all answers", _MODEL),
        _histogram(
            "time_to_first_token_seconds", "s", "From arrival to the first token", _MODEL, Buckets(0.001, 480, 18)
        ),
        _histogram("inter_token_latency_seconds", "s", "Between two tokens", _MODEL, Buckets(0.001, 2, 13)),
        _histogram("cached_tokens", "", "Tokens of a prompt found in a cache", _MODEL, _INPUT),
        _counter("refused_requests_total", "Requests and connections a limit refused", ("limit",)),
        _counter("model_rejection_total", "Requests refused because all is busy", (*_MODEL, "endpoint")),
        _counter("model_cancellation_total", "Requests given up by their client", _REQUEST),
        _counter(
            "model_migration_total",
            "Dispatches that failed, and broken answers another worker was looked for",
            (*_MODEL, "migration_type"),
        ),
        _histogram(
            "model_migration_duration_seconds",
            "s",
            "From a failure to the stream of another worker, or to giving up",
            (*_MODEL, "migration_type", "outcome"),
            (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0),
        ),
        _counter(
            "model_migration_max_seq_len_exceeded_total", "Requests that grew longer than those that migrate", _MODEL
        ),
    ),
    "component": (
        _counter("requests_total", "Requests taken", _INSTANCE),
        Instrument("inflight_requests", "up_down", "", "Requests taken and not ended", _INSTANCE),
        _histogram("request_duration_seconds", "s", "From taking to end", _INSTANCE, _DURATION),
        _counter("request_bytes_total", "Bytes of token ids in requests taken", _INSTANCE),
        _counter("response_bytes_total", "Bytes of token ids in answers", _INSTANCE),
        _counter("cancellation_total", "Requests stopped or killed by their caller", _INSTANCE),
        _counter("errors_total", "Requests that failed", (*_INSTANCE, "error_type")),
        _worker_gauge("model_load_time_seconds", "s", "How long the engine took to start"),
        _worker_gauge("drain_time_seconds", "s", "How long the engine took to drain"),
        _worker_gauge("cleanup_time_seconds", "s", "How long the engine took to clean up"),
        _worker_gauge("total_blocks", "", "KV blocks of the rank", "dp_rank"),
        _worker_gauge("gpu_cache_usage_percent", "", "Share of the rank's KV blocks in use, 0 to 1", "dp_rank"),
        _worker_gauge("kv_cache_hit_rate", "", "Share of prompt tokens found in the rank's cache, 0 to 1", "dp_rank"),
    ),
}
"""Every instrument of a family, its name without the family's prefix. Names end in their unit."""


class Metrics:
    """Records by the names of a family's table. A name, or a set of labels, that is not there raises ValueError.

    `rows` are the instruments if not those of the family. `prefix` replaces the family's own and is made a valid name;
    blank counts as none. `environment` may change buckets. Without a meter the globally configured one is used, which
    until then records nothing.
    """

    def __init__(
        self,
        meter: otel.Meter | None = None,
        *,
        family: Family = "frontend",
        prefix: str | None = None,
        rows: Sequence[Instrument] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._meter = _global_meter() if meter is None else meter
        self._prefix = sanitize_name(prefix) if prefix and prefix.strip() else PREFIXES[family]
        self._environment = environment or {}
        self._rows = {row.name: row for row in (TABLE[family] if rows is None else rows)}
        self._made: dict[str, Any] = {}
        self._checked: dict[tuple[object, ...], Any] = {}
        """Instruments by each use that was checked: the kinds it allows, the name and the names of the labels."""

    @property
    def meter(self) -> otel.Meter:
        """For other instruments beside these: `Metrics(metrics.meter, rows=...)`."""
        return self._meter

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to a counter, or moves an up_down."""
        self._instrument(_ADDED_TO, name, labels).add(value, labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._instrument(_SET, name, labels).set(value, labels)

    def record(self, name: str, value: float, **labels: str) -> None:
        """Put a value into a histogram."""
        self._instrument(_RECORDED, name, labels).record(value, labels)

    def recorder(self, name: str, **labels: str) -> Callable[[float], object]:
        """`add` or `record` for these labels, which are checked now: for what is counted again and again."""
        made = self._instrument(_ADDED_TO + _RECORDED, name, labels)
        if (bind := getattr(made, "bind", None)) is not None:  # of a meter that has something faster for it
            bound: Callable[[float], object] = bind(labels)
            return bound
        return partial(made.record if self._rows[name].kind == "histogram" else made.add, attributes=labels)

    def observe(self, name: str, look: Look) -> Callable[[], None]:
        """Report the values of `look` whenever the metrics are read. Return a function that ends this.

        A series that is not given any more is gone. Several may observe one instrument, also through other `Metrics` of
        the same meter. `look` must not wait and may be called in any thread; what it raises is logged, and so are wrong
        labels: its values are not shown then.
        """
        return self._observe(name, look, "observed")

    def observe_counter(self, name: str, look: Look) -> Callable[[], None]:
        """`observe` for a counter whose values, which only grow, are counted elsewhere; nothing is added to it then."""
        return self._observe(name, look, "counter")

    def _observe(self, name: str, look: Look, kind: Kind) -> Callable[[], None]:
        row, full_name = self._row(name), self.full_name(name)
        if row.kind != kind:
            raise ValueError(f"{name} is a {row.kind}")
        observed = _observed.setdefault(self._meter, {})
        if (observers := observed.get(full_name)) is None:
            observers = observed[full_name] = _Observers(full_name, row)
            is_counter = kind == "counter"
            make = self._meter.create_observable_counter if is_counter else self._meter.create_observable_gauge
            make(full_name, [observers], row.unit, row.description)
        return observers.add(look)

    def buckets(self, name: str) -> tuple[float, ...]:
        """Return the bucket bounds of a histogram, for callers that keep counts of their own."""
        return self._row(name).bounds(self._environment)

    def full_name(self, name: str) -> str:
        """Return the name with its prefix."""
        return f"{self._prefix}_{self._row(name).name}"

    def _row(self, name: str) -> Instrument:
        if name not in self._rows:
            raise ValueError(f"no metric {name!r} among {', '.join(self._rows)}")
        return self._rows[name]

    def _instrument(self, kinds: tuple[Kind, ...], name: str, labels: dict[str, str]) -> Any:
        use = (kinds, name, *labels)
        if (made := self._checked.get(use)) is None:
            row = self._row(name)
            if row.kind not in kinds:
                raise ValueError(f"{name} is a {row.kind}")
            row.check_labels(labels)
            if (made := self._made.get(name)) is None:
                made = self._made[name] = self._make(row)
            self._checked[use] = made
        return made

    def _make(self, row: Instrument) -> object:
        name, unit, text = self.full_name(row.name), row.unit, row.description
        if row.kind == "counter":
            return self._meter.create_counter(name, unit, text)
        if row.kind == "up_down":
            return self._meter.create_up_down_counter(name, unit, text)
        if row.kind == "gauge":
            return self._meter.create_gauge(name, unit, text)
        bounds = row.bounds(self._environment)
        return self._meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)


@define(eq=False)
class _Observers:
    """All callbacks of one instrument. A meter takes callbacks only with the instrument, and never removes them."""

    name: str
    row: Instrument
    _looks: dict[object, Look] = field(factory=dict)

    def add(self, look: Look) -> Callable[[], None]:
        place = object()
        self._looks[place] = look

        def forget() -> None:
            self._looks.pop(place, None)

        return forget

    def __call__(self, options: otel.CallbackOptions) -> Iterable[otel.Observation]:
        seen: list[otel.Observation] = []
        for look in list(self._looks.values()):
            try:
                values = list(look())
                for labels, _ in values:
                    self.row.check_labels(labels)
                seen += [otel.Observation(value, dict(labels)) for labels, value in values]
            except Exception:
                _log.exception("%s cannot be observed", self.name)
        return seen


_observed: WeakKeyDictionary[otel.Meter, dict[str, _Observers]] = WeakKeyDictionary()
"""By meter and full name."""


@cache
def _global_meter() -> otel.Meter:
    """Return one meter for all: until a provider is configured, every call of the API returns a new one."""
    return otel.get_meter("penstock")


def component_name(name: str) -> str:
    """Return the full name of a worker's own metric: `test metric` is `dynamo_component_test_metric`."""
    return f"{PREFIXES['component']}_{sanitize_name(name)}"


def sanitize_name(name: str) -> str:
    """Return the name with only letters, digits, `_` and `:`, no digit first. Raise InvalidArgument if none remain."""
    return _sanitized(re.sub(r"[^A-Za-z0-9_:]", "_", name), name, "metric name")


def sanitize_label(name: str) -> str:
    """Return a valid label name: as a metric's but without `:` and the reserved `__` before it."""
    cleaned = re.sub(r"[^A-Za-z0-9_]", "_", name)
    while cleaned.startswith("__"):
        cleaned = cleaned.removeprefix("__")
    return _sanitized(cleaned, name, "label")


def _sanitized(cleaned: str, name: str, what: str) -> str:
    if not cleaned.strip("_"):
        raise InvalidArgument(f"{name!r} leaves nothing of a {what}", field=what)
    return f"_{cleaned}" if cleaned[0].isdigit() else cleaned
