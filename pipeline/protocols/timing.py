"""Where the time of a request went and which workers had it.

Source: dynamo lib/llm/src/protocols/common/timing.rs, TimingInfo, WorkerIdInfo, RoutingData, RequestPhase.

LLMMetricAnnotation: token counts and latencies of a request, carried as an event beside its output.

Source: dynamo lib/llm/src/preprocessor.rs, LLMMetricAnnotation. Latencies are plain seconds here.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import define, fields, frozen

from .field_rules import U32, U64, skip


@define(slots=True)
class TraceLink:
    """The generate span of the worker before this one: 32 and 16 hex digits. Written by the framework only."""

    trace_id: str
    span_id: str


class RequestPhase(StrEnum):
    """The half of a request that a worker computes; aggregated is both."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


def worker_label(worker_id: int) -> str:
    """Return the id as metrics, logs, answer headers and instance names show it: hex digits without a prefix."""
    return f"{worker_id:x}"


@frozen
class RouterChoice:
    """Why a router chose a worker. Only the router `kv` sets all fields."""

    rule: str
    """The router's mode; for `kv` its rule of placement."""
    candidates: int | None = None
    """Workers compared."""
    overlap_blocks: float | None = None
    """Blocks of the prompt that the worker had."""
    best_overlap_blocks: float | None = None
    """Most blocks that a candidate had."""
    prompt_blocks: int | None = None
    """Blocks of the prompt."""
    cost: float | None = None
    """The worker's cost, in the unit of the rule."""


@define(slots=True)
class RouterDecision:
    """Where a request went, and why."""

    worker: RouterChoice | None = None
    """Choice of the worker."""
    prefill: RouterChoice | None = None
    """Choice of the prefill worker, if it is another one."""
    attempts: U32 | None = None
    """Workers that the request was sent to, one after the other."""


@define(slots=True)
class WorkerIdInfo:
    """The workers of a request and their data parallel ranks."""

    prefill_worker_id: U64 | None = None
    prefill_dp_rank: U32 | None = None
    decode_worker_id: U64 | None = None
    decode_dp_rank: U32 | None = None


@define(slots=True)
class TimingInfo:
    """Durations of a request."""

    request_received_ms: U64
    """Milliseconds since the epoch."""
    prefill_wait_time_ms: float | None = None
    """From receipt to the start of prefill."""
    prefill_time_ms: float | None = None
    """From the start of prefill to the first token."""
    ttft_ms: float | None = None
    """From receipt to the first token."""
    total_time_ms: float | None = None
    """From receipt to the end."""
    kv_hit_rate: float | None = None
    """Share of the prompt's blocks that the worker had."""
    router_queue_depth: U64 | None = None
    """Requests in the router's queue when this one was routed."""
    kv_transfer_estimated_latency_ms: float | None = None

    def fill_gaps(self, other: TimingInfo) -> None:
        """Take each duration this record lacks from `other`; the time of receipt stays."""
        for each in fields(TimingInfo):
            if getattr(self, each.name) is None:
                setattr(self, each.name, getattr(other, each.name))


@define(slots=True)
class RoutingData:
    """What a router reports with the output of a request."""

    timing: TimingInfo | None = None
    worker_id: WorkerIdInfo | None = None
    token_ids: list[U32] | None = None
    """The tokens of the prompt, if requested."""
    decision: RouterDecision | None = None


LLM_METRICS_EVENT = "llm_metrics"
PAYLOAD_USAGE_EVENT = "payload_usage"
METRIC_EVENTS = frozenset({LLM_METRICS_EVENT, PAYLOAD_USAGE_EVENT})


@define(slots=True)
class LLMMetricAnnotation:
    """What the metrics of one chunk need; travels as the one comment of a metrics event."""

    input_tokens: U64
    output_tokens: U64
    chunk_tokens: U64
    cached_tokens: U64 | None = None
    image_count: U64 = skip(0)
    video_count: U64 = skip(0)
    audio_count: U64 = skip(0)
    image_tokens: U64 | None = None
    prefill_worker_id: U64 | None = None
    prefill_dp_rank: U32 | None = None
    prefill_worker_type: str | None = None
    decode_worker_id: U64 | None = None
    decode_dp_rank: U32 | None = None
    decode_worker_type: str | None = None
    tokenize_latency_s: float | None = skip(name="tokenize_latency")
    detokenize_total_latency_s: float | None = skip(name="detokenize_total_latency")
    detokenize_count: U64 | None = None
