"""What KvPushRouter measures and writes into its spans."""

from __future__ import annotations

from functools import partial
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
from operators.kv import KvRouterConfig, kv_router
from operators.kv.errors import QueueRejected
from operators.kv.load import ReplicaSync
from operators.kv.metrics import RouterMetrics
from operators.kv.operator import KvPushRouter
from operators.kv.queue import PolicyClass, PolicyProfile
from pipeline import Annotated, CannotConnect, Context, Segment, Unavailable
from pipeline.network import Runtime, static_workers
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, RequestPhase, RequestTracker, RoutingHints
from pipeline.telemetry import traced
from pipeline.testing import ScriptedEngine, Wait

TWO_BLOCKS = [Annotated(LLMEngineOutput([1, 2])), Wait(4), Annotated(LLMEngineOutput([3, 4, 5]))]
OWN = {"dynamo_namespace": "ns", "dynamo_component": "comp", "router_id": "r"}


class Measured:
    """A graph of some workers, and what it has measured so far."""

    def __init__(
        self,
        script: Any = TWO_BLOCKS,
        *,
        worker_ids: tuple[int, ...] = (7,),
        fails: Exception | None = None,
        tracer: Any = None,
        profile: PolicyProfile | None = None,
        peers: ReplicaSync | None = None,
        **config: Any,
    ) -> None:
        self._reader = InMemoryMetricReader()
        meter = MeterProvider([self._reader], shutdown_on_exit=False).get_meter("test")
        metrics = RouterMetrics(meter, namespace="ns", component="comp", router_id="r", model="m")
        engines = {worker_id: ScriptedEngine(script, fails=fails) for worker_id in worker_ids}
        workers = static_workers(engines)
        chosen = KvRouterConfig(**{"use_kv_events": False, "router_replica_sync": peers is not None, **config})
        self.router = kv_router(workers, chosen, block_size_tokens=4, rng=Random(1), profile=profile, peers=peers)
        self.engine: Segment[Any, Any] = KvPushRouter(self.router, metrics=metrics, tracer=tracer) >> PushRouter(
            workers
        )

    async def send(
        self, count: int = 4, request_id: str = "r1", *, tracker: RequestTracker | None = None, **fields: Any
    ) -> None:
        request = PreprocessedRequest(list(range(count)), tracker=tracker, **fields)
        await (await self.engine.generate(Context(request, id=request_id))).collect()

    def points(self, prefix: str) -> list[tuple[str, dict[str, Any], Any]]:
        """Name, labels and point of all series whose name begins like this."""
        data: Any = self._reader.get_metrics_data()
        return [
            (metric.name.removeprefix(prefix), dict(point.attributes), point)
            for metric in data.resource_metrics[0].scope_metrics[0].metrics
            if metric.name.startswith(prefix)
            for point in metric.data.data_points
        ]

    @property
    def seen(self) -> dict[str, list[Any]]:
        """Of each of the router's own what was counted, or number and sum of what was recorded."""
        found: dict[str, list[Any]] = {}
        for name, labels, point in self.points("dynamo_component_router_"):
            assert name not in found
            of_type = name in ("non_max_overlap_selections_total", "overlap_blocks_lost")
            assert labels == ({**OWN, "worker_type": "decode"} if of_type else OWN)
            found[name] = [point.value] if hasattr(point, "value") else [point.count, point.sum]
        return found


def tracker() -> RequestTracker:
    return RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))


ZERO = {"requests_total": [0], "requests_started_total": [0], "non_max_overlap_selections_total": [0]}


async def test_the_counters_are_there_before_any_traffic() -> None:
    measured = Measured()
    assert measured.seen == ZERO
    refused = measured.points("dynamo_frontend_router_queue_backpressure_total")
    assert [(labels["reason"], labels["policy_class"], point.value) for _, labels, point in refused] == [
        ("request_limit", "default", 0),
        ("raw_isl_token_limit", "default", 0),
        ("cached_token_limit", "default", 0),
    ]
    applied = measured.points("dynamo_component_kv_cache_events_applied")
    assert [(labels["event_type"], labels["status"], point.value) for _, labels, point in applied] == [
        ("stored", "ok", 0),
        ("removed", "ok", 0),
        ("cleared", "ok", 0),
    ]


