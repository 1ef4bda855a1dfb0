"""Engines made of one function or of a list of steps, and their answers through the adapter."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio

from engines import EngineConfig, GenerateContext, LLMEngine
from engines.adapter import RequestAdapter
from pipeline import Annotated, Context, PenstockError
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest

Chunk = LLMEngineOutput
Generate = Callable[[PreprocessedRequest, GenerateContext], Any]
"""What `LLMEngine.generate` is: an async generator function, or a coroutine function that returns a generator."""


class FunctionEngine(LLMEngine):
    """An engine whose `generate` is one function; it records its calls and counts its open generators."""

    def __init__(self, function: Generate) -> None:
        self.function = function
        self.calls: list[tuple[PreprocessedRequest, GenerateContext]] = []
        self.open = 0

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="function")

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.calls.append((request, context))
        made = self.function(request, context)
        return made if isinstance(made, Awaitable) else self._counted(made)

    async def _counted(self, made: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
        self.open += 1
        try:
            async with aclosing(made) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.open -= 1

    async def cleanup(self) -> None:
        """Release nothing."""


class EndsOnKill(FunctionEngine):
    """Promises that its function ends by itself after a kill."""

    ends_on_kill = True


def scripted(*steps: Any) -> FunctionEngine:
    """Return an engine that yields the chunks among the steps, raises the errors, and sleeps for the floats.

    At a None it waits for ever.
    """

    async def generate(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Any, None]:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            if step is None:
                await anyio.sleep_forever()
            elif isinstance(step, float):
                await anyio.sleep(step)
            else:
                yield step

    return FunctionEngine(generate)


def request(**fields: Any) -> Context[PreprocessedRequest]:
    """Return a request for the prompt [1, 2] with these further fields."""
    return Context(PreprocessedRequest([1, 2], **fields))


async def answer(engine: LLMEngine, to: Context[Any] | None = None, **settings: Any) -> list[Annotated[Chunk]]:
    """Return the items that an adapter with these settings gives, by default to `request()`."""
    async with await RequestAdapter(engine, **settings).generate(to or request()) as stream:
        return [item async for item in stream]


async def failure(engine: LLMEngine, to: Context[Any] | None = None, **settings: Any) -> PenstockError:
    """Return the error that ends the answer, see `answer`."""
    error = (await answer(engine, to, **settings))[-1].extract_error()
    assert error is not None
    return error
