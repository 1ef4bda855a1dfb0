"""Engines whose callers are in other processes: the contract holds, and chunks arrive as they were made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import evolve

from engines import EchoEngine, LLMEngine, as_engine
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import Annotated, AsyncEngine, Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import bundled, check_engine
from tests.pipeline.network.tcp.worlds import OPTIONS, pair
from tests.pipeline.network.worlds import eventually

KIND: Any = Annotated[LLMEngineOutput]
REQUEST = PreprocessedRequest(list(range(64)), stop_conditions=StopConditions(max_tokens=64))
BAD = PreprocessedRequest([], prompt_embeds="AAAA")
NARROW = evolve(OPTIONS, window_items=8)


def made(name: str) -> LLMEngine:
    return EchoEngine(0.01) if name == "echo" else MockEngine(MockEngineArgs(speedup_ratio=10.0))


@asynccontextmanager
async def between_processes(
    engine: LLMEngine, held: list[Any], join_max: int = 1
) -> AsyncIterator[AsyncEngine[Any, Any]]:
    """The engine, as a caller in another process has it that reads up to so many waiting tokens as one item."""
    async with pair(evolve(NARROW, join_max_tokens=join_max)) as world, as_engine(engine) as local:
        serving, remote = await world.serve(local, KIND)
        held[:] = [serving]
        yield remote
        await eventually(lambda: serving.running == 0)


@pytest.mark.slow
@pytest.mark.parametrize("join_max", [1, 7, 256])
@pytest.mark.parametrize("name", ["echo", "mock"])
async def test_an_engine_of_another_process_holds_the_contract(name: str, join_max: int) -> None:
    held: list[Any] = []
    await check_engine(
        lambda: between_processes(made(name), held, join_max),
        request=REQUEST,
        bad_request=BAD,
        open_count=lambda _: held[0].running,
        compared=lambda items: [token_id for item in items for token_id in item.data.token_ids],
        settle_s=1.0,
    )


@pytest.mark.parametrize("name", ["echo", "mock"])
async def test_chunks_arrive_as_they_were_made(name: str) -> None:
    """Those of the mock engine as a whole: how many of its tokens are one chunk depends on when they are read."""

    async def received(engine: AsyncEngine[Any, Any]) -> list[Any]:
        whole = engine if name == "echo" else bundled(engine, None)
        return await (await whole.generate(Context(REQUEST, id="r"))).collect()

    async with as_engine(made(name)) as local:
        expected = await received(local)
    async with between_processes(made(name), []) as remote:
        found = await received(remote)
    assert [_timeless(item) for item in found] == [_timeless(item) for item in expected]
    assert sum(len(item.data.token_ids) for item in found) == 64


def _timeless(item: Any) -> Any:
    return evolve(item, data=evolve(item.data, worker_trace_link=None, engine_data=None))
