"""Limits of time: a reader that stopped, an engine that is silent, a request that does not end."""

from __future__ import annotations

from math import inf
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp

from pipeline.testing import Fail, ScriptedEngine, Stall, Wait, watch_streams
from serving.http import HttpOptions, Telemetry, app
from serving.http.generation.generation import KILL_GRACE_S
from serving.http.generation.reply import BUFFER_BYTES
from serving.http.open_requests import RequestClock, TimeLimits
from serving.limits import HttpLimits
from tests.serving.worlds import Stubborn, chat, complete, last, token

OFF: dict[str, Any] = {"write_timeout_s": 0.0, "silence_timeout_s": 0.0, "request_timeout_s": 0.0}


def limited(engine: Any, telemetry: Telemetry | None = None, **limits: Any) -> ASGIApp:
    options = HttpOptions(limits=HttpLimits(**(OFF | limits)))
    return app({"m": engine}, options=options, telemetry=telemetry)


def counts(telemetry: Telemetry, name: str) -> list[str]:
    lines = telemetry.text().decode().splitlines()
    return [line for line in lines if line.startswith(f"dynamo_frontend_{name}{{")]


# -- a reader that stopped


@pytest.mark.parametrize("engine_type", [ScriptedEngine, Stubborn])
async def test_a_reader_that_stopped_gives_its_engine_back(engine_type: Any) -> None:
    tokens = [token("x" * 1000)] * 1000
    engine = ScriptedEngine([*tokens, Stall()]) if engine_type is ScriptedEngine else Stubborn(tokens)
    telemetry = Telemetry()
    exchange = chat(limited(engine, telemetry, write_timeout_s=8), stream=True)
    exchange.stop_reading()
    began = anyio.current_time()
    with watch_streams() as streams:
        await exchange.run()
    assert 8 <= anyio.current_time() - began <= 10 + 2 + KILL_GRACE_S
    assert (engine.open, streams.open, exchange.writes) == (0, [], [])
    (ended,) = counts(telemetry, "requests_total")
    assert 'error_type="cancelled"' in ended
    assert ended.endswith(" 1.0")


