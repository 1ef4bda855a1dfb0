"""RequestAdapter holds the engine contract around every kind of engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from engines import GenerateContext
from engines.adapter import RequestAdapter
from pipeline import InvalidArgument
from pipeline.protocols import PreprocessedRequest
from pipeline.testing import check_engine
from tests.engines.worlds import Chunk, EndsOnKill, FunctionEngine


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
    """Checks for a stop only, and ignores a kill."""
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


async def _notices_kill(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[Chunk, None]:
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
        lambda: FunctionEngine(_counts),
        lambda: FunctionEngine(_ignores_kill),
        lambda: FunctionEngine(_sets_up),
        lambda: EndsOnKill(_notices_kill),
    ],
    ids=["counts", "ignores kill", "sets up", "notices kill"],
)
async def test_the_engine_contract_holds_whatever_the_engine_does(
    make: Callable[[], FunctionEngine], details: bool
) -> None:
    await check_engine(
        lambda: RequestAdapter(make(), details=details),
        request=PreprocessedRequest([1]),
        bad_request=PreprocessedRequest([]),
        open_count=lambda adapter: getattr(adapter, "engine").open,  # noqa: B009
    )
