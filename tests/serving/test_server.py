"""The app behind a real server, used by real clients over real sockets; real time, on asyncio only."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx2
import openai
import pytest
from starlette.types import Receive, Scope

from pipeline import InvalidArgument, ResourceExhausted
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait
from serving.http import Availability, app
from serving.server import HttpServer, listen, url_of
from tests.serving.worlds import last, token

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def serving(engine: ScriptedEngine, use: Callable[[str], Awaitable[None]]) -> None:
    """Call `use` with the URL of a server of the engine, and stop the server when it returns."""
    server = HttpServer(app({"m": engine}), listen("127.0.0.1", 0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        try:
            with anyio.fail_after(20):
                await use(server.url)
        finally:
            server.stop()


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def hello() -> ScriptedEngine:
    return ScriptedEngine([token("Hel"), token("lo"), last()])


async def test_the_openai_client_reads_streams_and_whole_answers(hello: ScriptedEngine) -> None:
    async def use(url: str) -> None:
        async with client_of(url) as client:
            whole = await client.chat.completions.create(model="m", messages=HI)
            assert whole.choices[0].message.content == "Hello"
            assert whole.usage is not None
            assert whole.usage.total_tokens == 7
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            assert [chunk.choices[0].delta.content async for chunk in stream] == ["Hel", "lo", None]
            completion = await client.completions.create(model="m", prompt=["a", "b"])
            assert [choice.text for choice in completion.choices] == ["Hello", "Hello"]
            parts = await client.completions.create(model="m", prompt="a", stream=True)
            assert "".join([part.choices[0].text async for part in parts]) == "Hello"
            assert [model.id async for model in client.models.list()] == ["m"]
            assert (await client.models.retrieve("m")).id == "m"

    await serving(hello, use)
    assert hello.open == 0


@pytest.mark.parametrize(
    ("engine", "model", "raised"),
    [
        (ScriptedEngine([], fails=InvalidArgument("bad field")), "m", openai.BadRequestError),
        (ScriptedEngine([]), "unknown", openai.NotFoundError),
        (ScriptedEngine([], fails=ResourceExhausted("secret")), "m", openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_become_exceptions_of_the_openai_client(
    engine: Any, model: str, raised: type[openai.APIStatusError], stream: bool
) -> None:
    async def use(url: str) -> None:
        async with client_of(url) as client:
            with pytest.raises(raised) as failure:
                await client.chat.completions.create(model=model, messages=HI, stream=stream)
            assert "secret" not in str(failure.value)

    await serving(engine, use)


async def test_an_error_in_the_middle_is_raised_by_the_openai_client() -> None:
    async def use(url: str) -> None:
        async with client_of(url) as client:
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            with pytest.raises(openai.APIError, match="Internal server error"):
                async for _ in stream:
                    pass

    await serving(ScriptedEngine([token("a"), Wait(0.01), Fail(RuntimeError("secret"))]), use)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_connection_that_is_cut_ends_the_request(stream: bool, tokens: int) -> None:
    """Also while the first item is waited for."""
    engine = ScriptedEngine([*[token("a")] * tokens, Stall()])

    async def use(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url) as client:

            async def read() -> None:
                async with client.stream(
                    "POST", "/v1/chat/completions", json={"model": "m", "messages": HI, "stream": stream}
                ) as response:
                    async for _ in response.aiter_raw():
                        pass

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                with anyio.fail_after(10):
                    while engine.delivered < tokens or not engine.open:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                await anyio.sleep(0.2)  # the item is read, or the answer waited for
                tasks.cancel_scope.cancel()
            assert engine.started == 1
        while engine.open:  # noqa: ASYNC110  (the engine knows no event)
            await anyio.sleep(0.01)
        assert engine.requests[0].is_killed

    await serving(engine, use)


async def test_connections_stay_open_between_requests(hello: ScriptedEngine) -> None:
    async def use(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, limits=httpx2.Limits(max_connections=1)) as client:
            ports = set()
            for stream in (True, False, True):
                body = {"model": "m", "messages": HI, "stream": stream}
                response = await client.post("/v1/chat/completions", json=body)
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1

    await serving(hello, use)


async def test_tokens_do_not_wait_for_a_full_packet() -> None:
    """Every accepted connection has TCP_NODELAY; with Nagle's algorithm a token can wait 40 ms."""
    seen: list[int] = []

    async def look(scope: Scope, receive: Receive, send: Any) -> None:
        connection = send.__self__.transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = HttpServer(look, listen("127.0.0.1", 0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        async with httpx2.AsyncClient() as client:
            assert (await client.get(server.url)).status_code == 204
        server.stop()
    assert seen
    assert all(seen)


async def test_a_drained_server_lets_its_answers_finish() -> None:
    availability = Availability()
    engine = ScriptedEngine([token("a"), Wait(0.3), token("b"), last()])
    server = HttpServer(app({"m": engine}, availability=availability), listen("127.0.0.1", 0))
    texts: list[str] = []

    async def read() -> None:
        async with client_of(server.url) as client:
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            texts.extend([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        tasks.start_soon(read)
        while not availability.in_flight:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await availability.drain(5)
        server.stop()
    assert texts == ["a", "b", ""]


@pytest.mark.parametrize("how", ["cancelled", "stopped", "stopped twice"])
async def test_a_server_that_has_ended_leaves_the_log_levels_as_they_were(how: str) -> None:
    log = logging.getLogger("uvicorn.error")
    level = log.level
    server = HttpServer(app({"m": ScriptedEngine([])}), listen("127.0.0.1", 0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        await anyio.sleep(0.05)
        server.stop()
        if how == "cancelled":
            tasks.cancel_scope.cancel()
    if how == "stopped twice":
        server.stop()
    assert log.level == level


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with listen("127.0.0.1", 0) as first:
        port = int(url_of(first).rpartition(":")[2])
        with pytest.raises(InvalidArgument, match=f"port {port} on 127.0.0.1 is in use") as taken:
            listen("127.0.0.1", port)
    assert taken.value.field == "port"
    assert isinstance(taken.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("failure", "field", "text"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "port", "no permission to listen at port 80 on 127.0.0.1"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), "host", "127.0.0.1 is no address of this machine"),
        (OSError(errno.ENOBUFS, "No buffer space"), "port", "cannot listen at port 80 on 127.0.0.1: No buffer space"),
    ],
)
def test_an_address_where_nothing_can_listen_is_named(
    failure: OSError, field: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def bind(*_: object) -> None:
        raise failure

    monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(InvalidArgument, match=text) as refused:
        listen("127.0.0.1", 80)
    assert refused.value.field == field


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'no host' is no known host") as refused:
        listen("no host", 0)
    assert refused.value.field == "host"
