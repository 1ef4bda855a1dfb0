"""What can go wrong between an engine and its server: statuses, broken answers, silence, and no connection."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import anyio
import pytest
import trio

from pipeline import Context, PenstockError
from pipeline.errors import (
    BackendCannotConnect,
    BackendResponseTimeout,
    BackendUnknown,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    InvalidArgument,
    InvalidMessage,
    ResponseTimeout,
    StatusError,
    StreamIncomplete,
    WorkerOverloaded,
)
from pipeline.protocols import (
    FinishReason,
)
from serving.live import Address, LiveEngine
from tests.engines.upstream.wire import Line, Received
from tests.serving.live.worlds import DONE, answer_to, answering, chunk, engine_of, outputs, prompt, serve, usage


async def refuse(status: int, body: Any, line: Line, received: Received) -> None:
    await line.whole(status, body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidArgument),
        (401, StatusError),
        (404, StatusError),
        (307, StatusError),
        (429, WorkerOverloaded),
        (529, WorkerOverloaded),
        (503, WorkerOverloaded),
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
    "a refusal before there were any": ([{"error": {"message": "full", "code": 503}}, DONE], WorkerOverloaded),
    "a wrong request, reported late": ([{"object": "error", "message": "too long", "code": 400}], InvalidArgument),
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
