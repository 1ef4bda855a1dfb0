"""How many requests may be open, in all and of one client; one more is refused before its body is read."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from typing import Any

import anyio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.testing import Fail, ScriptedEngine, Stall
from serving.http import Availability, HttpOptions, app
from serving.http.open_requests import OpenRequests, TooManyOfClient, TooManyOpen
from serving.limits import HttpLimits
from tests.serving.worlds import chat, last, program, request_to, token


def limited(engine: Any, availability: Availability | None = None, **limits: Any) -> ASGIApp:
    return app({"m": engine}, options=HttpOptions(limits=HttpLimits(**limits)), availability=availability)


async def test_one_more_than_the_limit_is_refused_and_the_limit_named() -> None:
    service = limited(ScriptedEngine([token("a"), Stall()]), max_open_requests=2)
    running = [chat(service, stream=stream) for stream in (True, False)]
    refused = chat(service)
    async with anyio.create_task_group() as tasks:
        for exchange in running:
            tasks.start_soon(exchange.run)
        await anyio.sleep(1)
        await refused.run()
        for exchange in running:
            exchange.leave()
    assert refused.status == 529
    assert refused.json["type"] == "Overloaded"
    assert refused.json["limit"] == {"name": "max_open_requests", "value": 3, "threshold": 2}
    assert refused.response_headers["retry-after"] == "1"
    assert refused.response_headers["x-penstock-limit"] == "max_open_requests; value=3; threshold=2"


async def test_the_status_of_overload_is_that_of_the_options() -> None:
    options = HttpOptions(overload_status=503, limits=HttpLimits(max_open_requests=1))
    service = app({"m": ScriptedEngine([Stall()])}, options=options)
    running = chat(service)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await anyio.sleep(1)
        assert (await chat(service).run()).status == 503
        running.leave()


async def test_the_requests_of_one_client_leave_room_for_others() -> None:
    stalled = limited(ScriptedEngine([Stall()]), max_open_requests_per_client=1)
    running, refused = chat(stalled), chat(stalled)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await anyio.sleep(1)
        await refused.run()
        other = chat(FromElsewhere(stalled))
        tasks.start_soon(other.run)
        await anyio.sleep(1)
        assert not other.returned
        other.leave()
        running.leave()
    assert (refused.status, refused.json["type"]) == (429, "Too Many Requests")
    assert refused.json["limit"] == {"name": "max_open_requests_per_client", "value": 2, "threshold": 1}
    assert refused.response_headers["retry-after"] == "1"


class FromElsewhere:
    """The same app for a client at another address."""

    def __init__(self, service: ASGIApp) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._service({**scope, "client": ("10.0.0.2", 1)}, receive, send)


async def test_a_body_that_is_still_read_counts() -> None:
    service = limited(ScriptedEngine([]), max_open_requests=1)
    sending = request_to(service, "/v1/chat/completions", b"")
    sending.body_delivered = True  # its body never comes
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sending.run)
        await anyio.sleep(1)
        assert (await chat(service).run()).status == 529
        sending.leave()
    assert (await chat(service, model="unknown").run()).status == 404


@pytest.mark.parametrize(
    "ending", ["answered", "refused", "wrong", "failed first", "failed later", "left", "stopped", "killed", "drained"]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_gives_its_place_back_however_it_ends(ending: str, stream: bool) -> None:
    failure = Fail(RuntimeError("broken"))
    script: dict[str, Any] = {
        "answered": [token("a"), last()],
        "failed first": [failure],
        "failed later": [token("a"), failure],
    }
    availability, engine = Availability(), ScriptedEngine(script.get(ending, [token("a"), Stall()]))
    service = limited(engine, availability, max_open_requests=1)
    wrong: dict[str, dict[str, Any]] = {"refused": {"model": "unknown"}, "wrong": {"messages": 1}}
    fields = wrong.get(ending, {})
    for _ in range(2 if ending != "drained" else 1):
        exchange = chat(service, stream=stream, **fields)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(1)
            if ending == "left":
                exchange.leave()
            elif ending == "stopped":
                engine.requests[-1].stop()
            elif ending == "killed":
                engine.requests[-1].kill()
            elif ending == "drained":
                await availability.drain(1)
        assert exchange.status != 529
    last_one = await chat(service, model="unknown").run()
    assert last_one.status == (503 if ending == "drained" else 404)


def test_zero_turns_a_limit_off() -> None:
    unlimited = OpenRequests(HttpLimits(max_open_requests=0, max_open_requests_per_client=0), float("inf"))
    for _ in range(20_000):
        unlimited.admit("a").__enter__()
    assert (len(unlimited.open), unlimited.by_client) == (20_000, {"a": 20_000})


def test_nothing_is_kept_of_clients_without_a_request() -> None:
    requests = OpenRequests(HttpLimits(max_open_requests=3, max_open_requests_per_client=2), float("inf"))
    with requests.admit("a"), requests.admit("a"):
        with pytest.raises(TooManyOfClient):
            requests.admit("a")
        with requests.admit("b"), pytest.raises(TooManyOpen):
            requests.admit("c")
    assert (len(requests.open), requests.by_client) == (0, {})


def test_a_refused_client_that_still_sends_its_body_reads_the_answer() -> None:
    """The rest of its body is read and dropped, so the connection is not reset and takes the next request."""
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "x" * 5_000_000}]})
    headers = {"Content-Type": "application/json"}
    options = ("--max-open-requests", "1", "--engine-arg", "delay_s=30")
    with program(*options) as (_, address), closing(http.client.HTTPConnection(address, timeout=10)) as running:
        running.request("POST", "/v1/chat/completions", body[:10] + " " * 10, headers | {"Content-Length": "1000"})
        with closing(http.client.HTTPConnection(address, timeout=10)) as refused:
            for _ in range(2):
                refused.request("POST", "/v1/chat/completions", body, headers)
                answer = refused.getresponse()
                assert (answer.status, json.loads(answer.read())["code"]) == (529, 529)
