"""Report: all figures of a replay, as values and as JSON.

In JSON the figures stand at the top level: `mean_ttft_ms`, `p99_ttft_ms`, `prefix_cache_reused_ratio`. The same replay
gives the same bytes: fields have one order, and wall time is only in it if `wall_time_ms` is set.

Source: dynamo lib/mocker/src/replay/collector.rs, TraceSimulationReport. Other than there, load balance, queue,
migrations and a time series are part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import frozen

from pipeline import InvalidArgument, wire

from ..samples import Role, Status
from .distribution import STATISTICS, Distribution
from .series import Series

_UNIT = "unit"
INTERRUPTED = "interrupted"
"""The setting of a replay that was ended before its load."""
_NEWER: dict[str, Any] = {"wall_time_ms": None, "errors": []}
"""Figures that older reports lack, with their values then."""
_NOT_FIGURES = ("samples", "percentiles")
"""Parts of a distribution in JSON that have no unit."""


@frozen
class Balance:
    """How evenly the workers share something."""

    max_over_mean: float = 1.0
    """1 if they share evenly."""
    cv: float = 0.0
    """Coefficient of variation: deviation over mean, 0 if they share evenly."""

    @classmethod
    def of(cls, shares: list[float]) -> Balance:
        spread = Distribution.of(shares)
        return cls(spread.max / spread.mean, spread.std / spread.mean) if spread.mean else cls()


@frozen
class WorkerReport:
    """The figures of one worker. Requests and tokens are those of requests that completed there."""

    worker: int
    role: Role
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    """Cached part of its prompts; None without a prompt."""
    mean_running: float
    """Requests at a time, on average over the replay."""
    preemptions: int
    worker_seconds: float
    """How long it existed; 0 if it is known from answers only."""


@frozen
class ErrorReport:
    """Requests that ended with errors of one type."""

    type: str
    requests: int
    example: str
    """The message of the first one."""


@frozen
class RequestReport:
    """The figures of one request; None for what it did not reach. Times are since the start of the replay."""

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
        """Return one line without a line break."""
        return wire.to_json(_written_out(self))


@frozen
class Goodput:
    """Figures of the requests within the limits."""

    completed_requests: int
    request_throughput_rps: float
    output_throughput_tok_s: float


def _figures(unit: str = "_ms") -> Any:
    return attrs.field(factory=Distribution, metadata={_UNIT: unit})


@frozen(kw_only=True)
class Report:
    """The figures of a replay. Latencies are in ms and of completed requests; rates are per second of replayed time."""

    settings: dict[str, Any] = attrs.field(factory=dict)
    """What was replayed and how, from the caller."""
    num_requests: int = 0
    completed_requests: int = 0
    rejected_requests: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0
    unfinished_requests: int = 0
    unsent_requests: int = 0
    """Never sent, because a turn before them failed."""
    skipped_lines: int = 0
    errors: list[ErrorReport] = attrs.field(factory=list)
    """Errors of rejected and failed requests, the most frequent first."""
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
    """Until a worker began with the prompt, where workers report it."""
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
    """Of the completed requests of each decode worker."""
    token_balance: Balance = attrs.field(factory=Balance)
    """Of the tokens that each of them computed: uncached prompt tokens and answers."""
    load_balance: Balance = attrs.field(factory=Balance)
    """Of the requests that each of them had at a time, on average."""
    goodput: Goodput | None = None
    workers: list[WorkerReport] = attrs.field(factory=list)
    series: Series | None = None
    per_request: list[RequestReport] | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the replay was ended before its load; the figures cover the requests until then."""
        return bool(self.settings.get(INTERRUPTED))

    def to_plain(self, left_out: Collection[str] = ()) -> dict[str, Any]:
        """Return the figures by their names in JSON, without those of the fields in `left_out`."""
        plain: dict[str, Any] = {}
        for name in (one for one in _KINDS if one not in left_out):
            value, keys = getattr(self, name), _KEYS[name]
            if keys and value is not None:
                plain |= {key: getattr(value, part) for part, key in keys.items()}
            elif value is not None or name not in ("wall_time_ms", "goodput"):
                plain[name] = _written_out(value)
        return plain

    @cached_property
    def figures(self) -> Mapping[str, Any]:
        """The figures by their names in JSON, without series, workers, requests and percentiles."""
        plain = self.to_plain(("series", "workers", "per_request"))
        return {name: one for name, one in plain.items() if not name.endswith("_percentiles")}

    def value(self, name: str) -> Any:
        """Return one figure by its name in JSON, such as `p99_ttft_ms`. Raise InvalidArgument for an unknown one."""
        plain = self.to_plain()
        if name not in plain:
            raise InvalidArgument(f"a report has no figure {name!r}", field=name)
        return plain[name]

    def to_json(self) -> bytes:
        """Return JSON with a line for each figure, so that two reports can be compared line by line."""
        lines = [
            f"{wire.to_json(key).decode()}: {wire.to_json(value).decode()}" for key, value in self.to_plain().items()
        ]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Report:
        """Return the report of a JSON text. Unknown figures are ignored.

        Raise InvalidArgument unless it is a JSON object, and for a figure that is missing or of the wrong type.
        """
        plain = _NEWER | wire.from_json(data, dict[str, Any])
        return wire.from_plain({name: _nested(name, keys, plain) for name, keys in _KEYS.items()}, cls)