async def test_a_reader_that_stopped_after_some_tokens_gives_its_engine_back() -> None:
    engine = ScriptedEngine([token("a"), Wait(1), *[token("x" * 1000)] * 1000, Stall()])
    exchange = chat(limited(engine, write_timeout_s=8), stream=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await exchange.until(lambda so_far: so_far.writes)
        exchange.stop_reading()
    assert exchange.text == "a"
    assert engine.open == 0


async def test_without_the_limit_a_reader_that_stopped_keeps_its_engine() -> None:
    engine = ScriptedEngine([token("x" * 1000)] * 1000)
    exchange = chat(limited(engine), stream=True)
    exchange.stop_reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(50_000)
        assert engine.open == 1
        exchange.leave()
    assert engine.open == 0


async def test_a_slow_reader_that_reads_is_served_to_the_end() -> None:
    engine = ScriptedEngine([*[token("x" * 1000)] * 200, last()])
    exchange = chat(limited(engine, write_timeout_s=8), stream=True)
    async with anyio.create_task_group() as tasks:
        exchange.stop_reading()
        tasks.start_soon(exchange.run)
        while not exchange.returned:
            await anyio.sleep(7)
            exchange.read_on()
            await anyio.wait_all_tasks_blocked()
            exchange.stop_reading()
    assert exchange.text == "x" * 200_000


async def test_a_stream_without_anything_to_read_is_no_stalled_write() -> None:
    engine = ScriptedEngine([token("a"), Wait(1000), last()])
    exchange = await chat(limited(engine, write_timeout_s=8), stream=True).run()
    assert exchange.text == "a"
    assert "error" not in exchange.chunks[-1]


async def test_a_whole_answer_that_is_not_read_ends_too() -> None:
    telemetry = Telemetry()
    engine = ScriptedEngine([token("x" * 500_000), last()])
    exchange = chat(limited(engine, telemetry, write_timeout_s=8, max_open_requests=1))
    exchange.stop_reading()
    began = anyio.current_time()
    await exchange.run()
    assert 8 <= anyio.current_time() - began <= 12
    assert 'error_type="cancelled"' in counts(telemetry, "requests_total")[0]


async def test_an_error_that_is_not_read_ends_too() -> None:
    service = limited(ScriptedEngine([Fail(RuntimeError("broken"))]), write_timeout_s=8, max_open_requests=1)
    wrong: list[dict[str, Any]] = [{"model": "unknown"}, {"messages": 1}, {}]
    for fields in wrong:
        exchange = chat(service, **fields)
        exchange.stop_reading()
        began = anyio.current_time()
        await exchange.run()
        assert anyio.current_time() - began == pytest.approx(8)


@pytest.mark.parametrize("prompts", [1, 8])
async def test_what_is_held_for_a_reader_that_stopped_is_bounded(prompts: int) -> None:
    frame_bytes = 1200
    engine = ScriptedEngine([token("x" * 1000)] * 1000)
    exchange = complete(limited(engine), prompt=["p"] * prompts, stream=True)
    exchange.stop_reading()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(exchange.run)
        await anyio.sleep(10)
        assert engine.delivered * 1000 <= 2 * (BUFFER_BYTES + prompts * frame_bytes)
        exchange.leave()


# -- silence and whole requests


async def test_silence_ends_a_request_and_names_the_limit() -> None:
    engine = ScriptedEngine([token("a"), Stall()])
    began = anyio.current_time()
    exchange = await chat(limited(engine, silence_timeout_s=10), stream=True).run()
    assert 10 <= anyio.current_time() - began <= 12.5
    error = exchange.chunks[-1]["error"]
    assert (error["code"], error["limit"]["name"], error["limit"]["threshold"]) == (500, "silence_timeout_s", 10)
    assert engine.open == 0


def test_silence_is_limited_by_default_and_the_older_variable_comes_first() -> None:
    assert TimeLimits.of(HttpOptions()).silence_s == HttpLimits().silence_timeout_s > 0
    variables = {"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "7"}
    assert TimeLimits.of(HttpOptions.from_environment(variables)).silence_s == 14
    assert TimeLimits.of(HttpOptions(limits=HttpLimits(silence_timeout_s=0))).silence_s == inf


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_takes_too_long_is_a_504_before_its_first_item(stream: bool) -> None:
    telemetry, engine = Telemetry(), ScriptedEngine([Stall()])
    exchange = await chat(limited(engine, telemetry, request_timeout_s=10), stream=stream).run()
    assert (exchange.status, exchange.json["type"]) == (504, "Gateway Timeout")
    assert exchange.json["limit"]["name"] == "request_timeout_s"
    assert exchange.response_headers["x-penstock-limit"].startswith("request_timeout_s; ")
    (ended,) = counts(telemetry, "requests_total")
    assert 'error_type="response_timeout"' in ended
    assert engine.open == 0


@pytest.mark.parametrize("engine_type", [ScriptedEngine, Stubborn])
async def test_a_stream_that_takes_too_long_ends_in_order(engine_type: Any) -> None:
    telemetry = Telemetry()
    scripted = ScriptedEngine([*[token("a"), Wait(4)] * 5, Stall()])
    engine = scripted if engine_type is ScriptedEngine else Stubborn([token("a")] * 3)
    began = anyio.current_time()
    exchange = await chat(limited(engine, telemetry, request_timeout_s=10), stream=True).run()
    assert 10 <= anyio.current_time() - began <= 12.5 + KILL_GRACE_S
    assert exchange.text == "aaa"
    error = exchange.chunks[-1]["error"]
    assert (error["code"], error["type"], error["limit"]["threshold"]) == (504, "gateway_timeout", 10)
    (ended,) = counts(telemetry, "requests_total")
    assert 'error_type="response_timeout"' in ended
    assert engine.open == 0


async def test_an_end_that_is_read_too_slowly_does_not_outlast_the_limit() -> None:
    engine = ScriptedEngine([token("x" * 500_000), last()])
    exchange = chat(limited(engine, request_timeout_s=10))
    exchange.stop_reading()
    began = anyio.current_time()
    await exchange.run()
    assert 10 <= anyio.current_time() - began <= 12.5


async def test_no_timer_runs_while_no_request_is_open() -> None:
    service = limited(ScriptedEngine([token("a"), last()]), silence_timeout_s=10)
    await chat(service).run()
    began = anyio.current_time()
    with anyio.move_on_after(1000):
        await chat(service).run()
    assert anyio.current_time() == began


# -- the decision


@given(st.lists(st.tuples(st.floats(0.1, 5), st.booleans()), max_size=40))
def test_silence_is_found_neither_early_nor_later_than_the_next_look(looks: list[tuple[float, bool]]) -> None:
    patience, now, items, since = RequestClock(TimeLimits(silence_s=10), 0.0), 0.0, 0, 0.0
    for step, moves in looks:
        now += step
        items += moves
        since = now if moves else since
        found = patience.silence(now, items, is_excused=False)
        assert (found is not None) == (now - since > 10 - 1e-3)


@given(st.lists(st.tuples(st.floats(0.1, 5), st.sampled_from(["none", "same", "new"])), max_size=40))
def test_a_write_is_stalled_once_the_same_one_was_seen_for_the_whole_time(looks: list[tuple[float, str]]) -> None:
    patience, now, write, since = RequestClock(TimeLimits(write_s=10), 0.0), 0.0, None, 0.0
    for step, what in looks:
        now += step
        if what != "same" or write is None:
            write, since = (None if what == "none" else object()), now
        found = patience.stalled_write(now, write)
        assert (found is not None) == (write is not None and now - since > 10 - 1e-3)
