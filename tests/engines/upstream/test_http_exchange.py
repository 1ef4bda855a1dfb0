"""Exchange: what is left of a request that is cancelled, however early; and pages, however they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines.upstream import Address, Client, Exchange, fetched
from pipeline import Cancelled, Control
from pipeline.errors import Disconnected, InvalidMessage, ResponseTimeout
from tests.engines.upstream.vllm_worlds import fake_vllm
from tests.engines.upstream.wire import Line, Received, Script
from tests.engines.upstream.worlds import URL, FakeServer


@pytest.mark.parametrize("turns", range(12))
async def test_a_request_cancelled_at_any_turn_leaves_no_connection_open(turns: int) -> None:
    async with fake_vllm(token_s=10.0) as server:
        client = Client(Address.parse(URL), 60.0, server.transport)

        async def send() -> None:
            body = b'{"token_ids": [5], "sampling_params": {"max_tokens": 3}, "stream": true}'
            async with Exchange(client, Control()) as exchange:
                await exchange.send("POST", "/inference/v1/generate", {}, body)
                await exchange.read()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            for _ in range(turns):
                await checkpoint()
            tasks.cancel_scope.cancel()
        await anyio.sleep(0.1)
        assert server.open == 0
        await client.aclose()


async def test_an_exchange_can_be_closed_while_no_read_waits() -> None:
    async with fake_vllm() as server:
        client, control = Client(Address.parse(URL), 60.0, server.transport), Control()
        async with Exchange(client, control) as exchange:
            body = b'{"token_ids": [5], "sampling_params": {"max_tokens": 900}, "stream": true}'
            assert await exchange.send("POST", "/inference/v1/generate", {}, body) == 200
            await exchange.read()
            await exchange.close()
            await anyio.sleep(0.1)
            assert server.open == 0
            assert server.running == {}
            with pytest.raises(Cancelled):
                await exchange.read()
        await client.aclose()


# -- pages


@asynccontextmanager
async def answering(script: Script) -> AsyncIterator[tuple[FakeServer, Client]]:
    """A server that answers by a script, and a client of it."""

    class Scripted(FakeServer):
        async def answer(self, line: Line, received: Received) -> None:
            await script(line, received)

    async with anyio.create_task_group() as tasks:
        server = Scripted(tasks)
        client = Client(Address.parse(URL), 60.0, server.transport)
        yield server, client
        await client.aclose()
        await anyio.sleep(0.1)
        assert (server.open, client.in_flight) == (0, 0)


def in_parts(body: bytes, size: int, *, each_s: float = 0.0, status: int = 200, is_cut: bool = False) -> Script:
    """An answer in parts of so many bytes; cut, the connection is closed in place of its end."""

    async def answer(line: Line, received: Received) -> None:
        await line.begin(status, "application/json")
        for place in range(0, len(body), size):
            await line.put(body[place : place + size])
            await anyio.sleep(each_s)
        await (line.wire.aclose() if is_cut else line.end())

    return answer


async def test_a_page_may_come_in_parts_of_one_byte() -> None:
    async with answering(in_parts(b"x" * 3000, 1)) as (server, client):
        for _ in range(2):
            assert await fetched(client, "GET", "/page", {}, within_s=5.0) == (200, b"x" * 3000)
        assert len(server.lines) == 1


async def test_a_page_that_is_cut_is_none() -> None:
    """Half of a page of metrics would be believed."""
    async with answering(in_parts(b"some_metric 1\n", 5, is_cut=True)) as (_, client):
        with pytest.raises(Disconnected):
            await fetched(client, "GET", "/page", {}, within_s=5.0)


async def test_a_refusal_that_is_cut_is_one_all_the_same() -> None:
    async with answering(in_parts(b'{"error": "no', 5, status=503, is_cut=True)) as (_, client):
        assert await fetched(client, "GET", "/page", {}, within_s=5.0) == (503, b'{"error": "no')


async def test_a_page_that_drips_is_given_up_in_time() -> None:
    """Each of its bytes comes within the longest silence."""
    async with answering(in_parts(b"x" * 1000, 1, each_s=1.0)) as (_, client):
        begun_s = anyio.current_time()
        with pytest.raises(ResponseTimeout, match="/page was not answered within 5 s"):
            await fetched(client, "GET", "/page", {}, within_s=5.0)
        assert anyio.current_time() - begun_s < 5.5


async def test_a_page_without_an_end_in_sight_is_refused_before_it_fills_the_memory() -> None:
    async with answering(in_parts(b"x" * 2**25, 2**20)) as (_, client):
        with pytest.raises(InvalidMessage, match="more than"):
            await fetched(client, "GET", "/page", {}, within_s=60.0)


async def test_a_refusal_whose_message_drips_is_raised_all_the_same() -> None:
    script = in_parts(b"x" * 1000, 1, each_s=1.0, status=503)
    async with answering(script) as (_, client), Exchange(client, Control()) as exchange:
        assert await exchange.send("POST", "/", {}, b"{}") == 503
        begun_s = anyio.current_time()
        assert await exchange.message() == b""
        assert anyio.current_time() - begun_s <= 5.0


# -- connections


async def test_a_stop_ends_the_wait_for_the_head_of_an_answer() -> None:
    async def late(line: Line, received: Received) -> None:
        await anyio.sleep(100.0)

    async with answering(late) as (server, client), anyio.create_task_group() as tasks:
        control, begun_s = Control(), anyio.current_time()

        async def stop() -> None:
            await anyio.sleep(0.1)
            control.stop()

        tasks.start_soon(stop)
        async with Exchange(client, control) as exchange:
            with pytest.raises(Cancelled):
                await exchange.send("POST", "/page", {}, b"{}")
        assert anyio.current_time() - begun_s < 0.2
        await anyio.sleep(0.1)
        assert server.open == 0


async def test_neither_the_environment_nor_its_files_change_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine gpu-1 login someone password secret\n", encoding="utf-8")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with answering(in_parts(b"page", 9)) as (server, client):
        assert await fetched(client, "GET", "/page", {}, within_s=5.0) == (200, b"page")
    assert "authorization" not in server.received[0].headers


async def test_the_content_type_of_an_answer_may_have_capitals_and_parameters() -> None:
    async def answer(line: Line, received: Received) -> None:
        await line.begin(200, "Text/Event-Stream ; charset=UTF-8")
        await line.end()

    async with answering(answer) as (_, client), Exchange(client, Control()) as exchange:
        await exchange.send("POST", "/", {}, b"{}")
        assert exchange.content_type == "text/event-stream"


async def test_a_connection_whose_answer_has_no_end_is_not_waited_for_and_not_used_again() -> None:
    async def answer(line: Line, received: Received) -> None:
        await line.begin()
        await line.event("[DONE]")
        await line.request()  # comes only with the end of the connection

    async with answering(answer) as (server, client):
        for connections in (1, 2):
            begun_s = anyio.current_time()
            async with Exchange(client, Control()) as exchange:
                await exchange.send("POST", "/", {}, b"{}")
                assert await exchange.read() == b"data: [DONE]\n\n"
                await exchange.finish()
            assert anyio.current_time() - begun_s < 0.5
            assert len(server.lines) == connections
