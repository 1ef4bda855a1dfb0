"""The attributes of a request's span, and the links between the spans of its workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engines import DisaggregationMode, GenerateContext, LLMEngine
from engines.adapter import RequestAdapter
from engines.chunks import GenerateRecord, gap_attributes, milliseconds, nearest_rank
from pipeline import Context, Disconnected, InvalidArgument
from pipeline.protocols import LLMEngineOutput, PrefillResult, PreprocessedRequest, TraceLink
from tests.engines.worlds import Chunk, FunctionEngine, scripted

DECODE, PREFILL, ENCODE = DisaggregationMode.DECODE, DisaggregationMode.PREFILL, DisaggregationMode.ENCODE


async def refuse(request: PreprocessedRequest, context: GenerateContext) -> Any:
    raise InvalidArgument("not me")


class Spans:
    """Return the recorded attributes."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    @property
    def one(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        assert span.name == "engine.generate"
        return span

    @property
    def span_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in (self.one.attributes or {}).items() if name != "penstock.request_id"}

    @property
    def has_failed(self) -> bool:
        return self.one.status.status_code is StatusCode.ERROR


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    recorded = Spans()
    monkeypatch.setattr("opentelemetry.trace.get_tracer", lambda name: recorded.tracer)
    return recorded


async def run_request(engine: LLMEngine, request: PreprocessedRequest | None = None, **settings: Any) -> list[Any]:
    adapter = RequestAdapter(engine, **{"details": True, **settings})
    caller = Context(request or PreprocessedRequest([1, 2], model="requested"))
    return [item.data for item in await (await adapter.generate(caller)).collect()]


async def test_the_span_of_a_clean_answer_has_its_tokens_and_times(spans: Spans) -> None:
    await run_request(
        scripted(0.25, Chunk.token(1), 0.01, Chunk.token(2), 0.03, Chunk([3, 4]), Chunk.length()), model="served"
    )
    assert spans.span_attributes == {
        "model": "served",
        "input_tokens": 2,
        "disagg_role": "agg",
        "output_tokens": 4,
        "cancelled": False,
        "finish_reason": "length",
        "ttft_ms": "250.00",
        "avg_itl_ms": "20.00",
        "itl_p50_ms": "30.00",
        "itl_p99_ms": "30.00",
        "itl_max_ms": "30.00",
    }
    assert not spans.has_failed


async def test_one_chunk_with_tokens_leaves_no_gap_to_record(spans: Spans) -> None:
    await run_request(scripted(Chunk([]), Chunk.token(1), 1.0, Chunk.stop()))
    assert spans.span_attributes["output_tokens"] == 1
    assert "ttft_ms" in spans.span_attributes
    assert not [name for name in spans.span_attributes if "itl" in name]


async def test_without_details_there_is_the_span_alone(spans: Spans) -> None:
    await run_request(scripted(Chunk.token(1), Chunk.length()), details=False)
    assert spans.span_attributes == {}
    assert not spans.has_failed


async def test_the_model_is_that_of_the_request_where_the_worker_names_none(spans: Spans) -> None:
    await run_request(
        scripted(Chunk.stop()),
        PreprocessedRequest([1], model="requested", prefill_result=PrefillResult({})),
        mode=DECODE,
    )
    assert (spans.span_attributes["model"], spans.span_attributes["disagg_role"]) == ("requested", "decode")


async def test_a_failed_set_up_is_recorded_as_such(spans: Spans) -> None:
    with pytest.raises(InvalidArgument):
        await run_request(FunctionEngine(refuse))
    assert spans.span_attributes["error_kind"] == "setup_failed"
    assert spans.has_failed


async def test_an_error_among_the_chunks_is_recorded_by_its_type(spans: Spans) -> None:
    await run_request(scripted(Chunk.token(1), Disconnected("lost")))
    assert spans.span_attributes["error_kind"] == "Disconnected"
    assert (spans.span_attributes["cancelled"], spans.span_attributes["output_tokens"]) == (False, 1)
    assert "finish_reason" not in spans.span_attributes
    assert spans.has_failed


@pytest.mark.parametrize("items", [0, 1])
async def test_a_stream_that_its_reader_leaves_is_dropped(spans: Spans, items: int) -> None:
    adapter = RequestAdapter(scripted(Chunk.token(1), Chunk.stop()), details=True)
    async with await adapter.generate(Context(PreprocessedRequest([1]))) as stream:
        for _ in range(items):
            await anext(stream)
    assert (spans.span_attributes["cancelled"], spans.span_attributes["finish_reason"]) == (True, "Dropped")
    assert spans.span_attributes["output_tokens"] == items
    assert spans.has_failed


