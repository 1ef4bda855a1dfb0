"""An engine that is a server: its requests, its items, and every error."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import pytest
import trio
from anyio.abc import ByteStream

from pipeline import Annotated, Context, InvalidArgument, PenstockError
from pipeline.errors import (
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    InvalidMessage,
    ResourceExhausted,
    ResponseTimeout,
    StatusError,
    StreamIncomplete,
    Unavailable,
)
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
from serving.live.stream import UNKNOWN_TOKEN
from tests.serving.live.worlds import Line, Received, Server, plug, serve

ADDRESS = Address.parse("http://far:8000/api/v1/")
DONE = "[DONE]"


def prompt(tokens: int = 3, **more: Any) -> PreprocessedRequest:
    stop = StopConditions(max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
    return PreprocessedRequest([5, 6, 7], stop_conditions=stop, **more)


def chunk(text: str = "a", reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]} | more


def usage(completion: int, prompt: int = 3, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion} | more


def answering(*events: Any, every_s: float = 0.0) -> Callable[[Any, Any], Awaitable[None]]:
    """A script: these events; bytes go out as they are."""

    async def script(line: Line, received: Received) -> None:
        await line.begin()
        for event in events:
            await anyio.sleep(every_s)
            await (line.put(event) if isinstance(event, bytes) else line.event(event))
        await line.end()

    return script


@asynccontextmanager
async def engine_of(server: Server, **how: Any) -> AsyncIterator[LiveEngine]:
    engine = LiveEngine(ADDRESS, "m", transport=server.transport, **how)
    try:
        yield engine
    finally:
        await engine.aclose()
        assert engine.in_flight == 0


async def outputs(engine: LiveEngine, request: PreprocessedRequest | None = None) -> list[LLMEngineOutput]:
    async with await engine.generate(Context(request or prompt())) as stream:
        return [item.data async for item in stream if item.data is not None]


async def answer_to(*events: Any, **how: Any) -> list[LLMEngineOutput]:
    async with serve(answering(*events)) as server, engine_of(server, **how) as engine:
        return await outputs(engine)


# -- the contract


class Canned(ByteStream):
    """A connection whose answers are there already, an event each 10 ms; a prompt of one token is refused."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_open = True

    async def send(self, item: bytes) -> None:
        if item.startswith(b"POST"):  # the body comes after the head
            return
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


@pytest.mark.parametrize(
    "more", [{"prompt_embeds": "x"}, {"sampling_options": SamplingOptions(n=2)}, {"multi_modal_data": {}}]
)
async def test_what_a_completion_cannot_say_is_refused_not_left_out(more: dict[str, Any]) -> None:
    async with serve(answering()) as server, engine_of(server) as engine:
        with pytest.raises(InvalidArgument, match="live server"):
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


# -- what can go wrong


async def refuse(status: int, body: Any, line: Line, received: Received) -> None:
    await line.whole(status, body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StatusError),
        (401, StatusError),
        (404, StatusError),
        (307, StatusError),
        (429, ResourceExhausted),
        (529, ResourceExhausted),
        (503, Unavailable),
        (500, BackendUnknown),
        (502, BackendCannotConnect),
        (504, BackendResponseTimeout),
    ],
)
async def test_a_status_is_an_error_of_the_tree_with_the_servers_message(
    status: int, kind: type[PenstockError]
) -> None:
    bodies = [
        {"error": {"message": "no  way"}},
        {"message": "no way"},
        {"error": "no way"},
        b"no\nway",
        {"detail": "no way"},
    ]
    for body in bodies:
        refusing = partial(refuse, status, body)
        async with serve(refusing) as server, engine_of(server) as engine:
            with pytest.raises(kind, match=f"^HTTP {status}: no way$") as caught:
                await outputs(engine)
            assert type(caught.value) is kind
            assert not isinstance(caught.value, StatusError) or caught.value.status == status


