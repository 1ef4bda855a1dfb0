"""An engine that is a server: its requests, its items, and every error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from engines.upstream import UNKNOWN_TOKEN
from pipeline import Annotated, Context, InvalidArgument
from pipeline.protocols import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from pipeline.telemetry import extract
from pipeline.testing import check_engine
from serving.live import Address, LiveEngine
from tests.engines.upstream.wire import plug
from tests.serving.live.worlds import (
    ADDRESS,
    DONE,
    answer_to,
    answering,
    chunk,
    engine_of,
    outputs,
    prompt,
    serve,
    usage,
)

# -- the contract


class Canned(ByteStream):
    """A connection whose answers are there already, an event each 10 ms; a prompt of one token is refused."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_open = True

    async def send(self, item: bytes) -> None:
        if b'"prompt":[1]' in item:
            self.parts = [b"HTTP/1.1 400 x\r\nContent-Length: 2\r\n\r\nno"]
            return
        events = [*map(json.dumps, [*(chunk(str(at)) for at in range(60)), chunk("", "length")]), DONE]
        whole = "".join(f"data: {event}\n\n" for event in events)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {len(whole)}\r\n\r\n"
        self.parts = [head.encode(), *(f"data: {event}\n\n".encode() for event in events)]

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.sleep(0.01)
        return self.parts.pop(0)

    async def send_eof(self) -> None:
        raise AssertionError

    async def aclose(self) -> None:
        self.is_open = False


async def test_it_holds_the_contract_of_an_engine() -> None:
    """E1 to E13; and what its connections are to their requests, open or closed, so they are to each other."""
    made: list[Canned] = []

    async def dial() -> ByteStream:
        made.append(Canned())
        return made[-1]

    @asynccontextmanager
    async def engine() -> AsyncIterator[LiveEngine]:
        one = LiveEngine(ADDRESS, "m", transport=plug(dial))
        yield one
        await one.aclose()

    wanted = [Annotated(LLMEngineOutput([UNKNOWN_TOKEN], text=str(at))) for at in range(60)]
    last = Annotated(LLMEngineOutput([], finish_reason=FinishReason.LENGTH))
    await check_engine(
        engine,
        request=prompt(60),
        expected=[*wanted, last],
        bad_request=PreprocessedRequest([1]),
        open_count=lambda engine: engine.in_flight,
    )
    assert not any(one.is_open for one in made)


# -- requests


async def test_what_ends_an_answer_is_sent() -> None:
    async with serve(answering(chunk("", "length"), DONE)) as server, engine_of(server) as engine:
        stop = StopConditions(max_tokens=3, stop=["\n"], stop_token_ids=[7])
        await outputs(engine, prompt(stop_conditions=stop))
        sent = server.received[0].json
        assert (sent["max_tokens"], sent["stop"], sent["stop_token_ids"]) == (3, ["\n"], [7])


async def test_a_request_wants_exactly_its_tokens_from_prompt_ids() -> None:
    async with serve(answering(chunk("", "length"), DONE)) as server, engine_of(server, api_key="secret\n") as engine:
        sampling = SamplingOptions(temperature=0.5)
        request = prompt(9, sampling_options=sampling, routing=RoutingHints(priority=3, strict_priority=1))
        metadata = {"X-Dynamo-Session-ID": " s 1\n", "policy class": "bulk\r\nx: y"}
        async with await engine.generate(Context(request, id="line:7", metadata=metadata)) as stream:
            assert [item async for item in stream]
        (received,) = server.received
        assert (received.method, received.path) == ("POST", "/api/v1/completions")
        assert received.json == {
            "model": "m",
            "prompt": [5, 6, 7],
            "max_tokens": 9,
            "min_tokens": 9,
            "ignore_eos": True,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        names = [name for name in received.headers if name.startswith(("x-", "auth", "host"))]
        assert {name: received.headers[name] for name in names} == {
            "host": "far:8000",
            "x-request-id": "line:7",
            "x-dynamo-session-id": "s 1",
            "x-dynamo-meta-policy-class": "bulk?x: y",
            "authorization": "Bearer secret",
        }


async def test_the_span_and_baggage_of_a_request_go_to_the_server() -> None:
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "v=1", "baggage": "user=7"}
    async with serve(answering(chunk("", "length"), DONE)) as server, engine_of(server) as engine:
        request = Context(prompt(9))
        request.trace = extract(headers)
        async with await engine.generate(request) as stream:
            assert [item async for item in stream]
        (received,) = server.received
        assert {name: received.headers[name] for name in headers} == headers


async def test_a_server_that_knows_nvext_gets_the_priority_and_returns_ids_workers_and_times() -> None:
    async with serve(answering(chunk("", "length"), DONE)) as server, engine_of(server, nvext=True) as engine:
        hints = RoutingHints(priority=3, strict_priority=1)
        await outputs(engine, prompt(routing=hints, annotations=["output_replay_id:line:7"]))
        received = server.received[0].json
        assert received["nvext"] == {
            "extra_fields": ["worker_id", "timing", "completion_token_ids"],
            "annotations": ["output_replay_id:line:7"],
            "agent_hints": {"priority": 3, "strict_priority": 1},
        }
        assert received["stream_options"] == {"include_usage": True}


async def test_the_adapter_of_a_request_is_the_model_that_answers() -> None:
    async with serve(answering(chunk("", "length"), DONE)) as server, engine_of(server) as engine:
        await outputs(engine, prompt(routing=RoutingHints(lora_name="french")))
        assert server.received[0].json["model"] == "french"