async def test_a_dropped_stream_ends_its_span_without_details_too(spans: Spans) -> None:
    adapter = RequestAdapter(scripted(Chunk.token(1), Chunk.stop()))
    async with await adapter.generate(Context(PreprocessedRequest([1]))) as stream:
        await anext(stream)
    assert spans.has_failed


@pytest.mark.parametrize(("verb", "finish"), [("stop", "cancelled"), ("kill", None)])
async def test_a_request_that_was_given_up_is_cancelled_and_no_failure(
    spans: Spans, verb: str, finish: str | None
) -> None:
    caller = Context(PreprocessedRequest([1]))
    async with await RequestAdapter(scripted(Chunk.token(1)), details=True).generate(caller) as stream:
        await anext(stream)
        getattr(caller, verb)()
        assert len([item async for item in stream]) == (verb == "stop")
    assert (spans.span_attributes["cancelled"], spans.span_attributes.get("finish_reason")) == (True, finish)
    assert not spans.has_failed


async def test_a_stop_behind_the_terminal_chunk_cancels_nothing_any_more(spans: Spans) -> None:
    caller = Context(PreprocessedRequest([1]))
    async with await RequestAdapter(scripted(Chunk.length()), details=True).generate(caller) as stream:
        await anext(stream)
        caller.stop()
    assert (spans.span_attributes["cancelled"], spans.span_attributes["finish_reason"]) == (False, "length")


async def test_a_reader_that_leaves_at_the_terminal_chunk_has_dropped_nothing(spans: Spans) -> None:
    adapter = RequestAdapter(scripted(Chunk.stop()), details=True)
    async with await adapter.generate(Context(PreprocessedRequest([1]))) as stream:
        await anext(stream)
    assert (spans.span_attributes["cancelled"], spans.span_attributes["finish_reason"]) == (False, "stop")
    assert not spans.has_failed


# -- links


