"""Spans of stages, links, and headers."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pipeline import (
    Annotated,
    AsyncEngine,
    Context,
    Disconnected,
    LinkError,
    Operator,
    ResponseStream,
    Segment,
    function_engine,
    identity,
    link,
    map_request,
    map_response,
)
from pipeline.protocols import TraceLink
from pipeline.telemetry import UNTRACED, RequestSpan, annotate, extract, inject, link_to, spanned, trace_link, traced
from pipeline.testing import Fail, OpenStreams, Probe, ScriptedEngine, Stall, Wait, check_engine, watch_streams


class Spans:
    """A tracer and what it has finished."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def of(self, *stages: Any) -> Segment[Any, Any]:
        return traced(link(*stages), tracer=self.tracer)

    @property
    def finished(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    @property
    def endings(self) -> dict[str, Any]:
        return {name: (span.attributes or {})["penstock.ending"] for name, span in self.finished.items()}


@pytest.fixture
def spans() -> Spans:
    return Spans()


class Twice(Operator[Any, Any, Any, Any]):
    """Call the next stage with a sub-request, then again."""

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        await (await next.generate(request.child("first"))).collect()
        return await next.generate(request.with_payload("second"))


# -- the graph stays what it was


async def test_a_traced_graph_holds_the_engine_contract(spans: Spans) -> None:
    held: list[ScriptedEngine] = []

    def graph() -> AsyncEngine[Any, Any]:
        held[:] = [ScriptedEngine(range(64))]
        return spans.of(Probe(), *held)

    await check_engine(graph, request=None, expected=list(range(64)), open_count=lambda _: held[0].open)
    await check_engine(
        lambda: spans.of(ScriptedEngine([], fails=Disconnected("x"))), request=None, bad_request=1, rules=["E2"]
    )


def test_a_traced_graph_looks_like_the_graph(spans: Spans) -> None:
    plain = link(Probe().named("watch"), ScriptedEngine([1]))
    graph = traced(plain, tracer=spans.tracer)
    assert str(graph) == str(plain)
    assert graph.draw("mermaid") == plain.draw("mermaid")


def test_the_parts_of_a_graph_are_its_stages_without_spans(spans: Spans) -> None:
    probe, engine = Probe(), ScriptedEngine([1])
    plain = link(probe, engine)
    assert list(plain.parts()) == list(spans.of(probe, engine).parts()) == [probe, engine]
    assert list(engine.parts()) == [engine]


async def test_stages_of_a_traced_graph_are_found_by_name(spans: Spans, open_streams: OpenStreams) -> None:
    graph = spans.of(Probe(), ScriptedEngine([1]).named("engine"))
    assert await (await graph.replace("engine", ScriptedEngine([2])).generate(Context(None))).collect() == [2]
    assert await (await graph.generate(Context(None))).collect() == [1]


@function_engine
async def letters(word: str) -> AsyncIterator[str]:
    for letter in word:
        yield letter


@function_engine
async def numbers(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


class Words(Operator[str, str, str, str]):
    async def generate(self, request: Context[str], next: AsyncEngine[str, str]) -> ResponseStream[str]:
        return await next.generate(request)


def test_a_wrong_edge_of_a_traced_graph_is_still_refused(spans: Spans) -> None:
    graph = spans.of(Words(), letters)
    with pytest.raises(LinkError):
        graph.replace("letters", numbers)


def test_only_stages_that_add_time_are_wrapped(spans: Spans) -> None:
    stages = (identity(), map_request(str), map_response(str), Probe(), ScriptedEngine([]))
    graph = spans.of(*stages)
    assert [ours is wrapped for ours, wrapped in zip(stages, graph.stages, strict=True)] == [True] * 3 + [False] * 2
    assert traced(graph, tracer=spans.tracer).stages == graph.stages


# -- spans


async def test_a_stages_span_hangs_below_that_of_the_stage_above(spans: Spans, open_streams: OpenStreams) -> None:
    graph = spans.of(Probe(), map_request(str), ScriptedEngine([1, 2]))
    request = Context(None, id="request-1")
    assert await (await graph.generate(request)).collect() == [1, 2]
    above, below = spans.finished["Probe"], spans.finished["ScriptedEngine"]
    assert above.parent is None
    assert below.parent == above.context
    assert (below.attributes or {})["penstock.request_id"] == "request-1"
    assert spans.endings == {"Probe": "ended", "ScriptedEngine": "ended"}
    assert request.trace is None


async def test_spans_of_sub_requests_hang_below_the_stage_that_made_them(spans: Spans) -> None:
    seen: list[Any] = []

    class Seeing(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            seen.append(trace_link(request))
            return await super().generate(request)

    await (await spans.of(Twice(), Seeing([1])).generate(Context(None))).collect()
    assert len(set(map(str, seen))) == 2
    twice = spans.finished["Twice"].context
    assert twice is not None
    assert all(link.trace_id == f"{twice.trace_id:032x}" for link in seen)
    parent = spans.finished["Seeing"].parent
    assert parent == twice


async def test_interleaved_requests_keep_their_own_parents(spans: Spans, open_streams: OpenStreams) -> None:
    graph = spans.of(Probe(), ScriptedEngine([1, 2]))
    first, second = [await graph.generate(Context(None)) for _ in range(2)]
    for _ in range(2):
        await first.__anext__()
        await second.__anext__()
    await second.aclose()
    await first.aclose()
    finished = spans._exporter.get_finished_spans()
    roots = [span.context for span in finished if span.name == "Probe"]
    assert sorted(str(span.parent) for span in finished if span.name != "Probe") == sorted(map(str, roots))


async def test_a_span_lasts_as_long_as_its_stream(spans: Spans, open_streams: OpenStreams) -> None:
    graph = spans.of(ScriptedEngine([1]))
    async with await graph.generate(Context(None)) as stream:
        assert await stream.__anext__() == 1
        assert not spans.finished
        assert [item async for item in stream] == []
        assert spans.endings == {"ScriptedEngine": "ended"}


async def test_a_raise_is_recorded(spans: Spans, open_streams: OpenStreams) -> None:
    graph = spans.of(Probe(), ScriptedEngine([1, Fail(Disconnected("lost"))]))
    with pytest.raises(Disconnected):
        await (await graph.generate(Context(None))).collect()
    for span in spans.finished.values():
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "lost")
        assert [event.name for event in span.events] == ["exception"]
    assert set(spans.endings.values()) == {"failed"}


async def test_a_refusal_is_recorded(spans: Spans, open_streams: OpenStreams) -> None:
    with pytest.raises(Disconnected):
        await spans.of(ScriptedEngine([], fails=Disconnected("no"))).generate(Context(None))
    assert spans.endings == {"ScriptedEngine": "failed"}


@pytest.mark.parametrize("closes", [True, False])
async def test_an_error_item_is_recorded(closes: bool, spans: Spans, open_streams: OpenStreams) -> None:
    graph = spans.of(ScriptedEngine([Annotated[Any].from_error(Disconnected("lost"))]))
    async with await graph.generate(Context(None)) as stream:
        await stream.__anext__()
        if not closes:
            assert [item async for item in stream] == []
    assert spans.endings == {"ScriptedEngine": "failed"}
    assert spans.finished["ScriptedEngine"].status.description == "lost"


@pytest.mark.parametrize(("reads", "ending"), [(0, "unread"), (1, "closed")])
async def test_a_close_ends_every_span_without_an_error(
    reads: int, ending: str, spans: Spans, open_streams: OpenStreams
) -> None:
    stream = await spans.of(Probe(), ScriptedEngine([1, 2])).generate(Context(None))
    for _ in range(reads):
        await stream.__anext__()
    await stream.aclose()
    assert spans.endings == {"Probe": ending, "ScriptedEngine": ending}
    assert all(span.status.status_code is StatusCode.UNSET for span in spans.finished.values())


@pytest.mark.parametrize(("reads", "ending"), [(0, "unread"), (1, "closed")])
async def test_a_dropped_stream_ends_its_spans(reads: int, ending: str, spans: Spans) -> None:
    with watch_streams() as streams, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        stream = await spans.of(ScriptedEngine([1, 2])).generate(Context(None))
        for _ in range(reads):
            await stream.__anext__()
        del stream
        for _ in range(5):
            await checkpoint()
        assert not streams.open
    assert spans.endings == {"ScriptedEngine": ending}


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_stopped_request_ends_its_spans(how: str, spans: Spans, open_streams: OpenStreams) -> None:
    request = Context(None)
    async with await spans.of(ScriptedEngine([1, Stall()])).generate(request) as stream:
        await stream.__anext__()
        getattr(request, how)()
        assert [item async for item in stream] == []
    assert spans.endings == {"ScriptedEngine": "ended"}


async def test_a_cancelled_reader_ends_its_spans(spans: Spans, open_streams: OpenStreams) -> None:
    with anyio.move_on_after(1):
        await (await spans.of(Probe(), ScriptedEngine([Wait(60), 1])).generate(Context(None))).collect()
    assert spans.endings == {"Probe": "closed", "ScriptedEngine": "closed"}


async def test_the_callers_current_span_is_the_root(spans: Spans, open_streams: OpenStreams) -> None:
    with spans.tracer.start_as_current_span("http") as outer:
        stream = await spans.of(ScriptedEngine([1])).generate(Context(None))
    await stream.collect()
    assert spans.finished["ScriptedEngine"].parent == outer.get_span_context()


# -- attributes and events of a stage


class Describing(Operator[Any, Any, Any, Any]):
    def __init__(self, describe: Callable[[Context[Any]], object]) -> None:
        self._describe = describe

    async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
        self._describe(request)
        return await next.generate(request)


async def test_annotations_and_links_go_to_the_stages_own_span(spans: Spans, open_streams: OpenStreams) -> None:
    earlier = TraceLink("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")

    def describe(request: Context[Any]) -> None:
        annotate(request, {"worker": 7, "why": "overlap"})
        link_to(request, earlier, TraceLink("not hex", "b7ad6b7169203331"), TraceLink("0" * 32, "0" * 16))

    await (await spans.of(Describing(describe), ScriptedEngine([1])).generate(Context(None))).collect()
    span = spans.finished["Describing"]
    attributes = span.attributes or {}
    assert (attributes["worker"], attributes["why"]) == (7, "overlap")
    assert [f"{link.context.trace_id:032x}-{link.context.span_id:016x}" for link in span.links] == [
        f"{earlier.trace_id}-{earlier.span_id}"
    ]
    assert "worker" not in (spans.finished["ScriptedEngine"].attributes or {})


def test_without_a_span_everything_is_silent() -> None:
    """For the link."""
    context = Context(None)
    annotate(context, {"a": 1})
    link_to(context, TraceLink("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"))
    assert trace_link(context) is None
    assert inject(context) == {}


# -- headers

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_an_extracted_span_is_the_parent_and_injects_again(spans: Spans, open_streams: OpenStreams) -> None:
    headers = {"Traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=value"}
    request = Context(None)
    request.trace = extract(headers)
    assert inject(request) == {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=value"}
    assert trace_link(request) == TraceLink(TRACE, SPAN)
    sent: list[dict[str, str]] = []
    await (await spans.of(Describing(lambda r: sent.append(inject(r))), ScriptedEngine([])).generate(request)).collect()
    span = spans.finished["Describing"]
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.context is not None
    assert sent[0]["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert sent[0]["tracestate"] == "vendor=value"


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{'g' * 32}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
    ],
)
def test_a_traceparent_that_is_not_exact_is_ignored_as_a_whole(traceparent: str) -> None:
    assert extract({"traceparent": traceparent, "tracestate": "vendor=value"}) is None


@pytest.mark.parametrize("header", [f"00-{TRACE}-{SPAN}-01", f"01-{TRACE.upper()}-{SPAN}-00", f" cc-{TRACE}-{SPAN}-0F"])
def test_other_versions_capitals_and_flags_are_read(header: str) -> None:
    context = Context(None)
    context.trace = extract({"traceparent": header})
    assert inject(context)["traceparent"] == f"00-{TRACE}-{SPAN}-{header[-2:].lower()}"


@given(st.text())
def test_no_header_text_fails(text: str) -> None:
    extract({"traceparent": text, "tracestate": text})
    extract({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": text})


# -- spans of a request, and of a part of it


async def test_a_requests_span_hangs_below_the_one_in_its_headers(spans: Spans, open_streams: OpenStreams) -> None:
    span = RequestSpan("GET /", {"traceparent": f"00-{TRACE}-{SPAN}-01"}, spans.tracer, {"a": 1})
    request = Context(None)
    request.trace = span.trace
    await (await spans.of(ScriptedEngine([1])).generate(request)).collect()
    span.end()
    root = spans.finished["GET /"]
    assert root.parent is not None
    assert (f"{root.parent.span_id:016x}", root.kind, (root.attributes or {})["a"]) == (SPAN, SpanKind.SERVER, 1)
    assert spans.finished["ScriptedEngine"].parent == root.context


async def test_a_requests_span_hangs_below_that_of_other_instrumentation(spans: Spans) -> None:
    """It has read the same headers already."""
    with spans.tracer.start_as_current_span("theirs") as theirs:
        RequestSpan("GET /", {"traceparent": f"00-{TRACE}-{SPAN}-01"}, spans.tracer).end()
    assert spans.finished["GET /"].parent == theirs.get_span_context()


async def test_baggage_goes_down_to_the_last_stage(spans: Spans, open_streams: OpenStreams) -> None:
    sent: list[dict[str, str]] = []
    request = Context(None)
    request.trace = RequestSpan("GET /", {"baggage": "user=7"}, spans.tracer).trace
    graph = spans.of(Probe(), Describing(lambda inner: sent.append(inject(inner))), ScriptedEngine([]))
    await (await graph.generate(request)).collect()
    assert sent[0]["baggage"] == "user=7"


async def test_a_request_that_is_untraced_has_no_spans(spans: Spans, open_streams: OpenStreams) -> None:
    request = Context(None)
    request.trace = UNTRACED
    assert await (await spans.of(Probe(), ScriptedEngine([1])).generate(request)).collect() == [1]
    assert spans.finished == {}


@pytest.mark.parametrize("reads", [0, 1, 2])
async def test_a_part_of_a_request_has_a_span_until_its_stream_ends(
    reads: int, spans: Spans, open_streams: OpenStreams
) -> None:
    earlier = TraceLink(TRACE, SPAN)
    engine = ScriptedEngine([1, 2])
    stream = await spanned(
        Context(None), "part", engine.generate, tracer=spans.tracer, attributes={"a": 1}, link=earlier
    )
    async with stream:
        assert spans.finished == {}
        for _ in range(reads):
            await anext(stream)
    span = spans.finished["part"]
    assert ((span.attributes or {})["a"], len(span.links)) == (1, 1)
    assert spans.endings == {"part": "closed" if reads else "unread"}


async def test_a_request_that_is_not_sampled_passes_through_the_stages_as_they_are(
    spans: Spans, open_streams: OpenStreams
) -> None:
    graph, request = spans.of(ScriptedEngine([1])), Context(None)
    request.trace = extract({"traceparent": f"00-{TRACE}-{SPAN}-00"})
    async with await graph.generate(request) as stream:
        assert stream._items.ag_code.co_name != "_followed"
        assert [item async for item in stream] == [1]
    assert spans.finished == {}


async def test_below_a_span_that_is_left_out_none_is_made(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ids go on."""
    request = Context(None)
    request.trace = RequestSpan("GET /", {"traceparent": f"00-{TRACE}-{SPAN}-00"}, spans.tracer).trace
    monkeypatch.setattr(type(spans.tracer), "start_span", None)
    sent: list[dict[str, str]] = []
    graph = spans.of(Describing(lambda inner: sent.append(inject(inner))), ScriptedEngine([1]))
    assert await (await graph.generate(request)).collect() == [1]
    assert sent == [inject(request)]
    assert sent[0]["traceparent"].endswith("-00")


async def test_below_a_span_that_has_ended_there_are_spans_all_the_same(spans: Spans) -> None:
    """Work in the background may begin after the stage that started it."""
    span, request = RequestSpan("GET /", {}, spans.tracer), Context(None)
    request.trace = span.trace
    span.end()
    await (await spans.of(ScriptedEngine([1])).generate(request)).collect()
    assert spans.finished["ScriptedEngine"].parent == spans.finished["GET /"].context


async def test_the_text_of_an_error_is_cut_and_has_no_traceback(spans: Spans, open_streams: OpenStreams) -> None:
    with pytest.raises(Disconnected):
        await spans.of(ScriptedEngine([], fails=Disconnected("x" * 100_000))).generate(Context(None))
    span = spans.finished["ScriptedEngine"]
    assert len(span.status.description or "") == 1024
    (event,) = span.events
    assert (event.attributes or {}).keys() == {"exception.type", "exception.message"}
    assert (event.attributes or {})["exception.type"] == "pipeline.errors.Disconnected"