async def test_a_request_with_a_tracker_is_measured_in_full() -> None:
    """The mean time between tokens is recorded at each block that is filled, tracked or not."""
    measured = Measured()
    await measured.send()
    await measured.send(8, tracker=tracker())
    assert measured.seen == {
        **ZERO,
        "requests_total": [2],
        "requests_started_total": [2],
        "input_sequence_tokens": [2, 12],
        "output_sequence_tokens": [2, 10],
        "kv_hit_rate": [1, 0.5],
        "best_available_overlap": [1, 0.5],
        "time_to_first_token_seconds": [1, 0.0],
        "inter_token_latency_seconds": [2, 0.0 + 1.0],
    }


async def test_without_a_tracker_only_tokens_are_measured() -> None:
    measured = Measured()
    await measured.send()
    assert measured.seen == {
        **ZERO,
        "requests_total": [1],
        "requests_started_total": [1],
        "input_sequence_tokens": [1, 4],
        "output_sequence_tokens": [1, 5],
    }


async def test_an_answer_without_tokens_counts() -> None:
    measured = Measured([])
    await measured.send()
    assert (measured.seen["requests_total"], measured.seen["output_sequence_tokens"]) == ([1], [1, 0])


async def test_a_query_is_no_traffic() -> None:
    measured = Measured()
    await measured.send(tracker=tracker(), annotations=["query_instance_id:"])
    assert measured.seen == ZERO
    assert measured.points("dynamo_router_overhead_") == []


async def test_a_failed_selection_counts_nothing_and_a_failed_push_no_answer() -> None:
    measured = Measured(fails=CannotConnect("not now"))
    with pytest.raises(Unavailable):
        await measured.send(routing=RoutingHints(backend_instance_id=9))
    assert measured.seen == ZERO
    with pytest.raises(CannotConnect):
        await measured.send()
    assert measured.seen == {**ZERO, "requests_started_total": [1], "input_sequence_tokens": [1, 4]}


# -- both halves of a request


TRANSFER = "kv_transfer_estimated_latency_seconds"
TWO_TOKENS = [Wait(1), Annotated(LLMEngineOutput([1])), Wait(4), Annotated(LLMEngineOutput([2]))]


async def test_the_transfer_is_from_the_first_token_of_prefill_to_that_of_decode() -> None:
    prefill, decode, times = Measured(TWO_TOKENS), Measured(TWO_TOKENS), tracker()
    times.phase = RequestPhase.PREFILL
    await prefill.send(tracker=times)
    times.phase = RequestPhase.DECODE
    await decode.send(tracker=times)
    assert times.kv_transfer_estimated_latency_s == 4 + 1
    assert decode.seen[TRANSFER] == [1, 5]
    assert TRANSFER not in prefill.seen


@pytest.mark.parametrize("phase", list(RequestPhase))
async def test_one_half_alone_transfers_nothing(phase: RequestPhase) -> None:
    measured, times = Measured(TWO_TOKENS), tracker()
    times.phase = phase
    await measured.send(tracker=times)
    assert (times.prefill_complete is not None) == (phase is RequestPhase.PREFILL)
    assert (times.decode_first_token is not None) == (phase is RequestPhase.DECODE)
    assert times.kv_transfer_estimated_latency_s is None
    assert TRANSFER not in measured.seen


async def test_a_later_attempt_is_no_second_transfer() -> None:
    decode, times = Measured(TWO_TOKENS), tracker()
    times.record_prefill_complete()
    times.phase = RequestPhase.DECODE
    await decode.send(tracker=times)
    times.begin_attempt(2)
    await decode.send(tracker=times)
    assert decode.seen[TRANSFER] == [1, 1]


