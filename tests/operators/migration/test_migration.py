"""Migration: what the caller sees of a request whose workers fail, what is counted, and what is left open."""

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
    Disconnected,
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

pytestmark = pytest.mark.anyio

LINK = TraceLink("1" * 32, "2" * 16)
ALL = list(range(101, 111))
REFUSED = Fault(fail_to_connect=True)


def broken(after: int) -> Fault:
    return Fault(disconnect_after=after)


def output(token_id: int, **fields: Any) -> Annotated[Any]:
    return Annotated(LLMEngineOutput([token_id], **fields))


# -- the tokens


async def test_a_healthy_worker_is_asked_once(world_of: Any) -> None:
    """MIG-01"""
    world = world_of()
    seen = await world.ask()
    assert (seen.tokens, seen.finish, len(world.asked)) == (ALL, FinishReason.LENGTH, 1)
    assert (world.recorded.counts(), world.recorded.durations()) == ((0, 0), {})


async def test_a_failed_dispatch_goes_to_another_worker(world_of: Any) -> None:
    """MIG-02"""
    world = world_of(REFUSED, None)
    assert (await world.ask()).tokens == ALL
    assert world.recorded.counts() == (1, 0)
    assert world.recorded.durations() == {("new_request", "success"): 1}


async def test_a_broken_answer_goes_on_with_another_worker(world_of: Any) -> None:
    world = world_of(broken(3), None)
    seen = await world.ask()
    assert (seen.tokens, seen.finish, seen.raised) == (ALL, FinishReason.LENGTH, None)
    assert world.recorded.counts() == (0, 1)
    assert world.recorded.durations() == {("ongoing_request", "success"): 1}


async def test_an_error_item_moves_the_request_like_a_raised_error(world_of: Any) -> None:
    world = world_of(Fault(error_after=3, error=StreamIncomplete("gone")), None)
    seen = await world.ask()
    assert (seen.tokens, seen.raised) == (ALL, None)
    assert not any(item.is_error for item in seen.items)


async def test_the_delivered_tokens_become_prompt_and_the_limits_shrink(world_of: Any, asking: Any) -> None:
    conditions = StopConditions(max_tokens=10, min_tokens=2, max_thinking_tokens=7, stop=["x"])
    asked = asking(stop_conditions=conditions)
    world = world_of(broken(3), broken(2), None)
    assert (await world.ask(asked)).tokens == ALL
    assert [one.token_ids for one in world.asked] == [[1, 2, 3], [1, 2, 3, *ALL[:3]], [1, 2, 3, *ALL[:5]]]
    left = [
        (c.max_tokens, c.min_tokens, c.max_thinking_tokens, c.stop)
        for c in (one.stop_conditions for one in world.asked)
    ]
    assert left == [(10, 2, 7, ["x"]), (7, 0, 4, ["x"]), (5, 0, 2, ["x"])]
    assert (asked.token_ids, asked.stop_conditions) == ([1, 2, 3], conditions)


async def test_raw_engine_output_is_tracked_as_detokenized_is(world_of: Any) -> None:
    """MIG-14"""
    for kind in (lambda i: LLMEngineOutput([i]), lambda i: BackendOutput([i], ["x"], "x")):
        world = world_of(None, script=[Annotated(kind(i)) for i in (200, 201, 202)] + [Fail(Disconnected("gone"))])
        await world.ask()
        assert world.asked[1].token_ids == [1, 2, 3, 200, 201, 202]


async def test_an_answer_that_breaks_before_its_first_token_is_asked_for_again_as_it_was(world_of: Any) -> None:
    world = world_of(broken(0), None)
    assert (await world.ask()).tokens == ALL
    assert [one.token_ids for one in world.asked] == [[1, 2, 3], [1, 2, 3]]
    assert world.recorded.counts() == (0, 1)


async def test_events_pass_and_are_not_taken_for_tokens(world_of: Any, model: Any) -> None:
    event = Annotated[Any].from_annotation("note", {"a": 1})
    world = world_of(broken(3), None, script=lambda payload: [event, *model(payload)])
    seen = await world.ask()
    assert seen.tokens == ALL
    assert [item for item in seen.items if item.event] == [event, event]


async def test_what_one_worker_left_on_the_request_the_next_one_does_not_see(world_of: Any, asking: Any) -> None:
    asked = asking(routing=RoutingHints(priority=1))
    world = world_of(broken(3), None)
    stream = await world.graph.generate(Context(asked))
    async with stream:
        await anext(stream)
        first = world.asked[0]
        first.ensure_routing().dp_rank, first.extra_args = 5, {"a": 1}
        async for _ in stream:
            pass
    assert world.asked[1].routing == asked.routing == RoutingHints(priority=1)
    assert world.asked[1].extra_args is None


