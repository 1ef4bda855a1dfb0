"""A request whose workers fail: the tokens of its answer, what each attempt gets, and where the operator links."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from operators import Detokenize, Migration, Model, Preprocess
from pipeline import (
    Annotated,
    AsyncEngine,
    Context,
    LinkError,
    Operator,
    ResponseStream,
    StreamIncomplete,
    link,
)
from pipeline.protocols import (
    BackendOutput,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    RequestTracker,
    RoutingHints,
    StopConditions,
    TraceLink,
)
from pipeline.protocols.openai import CompletionRequest
from pipeline.telemetry import traced
from pipeline.testing import Fail, Fault
from tests.operators.migration.worlds import ALL, GONE, REFUSED, World, broken, healthy, make_request, receive

LINK = TraceLink("1" * 32, "2" * 16)


# -- the tokens


async def test_a_healthy_worker_gets_the_request_once() -> None:
    world = World()
    seen = await world.collect()
    assert (seen.tokens, seen.finish, len(world.attempts)) == (ALL, FinishReason.LENGTH, 1)
    assert (world.recorded.counts(), world.recorded.durations()) == ((0, 0), {})


async def test_a_failed_dispatch_goes_to_another_worker() -> None:
    world = World(REFUSED, None)
    assert (await world.collect()).tokens == ALL
    assert world.recorded.counts() == (1, 0)
    assert world.recorded.durations() == {("new_request", "success"): 1}


async def test_a_broken_answer_goes_on_with_another_worker() -> None:
    world = World(broken(3), None)
    seen = await world.collect()
    assert (seen.tokens, seen.finish, seen.raised) == (ALL, FinishReason.LENGTH, None)
    assert world.recorded.counts() == (0, 1)
    assert world.recorded.durations() == {("ongoing_request", "success"): 1}


async def test_an_error_item_moves_the_request_like_a_raised_error() -> None:
    world = World(Fault(error_after=3, error=StreamIncomplete("gone")), None)
    seen = await world.collect()
    assert (seen.tokens, seen.raised) == (ALL, None)
    assert not any(item.is_error for item in seen.items)


async def test_the_delivered_tokens_become_prompt_and_the_limits_shrink() -> None:
    conditions = StopConditions(max_tokens=10, min_tokens=2, max_thinking_tokens=7, stop=["x"])
    sent = make_request(stop_conditions=conditions)
    world = World(broken(3), broken(2), None)
    assert (await world.collect(sent)).tokens == ALL
    assert [one.token_ids for one in world.attempts] == [[1, 2, 3], [1, 2, 3, *ALL[:3]], [1, 2, 3, *ALL[:5]]]
    left = [
        (c.max_tokens, c.min_tokens, c.max_thinking_tokens, c.stop)
        for c in (one.stop_conditions for one in world.attempts)
    ]
    assert left == [(10, 2, 7, ["x"]), (7, 0, 4, ["x"]), (5, 0, 2, ["x"])]
    assert (sent.token_ids, sent.stop_conditions) == ([1, 2, 3], conditions)


async def test_raw_engine_output_is_tracked_as_detokenized_is() -> None:
    for kind in (lambda i: LLMEngineOutput([i]), lambda i: BackendOutput([i], ["x"], "x")):
        world = World(None, script=[Annotated(kind(i)) for i in (200, 201, 202)] + [Fail(GONE)])
        await world.collect()
        assert world.attempts[1].token_ids == [1, 2, 3, 200, 201, 202]


async def test_an_answer_that_breaks_before_its_first_token_is_requested_again_unchanged() -> None:
    world = World(broken(0), None)
    assert (await world.collect()).tokens == ALL
    assert [one.token_ids for one in world.attempts] == [[1, 2, 3], [1, 2, 3]]
    assert world.recorded.counts() == (0, 1)


async def test_events_pass_and_are_not_taken_for_tokens() -> None:
    event = Annotated[Any].from_annotation("note", {"a": 1})
    world = World(broken(3), None, script=lambda payload: [event, *healthy(payload)])
    seen = await world.collect()
    assert seen.tokens == ALL
    assert [item for item in seen.items if item.event] == [event, event]


async def test_changes_that_one_worker_makes_to_the_request_do_not_reach_the_next_one() -> None:
    sent = make_request(routing=RoutingHints(priority=1))
    world = World(broken(3), None)
    stream = await world.graph.generate(Context(sent))
    async with stream:
        await anext(stream)
        first = world.attempts[0]
        first.ensure_routing().dp_rank, first.extra_args = 5, {"a": 1}
        async for _ in stream:
            pass
    assert world.attempts[1].routing == sent.routing == RoutingHints(priority=1)
    assert world.attempts[1].extra_args is None


# -- what rides along


async def test_each_attempt_is_a_child_with_the_id_metadata_and_registry_of_the_request() -> None:
    sent = Context(make_request(), id="r", metadata={"X-Dynamo-Session-ID": "s"})
    sent.registry.insert_shared("affinity", "w")
    world = World(REFUSED, broken(2), None)
    async with await world.graph.generate(sent) as stream:
        assert (stream.context.id, stream.context.control) == ("r", sent.control)
        assert [item.data.token_ids[0] async for item in stream] == ALL
    assert len(world.contexts) == 3
    for context in world.contexts:
        assert (context.id, context.metadata, context.registry.get("affinity", str)) == ("r", sent.metadata, "w")
        assert context.control is not sent.control


async def test_usage_and_cumulative_logprobs_are_those_of_the_whole_answer() -> None:
    def counting(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = healthy(payload)
        for place, item in enumerate(items, 1):
            item.data.log_probs, item.data.cum_log_probs = [-1.0], -1.0 * place
        items[-1].data.completion_usage = CompletionUsage.of(len(payload.token_ids), len(items))
        return items

    seen = await World(broken(3), broken(2), None, script=counting).collect()
    assert [item.data.cum_log_probs for item in seen.items] == [-1.0 * place for place in range(1, 11)]
    assert [item.data.log_probs for item in seen.items] == [[-1.0]] * 10
    assert seen.items[-1].data.completion_usage == CompletionUsage.of(3, 10)


async def test_the_tracker_counts_the_whole_answer_and_names_the_last_worker() -> None:
    tracker = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))

    class Routing(Operator[Any, Any, Any, Any]):
        async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
            tracker.record_worker(len(world.attempts) + 1)
            stream = await next.generate(request)
            return ResponseStream(self._counted(stream), request, stream)

        async def _counted(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
            generated = 0
            async with stream:
                async for item in stream:
                    generated += 1
                    tracker.record_osl(generated)
                    yield item

    world = World(broken(3), None)
    graph = link(world.migration, Routing(), world.faults, world.engine)
    await receive(graph, Context(make_request(tracker=tracker)))
    assert (tracker.osl_tokens, tracker.decode_worker.worker_id) == (10, 2)


async def test_the_trace_link_of_the_worker_before_goes_to_the_next_one() -> None:
    def linked(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = healthy(payload)
        items[0].data.worker_trace_link = LINK
        return items

    world = World(broken(3), REFUSED, None, script=linked)
    assert (await world.collect()).tokens == ALL
    assert [one.migration_link for one in world.attempts] == [None, LINK, LINK]


async def test_the_span_of_a_retry_is_linked_to_the_worker_before_it() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    def linked(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = healthy(payload)
        items[0].data.worker_trace_link = LINK
        return items

    world = World(broken(3), REFUSED, None, script=linked, tracer=tracer)
    graph = traced(link(world.migration, world.faults, world.engine), tracer=tracer)
    assert (await receive(graph, Context(make_request()))).tokens == ALL
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    retries = [span for span in spans if span.name == "migration.retry"]
    assert [[f"{link.context.span_id:016x}" for link in span.links] for span in retries] == [[LINK.span_id]] * 2
    assert [(span.attributes or {})["migration.attempt"] for span in retries] == [2, 3]
    assert [(span.attributes or {})["migration.delivered_tokens"] for span in retries] == [3, 3]
    for span in retries:
        assert span.parent is not None
        assert by_id[span.parent.span_id].name == "Migration"


async def test_the_span_of_a_request_that_may_not_move_has_the_reason() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    world = World()
    graph = traced(link(world.migration, world.engine), tracer=provider.get_tracer("test"))
    await receive(graph, Context(make_request(prompt_embeds="AAAA")))
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "Migration"]
    assert "prompt embeddings" in str((span.attributes or {})["migration.off"])


# -- its place


class Raw(AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]):
    async def generate(self, request: Context[PreprocessedRequest]) -> ResponseStream[Annotated[LLMEngineOutput]]:
        return ResponseStream.of([Annotated(LLMEngineOutput([104, 105], finish_reason=FinishReason.STOP))], request)


async def test_it_links_where_the_diagram_has_it() -> None:
    tiny = Model.byte_level("tiny")
    graph = Preprocess(tiny) >> Migration(limit=3) >> Detokenize(tiny) >> Raw()
    assert str(graph) == "Preprocess(tiny) >> Migration(limit=3) >> Detokenize(tiny) >> Raw()"
    sent = CompletionRequest(model="tiny", prompt="greet", max_tokens=2)
    (item,) = await (await graph.generate(Context(sent))).collect()
    assert item.data is not None
    assert (item.data.text, item.data.finish_reason) == ("hi", FinishReason.STOP)


def test_it_passes_on_the_type_of_items_so_that_a_wrong_neighbour_is_refused() -> None:
    tiny = Model.byte_level("tiny")
    assert str(link(Migration(3), Raw())) == "Migration(3) >> Raw()"
    with pytest.raises(LinkError):
        link(Preprocess(tiny), Migration(3), Raw())


def test_a_new_attempt_s_tokens_come_on_top_and_its_workers_replace_the_others() -> None:
    clock = iter(range(100))
    tracker = RequestTracker(lambda: float(next(clock)), lambda: 0, lambda: anyio.Semaphore(1))
    tracker.record_first_token()
    tracker.record_worker(1, 0, "aggregated")
    tracker.record_osl(3)
    tracker.begin_attempt(4)
    assert (tracker.osl_tokens, tracker.worker_info()) == (4, None)
    tracker.record_worker(2)
    tracker.record_osl(5)
    tracker.record_finish()
    assert (tracker.osl_tokens, tracker.decode_worker.worker_id, tracker.prefill_worker.worker_id) == (9, 2, 2)
    assert tracker.avg_itl_ms == 1000 / 8
