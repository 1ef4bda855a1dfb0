"""First tokens of a mock engine that takes no time, in real time: how soon they come, and before which others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import as_engine
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import Annotated, AsyncEngine, Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions

from .worlds import assert_empty

ARGS = MockEngineArgs(num_gpu_blocks=4096, block_size=4, max_num_seqs=32, speedup_ratio=0)
OTHERS = [f"other {index}" for index in range(8)]

Served = AsyncEngine[PreprocessedRequest, Annotated[LLMEngineOutput]]


class Readers:
    """Readers of one engine; `came` has the reader and the turn of the loop of each item."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.turn = 0
        self.sent_in: dict[str, int] = {}
        self.came: list[tuple[int, str]] = []

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await checkpoint()

    async def read(self, name: str, tokens: int) -> None:
        prompt = [7, len(self.sent_in), *range(10)]
        request = PreprocessedRequest(prompt, stop_conditions=StopConditions(max_tokens=tokens))
        async with await self.served.generate(Context(request)) as stream:
            self.sent_in[name] = self.turn
            async for _ in stream:
                self.came.append((self.turn, name))

    def first(self, name: str) -> int:
        """Return the turn in which the first item of a reader came."""
        return next(turn for turn, each in self.came if each == name)


@asynccontextmanager
async def readers_of_an_idle_engine() -> AsyncIterator[Readers]:
    """Give readers of an engine whose rank waits. At the end the engine holds nothing."""
    engine = MockEngine(ARGS)
    async with as_engine(engine) as served, anyio.create_task_group() as tasks:
        readers = Readers(served)
        tasks.start_soon(readers.count_turns)
        for _ in range(5):
            await checkpoint()
        yield readers
        tasks.cancel_scope.cancel()
    assert_empty(engine)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # the order within a turn is fixed there
class TestInRealTime:
    async def test_a_first_token_of_an_idle_rank_comes_two_turns_after_its_request(self) -> None:
        """One for the rank to step, one for the reader: the output waited for the turn after the step."""
        async with readers_of_an_idle_engine() as readers:
            await readers.read("one", 1)
        assert readers.first("one") - readers.sent_in["one"] == 2

    async def test_first_tokens_are_read_before_other_tokens_of_their_step(self) -> None:
        async with readers_of_an_idle_engine() as readers, anyio.create_task_group() as reading:
            for name in OTHERS:
                reading.start_soon(readers.read, name, 400)
            while len(readers.came) < 5 * len(OTHERS):
                await checkpoint()
            reading.start_soon(readers.read, "new", 4)
        turn = readers.first("new")
        in_turn = [name for each, name in readers.came if each == turn]
        assert set(in_turn) > set(OTHERS)
        assert in_turn[0] == "new"
