"""A long answer that is ready does not keep the server from others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pipeline import Annotated, function_engine
from pipeline.protocols import BackendOutput
from pipeline.testing import ScriptedEngine, Stall, watch_streams
from serving.http import app
from tests.serving.worlds import chat, complete, last, request_to, token

TOKENS = 20_000


@pytest.mark.parametrize("stream", [False, True])
async def test_others_are_answered_while_a_long_answer_is_made(stream: bool) -> None:
    """`/live` waited until the last token of a whole answer was made."""
    at_once, end, begun, made = token("a"), last(), anyio.Event(), 0
    made_until_live = 0

    @function_engine
    async def ready(request: Any) -> AsyncIterator[Annotated[BackendOutput]]:
        nonlocal made
        begun.set()
        for _ in range(TOKENS):
            made += 1
            yield at_once
        yield end

    service = app({"m": ready})
    answer, live = chat(service, stream=stream), request_to(service, "/live", method="GET")

    async def ask_meanwhile() -> None:
        nonlocal made_until_live
        await begun.wait()
        await live.run()
        made_until_live = made

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_meanwhile)
        tasks.start_soon(answer.run)
    assert live.status == 200
    assert 0 < made_until_live < TOKENS
    assert (answer.text if stream else answer.json["choices"][0]["message"]["content"]) == "a" * TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_of_a_batch_are_begun_a_few_at_a_time(stream: bool) -> None:
    """128 of 8 kB took 50 ms of the loop in two turns of it."""
    engine, begun = ScriptedEngine([token("a"), last()]), [0]

    async def watch() -> None:
        while begun[-1] < 128:
            begun.append(engine.started)
            await checkpoint()

    answer = complete(app({"m": engine}), prompt=["x"] * 128, stream=stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await answer.run()
    assert answer.status == 200
    assert max(after - before for before, after in pairwise(begun)) <= 16
    assert engine.open == 0


async def test_a_batch_whose_client_leaves_while_it_begins_begins_no_more() -> None:
    engine = ScriptedEngine([token("a"), Stall()])
    exchange = complete(app({"m": engine}), prompt=["x"] * 128)
    with watch_streams() as streams:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(exchange.run)
            while not engine.started:
                await checkpoint()
            exchange.leave()
    assert 0 < engine.started < 128
    assert (engine.open, streams.open) == (0, [])