LINK = TraceLink("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


async def test_a_migrated_request_is_linked_to_the_worker_before(spans: Spans) -> None:
    await run_request(scripted(Chunk.stop()), PreprocessedRequest([1], migration_link=LINK), details=False)
    assert spans.span_attributes == {"migration.trace_id": LINK.trace_id, "migration.span_id": LINK.span_id}
    (link,) = spans.one.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (LINK.trace_id, LINK.span_id)


async def test_a_link_may_be_written_in_capitals(spans: Spans) -> None:
    link = TraceLink(LINK.trace_id.upper(), LINK.span_id.upper())
    await run_request(scripted(Chunk.stop()), PreprocessedRequest([1], migration_link=link), details=False)
    assert spans.span_attributes == {"migration.trace_id": link.trace_id, "migration.span_id": link.span_id}
    assert [f"{each.context.trace_id:032x}" for each in spans.one.links] == [LINK.trace_id]


async def test_ids_that_are_not_hexadecimal_are_recorded_but_not_linked(spans: Spans) -> None:
    await run_request(
        scripted(Chunk.stop()), PreprocessedRequest([1], migration_link=TraceLink("x", "y")), details=False
    )
    assert spans.span_attributes == {"migration.trace_id": "x", "migration.span_id": "y"}
    assert not spans.one.links


async def test_a_request_that_did_not_migrate_has_neither(spans: Spans) -> None:
    await run_request(scripted(Chunk.stop()), details=False)
    assert spans.span_attributes == {}
    assert not spans.one.links


async def test_the_first_chunk_with_tokens_carries_the_span(spans: Spans) -> None:
    chunks = await run_request(scripted(Chunk([]), Chunk.token(1), Chunk.token(2), Chunk.stop()))
    ids = spans.one.context
    assert ids is not None
    link = TraceLink(f"{ids.trace_id:032x}", f"{ids.span_id:016x}")
    assert [chunk.worker_trace_link for chunk in chunks] == [None, link, None, None]


async def test_a_link_that_the_engine_has_set_stays(spans: Spans) -> None:
    (chunk,) = await run_request(scripted(Chunk([1], finish_reason=Chunk.stop().finish_reason, worker_trace_link=LINK)))
    assert chunk.worker_trace_link == LINK
    assert spans.one


async def test_a_chunk_shared_by_all_requests_is_not_changed(spans: Spans) -> None:
    """Otherwise the next request would get the link of this one."""
    always = Chunk.token(1)
    engine = scripted(always, always, Chunk.stop())
    for answers in (1, 2):
        chunks = await run_request(engine)
        assert [chunk.worker_trace_link is not None for chunk in chunks] == [True, False, False]
        assert len(spans.exporter.get_finished_spans()) == answers
    assert always == Chunk.token(1)


@pytest.mark.parametrize(
    ("mode", "last", "is_stamped"),
    [
        (DisaggregationMode.AGGREGATED, Chunk.stop, False),
        (PREFILL, Chunk.stop, True),
        (ENCODE, lambda: Chunk.encode_terminal({}), True),
    ],
)
async def test_where_no_tokens_are_due_the_terminal_chunk_carries_it(
    spans: Spans, mode: DisaggregationMode, last: Any, is_stamped: bool
) -> None:
    (chunk,) = await run_request(scripted(last()), mode=mode)
    assert (chunk.worker_trace_link is not None) is is_stamped
    assert spans.one


async def test_only_one_chunk_carries_it(spans: Spans) -> None:
    chunks = await run_request(scripted(Chunk.token(1), Chunk.stop()), mode=PREFILL)
    assert [chunk.worker_trace_link is not None for chunk in chunks] == [True, False]
    assert spans.one


async def test_without_tracing_no_chunk_carries_a_link() -> None:
    chunks = await run_request(scripted(Chunk.token(1), Chunk.stop()))
    assert [chunk.worker_trace_link for chunk in chunks] == [None, None]


# -- the times and counts of one request


def record(times_s: list[float]) -> GenerateRecord:
    """Return a record whose clock returns these times, one per call."""
    clock: Iterator[float] = iter(times_s)
    return GenerateRecord(PreprocessedRequest([1, 2, 3], model="requested"), "agg", "", lambda: next(clock))


def attributes_of(kept: GenerateRecord, **ending: Any) -> dict[str, Any]:
    return dict(kept.attributes(**{"cancelled": False, "dropped": False, "error_kind": None, **ending}))


def test_the_gaps_of_the_specification() -> None:
    assert gap_attributes([10, 20, 30, 40, 50]) == {
        "avg_itl_ms": "30.00",
        "itl_p50_ms": "30.00",
        "itl_p99_ms": "50.00",
        "itl_max_ms": "50.00",
    }
    assert gap_attributes([]) == {}


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([7], 0.99, 7), ([1, 2], 0.5, 2), ([1, 2, 3, 4], 0.5, 3), ([1, 2, 3], 0.0, 1), (list(range(101)), 0.99, 99)],
)
def test_a_percentile_is_the_value_at_the_nearest_rank(values: list[float], share: float, found: float) -> None:
    assert nearest_rank(values, share) == found


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_the_median_lies_between_and_the_order_of_the_gaps_does_not_matter(gaps_ms: list[float]) -> None:
    ordered = sorted(gaps_ms)
    assert nearest_rank(ordered, 0.5) in ordered
    assert nearest_rank(ordered, 0.99) <= ordered[-1]
    assert gap_attributes(gaps_ms)["itl_p50_ms"] == gap_attributes(ordered)["itl_p50_ms"]


@pytest.mark.parametrize(("value", "text"), [(0, "0.00"), (1.005, "1.00"), (12.346, "12.35"), (1000, "1000.00")])
def test_milliseconds_have_two_decimals(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_only_chunks_with_tokens_are_timed_and_tokens_are_counted_not_chunks() -> None:
    kept = record([10.0, 10.1, 10.3])
    for chunk in (LLMEngineOutput([]), LLMEngineOutput([1, 2]), LLMEngineOutput([]), LLMEngineOutput([3])):
        kept.observe(chunk)
    found = attributes_of(kept)
    assert (found["output_tokens"], found["ttft_ms"], found["itl_max_ms"]) == (3, "100.00", "200.00")
    assert (found["input_tokens"], found["model"], found["disagg_role"]) == (3, "requested", "agg")


def test_unknown_attributes_are_left_out() -> None:
    assert attributes_of(record([0.0])) == {
        "model": "requested",
        "input_tokens": 3,
        "disagg_role": "agg",
        "output_tokens": 0,
        "cancelled": False,
    }


def test_the_ending_is_recorded() -> None:
    kept = record([0.0])
    kept.observe(LLMEngineOutput.error("no memory"))
    assert attributes_of(kept)["finish_reason"] == "error: no memory"
    assert attributes_of(kept, cancelled=True)["cancelled"] is True
    dropped = attributes_of(kept, dropped=True)
    assert (dropped["finish_reason"], dropped["cancelled"]) == ("Dropped", True)
    assert attributes_of(kept, error_kind="Disconnected")["error_kind"] == "Disconnected"
