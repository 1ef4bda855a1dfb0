"""Where the time of a request went and which workers had it.

Source: dynamo lib/llm/src/protocols/common/timing.rs, TimingInfo, WorkerIdInfo, RoutingData, RequestPhase.

LLMMetricAnnotation: token counts and latencies of a request, carried as an event beside its output.

Source: dynamo lib/llm/src/preprocessor.rs, LLMMetricAnnotation. Latencies are plain seconds here.
"""

from __future__ import annotations

from enum import StrEnum

from attrs import define, frozen

from .field_rules import U32, U64, skip


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
    """Why a router sent a request to its worker.

    `rule` is the mode of the router, or the rule of placement of the router `kv`, which also knows the rest: of the
    `prompt_blocks` of the prompt the worker had `overlap_blocks`, `best_overlap_blocks` is the most that one of the
    `candidates` had, `cost` is what the worker was chosen by, in the rule's unit.
    """

    rule: str
    candidates: int | None = None
    overlap_blocks: float | None = None
    best_overlap_blocks: float | None = None
    prompt_blocks: int | None = None
    cost: float | None = None


@define(slots=True)
class RouterDecision:
    """Where a request went and why: the choice of its worker, that of its prefill worker if it is another one, and to
    how many workers it was sent one after the other."""

    worker: RouterChoice | None = None
    prefill: RouterChoice | None = None
    attempts: U32 | None = None


@define(slots=True)
class WorkerIdInfo:
    """The workers of a request and their data parallel ranks."""

    prefill_worker_id: U64 | None = None
    prefill_dp_rank: U32 | None = None
    decode_worker_id: U64 | None = None
    decode_dp_rank: U32 | None = None


@define(slots=True)
class TimingInfo:
    """Durations of a request in milliseconds; `request_received_ms` is milliseconds since the epoch."""

    request_received_ms: U64
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    ttft_ms: float | None = None
    total_time_ms: float | None = None
    kv_hit_rate: float | None = None
    router_queue_depth: U64 | None = None
    kv_transfer_estimated_latency_ms: float | None = None

    def fill_gaps(self, other: TimingInfo) -> None:
        """Take each duration this record lacks from `other`; the time of receipt stays."""
        for name in _FILLABLE:
            if getattr(self, name) is None:
                setattr(self, name, getattr(other, name))


_FILLABLE = (
    "prefill_wait_time_ms",
    "prefill_time_ms",
    "ttft_ms",
    "total_time_ms",
    "kv_hit_rate",
    "router_queue_depth",
    "kv_transfer_estimated_latency_ms",
)


@define(slots=True)
class RoutingData:
    """What a router learned about a request and reports with its output."""

    timing: TimingInfo | None = None
    worker_id: WorkerIdInfo | None = None
    token_ids: list[U32] | None = None
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