BROKEN: dict[str, tuple[list[Any], type[PenstockError]]] = {
    "no JSON": ([chunk(), b"data: {oops\n\n"], InvalidMessage),
    "JSON that is no chunk": (["[1, 2]"], InvalidMessage),
    "a list where an object is": ([{"choices": ["x"]}], InvalidMessage),
    "a text where a number is": ([chunk(usage=usage(1) | {"completion_tokens": "x"})], InvalidMessage),
    "no end mark": ([chunk("a", "length")], StreamIncomplete),
    "an end mark without a reason": ([chunk(), DONE], StreamIncomplete),
    "nothing at all": ([], StreamIncomplete),
    "an error frame": ([chunk(), {"error": {"message": "it broke", "code": 500}}, DONE], BackendUnknown),
    "a refusal where there were tokens": ([chunk(), {"error": {"message": "it broke", "code": 503}}], BackendUnknown),
    "a refusal before there were any": ([{"error": {"message": "full", "code": 503}}, DONE], Unavailable),
    "a wrong request, reported late": ([{"object": "error", "message": "too long", "code": 400}], StatusError),
    "an error event": ([b"event: error\n: it broke\n\n"], BackendUnknown),
    "an error event with data": ([b'event: error\ndata: {"message": "it broke"}\n\n'], BackendUnknown),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_is_delivered_as_far_as_it_came_then_raises(name: str) -> None:
    events, kind = BROKEN[name]
    async with serve(answering(*events)) as server, engine_of(server) as engine:
        found: list[str | None] = []
        with pytest.raises(kind) as caught:
            await note_texts(await engine.generate(Context(prompt())), found)
        assert type(caught.value) is kind
        assert found == ["a"] * (events[:1] in ([chunk()], [chunk("a", "length")]))


async def note_texts(stream: Any, found: list[str | None]) -> None:
    async with stream:
        async for item in stream:
            found.append(item.data.text)


async def test_an_answer_cut_off_by_the_connection_is_a_disconnect() -> None:
    async def script(line: Line, received: Received) -> None:
        await line.begin()
        await line.event(chunk())
        await line.wire.aclose()

    async with serve(script) as server, engine_of(server) as engine:
        with pytest.raises(Disconnected, match="after 1 tokens"):
            await outputs(engine)


async def test_an_end_mark_without_its_line_end_still_counts() -> None:
    found = await answer_to(chunk("a", "stop"), b"data: [DONE]")
    assert found[-1].finish_reason == FinishReason.STOP


async def test_what_is_no_event_stream_is_no_answer() -> None:
    async with serve(lambda line, received: line.whole(200, chunk())) as server, engine_of(server) as engine:
        with pytest.raises(InvalidMessage, match="application/json"):
            await outputs(engine)


async def test_what_is_no_http_is_no_answer() -> None:
    async def script(line: Line, received: Received) -> None:
        await line.wire.send(b"220 smtp ready\r\n\r\n")

    async with serve(script) as server, engine_of(server) as engine:
        with pytest.raises(InvalidMessage, match="no HTTP"):
            await outputs(engine)


async def test_an_interim_answer_is_passed_over() -> None:
    async def script(line: Line, received: Received) -> None:
        await line.wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        await answering(chunk("a", "length"), DONE)(line, received)

    async with serve(script) as server, engine_of(server) as engine:
        assert len(await outputs(engine)) == 2


@pytest.mark.parametrize("silent", ["before the head", "after a token"])
async def test_a_server_that_falls_silent_is_given_up_on(silent: str) -> None:
    async def script(line: Line, received: Received) -> None:
        if silent == "after a token":
            await line.begin()
            await anyio.sleep(4.0)
            await line.event(chunk())
        await line.request()

    async with serve(script) as server, engine_of(server, silence_s=5.0) as engine:
        with pytest.raises(ResponseTimeout, match="5 s"):
            await outputs(engine)
        assert anyio.current_time() == pytest.approx(9.0 if silent == "after a token" else 5.0, abs=0.1)
        await server.lines[0].saw_end.wait()


@pytest.mark.parametrize(
    ("how", "kind"),
    [("refused", CannotConnect), ("unknown", CannotConnect), ("silent", ConnectionTimeout)],
)
async def test_a_connection_that_cannot_be_made_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, how: str, kind: type[PenstockError]
) -> None:
    async def connect(*address: Any, **more: Any) -> Any:
        if how == "silent":
            await anyio.sleep_forever()
        if how == "refused":
            raise OSError("all failed") from ExceptionGroup("", [ConnectionRefusedError(111, "Connect call failed")])
        raise socket.gaierror(-2, "not known")

    # What httpx2 makes its connections by: anyio on asyncio, and trio itself.
    monkeypatch.setattr(anyio, "connect_tcp", connect)
    monkeypatch.setattr(trio, "open_tcp_stream", connect)
    found = {"refused": "Connection refused", "unknown": "not known", "silent": "10 s"}[how]
    engine = LiveEngine(Address.parse("http://far"), "m")
    with pytest.raises(kind, match=f"far.*{found}") as caught:
        await outputs(engine)
    assert type(caught.value) is kind
    assert engine.in_flight == 0
    await engine.aclose()


