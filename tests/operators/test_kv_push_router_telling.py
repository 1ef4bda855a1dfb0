"""What KvPushRouter measures and writes into its spans."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from operators import PushRouter
from operators.kv.chooser import KvRouter
from operators.kv.config import KvRouterConfig
from operators.kv.router_metrics import ROUTER_INSTRUMENTS, RouterMetrics
from operators.kv_push_router import KvPushRouter
from pipeline import Annotated, CannotConnect, Context, Segment, Unavailable
from pipeline.network import static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RequestTracker, RoutingHints
from pipeline.testing import ScriptedEngine, Wait
from pipeline.tracing import traced

pytestmark = pytest.mark.anyio

TWO_BLOCKS = [Annotated(LLMEngineOutput([1, 2])), Wait(4), Annotated(LLMEngineOutput([3, 4, 5]))]


class Measured:
    """A graph of one worker, and what it has measured so far."""

    def __init__(self, script: Any = TWO_BLOCKS, *, fails: Exception | None = None, tracer: Any = None) -> None:
        self._reader = InMemoryMetricReader()
        metrics = RouterMetrics(
            MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test"),
            namespace="ns",
            component="comp",
            router_id="r",
        )
        workers: Any = static_workers({7: ScriptedEngine(script, fails=fails)})
        config = KvRouterConfig(use_kv_events=False)
        chooser = KvRouter(workers, config, block_size_tokens=4, rng=Random(1))
        self.engine: Segment[Any, Any] = KvPushRouter(chooser, metrics=metrics, tracer=tracer) >> PushRouter(workers)

    async def ask(self, count: int = 4, *, tracker: RequestTracker | None = None, **fields: Any) -> None:
        request = PreprocessedRequest(list(range(count)), tracker=tracker, **fields)
        await (await self.engine.generate(Context(request, id="r1"))).collect()

    @property
    def seen(self) -> dict[str, list[Any]]:
        """Of each instrument what was counted, or number and sum of what was recorded; nothing where it is zero."""
        found: dict[str, list[Any]] = {}
        data: Any = self._reader.get_metrics_data()
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            name = metric.name.removeprefix("dynamo_component_router_")
            (point,) = metric.data.data_points
            assert dict(point.attributes) == {"dynamo_namespace": "ns", "dynamo_component": "comp", "router_id": "r"}
            found[name] = [point.value] if hasattr(point, "value") else [point.count, point.sum]
        return found


def tracker() -> RequestTracker:
    return RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))


ZERO = {"requests_total": [0], "requests_started_total": [0]}


async def test_the_counters_are_there_before_any_traffic() -> None:
    """KV-181"""
    assert Measured().seen == ZERO


async def test_a_request_with_a_tracker_is_measured_in_full() -> None:
    """KV-168, KV-178; the mean time between tokens at each block that is filled, tracked or not"""
    measured = Measured()
    await measured.ask()
    await measured.ask(8, tracker=tracker())
    assert measured.seen == {
        "requests_total": [2],
        "requests_started_total": [2],
        "input_sequence_tokens": [2, 12],
        "output_sequence_tokens": [2, 10],
        "kv_hit_rate": [1, 0.5],
        "time_to_first_token_seconds": [1, 0.0],
        "inter_token_latency_seconds": [2, 0.0 + 1.0],
    }


async def test_without_a_tracker_only_tokens_are_measured() -> None:
    """KV-178"""
    measured = Measured()
    await measured.ask()
    assert measured.seen == {
        "requests_total": [1],
        "requests_started_total": [1],
        "input_sequence_tokens": [1, 4],
        "output_sequence_tokens": [1, 5],
    }


async def test_an_answer_without_tokens_counts() -> None:
    """KV-174"""
    measured = Measured([])
    await measured.ask()
    assert (measured.seen["requests_total"], measured.seen["output_sequence_tokens"]) == ([1], [1, 0])


async def test_a_query_is_no_traffic() -> None:
    measured = Measured()
    await measured.ask(tracker=tracker(), annotations=["query_instance_id:"])
    assert measured.seen == ZERO


async def test_a_failed_selection_counts_nothing_and_a_failed_push_no_answer() -> None:
    measured = Measured(fails=CannotConnect("not now"))
    with pytest.raises(Unavailable):
        await measured.ask(routing=RoutingHints(backend_instance_id=9))
    assert measured.seen == ZERO
    with pytest.raises(CannotConnect):
        await measured.ask()
    assert measured.seen == {**ZERO, "requests_started_total": [1], "input_sequence_tokens": [1, 4]}


def test_the_buckets_are_those_of_the_table() -> None:
    bounds = {row.name: row.bounds({}) for row in ROUTER_INSTRUMENTS if row.kind == "histogram"}
    assert bounds["time_to_first_token_seconds"][:4] == (0, 0.0022, 0.0047, 0.01)
    assert bounds["inter_token_latency_seconds"][-3:] == (0.56, 1.1, 2)
    assert bounds["input_sequence_tokens"][-2:] == (63000, 130000)
    assert bounds["output_sequence_tokens"][4:6] == (880, 1800)
    assert (len(bounds["kv_hit_rate"]), bounds["kv_hit_rate"][1]) == (21, 0.05)


async def test_the_choice_and_its_reasons_are_in_the_spans() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    measured = Measured(tracer=tracer)
    graph = traced(measured.engine, tracer=tracer)
    async with await graph.generate(Context(PreprocessedRequest([1, 2, 3, 4]), id="r1")) as stream:
        before_the_first_item = {span.name for span in exporter.get_finished_spans()}
        async for _ in stream:
            pass
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert before_the_first_item == {"kv_router.select_worker", "kv_router.route_request"}
    reasons = dict(spans["KvPushRouter"].attributes or {})
    assert (reasons["kv_router.worker_id"], reasons["kv_router.cost"], reasons["kv_router.candidates"]) == (7, 2.0, 1)
    sent = dict(spans["kv_router.route_request"].attributes or {})
    expected = {"request_id": "r1", "worker_id": 7, "dp_rank": 0, "overlap_blocks": 0, "phase": "aggregated"}
    assert {name: sent[name] for name in expected} == expected
