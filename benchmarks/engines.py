"""Engines: what the adapter adds to a chunk, and how much the mock engine simulates in a second."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from random import Random
from time import perf_counter
from typing import Any, ClassVar

import anyio

from engines import EngineConfig, GenerateContext, LLMEngine, as_engine
from engines.mocker import MockEngine, MockEngineArgs
from pipeline import Context
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
from pipeline.testing import run_in_virtual_time

from .measure import Result, best_of

CHUNKS = 50_000
REQUESTS = 3_000
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
ARRIVALS_PER_S = 4.0
"""For each worker."""
REPEATS = 3


class Plain(LLMEngine):
    """Generate the same token again and again; its host ends it on a kill."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="plain")

    async def generate(
        self, request: PreprocessedRequest, context: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        for _ in range(CHUNKS):
            yield LLMEngineOutput([97])
        yield LLMEngineOutput.length()

    async def cleanup(self) -> None:
        pass


class Hearing(Plain):
    """The same; it need not be raced, for it never waits."""

    ends_on_kill: ClassVar[bool] = True


async def _bare() -> float:
    engine, request = Plain(), PreprocessedRequest([1])

    async def run() -> int:
        async for _ in engine.generate(request, GenerateContext(Context(request))):
            pass
        return CHUNKS

    return await best_of(run) * 1e6


async def _adapted(engine: LLMEngine) -> float:
    async with as_engine(engine) as adapter:

        async def run() -> int:
            async with await adapter.generate(Context(PreprocessedRequest([1]))) as stream:
                async for _ in stream:
                    pass
            return CHUNKS

        return await best_of(run) * 1e6


async def _simulate(workers: int) -> float:
    """Wall seconds to simulate the requests, which arrive at random at a steady rate for each worker."""
    rng = Random(1)
    prompts = [[rng.randrange(32_000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)]
    arrivals_s = sorted(rng.random() * REQUESTS / (ARRIVALS_PER_S * workers) for _ in range(REQUESTS))
    limit = StopConditions(max_tokens=OUTPUT_TOKENS)

    async def collect(engine: Any, prompt: list[int]) -> None:
        async with await engine.generate(Context(PreprocessedRequest(prompt, stop_conditions=limit))) as stream:
            async for _ in stream:
                pass

    async with AsyncExitStack() as hosts:
        engines = [
            await hosts.enter_async_context(as_engine(MockEngine(MockEngineArgs()), worker_id=worker))
            for worker in range(workers)
        ]
        begun_s, virtual_s = perf_counter(), anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for number, (prompt, at_s) in enumerate(zip(prompts, arrivals_s, strict=True)):
                await anyio.sleep_until(virtual_s + at_s)
                tasks.start_soon(collect, engines[number % workers], prompt)
        return perf_counter() - begun_s


async def _mocked(workers: int) -> list[Result]:
    def run() -> float:
        return min(run_in_virtual_time(_simulate, workers, backend="asyncio") for _ in range(REPEATS))

    wall_s = await anyio.to_thread.run_sync(run)
    among = f"{workers} mock worker{'s' if workers > 1 else ''}"
    return [
        Result(f"requests simulated a second, {among}", REQUESTS / wall_s, "/s"),
        Result(f"tokens simulated a second, {among}", REQUESTS * OUTPUT_TOKENS / wall_s, "/s"),
    ]


async def measure() -> list[Result]:
    bare = await _bare()
    results = [
        Result("chunk of an engine, adapter included", await _adapted(Hearing()), "µs", bare),
        Result("the same, each chunk raced against a kill", await _adapted(Plain()), "µs", bare),
    ]
    for workers in (1, 8, 64):
        results += await _mocked(workers)
    return results
