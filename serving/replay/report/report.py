"""Report: all figures of a replay, as values, as JSON and as a table.

In JSON the figures stand at the top level: `mean_ttft_ms`, `p99_ttft_ms`, `prefix_cache_reused_ratio`. The same replay
gives the same bytes: fields have one order, and time on the wall is in it only if somebody put it there.

Source: dynamo lib/mocker/src/replay/collector.rs, TraceSimulationReport. Other than there, load balance, queue,
migrations and a time series are part of it.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
from attrs import frozen

from pipeline import InvalidArgument, wire

from ..samples import Role, Status
from .distribution import STATISTICS, Distribution
from .series import Series

_UNIT = "unit"
INTERRUPTED = "interrupted"
"""The setting that says so of a replay that somebody ended early."""
_NEWER: dict[str, Any] = {"wall_time_ms": None, "errors": []}
"""What a report may lack, and what it then says."""
_NOT_FIGURES = ("samples", "percentiles")
"""What is written after the figures of a distribution, without a unit."""


@frozen
class Balance:
    """How evenly workers share: the greatest over the mean, and the deviation over the mean. Even is 1 and 0."""

    max_over_mean: float = 1.0
    cv: float = 0.0

    @classmethod
    def of(cls, shares: list[float]) -> Balance:
        spread = Distribution.of(shares)
        return cls(spread.max / spread.mean, spread.std / spread.mean) if spread.mean else cls()


@frozen
class WorkerReport:
    """One worker. Requests and tokens are those of requests that ended there; `hit_rate` is None without a prompt."""

    worker: int
    role: Role
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    mean_running: float
    preemptions: int
    worker_seconds: float


@frozen
class ErrorReport:
    """Requests that ended with errors of one type, and what the first of them said."""

    type: str
    requests: int
    example: str


@frozen
class RequestReport:
    """One request, as far as it came."""

    name: str
    session_id: str | None
    turn_index: int | None
    status: Status
    arrival_time_ms: float
    first_token_ms: float | None
    last_token_ms: float | None
    terminal_time_ms: float | None
    ttft_ms: float | None
    ttst_ms: float | None
    tpot_ms: float | None
    e2e_latency_ms: float | None
    queue_wait_ms: float | None
    prefill_wait_ms: float | None
    prefill_time_ms: float | None
    kv_transfer_ms: float | None
    input_length: int
    requested_output_length: int | None
    output_length: int
    reused_input_tokens: int
    worker: int | None
    prefill_worker: int | None
    migrations: int
    error: str | None = None

    def to_json(self) -> bytes:
        """One line, without its end."""
        return wire.to_json(_written_out(self))


@frozen
class Goodput:
    """What counts only requests that kept the limits they were given."""

    completed_requests: int
    request_throughput_rps: float
    output_throughput_tok_s: float


def _figures(unit: str = "_ms") -> Any:
    return attrs.field(factory=Distribution, metadata={_UNIT: unit})


@frozen(kw_only=True)
class Report:
    """The figures of a replay. Latencies are in ms and of completed requests; a rate is a second of replayed time."""

    settings: dict[str, Any] = attrs.field(factory=dict)
    """What was replayed and how, as whoever ran it says."""
    num_requests: int = 0
    completed_requests: int = 0
    rejected_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    unfinished_requests: int = 0
    unsent_requests: int = 0
    """Never sent, for a turn before them failed."""
    skipped_lines: int = 0
    errors: list[ErrorReport] = attrs.field(factory=list)
    """What requests were rejected for or failed with, the most frequent first."""
    total_input_tokens: int = 0
    total_output_tokens: int = 0
    processed_tokens: int = 0
    duration_ms: float = 0.0
    """Until the last request ended."""
    wall_time_ms: float | None = None
    request_throughput_rps: float = 0.0
    input_throughput_tok_s: float = 0.0
    output_throughput_tok_s: float = 0.0
    total_throughput_tok_s: float = 0.0
    prefix_cache_reused_ratio: float = 0.0
    first_admission_prefix_cache_reused_ratio: float = 0.0
    ttft: Distribution = _figures()
    ttst: Distribution = _figures()
    tpot: Distribution = _figures()
    itl: Distribution = _figures()
    e2e_latency: Distribution = _figures()
    output_token_throughput_per_user: Distribution = _figures("")
    queue_wait: Distribution = _figures()
    """Until the router chose a worker."""
    prefill_wait: Distribution = _figures()
    """Until a worker began with the prompt, where workers say."""
    prefill_time: Distribution = _figures()
    kv_transfer: Distribution = _figures()
    max_router_queue_depth: int = 0
    preemptions: int = 0
    migrations: int = 0
    migrated_requests: int = 0
    worker_seconds: float = 0.0
    prefill_worker_seconds: float = 0.0
    decode_worker_seconds: float = 0.0
    gpu_hours: float = 0.0
    request_balance: Balance = attrs.field(factory=Balance)
    """Of the requests each answering worker ended."""
    token_balance: Balance = attrs.field(factory=Balance)
    """Of the tokens each of them computed: prompts without what was cached, and answers."""
    load_balance: Balance = attrs.field(factory=Balance)
    """Of the requests each of them had on average."""
    goodput: Goodput | None = None
    workers: list[WorkerReport] = attrs.field(factory=list)
    series: Series | None = None
    per_request: list[RequestReport] | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody ended the replay before its load: the figures are of what was done until then."""
        return bool(self.settings.get(INTERRUPTED))

    def to_plain(self) -> dict[str, Any]:
        """The figures by their names, as in JSON."""
        plain: dict[str, Any] = {}
        for attribute in attrs.fields(Report):
            value = getattr(self, attribute.name)
            if isinstance(value, Distribution):
                unit = attribute.metadata[_UNIT]
                plain |= {f"{figure}_{attribute.name}{unit}": getattr(value, figure) for figure in STATISTICS}
                plain |= {f"{attribute.name}_{part}": getattr(value, part) for part in _NOT_FIGURES}
            elif isinstance(value, Balance | Goodput):
                plain |= {f"{attribute.name}_{name}": part for name, part in wire.to_plain(value).items()}
            elif value is not None or attribute.name not in ("wall_time_ms", "goodput"):
                plain[attribute.name] = _written_out(value)
        return plain

    def value(self, name: str) -> Any:
        """One figure by its name in JSON, such as `p99_ttft_ms`. Raises InvalidArgument for one it does not have."""
        plain = self.to_plain()
        if name not in plain:
            raise InvalidArgument(f"a report has no figure {name!r}", field=name)
        return plain[name]

    def to_json(self) -> bytes:
        """A line for each figure, so that two reports can be compared by their lines."""
        lines = [f"{wire.to_json(key).decode()}: {wire.to_json(value).decode()}" for key, value in self._named()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Report:
        """The report of a JSON text. Unknown figures are passed over.

        Raises InvalidArgument for what is no JSON object, and for a figure that is missing or of the wrong kind.
        """
        plain = wire.from_json(data, dict[str, Any])
        return cls(**{attribute.name: _read(attribute, plain) for attribute in attrs.fields(cls)})

    def _named(self) -> list[tuple[str, Any]]:
        return list(self.to_plain().items())


def _written_out(value: Any) -> Any:
    """As plain values, with what is None said to be."""
    if attrs.has(type(value)):
        return {one.name: _written_out(getattr(value, one.name)) for one in attrs.fields(type(value))}
    if isinstance(value, list) and value and attrs.has(type(value[0])):
        return [_written_out(item) for item in value]
    return value


def _read(attribute: attrs.Attribute[Any], plain: dict[str, Any]) -> Any:
    name = attribute.name
    kind = _KINDS[name]
    if kind is Distribution:
        unit = attribute.metadata[_UNIT]
        parts = {figure: _need(plain, f"{figure}_{name}{unit}") for figure in STATISTICS}
        parts |= {part: _need(plain, f"{name}_{part}") for part in _NOT_FIGURES}
        return _structured(parts, kind, name)
    if kind is Balance:
        return _structured({part.name: _need(plain, f"{name}_{part.name}") for part in attrs.fields(kind)}, kind, name)
    if kind == Goodput | None:
        parts = {part.name: plain.get(f"{name}_{part.name}") for part in attrs.fields(Goodput)}
        return None if set(parts.values()) == {None} else _structured(parts, Goodput, name)
    if name in _NEWER:
        return _structured(plain.get(name, _NEWER[name]), kind, name)
    return _structured(_need(plain, name), kind, name)


def _need(plain: dict[str, Any], key: str) -> Any:
    if key not in plain:
        raise InvalidArgument(f"the report has no {key}", field=key)
    return plain[key]


def _structured(value: Any, kind: Any, name: str) -> Any:
    try:
        return wire.from_plain(value, kind)
    except InvalidArgument as error:
        joint = "." if error.field and not error.field.startswith("[") else ""
        place = f"{name}{joint}{error.field}"
        raise InvalidArgument(f"{place}: {error}", field=place, cause=error) from error


_KINDS = cast(dict[str, Any], {one.name: one.type for one in attrs.fields(attrs.resolve_types(Report))})