def read_reports(paths: Sequence[Path]) -> dict[str, Report]:
    """Return the reports of the files, named after them; by the whole path if two files have one name.

    Raise InvalidArgument for fewer than two, one given twice, and a file that is no report or cannot be read.
    """
    stems = [path.stem for path in paths]
    named = {path.stem if stems.count(path.stem) == 1 else str(path): _read(path) for path in paths}
    if len(named) < max(2, len(paths)):
        what = "needs two reports at least" if len(paths) < 2 else "a report is given twice"
        raise InvalidArgument(what, field="reports")
    return named


def _read(path: Path) -> Report:
    try:
        return Report.from_json(path.read_bytes())
    except InvalidArgument as error:
        raise InvalidArgument(f"{path} is no report: {error}", cause=error) from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", cause=error) from error


def _written_out(value: Any) -> Any:
    """Return plain values, with None where a field is None."""
    if attrs.has(type(value)):
        return {one.name: _written_out(getattr(value, one.name)) for one in attrs.fields(type(value))}
    if isinstance(value, list) and value and attrs.has(type(value[0])):
        return [_written_out(item) for item in value]
    return value


def _keys(field: attrs.Attribute[Any], kind: Any) -> dict[str, str]:
    """Return the keys in JSON of the parts of a field that has some."""
    if kind is Distribution:
        unit = field.metadata[_UNIT]
        keys = {figure: f"{figure}_{field.name}{unit}" for figure in STATISTICS}
        return keys | {part: f"{field.name}_{part}" for part in _NOT_FIGURES}
    parts = {Balance: Balance, Goodput | None: Goodput}.get(kind)
    return {part.name: f"{field.name}_{part.name}" for part in attrs.fields(parts)} if parts else {}


def _nested(name: str, keys: Mapping[str, str], plain: Mapping[str, Any]) -> Any:
    """Return the plain value of a field. Raise InvalidArgument if a figure of it is missing."""
    if name == "goodput" and not any(key in plain for key in keys.values()):
        return None
    for key in keys.values() or (name,):
        if key not in plain:
            raise InvalidArgument(f"the report has no {key}", field=key)
    return {part: plain[key] for part, key in keys.items()} if keys else plain[name]


_KINDS = cast(dict[str, Any], {one.name: one.type for one in attrs.fields(attrs.resolve_types(Report))})
_KEYS = {one.name: _keys(one, _KINDS[one.name]) for one in attrs.fields(Report)}
"""By field: the keys in JSON of its parts."""
