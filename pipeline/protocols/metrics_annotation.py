"""LLMMetricAnnotation: token counts and latencies of a request, carried as an event beside its output.

Source: dynamo lib/llm/src/preprocessor.rs, LLMMetricAnnotation. Latencies are plain seconds here.
"""

from __future__ import annotations

from attrs import define

from .wire import U32, U64, skip

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
