"""RouterMetrics: what a KV router counts of the requests it routes and refuses, and of KV events.

What is in flight and waits in it is in `gauges.py`.

Source: dynamo lib/llm/src/kv_router/metrics.rs. Other than there queries are not counted as traffic, the time between
tokens is measured whether or not output blocks are tracked, and prefixes given up are counted of all types of workers.

RoutingSteps: how long each step of a search for a worker takes, with a span around it if the request is traced.

Source: dynamo lib/llm/src/kv_router.rs and its metrics.rs, RoutingOverheadMetrics. Other than there a step that is not
needed (nothing is hashed without an index and without tracking) is not observed instead of observed as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from attrs import define

from pipeline import Context
from pipeline.protocols import RequestPhase, RequestTracker
from pipeline.telemetry import Buckets, Instrument, Metrics, OpenSpan

from .decision import Decision
from .errors import LimitKind, QueueRejected
from .selection import WorkerType
from .types import DEFAULT_CLASS

Step = Literal["block_hashing", "seq_hashing", "indexer_find_matches", "scheduling"]
Recorders = Mapping[str, Callable[[float], object]]
"""By name of the step or figure."""

SPANS: Mapping[Step, str] = {
    "block_hashing": "kv_router.compute_block_hashes",
    "seq_hashing": "kv_router.compute_seq_hashes",
    "scheduling": "kv_router.schedule",
}

OVERHEAD_PREFIX = "dynamo_router_overhead"
_COMPUTE_MS = tuple(2**step / 1000 for step in range(15))
_WAIT_MS = tuple(3**step / 100 for step in range(17))


def _overhead(step: str, description: str, bounds: tuple[float, ...]) -> Instrument:
    return Instrument(f"{step}_ms", "histogram", "", description, ("router_id",), bounds)


OVERHEAD_INSTRUMENTS = (
    _overhead("block_hashing", "Milliseconds to hash a prompt's blocks", _COMPUTE_MS),
    _overhead("seq_hashing", "Milliseconds to chain the hashes of a prompt's blocks", _COMPUTE_MS),
    _overhead("indexer_find_matches", "Milliseconds to look up who holds a prompt's blocks", _WAIT_MS),
    _overhead("scheduling", "Milliseconds to choose and book a worker, waiting for room included", _WAIT_MS),
    _overhead("total", "Milliseconds from asking for a worker to having one", _WAIT_MS),
)


class RoutingSteps:
    """The steps of one search, timed and traced; a context manager around the search.

        with steps:                           # a span around the search; those of the steps hang below it
            steps.begin("block_hashing") ...  # ends the step before
            steps.end()

    A step that fails is not timed, nor is the search then. A request that is not traced has no spans.
    """

    __slots__ = (
        *("_began_s", "_last_s", "_now_s", "_record_ms", "_refused", "_request"),
        *("_search", "_span", "_step", "_tracer"),
    )

    def __init__(
        self,
        now_s: Callable[[], float],
        record_ms: Recorders | None = None,
        *,
        request: Context[Any] | None = None,
        tracer: Any = None,
        refused: Callable[[QueueRejected], object] | None = None,
    ) -> None:
        self._now_s, self._record_ms, self._refused = now_s, record_ms, refused
        self._request = None if request is None or request.trace is None else request
        self._tracer = tracer
        self._step: Step | None = None
        self._span: OpenSpan | None = None
        self._search: OpenSpan | None = None
        self._began_s = self._last_s = 0.0 if record_ms is None else now_s()

    def begin(self, step: Step | None) -> None:
        """End the step before, and begin this one, if it is one."""
        if self._record_ms is None and self._request is None:
            return
        before, self._step = self._step, step
        if before is not None and self._record_ms is not None:
            began_s, self._last_s = self._last_s, self._now_s()
            self._record_ms[before](1000 * (self._last_s - began_s))
        if self._request is None:
            return
        span, self._span = self._span, None
        if span is not None:
            span.end()
        if step is not None and step in SPANS:
            above = self._request if self._search is None else self._search.context
            self._span = OpenSpan(above, SPANS[step], tracer=self._tracer)

    def end(self) -> None:
        """End the last step, and the search."""
        self.begin(None)
        if self._record_ms is not None:
            self._record_ms["total"](1000 * (self._last_s - self._began_s))

    def __enter__(self) -> Self:
        if self._request is not None:
            self._search = OpenSpan(self._request, "kv_router.select_worker", tracer=self._tracer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._refused is not None and isinstance(error, QueueRejected):
            self._refused(error)
        for span in (self._span, self._search):
            if span is not None:
                if error is not None:
                    span.fails(error)
                span.end()


UNTIMED = RoutingSteps(lambda: 0.0)
"""For a search that is neither timed nor traced; it keeps nothing and may be shared."""


PREFIX = "dynamo_component_router"
_PLACE = ("dynamo_namespace", "dynamo_component")
_LABELS = (*_PLACE, "router_id")
_OF_TYPE = (*_LABELS, "worker_type")
_SHARES = tuple(step / 20 for step in range(21))


def _histogram(name: str, unit: str, description: str, buckets: Buckets | tuple[float, ...]) -> Instrument:
    return Instrument(name, "histogram", unit, description, _LABELS, buckets)


ROUTER_INSTRUMENTS = (
    Instrument("requests_total", "counter", "", "Requests routed whose stream is over", _LABELS),
    Instrument("requests_started_total", "counter", "", "Requests booked on a worker", _LABELS),
    _histogram("time_to_first_token_seconds", "s", "From arrival to the first token", Buckets(0.001, 480, 18)),
    _histogram(
        "inter_token_latency_seconds", "s", "Mean time between tokens, at each block of output", Buckets(0.001, 2, 13)
    ),
    _histogram("input_sequence_tokens", "", "Tokens of a routed prompt", Buckets(50, 128_000, 12)),
    _histogram("output_sequence_tokens", "", "Tokens of an answer", Buckets(50, 32_000, 10)),
    _histogram("kv_hit_rate", "", "Share of a prompt's blocks that its worker had, 0 to 1", _SHARES),
    _histogram(
        "best_available_overlap",
        "",
        "Share of a prompt's blocks that the worker with the most of them had, of those that could take it, 0 to 1",
        _SHARES,
    ),
    _histogram(
        "kv_transfer_estimated_latency_seconds",
        "s",
        "From the end of a prefill to the first token of its decode",
        Buckets(0.001, 10, 15),
    ),
    Instrument(
        "non_max_overlap_selections_total",
        "counter",
        "",
        "Requests sent to a worker although another that could take them had more of the prompt",
        _OF_TYPE,
    ),
    Instrument(
        "overlap_blocks_lost",
        "histogram",
        "",
        "How many blocks more the other worker had",
        _OF_TYPE,
        tuple(2**step / 4 for step in range(16)),
    ),
)

QUEUE_INSTRUMENTS = (
    Instrument(
        "router_queue_backpressure_total",
        "counter",
        "",
        "Requests refused because too many wait, by the limit that was reached",
        ("model", "worker_type", "policy_class", "reason"),
    ),
)

EVENT_INSTRUMENTS = (
    # It only grows, but a counter would be shown with `_total` behind its name, which the original's does not have.
    Instrument(
        "kv_cache_events_applied",
        "up_down",
        "",
        "KV events taken into the index, by what became of them",
        (*_PLACE, "event_type", "status"),
    ),
)

REASONS: Mapping[LimitKind, str] = {
    "requests": "request_limit",
    "raw_isl_tokens": "raw_isl_token_limit",
    "cached_tokens": "cached_token_limit",
}
EVENT_TYPES = ("stored", "removed", "cleared")


class RouterMetrics:
    """The instruments of one router. The counters are there at zero from the start.

    Without a meter the globally configured one is used. `policy_classes` are the names of the router's queue classes.
    `perf_s` is a clock for what the steps of a search take, as `time.perf_counter`: without one that is the loop's,
    which may know milliseconds only.
    """

    def __init__(
        self,
        meter: Any = None,
        *,
        namespace: str = "",
        component: str = "",
        router_id: str = "",
        model: str = "",
        worker_type: WorkerType = "aggregated",
        policy_classes: Iterable[str] = (DEFAULT_CLASS,),
        perf_s: Callable[[], float] | None = None,
    ) -> None:
        place = {"dynamo_namespace": namespace, "dynamo_component": component}
        own, typed = {**place, "router_id": router_id}, {"worker_type": shown_type(worker_type)}
        router = Metrics(meter, prefix=PREFIX, rows=ROUTER_INSTRUMENTS)
        overhead = Metrics(meter, prefix=OVERHEAD_PREFIX, rows=OVERHEAD_INSTRUMENTS)
        self.record: Recorders = {
            row.name: router.recorder(row.name, **own, **(typed if row.labels is _OF_TYPE else {}))
            for row in ROUTER_INSTRUMENTS
        }
        self._overhead_ms: Recorders = {
            row.name.removesuffix("_ms"): overhead.recorder(row.name, router_id=router_id)
            for row in OVERHEAD_INSTRUMENTS
        }
        self._perf_s = perf_s
        self._queue, self._queue_labels = Metrics(meter, rows=QUEUE_INSTRUMENTS), {"model": model, **typed}
        self._events, self._place = Metrics(meter, family="component", rows=EVENT_INSTRUMENTS), place
        self._applied: dict[tuple[str, str], Callable[[float], object]] = {}
        for row in ROUTER_INSTRUMENTS:
            if row.kind == "counter":
                self.record[row.name](0)
        for event_type in EVENT_TYPES:
            self._event_recorder(event_type, "ok")(0)
        for policy_class in policy_classes:
            for reason in REASONS.values():
                self._add_refused(policy_class, reason, 0)

    def steps(self, now_s: Callable[[], float], request: Context[Any], tracer: Any = None) -> RoutingSteps:
        """Time a search for a worker; its spans hang below the request's."""
        clock = self._perf_s or now_s
        return RoutingSteps(clock, self._overhead_ms, request=request, tracer=tracer, refused=self.refused)

    def routed(self, input_tokens: int, tracker: RequestTracker | None, decision: Decision) -> None:
        """A booked request is about to be sent."""
        record, best = self.record, decision.best_available_overlap_blocks
        record["requests_started_total"](1)
        record["input_sequence_tokens"](input_tokens)
        if tracker is not None:
            tracker.record_prefill_start()
            if (rate := tracker.kv_hit_rate) is not None:
                record["kv_hit_rate"](rate)
                record["best_available_overlap"](best / decision.prompt.blocks)
        if best > decision.overlap_blocks:
            record["non_max_overlap_selections_total"](1)
            record["overlap_blocks_lost"](best - decision.overlap_blocks)

    def refused(self, error: QueueRejected) -> None:
        """A request may not even wait."""
        self._add_refused(error.policy_class, REASONS[error.limit_kind], 1)

    def event_applied(self, event_type: str, status: str) -> None:
        """A KV event was taken into the index, or not: give this to the KvRouter as `counted`."""
        self._event_recorder(event_type, status)(1)

    def _add_refused(self, policy_class: str, reason: str, count: int) -> None:
        labels = {**self._queue_labels, "policy_class": policy_class, "reason": reason}
        self._queue.add("router_queue_backpressure_total", count, **labels)

    def _event_recorder(self, event_type: str, status: str) -> Callable[[float], object]:
        if (known := self._applied.get((event_type, status))) is None:
            known = self._applied[event_type, status] = self._events.recorder(
                "kv_cache_events_applied", **self._place, event_type=event_type, status=status
            )
        return known


