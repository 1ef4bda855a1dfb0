"""The connections of an engine to its server: kept, counted, replaced, and closed with the stream that needs one."""

from __future__ import annotations

import gc
from pathlib import Path

import anyio
import httpx2
import pytest

from pipeline import Context, PenstockError
from pipeline.errors import (
    Disconnected,
    StatusError,
)
from pipeline.protocols import (
    LLMEngineOutput,
)
from serving.live import LiveEngine
from tests.engines.upstream.wire import Line, Received
from tests.serving.live.worlds import ADDRESS, DONE, answering, chunk, engine_of, outputs, prompt, serve


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


async def test_a_connection_that_was_idle_for_long_is_not_used_again() -> None:
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
