"""Servers that share a port: each takes its part of the connections, and one that ends hands its own over."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import httpx2
import pytest

from pipeline.testing import ScriptedEngine, Wait
from serving.http import Availability, app
from serving.server import HttpServer, Interrupts, listen, serve
from serving.socket import PortShares
from tests.serving.worlds import last, token

KEEP_ALL = httpx2.Limits(max_keepalive_connections=100)
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop" and sys.platform != "win32"}


class Process:
    """A server with what a process of its own would have."""

    def __init__(
        self, listener: socket.socket, shares: PortShares, answer_s: float, grace_s: float, hand_over_s: float
    ) -> None:
        self.availability = Availability()
        self.grace_s, self.hand_over_s = grace_s, hand_over_s
        self.engine = ScriptedEngine([token("a"), Wait(answer_s), last()] if answer_s else [token("a"), last()])
        application = app({"m": self.engine}, availability=self.availability)
        self.server = HttpServer(application, listener, is_shared=True, shares=shares)
        self.interrupts = Interrupts(lambda: None)
        self.is_ending = False

    def end(self) -> None:
        """As the first signal does."""
        if not self.is_ending:
            self.is_ending = True
            self.interrupts.first()

    async def until_it_stops(self) -> None:
        """Wait until its hand-over and its grace are over."""
        while self.availability.phase.value != "stopping":  # noqa: ASYNC110
            await anyio.sleep(0.01)

    async def run(self) -> None:
        await serve(self.server, self.availability, self.interrupts, self.grace_s, hand_over_s=self.hand_over_s)


@asynccontextmanager
async def sharing(
    count: int, *, answer_s: float = 0.0, grace_s: float = 5.0, hand_over_s: float = 0.3
) -> AsyncIterator[list[Process]]:
    """So many servers behind one listening socket; those that still run are ended with the block."""
    with listen("127.0.0.1", 0) as listener, TemporaryDirectory() as folder:
        listener.setblocking(False)
        PortShares.make(path := Path(folder) / "shares", count)
        shares = [PortShares(path, number) for number in range(count)]
        processes = [Process(listener.dup(), each, answer_s, grace_s, hand_over_s) for each in shares]
        async with anyio.create_task_group() as tasks:
            for each in processes:
                tasks.start_soon(each.run)
            with anyio.fail_after(40):
                yield processes
            for each in processes:
                each.end()


async def test_many_connections_at_once_are_shared_out() -> None:
    async with (
        sharing(2) as (one, other),
        httpx2.AsyncClient(base_url=one.server.url, timeout=10, limits=KEEP_ALL) as client,
    ):

        async def ask() -> None:
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200

        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(ask)
        taken = [each.server.count_connections() for each in (one, other)]
        assert sum(taken) == 60
        assert min(taken) >= 27


async def test_a_server_that_ends_answers_on_each_open_connection_once_more_and_closes_it() -> None:
    async with (
        sharing(2, hand_over_s=5) as (one, other),  # which ends sooner, once every connection had its answer
        httpx2.AsyncClient(base_url=one.server.url, limits=KEEP_ALL) as client,
    ):
        how: Counter[str] = Counter()

        async def ask() -> None:
            response = await client.post("/v1/chat/completions", json=BODY, timeout=10)
            assert response.status_code == 200
            how[response.headers.get("connection", "kept")] += 1

        async def ask_all() -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(20):
                    tasks.start_soon(ask)

        await ask_all()
        its = one.server.count_connections()
        assert 0 < its < 20
        one.end()
        await anyio.sleep(0.05)
        assert one.availability.phase.value == "handing_over"
        await ask_all()
        assert how == {"close": its, "kept": 40 - its}
        await one.until_it_stops()
        await ask_all()
        assert how == {"close": its, "kept": 60 - its}
        assert other.engine.started == 60 - 2 * its


async def test_new_connections_go_to_the_others_at_once() -> None:
    async with sharing(2) as (one, other):
        await anyio.sleep(0.05)
        one.end()
        await anyio.sleep(0.01)
        before = one.engine.started
        for _ in range(20):
            async with httpx2.AsyncClient(base_url=one.server.url, timeout=10) as client:
                assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
        assert one.engine.started == before
        assert other.engine.started == 20


async def test_a_request_that_runs_when_the_end_begins_is_answered() -> None:
    body = BODY | {"stream": True}
    async with sharing(1) as (one,), httpx2.AsyncClient(base_url=one.server.url, timeout=10) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            one.end()
            text = (await response.aread()).decode()
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.15])
async def test_a_stream_that_outlasts_the_hand_over_leaves_its_client_time_for_one_more_request(pause_s: float) -> None:
    body = BODY | {"stream": True}
    async with (
        sharing(2, answer_s=2.5, hand_over_s=2) as both,
        httpx2.AsyncClient(base_url=both[0].server.url, timeout=20) as client,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            (one,) = (each for each in both if each.engine.open)
            one.end()
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")
            assert "connection" not in response.headers
        assert one.availability.phase.value == "handing_over"
        await anyio.sleep(pause_s)
        again = await client.post("/v1/chat/completions", json=body)
        assert (again.status_code, again.headers["connection"], one.engine.started) == (200, "close", 2)
        with anyio.fail_after(10):
            await one.until_it_stops()


@pytest.mark.slow
async def test_a_client_that_sends_nothing_after_its_stream_does_not_hold_up_the_end() -> None:
    body = BODY | {"stream": True}
    async with (
        sharing(2, answer_s=2.5, grace_s=60, hand_over_s=2) as both,
        httpx2.AsyncClient(base_url=both[0].server.url, timeout=20) as client,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            (one,) = (each for each in both if each.engine.open)
            one.end()
            await response.aread()
        assert one.server.count_connections() == 1
        with anyio.fail_after(10):
            await one.until_it_stops()
            while one.server.count_connections():  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert one.engine.started == 1


async def test_streams_have_the_same_time_in_all_as_without_a_further_request() -> None:
    body = BODY | {"stream": True}
    async with (
        sharing(1, answer_s=60, grace_s=0.5) as (one,),
        httpx2.AsyncClient(base_url=one.server.url, timeout=10) as client,
    ):
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            begun_s = anyio.current_time()
            one.end()
            text = (await response.aread()).decode()
        assert 0.75 < anyio.current_time() - begun_s < 10  # the answer itself would take 60 s
        assert '"error"' in text
