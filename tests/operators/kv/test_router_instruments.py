"""Every instrument of a KV router: its name, labels and buckets, as dashboards for the original know them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from operators.kv.gauges import ROUTER_GAUGES
from operators.kv.metrics import (
    EVENT_INSTRUMENTS,
    OVERHEAD_INSTRUMENTS,
    OVERHEAD_PREFIX,
    PREFIX,
    QUEUE_INSTRUMENTS,
    ROUTER_INSTRUMENTS,
    RouterMetrics,
    shown_type,
)
from pipeline.telemetry import Instrument, Metrics

PLACE = {"dynamo_namespace", "dynamo_component"}
ROUTER = PLACE | {"router_id"}
WORKER = {"worker_id", "dp_rank", "worker_type"}
QUEUE = {"model", "worker_type", "policy_class"}

LABELS = {
    "dynamo_component_router_requests_total": ROUTER,
    "dynamo_component_router_requests_started_total": ROUTER,
    "dynamo_component_router_time_to_first_token_seconds": ROUTER,
    "dynamo_component_router_inter_token_latency_seconds": ROUTER,
    "dynamo_component_router_input_sequence_tokens": ROUTER,
    "dynamo_component_router_output_sequence_tokens": ROUTER,
    "dynamo_component_router_kv_hit_rate": ROUTER,
    "dynamo_component_router_best_available_overlap": ROUTER,
    "dynamo_component_router_kv_transfer_estimated_latency_seconds": ROUTER,
    "dynamo_component_router_non_max_overlap_selections_total": ROUTER | {"worker_type"},
    "dynamo_component_router_overlap_blocks_lost": ROUTER | {"worker_type"},
    "dynamo_router_overhead_block_hashing_ms": {"router_id"},
    "dynamo_router_overhead_seq_hashing_ms": {"router_id"},
    "dynamo_router_overhead_indexer_find_matches_ms": {"router_id"},
    "dynamo_router_overhead_scheduling_ms": {"router_id"},
    "dynamo_router_overhead_total_ms": {"router_id"},
    "dynamo_frontend_worker_active_decode_blocks": WORKER,
    "dynamo_frontend_worker_active_prefill_tokens": WORKER,
    "dynamo_frontend_worker_known_cached_blocks": WORKER | {"index"},
    "dynamo_frontend_router_queue_pending_requests": QUEUE,
    "dynamo_frontend_router_queue_pending_isl_tokens": QUEUE,
    "dynamo_frontend_router_queue_pending_cached_tokens": QUEUE,
    "dynamo_frontend_router_queue_backpressure_total": QUEUE | {"reason"},
    "dynamo_component_kv_cache_events_applied": PLACE | {"event_type", "status"},
}

COMPUTE_MS = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384]
WAIT_MS = [
    *(0.01, 0.03, 0.09, 0.27, 0.81, 2.43, 7.29, 21.87, 65.61, 196.83, 590.49, 1771.47, 5314.41, 15943.23),
    *(47829.69, 143489.07, 430467.21),
]
PROMPT = [0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000]
TTFT = [0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480]
TRANSFER = [0, 0.0019, 0.0037, 0.0072, 0.014, 0.027, 0.052, 0.1, 0.19, 0.37, 0.72, 1.4, 2.7, 5.2, 10.0]
SHARES = [
    *(0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5),
    *(0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1),
]
BOUNDS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": [0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2],
    "input_sequence_tokens": PROMPT,
    "output_sequence_tokens": [0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000],
    "kv_hit_rate": SHARES,
    "best_available_overlap": SHARES,
    "kv_transfer_estimated_latency_seconds": TRANSFER,
    "overlap_blocks_lost": [0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192],
    "block_hashing_ms": COMPUTE_MS,
    "seq_hashing_ms": COMPUTE_MS,
    "indexer_find_matches_ms": WAIT_MS,
    "scheduling_ms": WAIT_MS,
    "total_ms": WAIT_MS,
}

TABLES = [
    (Metrics(prefix=PREFIX, rows=ROUTER_INSTRUMENTS), ROUTER_INSTRUMENTS),
    (Metrics(prefix=OVERHEAD_PREFIX, rows=OVERHEAD_INSTRUMENTS), OVERHEAD_INSTRUMENTS),
    (Metrics(rows=ROUTER_GAUGES), ROUTER_GAUGES),
    (Metrics(rows=QUEUE_INSTRUMENTS), QUEUE_INSTRUMENTS),
    (Metrics(family="component", rows=EVENT_INSTRUMENTS), EVENT_INSTRUMENTS),
]
ROWS: list[Instrument] = [row for _, rows in TABLES for row in rows]


def test_names_and_labels() -> None:
    assert {metrics.full_name(row.name): set(row.labels) for metrics, rows in TABLES for row in rows} == LABELS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_buckets_of(row: Instrument) -> None:
    assert list(row.bounds({})) == BOUNDS.get(row.name, [])
    assert (row.kind == "histogram") == (row.name in BOUNDS)
    assert (row.kind == "counter") == row.name.endswith("_total")


@pytest.mark.parametrize(
    ("worker_type", "shown"), [("prefill", "prefill"), ("decode", "decode"), ("aggregated", "decode")]
)
def test_a_worker_that_does_both_is_shown_as_one_that_decodes(worker_type: Any, shown: str) -> None:
    assert shown_type(worker_type) == shown


def test_events_are_counted_by_what_they_were_and_what_became_of_them() -> None:
    reader = InMemoryMetricReader()
    metrics = RouterMetrics(MeterProvider([reader], shutdown_on_exit=False).get_meter("test"), namespace="n")
    for status in ("ok", "ok", "parent_block_not_found"):
        metrics.event_applied("stored", status)
    data: Any = reader.get_metrics_data()
    points = {metric.name: metric.data.data_points for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    applied = {
        (point.attributes["event_type"], point.attributes["status"]): point.value
        for point in points["dynamo_component_kv_cache_events_applied"]
    }
    assert applied == {
        ("stored", "ok"): 2,
        ("stored", "parent_block_not_found"): 1,
        ("removed", "ok"): 0,
        ("cleared", "ok"): 0,
    }
