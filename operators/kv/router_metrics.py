"""RouterMetrics: what a KV router counts of the requests it routes.

Source: dynamo lib/llm/src/kv_router/metrics.rs, RouterRequestMetrics. Other than there queries are not counted as
traffic, and the time between tokens is measured whether or not output blocks are tracked.
"""

from __future__ import annotations

from typing import Any

from pipeline.metrics import Buckets, Instrument, Metrics
from pipeline.protocols import RequestTracker

PREFIX = "dynamo_component_router"
_LABELS = ("dynamo_namespace", "dynamo_component", "router_id")

ROUTER_INSTRUMENTS = (
    Instrument("requests_total", "counter", "", "Requests routed whose stream is over", _LABELS),
    Instrument("requests_started_total", "counter", "", "Requests booked on a worker", _LABELS),
    Instrument(
        "time_to_first_token_seconds",
        "histogram",
        "s",
        "From arrival to the first token",
        _LABELS,
        Buckets(0.001, 480, 18),
    ),
    Instrument(
        "inter_token_latency_seconds",
        "histogram",
        "s",
        "Mean time between tokens, at each block of output",
        _LABELS,
        Buckets(0.001, 2, 13),
    ),
    Instrument(
        "input_sequence_tokens", "histogram", "", "Tokens of a routed prompt", _LABELS, Buckets(50, 128_000, 12)
    ),
    Instrument("output_sequence_tokens", "histogram", "", "Tokens of an answer", _LABELS, Buckets(50, 32_000, 10)),
    Instrument(
        "kv_hit_rate",
        "histogram",
        "",
        "Share of a prompt's blocks that its worker had, 0 to 1",
        _LABELS,
        tuple(step / 20 for step in range(21)),
    ),
)


class RouterMetrics(Metrics):
    """The instruments of one router. The counters are there at zero from the start.

    Without a meter the globally configured one is used.
    """

    def __init__(self, meter: Any = None, *, namespace: str = "", component: str = "", router_id: str = "") -> None:
        super().__init__(meter, family="component", prefix=PREFIX)
        self._rows = {row.name: row for row in ROUTER_INSTRUMENTS}
        self._labels = {row.name: (frozenset(row.labels), frozenset(row.optional)) for row in ROUTER_INSTRUMENTS}
        self._own = {"dynamo_namespace": namespace, "dynamo_component": component, "router_id": router_id}
        for name in ("requests_total", "requests_started_total"):
            self.add(name, 0, **self._own)

    def routed(self, input_tokens: int, tracker: RequestTracker | None) -> None:
        """A request was booked."""
        self.add("requests_started_total", 1, **self._own)
        self.record("input_sequence_tokens", input_tokens, **self._own)
        if tracker is not None and (rate := tracker.kv_hit_rate) is not None:
            self.record("kv_hit_rate", rate, **self._own)

    def first_token(self, tracker: RequestTracker) -> None:
        """Its first token is there."""
        if (ttft_ms := tracker.ttft_ms) is not None:
            self.record("time_to_first_token_seconds", ttft_ms / 1000, **self._own)

    def block_of_output(self, tracker: RequestTracker) -> None:
        """Its output filled another block."""
        if (itl_ms := tracker.avg_itl_ms) is not None:
            self.record("inter_token_latency_seconds", itl_ms / 1000, **self._own)

    def ended(self, output_tokens: int) -> None:
        """Its stream is over, however."""
        self.record("output_sequence_tokens", output_tokens, **self._own)
        self.add("requests_total", 1, **self._own)
