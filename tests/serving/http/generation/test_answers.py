"""What clients get for chats and completions, streamed and whole."""

from __future__ import annotations

from typing import Any

import pytest

from operators.text import PROMPT_TOKENS
from pipeline import Annotated, Context, ResponseStream
from pipeline.protocols import BackendOutput, CompletionUsage, FinishReason, PromptTokensDetails, RoutingData
from pipeline.protocols.timing import WorkerIdInfo
from pipeline.testing import ScriptedEngine, Wait, watch_streams
from serving.deployment import GraphConfig, standard_graph
from serving.http import HttpOptions, app
from tests.serving.worlds import chat, complete, last, token


@pytest.fixture
def hello() -> ScriptedEngine:
    return ScriptedEngine([token("Hel"), token("lo"), token("!"), last()])


async def test_a_chat_streams_one_event_a_token(hello: ScriptedEngine) -> None:
    answer = await chat(app({"m": hello}), stream=True).run()
    assert answer.status == 200
    assert answer.response_headers["content-type"] == "text/event-stream"
    assert [chunk["choices"][0]["delta"].get("content") for chunk in answer.chunks] == ["Hel", "lo", "!", None]
    assert {chunk["object"] for chunk in answer.chunks} == {"chat.completion.chunk"}
    assert answer.data[-1] == "[DONE]"
    assert hello.open == 0


async def test_the_role_comes_with_the_first_chunk_of_each_choice() -> None:
    items = [token("a", index=0), token("b", index=1), token("c", index=0), last(index=0), last(index=1)]
    answer = await chat(app({"m": ScriptedEngine(items)}), stream=True, n=2).run()
    roles = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("role")) for c in answer.chunks]
    assert roles == [(0, "assistant"), (1, "assistant"), (0, None), (0, None), (1, None)]