@define
class RequestMeter:
    """What one dispatched request reports: to its tracker, if it has one, and to the router's instruments.

    `phase` is that of this dispatch: the tracker goes on to the next one while a prefill still runs. The length of the
    answer and its end are recorded by its decode only, however late the prefill ends.
    """

    metrics: RouterMetrics
    tracker: RequestTracker | None
    phase: RequestPhase

    def first_token(self) -> None:
        """The first token arrived. To a decode it shows that the prefill's blocks are there."""
        if (tracker := self.tracker) is None:
            return
        record = self.metrics.record
        tracker.record_first_token()
        if (ttft_ms := tracker.ttft_ms) is not None:
            record["time_to_first_token_seconds"](ttft_ms / 1000)
        if self.phase is RequestPhase.PREFILL:
            tracker.record_prefill_complete()
        elif self.phase is RequestPhase.DECODE and tracker.record_decode_first_token():
            transfer_s = tracker.kv_transfer_estimated_latency_s
            if transfer_s is not None:  # another worker prefilled
                record["kv_transfer_estimated_latency_seconds"](transfer_s)

    def block_filled(self, output_tokens: int) -> None:
        """The output filled another block."""
        if (tracker := self.tracker) is not None and self.phase is not RequestPhase.PREFILL:
            tracker.record_osl(output_tokens)
            tracker.record_finish()
            if (itl_ms := tracker.avg_itl_ms) is not None:
                self.metrics.record["inter_token_latency_seconds"](itl_ms / 1000)

    def ended(self, output_tokens: int) -> None:
        """The stream ended, in any way. May be called in a plain callback of the loop."""
        self.metrics.record["output_sequence_tokens"](output_tokens)
        self.metrics.record["requests_total"](1)

    def finished(self, output_tokens: int) -> None:
        """The stream ended; record when, by the loop's clock."""
        if (tracker := self.tracker) is not None and self.phase is not RequestPhase.PREFILL:
            tracker.record_finish()
            tracker.record_osl(output_tokens)


def shown_type(worker_type: WorkerType) -> str:
    """The label for a type of worker: one that does both is shown as one that decodes."""
    return "prefill" if worker_type == "prefill" else "decode"


@contextmanager
def span_below(
    request: Context[Any], name: str, tracer: Any, attributes: Mapping[str, Any] | None = None
) -> Iterator[Context[Any]]:
    """Put a span around the block, if the request is traced; yield the request as it is below the span."""
    if request.trace is None:
        yield request
        return
    span = OpenSpan(request, name, tracer=tracer, attributes=attributes)
    try:
        yield span.context
    except BaseException as error:
        span.fails(error)
        raise
    finally:
        span.end()
