"""For each failure of the conformance kit without stop, kill or close there are engines with only this failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio
import numpy
import pytest

from engines import (
    GenerateContext,
)
from engines.conformance import MEANINGS
from pipeline import Disconnected, InvalidArgument
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest
from tests.engines.conformance.worlds import (
    TOKEN_S,
    BrokenEngine,
    BrokenEngines,
    Chunks,
    Sevens,
    expect_its_failures,
    sevens,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


ELSEWHERE = {
    *("StartFailed", "EmptyModelInConfig", "BackgroundFailed", "KvEventSourcesFailed"),
    *("KvEventSourcesNotIdempotent", "SetupMetricsFailed", "ComponentMetricsNotIdempotent", "DrainFailed"),
    *("CleanupFailed", "SecondCleanupFailed", "CleanupWithoutStartFailed"),
    *("CancellationNotObserved", "CancellationIgnored", "StopInWaitIgnored", "StopInWaitUnanswered"),
    *("AbortFailed", "AbortIgnored", "KillIgnored", "CloseFailed", "NotServedAfterwards"),
    *("TokenRepeatedAfterStop", "TokensLeftOver", "StreamsShareState", "LimitUsageMismatch"),
    *("PromptTokensMismatch", "RequestChanged", "MaxTokensIgnored", "LimitNotNamed", "MinTokensIgnored"),
    *("IgnoreEosIgnored", "ChoicesIgnored", "LockHeldOverYield", "CancelScopeHeldOverYield"),
    *("TaskGroupHeldOverYield", "HeldUpByPausedReader", "LoopBlocked", "TasksLeftByCleanup"),
    *("ThreadsLeftByCleanup", "TasksLeftByStream", "ThreadsLeftByStream", "WorkLeftByStream"),
    *("ChunkChanged", "CancellationSwallowed", "OfferedTokensMismatch", "OfferedUsageMismatch"),
}
"""The failures that the other files of tests cover."""
HOSTED = {f"E{rule}" for rule in range(1, 14)}
"""The adapter prevents most of these failures, whatever an engine does."""
ON_REQUEST = {"BadRequestServed"}
"""The kit checks this only if a test names a bad request."""


# -- one request


@breaks("GenerateFailed")
async def generate_raises(request: PreprocessedRequest, context: GenerateContext) -> Any:
    raise InvalidArgument("not me")


@breaks("GenerateFailed")
def generate_raises_at_once(request: PreprocessedRequest, context: GenerateContext) -> Any:
    raise TypeError("not me")


@breaks("GenerateFailed")
async def generate_hangs(request: PreprocessedRequest, context: GenerateContext) -> Any:
    await anyio.sleep_forever()


@breaks("GenerateFailed")
async def generate_gives_a_list(request: PreprocessedRequest, context: GenerateContext) -> Any:
    return [LLMEngineOutput.stop()]


@breaks("GenerateFailed")
async def first_chunk_never_comes(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    await context.stopped()
    yield LLMEngineOutput.cancelled()


@breaks("GenerateFailed")
async def endless(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    """Never waits, so that no clock advances meanwhile."""
    while not context.is_stopped:
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.cancelled()


@breaks("NoChunksYielded")
async def silent(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    if context is None:
        yield LLMEngineOutput.stop()


@breaks("StreamYieldedError")
async def stream_raises(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    yield LLMEngineOutput.token(1)
    raise Disconnected("lost the device")


@breaks("StreamYieldedError")
async def raises_after_its_terminal_chunk(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk
    raise KeyError("request")


@breaks("NotAChunk")
async def yields_numbers(request: PreprocessedRequest, context: GenerateContext) -> AsyncGenerator[int, None]:
    yield 7


@breaks("StreamYieldedError")
async def only_fails(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    """Fails by the finish reason of its last chunk."""
    yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.error("no memory")


@breaks("StreamYieldedError")
async def only_gives_up(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    yield LLMEngineOutput.cancelled()


@breaks("NotAChunk")
async def yields_no_list(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    yield LLMEngineOutput(None)  # type: ignore[arg-type]


@breaks("NotAChunk")
async def yields_numpy_numbers(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    """Yields NumPy integers, as engines have them; they do not cross the wire."""
    yield LLMEngineOutput([numpy.int64(7)])  # type: ignore[list-item]


@breaks("NotAChunk")
async def finishes_with_a_text(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    yield LLMEngineOutput([7], finish_reason="stop")  # type: ignore[arg-type]


@breaks("NotAChunk")
async def yields_another_choice(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    yield LLMEngineOutput([7], index=1)


@breaks("ChunkAfterTerminal")
async def goes_on(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk
    if not context.is_stopped:
        yield LLMEngineOutput.token(8)


@breaks("ChunkAfterTerminal")
async def ends_twice(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk
    yield LLMEngineOutput.cancelled()


@breaks("ChunkAfterTerminal")
async def ends_another_choice_too(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.stop()
    if not context.is_stopped:
        yield LLMEngineOutput([5], index=1)


@breaks("NoTerminalChunk")
async def just_ends(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            if chunk.finish_reason is None or context.is_stopped:
                yield chunk


@breaks("CompletionTokensMismatch")
async def miscounts(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk if chunk.finish_reason is None else chunk.with_usage(CompletionUsage.of(3, 5))


@breaks("StopUsageMismatch")
async def miscounts_when_stopped(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        async for chunk in chunks:
            yield chunk.with_usage(CompletionUsage.of(3, 99)) if context.is_stopped else chunk


# -- several requests


@breaks("ConcurrentGenerateFailed")
class EmptyAmongOthers(Sevens):
    running = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.running += 1
        await anyio.sleep(TOKEN_S)
        is_alone, self.running = self.running == 1, 0
        return sevens(request, context) if is_alone else silent(request, context)


@breaks("ConcurrentGenerateFailed")
class SharesItsCount(Sevens):
    sent = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.sent = 0
        return self._counted(sevens(request, context))

    async def _counted(self, source: Chunks) -> Chunks:
        async with aclosing(source) as chunks:
            async for chunk in chunks:
                self.sent += len(chunk.token_ids)
                yield chunk if chunk.finish_reason is None else chunk.with_usage(CompletionUsage.of(3, self.sent))


@breaks("ConcurrentGenerateFailed")
class RefusesASecond(Sevens):
    is_running = False

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        if self.is_running:
            raise RuntimeError("busy")
        return self._alone(sevens(request, context))

    async def _alone(self, source: Chunks) -> Chunks:
        self.is_running = True
        try:
            async with aclosing(source) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.is_running = False


@breaks("ConcurrentGenerateFailed")
class StopsAllForOne(Sevens):
    """This failure does not show among undisturbed requests."""

    running = stopped = 0

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Any:
        self.running += 1
        try:
            async with aclosing(sevens(request, context)) as chunks:
                async for chunk in chunks:
                    self.stopped |= context.is_stopped
                    if self.stopped:
                        yield LLMEngineOutput.cancelled()
                        return
                    yield chunk
        finally:
            self.running -= 1
            if not self.running:
                self.stopped = 0


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(
    broken: BrokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.conformance.answers.MOST_CHUNKS", 12_000)  # still above the long request
    await expect_its_failures(broken)


def test_every_other_failure_has_an_engine_that_fails_it() -> None:
    assert BROKEN.names == set(MEANINGS) - ELSEWHERE - ON_REQUEST - HOSTED