async def test_the_finish_reason_comes_with_the_last_chunk_only(hello: ScriptedEngine) -> None:
    answer = await chat(app({"m": hello}), stream=True).run()
    assert [c["choices"][0]["finish_reason"] for c in answer.chunks] == [None, None, None, "stop"]


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP, "stop"),
        (FinishReason.CANCELLED, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CONTENT_FILTER, "content_filter"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_finish_reasons_are_those_of_openai(reason: FinishReason, shown: str, stream: bool) -> None:
    answer = await chat(app({"m": ScriptedEngine([token("a"), last(reason)])}), stream=stream).run()
    whole = answer.chunks[-1] if stream else answer.json
    assert whole["choices"][0]["finish_reason"] == shown


async def test_a_whole_chat_is_one_body(hello: ScriptedEngine) -> None:
    answer = await chat(app({"m": hello})).run()
    assert answer.status == 200
    assert answer.response_headers["content-type"] == "application/json"
    assert answer.json["object"] == "chat.completion"
    assert answer.json["id"].startswith("chatcmpl-")
    assert answer.json["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello!"}, "finish_reason": "stop", "logprobs": None}
    ]
    assert answer.json["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert hello.open == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_completion_has_text_choices(hello: ScriptedEngine, stream: bool) -> None:
    answer = await complete(app({"m": hello}), stream=stream).run()
    parts = answer.chunks if stream else [answer.json]
    assert "".join(part["choices"][0]["text"] for part in parts) == "Hello!"
    assert {part["object"] for part in parts} == {"text_completion"}
    assert all(part["id"].startswith("cmpl-") for part in parts)


async def test_a_stream_has_no_usage_by_default(hello: ScriptedEngine) -> None:
    answer = await chat(app({"m": hello}), stream=True).run()
    assert b"usage" not in answer.content


async def test_include_usage_adds_one_chunk_without_choices(hello: ScriptedEngine) -> None:
    answer = await chat(app({"m": hello}), stream=True, stream_options={"include_usage": True}).run()
    *content, usage = answer.chunks
    assert [chunk["usage"] for chunk in content] == [None] * 4
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


async def test_continuous_usage_counts_up() -> None:
    engine = ScriptedEngine([token("a"), token("b"), last()])
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await chat(app({"m": engine}), stream=True, stream_options=options).run()
    assert [chunk["usage"]["completion_tokens"] for chunk in answer.chunks] == [1, 2, 2, 2]


async def test_usage_can_be_forced(hello: ScriptedEngine) -> None:
    wanted: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": False}}
    answer = await chat(app({"m": hello}, options=HttpOptions(force_usage=True)), **wanted).run()
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 3


async def test_no_usage_chunk_without_a_finish_reason() -> None:
    engine = ScriptedEngine([token("a")])
    answer = await chat(app({"m": engine}), stream=True, stream_options={"include_usage": True}).run()
    assert len(answer.chunks) == 1


async def test_an_empty_delta_is_not_sent_but_its_tokens_count() -> None:
    silent = Annotated(BackendOutput([7, 8], [None, None], None))
    engine = ScriptedEngine([token("a"), silent, token(""), token("b"), last()])
    answer = await chat(app({"m": engine}), stream=True, stream_options={"include_usage": True}).run()
    assert len(answer.chunks) == 4
    assert answer.chunks[-1]["usage"]["completion_tokens"] == 5


async def test_what_a_worker_reports_of_the_prompt_is_believed() -> None:
    usage = CompletionUsage(9, 99, 108, PromptTokensDetails(cached_tokens=4))
    end = Annotated(BackendOutput([1], ["b"], "b", finish_reason=FinishReason.STOP, completion_usage=usage))
    answer = await chat(app({"m": ScriptedEngine([token("a"), end])})).run()
    assert answer.json["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_without_a_report_of_the_worker_the_prompt_is_as_long_as_preprocessing_found() -> None:
    class Counting(ScriptedEngine):
        async def generate(self, request: Context[Any]) -> ResponseStream[Any]:
            request.registry.insert_shared(PROMPT_TOKENS, 5)
            return await super().generate(request)

    end = Annotated(BackendOutput([], [], None, finish_reason=FinishReason.STOP))
    service = app({"m": Counting([token("a"), end])})
    assert (await chat(service).run()).json["usage"]["total_tokens"] == 6
    assert (await complete(service, prompt=["a", "b", "c"]).run()).json["usage"]["prompt_tokens"] == 15


async def test_each_prompt_of_a_batch_is_a_request_of_its_own() -> None:
    items = [token("a", index=0), token("b", index=1), last(index=0), last(index=1)]
    engine = ScriptedEngine(items)
    answer = await complete(app({"m": engine}), prompt=["p1", "p2"], n=2, temperature=1).run()
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer.json["choices"]] == ["a", "b", "a", "b"]
    whole = answer.json["id"].removeprefix("cmpl-")
    seen = {request.id: request.payload.prompt for request in engine.requests}
    assert seen == {f"{whole}-0": "p1", f"{whole}-1": "p2"}


async def test_a_batch_streams_one_usage_chunk_of_all(hello: ScriptedEngine) -> None:
    wanted: dict[str, Any] = {"prompt": ["a", "b", "c"], "stream": True, "stream_options": {"include_usage": True}}
    answer = await complete(app({"m": hello}), **wanted).run()
    usages = [chunk for chunk in answer.chunks if not chunk["choices"]]
    assert [chunk["usage"]["total_tokens"] for chunk in usages] == [24]
    assert len({chunk["id"] for chunk in answer.chunks}) == 1


async def test_prompts_of_a_batch_run_together() -> None:
    engine = ScriptedEngine(lambda _: [token("a"), Wait(5), last()])
    exchange = complete(app({"m": engine}), prompt=[[1, 2], [3]])
    with watch_streams() as streams:
        await exchange.run()
    assert exchange.status == 200
    assert sorted(request.payload.prompt for request in engine.requests) == [[1, 2], [3]]
    assert streams.open == []


async def test_annotations_are_events_before_the_data(hello: ScriptedEngine) -> None:
    note = Annotated[Any].from_annotation("formatted_prompt", "two\nlines")
    answer = await chat(app({"m": ScriptedEngine([note, token("a"), last()])}), stream=True).run()
    assert answer.content.startswith(b'event: formatted_prompt\n: "two\\nlines"\n\ndata: {')


async def test_metric_events_never_reach_the_client() -> None:
    hidden = [Annotated[Any].from_annotation(name, {"secret": 1}) for name in ("llm_metrics", "payload_usage")]
    answer = await chat(app({"m": ScriptedEngine([token("a"), *hidden, last()])}), stream=True).run()
    assert b"secret" not in answer.content
    assert len(answer.chunks) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_extension_fields_are_sent_to_clients_that_request_them(stream: bool) -> None:
    engine = ScriptedEngine([token("a", engine_data={"k": 1}), last()])
    answer = await chat(app({"m": engine}), stream=stream, nvext={"extra_fields": ["engine_data"]}).run()
    first = answer.chunks[0] if stream else answer.json
    assert first["nvext"] == {"engine_data": {"k": 1}}
    unasked = await chat(app({"m": engine}), stream=stream).run()
    assert b"nvext" not in unasked.content


async def test_completion_token_ids_are_joined() -> None:
    items = [Annotated(BackendOutput(ids, ["x"] * len(ids), "x")) for ids in ([1], [2, 3])]
    wanted: dict[str, Any] = {"nvext": {"extra_fields": ["completion_token_ids"]}}
    answer = await chat(app({"m": ScriptedEngine([*items, last()])}), **wanted).run()
    assert answer.json["nvext"]["completion_token_ids"] == [1, 2, 3]


async def test_asking_for_the_workers_shows_them() -> None:
    routing = RoutingData(worker_id=WorkerIdInfo(decode_worker_id=7), token_ids=[1, 2])
    engine = ScriptedEngine([last(routing_data=routing)])
    wanted: dict[str, Any] = {"nvext": {"annotations": ["query_instance_id:x"]}}
    answer = await chat(app({"m": engine}), **wanted).run()
    assert answer.json["nvext"] == {"worker_id": {"decode_worker_id": 7}, "token_ids": [1, 2]}


async def test_the_clients_request_id_comes_back(hello: ScriptedEngine) -> None:
    for stream in (True, False):
        answer = await chat(app({"m": hello}), stream=stream, headers={"x-request-id": "my id"}).run()
        assert answer.response_headers["x-request-id"] == "my id"


async def test_only_a_uuid_becomes_the_id_of_the_request(hello: ScriptedEngine) -> None:
    uuid = "6f0d2d0c-6c1e-4b57-9c11-5f8e0e4b2a55"
    await chat(app({"m": hello}), headers={"x-dynamo-request-id": uuid}).run()
    await chat(app({"m": hello}), headers={"x-dynamo-request-id": "../../x"}).run()
    first, second = (request.id for request in hello.requests)
    assert first == uuid
    assert len(second) == 36
    assert second != uuid


async def test_headers_win_over_the_extension_in_the_body(hello: ScriptedEngine) -> None:
    headers = {"x-dynamo-dp-rank": "3", "x-dynamo-request-priority": "abc"}
    body = {"nvext": {"dp_rank": 1, "agent_hints": {"priority": 4}}}
    await chat(app({"m": hello}), headers=headers, **body).run()
    seen = hello.requests[0].payload.nvext
    assert (seen.dp_rank, seen.agent_hints.priority) == (3, 4)


async def test_extensions_can_be_turned_off(hello: ScriptedEngine) -> None:
    off = app({"m": hello}, options=HttpOptions(nvext=False))
    await chat(off, headers={"x-dynamo-dp-rank": "3"}, nvext={"dp_rank": 1}).run()
    assert hello.requests[0].payload.nvext is None


async def test_metadata_headers_travel_without_credentials(hello: ScriptedEngine) -> None:
    headers = {"x-dynamo-meta-team": "a", "x-dynamo-meta-authorization": "secret", "other": "b"}
    await chat(app({"m": hello}), headers=headers).run()
    assert hello.requests[0].metadata == {"team": "a"}


async def test_the_session_of_a_request_travels_with_it(hello: ScriptedEngine) -> None:
    await chat(app({"m": hello}), headers={"X-Dynamo-Session-ID": "one"}).run()
    assert hello.requests[0].metadata == {"x-dynamo-session-id": "one"}


async def test_several_models_in_one_app_and_several_apps_in_one_process() -> None:
    engines = [ScriptedEngine([token(text), last()]) for text in "abc"]
    first, second = app({"x": engines[0], "y": engines[1]}), app({"x": engines[2]})
    answers = [await chat(each, model=name).run() for each, name in ((first, "x"), (first, "y"), (second, "x"))]
    assert [answer.json["choices"][0]["message"]["content"] for answer in answers] == ["a", "b", "c"]
    assert [answer.json["model"] for answer in answers] == ["x", "y", "x"]


async def test_an_answer_that_ends_at_a_stop_string_has_its_whole_usage() -> None:
    """The worker is stopped there and does not sum up any more."""
    wanted: dict[str, Any] = {"messages": [{"role": "user", "content": "abcdef"}], "stop": "cd"}
    async with standard_graph(GraphConfig()) as graph:
        whole = await chat(app({"m": graph}), **wanted).run()
        streamed = await chat(app({"m": graph}), **wanted, stream=True, stream_options={"include_usage": True}).run()
    usage = {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert whole.json["choices"][0]["message"]["content"] == "ab"
    assert whole.json["usage"] == streamed.chunks[-1]["usage"] == usage