# -- stop, kill, a dropped stream


@pytest.mark.parametrize("how", ["stop", "kill", "close"])
async def test_the_server_sees_that_its_client_is_gone(how: str) -> None:
    async def script(line: Line, received: Received) -> None:
        await line.begin()
        await line.event(chunk())
        await line.request()

    async with serve(script) as server, engine_of(server) as engine, anyio.create_task_group() as tasks:
        context = Context(prompt())
        stream = await engine.generate(context)
        first = await stream.__anext__()
        assert first.data is not None
        if how == "close":
            await stream.aclose()
        else:
            tasks.start_soon(anyio.sleep, 1.0)
            getattr(context, how)()
            rest = [item.data async for item in stream]
            assert rest == ([LLMEngineOutput.cancelled()] if how == "stop" else [])
        await server.lines[0].saw_end.wait()


@pytest.mark.filterwarnings("ignore:stream of request:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_a_stream_that_is_dropped_closes_its_connection() -> None:
    async def script(line: Line, received: Received) -> None:
        await line.begin()
        await line.event(chunk())
        await line.request()

    async with serve(script) as server, engine_of(server) as engine:
        stream = await engine.generate(Context(prompt()))
        await stream.__anext__()
        del stream
        gc.collect()
        with anyio.fail_after(1.0):
            await server.lines[0].saw_end.wait()
        await anyio.sleep(0.1)


# -- connections


async def test_a_connection_serves_one_request_after_another() -> None:
    async with serve(answering(chunk("a", "length"), DONE)) as server, engine_of(server) as engine:
        for _ in range(5):
            await outputs(engine)
        assert (len(server.received), len(server.lines)) == (5, 1)


async def test_there_are_as_many_connections_as_requests_at_once() -> None:
    script = answering(chunk("a", "length"), DONE, every_s=1.0)
    async with serve(script) as server, engine_of(server) as engine:
        async with anyio.create_task_group() as tasks:
            for _ in range(150):  # more than httpx2 has unasked
                tasks.start_soon(outputs, engine)
        assert len(server.lines) == 150
        assert anyio.current_time() < 3


@pytest.mark.parametrize("in_sight", [True, False])
async def test_a_request_that_a_kept_connection_did_not_take_is_sent_on_a_new_one(in_sight: bool) -> None:
    """Whether it is seen beforehand that the server has closed it, or only noticed when it is used."""

    async def script(line: Line, received: Received) -> None:
        await answering(chunk("a", "length"), DONE)(line, received)
        await line.wire.aclose()

    async with serve(script, closes_in_sight=in_sight) as server, engine_of(server) as engine:
        for _ in range(3):
            assert len(await outputs(engine)) == 2
        assert (len(server.received), len(server.lines)) == (3, 3)


async def test_a_new_connection_that_is_closed_without_an_answer_is_not_tried_again() -> None:
    async with serve(lambda line, received: line.wire.aclose()) as server, engine_of(server) as engine:
        with pytest.raises(Disconnected, match="before there was an answer"):
            await outputs(engine)
        assert len(server.lines) == 1


async def test_a_transport_without_connections_that_breaks_is_tried_once() -> None:
    class Broken(httpx2.AsyncBaseTransport):
        received = 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            self.received += 1
            assert self.received == 1
            raise httpx2.ReadError("gone", request=request)

    engine = LiveEngine(ADDRESS, "m", transport=Broken())
    with pytest.raises(Disconnected, match="broke"):
        await outputs(engine)
    await engine.aclose()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_that_is_open_when_the_engine_is_closed_ends_with_disconnected(
    kept: bool, has_begun: bool
) -> None:
    """And so does one that comes later. Kept: it went out on a connection that had served another one."""

    async def script(line: Line, received: Received) -> None:
        if len(server.received) <= kept:
            await answering(chunk("a", "length"), DONE)(line, received)
            return
        if has_begun:
            await line.begin()
            await line.event(chunk())
        await line.request()

    async with serve(script) as server, engine_of(server) as engine:
        if kept:
            await outputs(engine)
        raised: list[BaseException] = []

        async def ask_it() -> None:
            try:
                await outputs(engine)
            except PenstockError as error:
                raised.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_it)
            await anyio.sleep(1.0)
            await engine.aclose()
        await ask_it()
        assert [type(error) for error in raised] == [Disconnected, Disconnected]
        assert len(server.lines) == 1


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # httpx2 looks at this clock whatever loop it is in.
    monkeypatch.setattr("httpcore2._async.http11.time", SimpleNamespace(monotonic=anyio.current_time))
    async with serve(answering(chunk("a", "length"), DONE)) as server, engine_of(server) as engine:
        for idle_s, connections in ((0.0, 1), (3.9, 1), (4.1, 2)):
            await anyio.sleep(idle_s)
            await outputs(engine)
            assert len(server.lines) == connections