# -- what rides along


async def test_each_attempt_is_a_child_with_the_id_metadata_and_registry_of_the_request(
    world_of: Any, asking: Any
) -> None:
    """MIG-16"""
    asked = Context(asking(), id="r", metadata={"X-Dynamo-Session-ID": "s"})
    asked.registry.insert_shared("affinity", "w")
    world = world_of(REFUSED, broken(2), None)
    async with await world.graph.generate(asked) as stream:
        assert (stream.context.id, stream.context.control) == ("r", asked.control)
        assert [item.data.token_ids[0] async for item in stream] == ALL
    assert len(world.contexts) == 3
    for context in world.contexts:
        assert (context.id, context.metadata, context.registry.get("affinity", str)) == ("r", asked.metadata, "w")
        assert context.control is not asked.control


async def test_usage_and_cumulative_logprobs_are_those_of_the_whole_answer(world_of: Any, model: Any) -> None:
    def counting(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = model(payload)
        for place, item in enumerate(items, 1):
            item.data.log_probs, item.data.cum_log_probs = [-1.0], -1.0 * place
        items[-1].data.completion_usage = CompletionUsage.of(len(payload.token_ids), len(items))
        return items

    seen = await world_of(broken(3), broken(2), None, script=counting).ask()
    assert [item.data.cum_log_probs for item in seen.items] == [-1.0 * place for place in range(1, 11)]
    assert [item.data.log_probs for item in seen.items] == [[-1.0]] * 10
    assert seen.items[-1].data.completion_usage == CompletionUsage.of(3, 10)


async def test_the_tracker_counts_the_whole_answer_and_names_the_last_worker(
    world_of: Any, see: Any, asking: Any
) -> None:
    tracker = RequestTracker(anyio.current_time, lambda: 0, lambda: anyio.Semaphore(1))

    class Routing(Operator[Any, Any, Any, Any]):
        async def generate(self, request: Context[Any], next: AsyncEngine[Any, Any]) -> ResponseStream[Any]:
            tracker.record_worker(len(world.asked) + 1)
            stream = await next.generate(request)
            return ResponseStream(self._counted(stream), request, stream)

        async def _counted(self, stream: ResponseStream[Any]) -> AsyncGenerator[Any, None]:
            said = 0
            async with stream:
                async for item in stream:
                    said += 1
                    tracker.record_osl(said)
                    yield item

    world = world_of(broken(3), None)
    graph = link(world.migration, Routing(), world.faults, world.engine)
    await see(graph, Context(asking(tracker=tracker)))
    assert (tracker.osl_tokens, tracker.decode_worker.worker_id) == (10, 2)


async def test_the_worker_before_is_named_to_the_next_one(world_of: Any, model: Any) -> None:
    def linked(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = model(payload)
        items[0].data.worker_trace_link = LINK
        return items

    world = world_of(broken(3), REFUSED, None, script=linked)
    assert (await world.ask()).tokens == ALL
    assert [one.migration_link for one in world.asked] == [None, LINK, LINK]


async def test_the_span_of_a_retry_is_linked_to_the_worker_before_it(
    world_of: Any, model: Any, see: Any, asking: Any
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")

    def linked(payload: PreprocessedRequest) -> list[Any]:
        items: list[Any] = model(payload)
        items[0].data.worker_trace_link = LINK
        return items

    world = world_of(broken(3), REFUSED, None, script=linked, tracer=tracer)
    graph = traced(link(world.migration, world.faults, world.engine), tracer=tracer)
    assert (await see(graph, Context(asking()))).tokens == ALL
    spans = exporter.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    retries = [span for span in spans if span.name == "migration.retry"]
    assert [[f"{link.context.span_id:016x}" for link in span.links] for span in retries] == [[LINK.span_id]] * 2
    assert [(span.attributes or {})["migration.attempt"] for span in retries] == [2, 3]
    assert [(span.attributes or {})["migration.delivered_tokens"] for span in retries] == [3, 3]
    for span in retries:
        assert span.parent is not None
        assert by_id[span.parent.span_id].name == "Migration"


async def test_a_request_that_may_not_move_says_so_in_its_span(world_of: Any, see: Any, asking: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    world = world_of()
    graph = traced(link(world.migration, world.engine), tracer=provider.get_tracer("test"))
    await see(graph, Context(asking(prompt_embeds="AAAA")))
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
    asked = CompletionRequest(model="tiny", prompt="say", max_tokens=2)
    (item,) = await (await graph.generate(Context(asked))).collect()
    assert item.data is not None
    assert (item.data.text, item.data.finish_reason) == ("hi", FinishReason.STOP)


def test_it_hands_on_the_type_of_items_so_that_a_wrong_neighbour_is_seen() -> None:
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