async def test_a_server_that_knows_nvext_keeps_tenants_and_reasoning_apart() -> None:
    async with serve(answering(chunk("", "length"), DONE)) as server, engine_of(server, nvext=True) as engine:
        stop = StopConditions(max_tokens=3, max_thinking_tokens=2)
        await outputs(engine, prompt(stop_conditions=stop, routing=RoutingHints(cache_namespace="a tenant's")))
        sent = server.received[0].json["nvext"]
        assert (sent["cache_salt"], sent["max_thinking_tokens"]) == ("a tenant's", 2)


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_embeds": "x"},
        {"multi_modal_data": {}},
        {"sampling_options": SamplingOptions(n=2)},
        {"sampling_options": SamplingOptions(best_of=2)},
        {"stop_conditions": StopConditions(max_thinking_tokens=9)},
        {"routing": RoutingHints(cache_namespace="a tenant's")},
    ],
    ids=repr,
)
async def test_what_a_completion_cannot_express_is_refused_not_left_out(more: dict[str, Any]) -> None:
    async with serve(answering()) as server, engine_of(server) as engine:
        with pytest.raises(InvalidArgument, match="in text does not take it"):
            await outputs(engine, prompt(**more))
        assert not server.lines


# -- how many tokens a chunk has

COUNTED: dict[str, tuple[list[Any], list[int]]] = {
    "one for each chunk with text": ([chunk("a"), chunk("b"), chunk("c", "length")], [1, 1, 1, 0]),
    "several in a chunk, by the running total": (
        [chunk("ab", usage=usage(2)), chunk("", usage=usage(2)), chunk("cde", "length", usage=usage(5))],
        [2, 3, 0],
    ),
    "none shown yet, half a character, by the running total": (
        [chunk("", usage=usage(1)), chunk("é", "length", usage=usage(2))],
        [1, 1, 0],
    ),
    "by text, while the total is one in name only": (
        [chunk("a", usage=usage(0)), chunk("b", "length", usage=usage(0)), {"choices": [], "usage": usage(3)}],
        [1, 1, 1, 0],
    ),
    "the rest, by the usage at the end": ([chunk("abc", "length"), {"choices": [], "usage": usage(4)}], [1, 3, 0]),
    "all of them at the end": ([chunk("", "length"), {"choices": [], "usage": usage(2)}], [2, 0]),
    "ids of nvext": ([chunk("ab", nvext={"completion_token_ids": [8, 9]}), chunk("c", "length")], [2, 1, 0]),
    "ids beside the text": (
        [{"choices": [{"index": 0, "text": "ab", "token_ids": [8, 9], "finish_reason": "length"}]}],
        [2, 0],
    ),
    "nothing in empty events": ([b": ping\n\n", chunk(""), chunk("a", "length")], [1, 0]),
}


@pytest.mark.parametrize("name", COUNTED)
async def test_every_token_is_counted_once(name: str) -> None:
    events, counts = COUNTED[name]
    found = await answer_to(*events, DONE)
    assert [len(output.token_ids) for output in found] == counts
    assert [output.finish_reason for output in found] == [None] * (len(counts) - 1) + [FinishReason.LENGTH]


async def test_ids_workers_times_and_usage_are_handed_on() -> None:
    known = {"worker_id": {"prefill_worker_id": 4, "decode_worker_id": 5, "new": 1}, "completion_token_ids": [8]}
    times = {"timing": {"request_received_ms": 1, "prefill_wait_time_ms": 2.5}}
    whole = usage(1, prompt_tokens_details={"cached_tokens": 2})
    events = [chunk("a", nvext=known), chunk("", "stop", nvext=times), {"choices": [], "usage": whole}]
    first, second, last = await answer_to(*events, DONE, nvext=True)
    assert (first.token_ids, first.text) == ([8], "a")
    assert first.routing_data is not None
    assert first.routing_data.worker_id is not None
    assert first.routing_data.worker_id.decode_worker_id == 5
    assert second.routing_data is not None
    assert second.routing_data.timing is not None
    assert second.routing_data.timing.prefill_wait_time_ms == 2.5
    assert isinstance(last.completion_usage, CompletionUsage)
    assert last.completion_usage.prompt_tokens_details is not None
    assert last.completion_usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize(
    ("found", "meant"),
    [("stop", FinishReason.STOP), ("abort", FinishReason.CANCELLED), ("tool_calls", FinishReason.STOP)],
)
async def test_a_reason_beyond_our_words_is_a_stop(found: str, meant: FinishReason) -> None:
    assert (await answer_to(chunk("a", found), DONE))[-1].finish_reason == meant


async def test_an_answer_that_the_server_fails_with_is_an_error() -> None:
    (last,) = (one for one in await answer_to(chunk("a", "error"), DONE) if one.finish_reason is not None)
    assert last.finish_reason is not None
    assert last.finish_reason.is_error


# -- addresses


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a", "http://a"),
        ("https://a/v1", "https://a"),
        ("http://a:80/", "http://a"),
        ("http://[::1]:8000/x/v1/", "http://[::1]:8000/x"),
    ],
)
def test_a_url_may_end_in_v1_or_not(url: str, shown: str) -> None:
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:80", "ftp://a", "http://", "http://a:x", "http://a:65536", "http://a/ b", "http://1.2.3.999"),
        *("http://u:secret@a", "ftp://u:secret@a", "http://u:secret@", "http://u:secret@a:x", "http://u:sec/ret@a"),
        *("http://a?secret", "http://a:x?secret", "ftp://a?secret"),
    ],
)
def test_any_other_text_is_refused_without_the_secrets_in_it(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Address.parse(url, field="live")
    assert caught.value.field == "live"
    assert "sec" not in caught.value.message


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        LiveEngine(ADDRESS, "m", silence_s=0)