async def test_a_server_that_wants_to_close_is_let_go() -> None:
    async def script(line: Line, received: Received) -> None:
        body = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"
        await line.wire.send(head + body)
        await line.wire.aclose()

    async with serve(script) as server, engine_of(server) as engine:
        for _ in range(2):
            assert [len(output.token_ids) for output in await outputs(engine)] == [1, 0]
        assert len(server.lines) == 2


async def test_the_first_answer_of_the_server_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxy, no password of the user's, no redirect; and no cookie, which would tie all requests to one worker."""
    (tmp_path / "netrc").write_text("machine far login me password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")

    async def script(line: Line, received: Received) -> None:
        head = b"HTTP/1.1 307 x\r\nLocation: /there\r\nSet-Cookie: worker=1\r\nContent-Length: 2\r\n\r\nno"
        await line.wire.send(head)

    async with serve(script) as server, engine_of(server) as engine:
        for _ in range(2):
            with pytest.raises(StatusError, match="307"):
                await outputs(engine)
        assert [received.path for received in server.received] == ["/api/v1/completions"] * 2
        for received in server.received:
            assert not {"cookie", "authorization", "proxy-authorization"} & received.headers.keys()
            assert (received.headers["host"], received.headers["accept-encoding"]) == ("far:8000", "identity")
        assert len(server.lines) == 1


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
    ["", "a:80", "ftp://a", "http://", "http://a:x", "http://u:p@a", "http://a?b", "http://a/ b", "http://1.2.3.999"],
)
def test_any_other_text_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Address.parse(url)
    assert caught.value.field == "live"


def test_a_limit_of_no_time_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        LiveEngine(ADDRESS, "m", silence_s=0)
