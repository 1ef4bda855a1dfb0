"""RequestAdapter holds the engine contract around every kind of engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import EngineConfig, GenerateContext, LLMEngine, RequestAdapter
from pipeline import InvalidArgument
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest
from pipeline.testing import check_engine

pytestmark = pytest.mark.anyio

Chunk = LLMEngineOutput
Saying = Callable[[PreprocessedRequest, GenerateContext], Any]


class Says(LLMEngine):
    """An engine of one function, which counts its open generators."""

    def __init__(self, saying: Saying) -> None:
        self.saying = saying
        self.open = 0

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="says")

    def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        made = self.saying(request, context)
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
        """There is nothing to release."""


class HearsKill(Says):
    hears_kill = True


async def _counts(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
    if not request.token_ids:
        raise InvalidArgument("no prompt")
    for n in range(60):
        if context.is_stopped:
            yield Chunk.cancelled()
            return
        await anyio.sleep(0.01)
        yield Chunk.token(n)
    yield Chunk.stop()


async def _ignores_kill(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
    """Looks at stop alone, and sleeps through a kill."""
    if not request.token_ids:
        raise KeyError("prompt")
    for n in range(60):
        if context.is_stopped and not context.is_killed:
            return
        await anyio.sleep(1.0 if n % 8 == 7 else 0.0)
        yield Chunk.token(n)
    yield Chunk.stop()


async def _sets_up(request: PreprocessedRequest, context: GenerateContext) -> Any:
    await checkpoint()
    if not request.token_ids:
        raise InvalidArgument("no prompt")
    return _counts(request, context)


async def _hears_kill(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
    if not request.token_ids:
        raise InvalidArgument("no prompt")
    for n in range(60):
        with anyio.move_on_after(0.01):
            await context.stopped()
        if context.is_stopped:
            yield Chunk.cancelled()
            return
        yield Chunk.token(n)
    yield Chunk.stop()


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Says(_counts),
        lambda: Says(_ignores_kill),
        lambda: Says(_sets_up),
        lambda: HearsKill(_hears_kill),
    ],
    ids=["counts", "ignores kill", "sets up", "hears kill"],
)
async def test_the_engine_contract_holds_whatever_the_engine_does(make: Callable[[], Says], details: bool) -> None:
    await check_engine(
        lambda: RequestAdapter(make(), details=details),
        request=PreprocessedRequest([1]),
        bad_request=PreprocessedRequest([]),
        open_count=lambda adapter: getattr(adapter, "engine").open,  # noqa: B009
    )
