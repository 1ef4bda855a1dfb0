"""A client that goes away ends its request all the way down; whatever ends it, nothing stays open."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline import Annotated, AnyContext, Disconnected, ResponseStream
from pipeline.testing import Fail, ScriptedEngine, Stall, Wait, watch_streams
from serving.http import Availability, HttpOptions, Telemetry, app
from serving.http.generation.generation import KILL_GRACE_S
from serving.http.open_requests import Phase
from tests.serving.worlds import Stubborn, chat, complete, last, request_to, token


def engines() -> list[Any]:
    return [
        ScriptedEngine([Stall()]),
        ScriptedEngine([token("a"), Stall()]),
        Stubborn([]),
        Stubborn([token("a")]),
        Stubborn([], in_generate=True),
    ]


@pytest.mark.parametrize("which", range(5), ids=["first", "middle", "stubborn first", "stubborn", "generate"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_a_client_that_goes_away_ends_its_request(which: int, stream: bool) -> None:
    """Also while the first item is waited for, and with an engine that ignores kill."""
    engine = engines()[which]
    exchange = chat(app({"m": engine}), stream=stream)
    with watch_streams() as streams, anyio.fail_after(KILL_GRACE_S + 1):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(0.5)
            assert engine.open == 1
            assert not exchange.returned
            exchange.leave()
    assert exchange.returned
    assert engine.open == 0
    assert streams.open == []
    assert b"[DONE]" not in exchange.content


async def test_a_kill_reaches_the_context_at_once() -> None:
    engine = ScriptedEngine([token("a"), Stall()])
    exchange, left = chat(app({"m": engine}), stream=True), -1.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await exchange.until(lambda so_far: so_far.writes)
        left = anyio.current_time()
        exchange.leave()
    assert engine.requests[0].is_killed
    assert anyio.current_time() == left


async def test_every_prompt_of_a_batch_ends_with_its_client() -> None:
    engine = ScriptedEngine([token("a"), Stall()])
    exchange = complete(app({"m": engine}), prompt=["a", "b", "c"], stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(1)
        assert engine.open == 3
        exchange.leave()
    assert engine.open == 0


async def test_a_server_may_report_with_an_error_that_the_client_is_gone() -> None:
    engine = ScriptedEngine(lambda _: [token("a"), Wait(1), *[token("b")] * 5, Stall()])
    exchange = chat(app({"m": engine}), stream=True)
    exchange.breaks_on_send = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await exchange.until(lambda so_far: so_far.writes)
        exchange.leave()
    assert engine.open == 0
    assert exchange.returned


async def test_a_client_that_leaves_after_its_answer_is_no_disconnect() -> None:
    engine = ScriptedEngine([token("a"), last()])
    for stream in (True, False):
        await chat(app({"m": engine}), stream=stream).run()
        assert not engine.requests[-1].is_stopped


async def test_a_slow_client_holds_its_engine_back() -> None:
    engine = ScriptedEngine([*[token("x" * 1000)] * 1000, last()])
    exchange = chat(app({"m": engine}), stream=True)
    exchange.stop_reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(1)
        assert engine.delivered < 100
        exchange.read_on()
    assert engine.delivered == 1001
    assert exchange.text == "x" * 1_000_000


async def test_a_client_that_leaves_while_it_reads_nothing_frees_the_engine() -> None:
    engine = ScriptedEngine([token("x" * 1000)] * 1000)
    exchange = chat(app({"m": engine}), stream=True)
    exchange.stop_reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(1)
        exchange.leave()
    assert engine.open == 0
    assert engine.delivered < 1000


# -- a server that calls back


class CallsBack:
    """An app as a server runs it that calls back when its client leaves: nothing may wait in `receive` then."""

    def __init__(self, service: ASGIApp) -> None:
        self._service = service
        self.callbacks: list[Any] = []
        self.forgotten = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def receive_body() -> Any:
            nonlocal received
            received += 1
            assert received == 1
            return await receive()

        await self._service({**scope, "penstock.on_gone": self._on_gone}, receive_body, send)

    def _on_gone(self, callback: Any) -> Any:
        self.callbacks.append(callback)
        return self._forget

    def _forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize("which", range(5), ids=["first", "middle", "stubborn first", "stubborn", "generate"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_a_client_that_goes_away_may_be_noticed_by_a_callback(which: int, stream: bool) -> None:
    engine, telemetry = engines()[which], Telemetry()
    server = CallsBack(app({"m": engine}, telemetry=telemetry))
    exchange = chat(server, stream=stream)
    with watch_streams() as streams, anyio.fail_after(KILL_GRACE_S + 1):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            await anyio.sleep(0.5)
            assert engine.open == 1
            server.callbacks[0]()
    assert (engine.open, streams.open, server.forgotten) == (0, [], 1)
    assert 'error_type="cancelled"' in telemetry.text().decode()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_callback_is_taken_back_when_the_request_is_over(stream: bool) -> None:
    server = CallsBack(app({"m": ScriptedEngine([token("a"), last()])}))
    assert (await chat(server, stream=stream).run()).status == 200
    assert (len(server.callbacks), server.forgotten) == (1, 1)


# -- silence


@pytest.mark.parametrize("engine_type", [ScriptedEngine, Stubborn])
async def test_a_silent_engine_is_given_up(engine_type: Any) -> None:
    steps = [token("a"), Stall()] if engine_type is ScriptedEngine else [token("a")]
    engine = engine_type(steps)
    exchange = chat(app({"m": engine}, options=HttpOptions(silence_timeout_s=10)), stream=True)
    began = anyio.current_time()
    await exchange.run()
    assert 10 <= anyio.current_time() - began <= 12.5 + KILL_GRACE_S
    assert exchange.chunks[-1]["error"]["code"] == 500
    assert engine.open == 0


async def test_a_silent_engine_before_the_first_item_is_a_status() -> None:
    engine = ScriptedEngine([Stall()])
    exchange = await chat(app({"m": engine}, options=HttpOptions(silence_timeout_s=10)), stream=True).run()
    assert (exchange.status, exchange.json["message"]) == (500, "Internal server error")


async def test_an_engine_that_speaks_now_and_then_is_not_silent() -> None:
    engine = ScriptedEngine([*[token("a"), Wait(9)] * 5, last()])
    exchange = await chat(app({"m": engine}, options=HttpOptions(silence_timeout_s=10)), stream=True).run()
    assert exchange.text == "aaaaa"
    assert "error" not in exchange.chunks[-1]


async def test_a_silent_prompt_is_given_up_though_others_are_full() -> None:
    """Nothing leaves before every prompt has begun, so the first one waits for the second, not for the client."""

    class Second(ScriptedEngine):
        async def generate(self, request: AnyContext) -> ResponseStream[Any]:
            engine = full if request.payload.prompt == "full" else silent
            return await engine.generate(request)

    full, silent = ScriptedEngine([token("x" * 1000)] * 100), ScriptedEngine([Stall()])
    service = app({"m": Second([])}, options=HttpOptions(silence_timeout_s=10))
    exchange = await complete(service, stream=True, prompt=["full", "silent"]).run()
    assert exchange.status == 500
    assert (full.open, silent.open) == (0, 0)


async def test_annotations_wait_for_a_slow_client_too() -> None:
    note = Annotated[Any].from_annotation("note", "x" * 1000)
    engine = ScriptedEngine([token("a"), *[note] * 1000, last()])
    exchange = chat(app({"m": engine}), stream=True)
    exchange.stop_reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.wait_all_tasks_blocked()
        assert engine.delivered < 100
        exchange.read_on()
    assert len(exchange.chunks) == 2


async def test_annotations_before_the_first_item_never_wait() -> None:
    """They may be long, and nothing leaves before the first item."""
    note = Annotated[Any].from_annotation("note", "x" * 100_000)
    engine = ScriptedEngine([note, note, last()])
    assert (await chat(app({"m": engine}), stream=True).run()).status == 200


async def test_a_slow_client_is_not_the_engines_silence() -> None:
    engine = ScriptedEngine([*[token("x" * 1000)] * 1000, last()])
    exchange = chat(app({"m": engine}, options=HttpOptions(silence_timeout_s=10)), stream=True)
    exchange.stop_reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(100)
        exchange.read_on()
    assert "error" not in exchange.chunks[-1]


async def test_a_waiting_client_gets_comments() -> None:
    engine = ScriptedEngine([Wait(1), token("a"), Wait(1), last()])
    exchange = await chat(app({"m": engine}, options=HttpOptions(keep_alive_s=0.4)), stream=True).run()
    assert exchange.content.startswith(b":\n\n:\n\ndata: {")
    assert exchange.content.count(b":\n\n") == 4
    assert len(exchange.chunks) == 2


async def test_a_waiting_client_gets_nothing_unless_wished() -> None:
    exchange = chat(app({"m": ScriptedEngine([Wait(100), token("a"), last()])}), stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(99)
        assert (exchange.status, exchange.writes) == (0, [])


async def test_an_error_after_a_comment_is_a_frame() -> None:
    engine = ScriptedEngine([Wait(1)])
    exchange = await chat(app({"m": engine}, options=HttpOptions(keep_alive_s=0.4)), stream=True).run()
    assert exchange.status == 200
    assert exchange.chunks[-1]["error"]["code"] == 500


# -- draining

SHUTTING_DOWN = {"message": "Service temporarily unavailable", "type": "service_unavailable", "code": 503}


def stopping(context: AnyContext) -> None:
    context.stop()


def killing(context: AnyContext) -> None:
    context.kill()


@pytest.mark.parametrize("end", [stopping, killing])
async def test_a_stopped_request_ends_with_an_orderly_tail(end: Any) -> None:
    engine = ScriptedEngine([token("a"), Stall()])
    exchange = chat(app({"m": engine}), stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await exchange.until(lambda so_far: so_far.writes)
        end(engine.requests[0])
    error = {"message": "Request cancelled", "type": "client_closed_request", "code": 499}
    assert exchange.chunks[-1] == {"error": error}


async def test_a_stop_that_the_engine_answers_is_a_normal_end() -> None:
    engine = ScriptedEngine(lambda _: [token("a"), last()])
    exchange = chat(app({"m": engine}), stream=True)
    await exchange.run()
    assert "error" not in exchange.chunks[-1]


async def test_draining_refuses_what_is_new_and_finishes_what_runs() -> None:
    availability = Availability()
    service = app({"m": ScriptedEngine([token("a"), Wait(3), last()])}, availability=availability)
    running = chat(service, stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.until(lambda so_far: so_far.writes)
        tasks.start_soon(availability.drain, 5)
        await anyio.sleep(1)
        refused = await chat(service).run()
        assert (refused.status, refused.json["message"]) == (503, "Service is not ready")
        health = await request_to(service, "/health", method="GET").run()
        assert (health.status, health.json["status"], health.json["stage"]) == (503, "not_ready", "draining")
        assert (await request_to(service, "/live", method="GET").run()).status == 200
        assert (await request_to(service, "/v1/not_a_route", method="GET").run()).status == 404
        assert (await request_to(service, "/metrics", method="GET").run()).status == 200
    assert "error" not in running.chunks[-1]
    assert (await request_to(service, "/live", method="GET").run()).status == 503


async def test_draining_ends_what_takes_too_long() -> None:
    availability, engine = Availability(), ScriptedEngine([token("a"), Stall()])
    running = chat(app({"m": engine}, availability=availability), stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await running.until(lambda so_far: so_far.writes)
        began = anyio.current_time()
        await availability.drain(5)
        assert anyio.current_time() - began == pytest.approx(5)
    assert running.chunks[-1] == {"error": SHUTTING_DOWN}
    assert (availability.phase, availability.in_flight, engine.open) == (Phase.STOPPING, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [[Stall()], [Wait(7), Fail(Disconnected("cut"))]], ids=["killed", "lost"])
async def test_a_request_that_the_end_of_the_server_cuts_gets_503(stream: bool, script: list[Any]) -> None:
    """It got the error of a stream that its client had closed."""
    availability, telemetry = Availability(), Telemetry()
    running = chat(app({"m": ScriptedEngine(script)}, availability=availability, telemetry=telemetry), stream=stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await anyio.sleep(1)
        await availability.drain(5 if isinstance(script[0], Stall) else 10)
    wanted = SHUTTING_DOWN | {"type": "Service Unavailable", "request_id": running.response_headers["x-request-id"]}
    assert (running.status, running.json) == (503, wanted)
    assert 'error_type="unavailable"' in telemetry.text().decode()
    assert 'error_type="cancelled"' not in telemetry.text().decode()


async def test_a_client_that_leaves_while_the_server_drains_is_a_client_that_left() -> None:
    availability, telemetry = Availability(), Telemetry()
    running = chat(app({"m": ScriptedEngine([token("a"), Stall()])}, availability=availability, telemetry=telemetry))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(running.run)
        await anyio.sleep(1)
        tasks.start_soon(availability.drain, 5)
        await anyio.sleep(1)
        running.leave()
    assert 'error_type="cancelled"' in telemetry.text().decode()


async def test_draining_an_idle_program_takes_no_time() -> None:
    availability, began = Availability(), anyio.current_time()
    await availability.drain(5)
    assert anyio.current_time() == began