@pytest.mark.parametrize("tokens", [1, 9])
async def test_a_prefill_that_ends_behind_its_decode_changes_neither_length_nor_end(tokens: int) -> None:
    """Also where it fills blocks of output, and though the phase has gone on meanwhile."""
    filled = Annotated(LLMEngineOutput(list(range(tokens))))
    prefill = Measured([Wait(1), filled, Wait(20), filled])
    decode, times = Measured(TWO_TOKENS), tracker()
    found: list[tuple[Any, ...]] = []
    times.phase = RequestPhase.PREFILL
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(prefill.send, tracker=times))
        await anyio.sleep(2)
        times.phase = RequestPhase.DECODE
        await decode.send(tracker=times)
        found.append((times.osl_tokens, times.total_time_ms, times.avg_itl_ms))
    found.append((times.osl_tokens, times.total_time_ms, times.avg_itl_ms))
    assert found == [(2, 7000, 6000)] * 2
    assert prefill.seen["output_sequence_tokens"] == [1, 2 * tokens]


# -- prefixes given up


async def test_a_choice_against_the_longest_prefix_is_counted_with_what_it_lost() -> None:
    """Credit for what is cached is so low that the load of the worker that has it decides."""
    measured = Measured([Wait(10), Annotated(LLMEngineOutput([1]))], worker_ids=(1, 2), overlap_score_credit=0.1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measured.send, 12)  # in flight, and its three blocks are on its worker
        await anyio.sleep(1)
        await measured.send(12, "r2")
    assert measured.seen["non_max_overlap_selections_total"] == [1]
    assert measured.seen["overlap_blocks_lost"] == [1, 3]


async def test_what_the_best_worker_had_is_measured_beside_what_the_chosen_one_had() -> None:
    measured = Measured([Wait(10), Annotated(LLMEngineOutput([1]))], worker_ids=(1, 2), overlap_score_credit=0.1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measured.send, 12)
        await anyio.sleep(1)
        await measured.send(16, "r2", tracker=tracker())
    assert measured.seen["kv_hit_rate"] == [1, 0.0]
    assert measured.seen["best_available_overlap"] == [1, 0.75]


async def test_a_tie_and_a_pinned_request_give_nothing_up() -> None:
    measured = Measured(worker_ids=(1, 2))
    for worker_id in (1, 2, 2, 1):
        await measured.send(12, routing=RoutingHints(backend_instance_id=worker_id))
    await measured.send(12)
    assert measured.seen["non_max_overlap_selections_total"] == [0]
    assert "overlap_blocks_lost" not in measured.seen


# -- requests that may not even wait


async def test_a_refusal_is_counted_by_the_limit_that_was_reached() -> None:
    only_one = PolicyClass("small", prefill_busy_threshold=0, request_queue_limit_per_worker=0)
    measured = Measured([Wait(10), Annotated(LLMEngineOutput([1]))], profile=PolicyProfile.single(only_one))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measured.send)
        await anyio.sleep(1)
        with pytest.raises(QueueRejected):
            await measured.send()
    refused = measured.points("dynamo_frontend_router_queue_backpressure_total")
    assert [labels for _, labels, point in refused if point.value == 1] == [
        {"model": "m", "worker_type": "decode", "policy_class": "small", "reason": "request_limit"}
    ]
    assert measured.seen["requests_started_total"] == [1]


# -- steps


async def test_each_step_of_a_search_is_timed_and_waiting_belongs_to_scheduling() -> None:
    one_at_a_time = PolicyProfile.single(PolicyClass(prefill_busy_threshold=0))
    measured = Measured([Wait(10), Annotated(LLMEngineOutput([1]))], profile=one_at_a_time)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measured.send)
        await anyio.sleep(1)
        tasks.start_soon(measured.send, 4, "r2")
    spent = {name: (labels, point.count, point.sum) for name, labels, point in measured.points("dynamo_router_")}
    assert spent == {
        "overhead_block_hashing_ms": ({"router_id": "r"}, 2, 0),
        "overhead_indexer_find_matches_ms": ({"router_id": "r"}, 2, 0),
        "overhead_scheduling_ms": ({"router_id": "r"}, 2, pytest.approx(9000)),
        "overhead_total_ms": ({"router_id": "r"}, 2, pytest.approx(9000)),
    }


async def test_what_is_not_needed_is_neither_hashed_nor_timed() -> None:
    measured = Measured(overlap_score_credit=0, router_track_active_blocks=False)
    await measured.send()
    names = [name for name, *_ in measured.points("dynamo_router_overhead_")]
    assert names == ["indexer_find_matches_ms", "scheduling_ms", "total_ms"]


async def test_a_search_that_fails_is_not_timed_as_one() -> None:
    measured = Measured()
    with pytest.raises(Unavailable):
        await measured.send(routing=RoutingHints(backend_instance_id=9))
    names = [name for name, *_ in measured.points("dynamo_router_overhead_")]
    assert names == ["block_hashing_ms", "indexer_find_matches_ms"]


# -- spans


class Spans:
    """A graph with its spans."""

    def __init__(self, **settings: Any) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tracer = provider.get_tracer("test")
        self.measured = Measured(tracer=tracer, **settings)
        self.graph = traced(self.measured.engine, tracer=tracer)

    @property
    def ended(self) -> dict[str, Any]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def above(self, name: str) -> str:
        """The name of the span this one hangs below."""
        parent = self.ended[name].parent
        return {span.context.span_id: name for name, span in self.ended.items()}[parent.span_id]


CHOOSING = {"kv_router.select_worker", "kv_router.compute_block_hashes", "kv_router.schedule"}


async def test_the_choice_and_its_reasons_are_in_the_spans() -> None:
    spans = Spans()
    request = Context(PreprocessedRequest([1, 2, 3, 4]), id="r1")
    async with await spans.graph.generate(request) as stream:
        assert spans.ended.keys() == {*CHOOSING, "kv_router.route_request"}
        async for _ in stream:
            pass
    reasons = dict(spans.ended["KvPushRouter"].attributes or {})
    assert (reasons["kv_router.worker_id"], reasons["kv_router.cost"], reasons["kv_router.candidates"]) == (7, 2.0, 1)
    sent = dict(spans.ended["kv_router.route_request"].attributes or {})
    expected = {"request_id": "r1", "worker_id": 7, "dp_rank": 0, "overlap_blocks": 0, "phase": "aggregated"}
    expected["best_available_overlap_blocks"] = 0
    assert reasons["kv_router.best_available_overlap_blocks"] == 0
    assert {name: sent[name] for name in expected} == expected


async def test_the_steps_of_a_search_hang_below_it() -> None:
    spans = Spans()
    await (await spans.graph.generate(Context(PreprocessedRequest([1, 2, 3, 4])))).collect()
    assert {spans.above(name) for name in CHOOSING - {"kv_router.select_worker"}} == {"kv_router.select_worker"}
    assert spans.above("kv_router.select_worker") == "KvPushRouter"


async def test_hashes_are_chained_only_where_other_routers_know_prompts_by_them() -> None:
    alone = Spans()
    await (await alone.graph.generate(Context(PreprocessedRequest([1, 2, 3, 4])))).collect()
    async with Runtime.in_process() as runtime:
        spans = Spans(peers=ReplicaSync(runtime.events, "ns/comp/generate"))
        with spans.measured.router:
            await (await spans.graph.generate(Context(PreprocessedRequest([1, 2, 3, 4])))).collect()
    assert spans.above("kv_router.compute_seq_hashes") == "kv_router.select_worker"
    assert spans.ended.keys() - alone.ended.keys() == {"kv_router.compute_seq_hashes"}
    prefix = "dynamo_router_overhead_"
    before, counts = ({name: point.count for name, _, point in one.measured.points(prefix)} for one in (alone, spans))
    assert ("seq_hashing_ms" in before, counts["seq_hashing_ms"]) == (False, 1)


async def test_an_error_is_on_the_step_it_came_from() -> None:
    spans = Spans()
    request = PreprocessedRequest([1, 2, 3, 4], routing=RoutingHints(backend_instance_id=9))
    with pytest.raises(Unavailable):
        await spans.graph.generate(Context(request))
    assert spans.ended["kv_router.compute_block_hashes"].status.is_ok
    assert not spans.ended["kv_router.schedule"].status.is_ok


async def test_a_request_that_is_not_traced_has_no_spans() -> None:
    spans = Spans()
    await spans.measured.send()
    assert spans.ended == {}
