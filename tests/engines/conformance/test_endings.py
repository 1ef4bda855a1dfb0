"""Each failure of the conformance kit at a stop has engines with just this failure."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import pytest

from engines import GenerateContext
from pipeline.protocols import CompletionUsage, LLMEngineOutput, PreprocessedRequest
from tests.engines.conformance.worlds import (
    TOKEN_S,
    BrokenEngine,
    BrokenEngines,
    Chunks,
    Generate,
    Sevens,
    expect_its_failures,
    refuse_more,
    sevens,
)

BROKEN = BrokenEngines()
breaks = BROKEN.breaks


# -- stop


def when_stopped(then: Any) -> Generate:
    """Yields sevens, and after a stop what `then` yields."""

    async def generate(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(sevens(request, context)) as chunks:
            async for chunk in chunks:
                if not context.is_stopped:
                    yield chunk
                    continue
                async with aclosing(then()) as instead:
                    async for other in instead:
                        yield other
                return

    generate.__name__ = then.__name__
    return generate


@breaks("CancellationNotObserved")
@when_stopped
async def hangs_after_stop() -> Chunks:
    await anyio.sleep_forever()
    yield LLMEngineOutput.cancelled()


@breaks("CancellationNotObserved")
@when_stopped
async def takes_long_to_stop() -> Chunks:
    await anyio.sleep(2.1)
    yield LLMEngineOutput.cancelled()


@breaks("CancellationNotObserved")
@when_stopped
async def drips_after_stop() -> Chunks:
    """Each chunk comes in time, but the end does not."""
    for _ in range(5):
        await anyio.sleep(0.5)
        yield LLMEngineOutput.token(1)
    yield LLMEngineOutput.cancelled()


@breaks("CancellationNotObserved")
@when_stopped
async def runs_on_after_stop() -> Chunks:
    while True:
        yield LLMEngineOutput.token(1)


@breaks("CancellationIgnored")
@when_stopped
async def calls_a_stop_a_limit() -> Chunks:
    yield LLMEngineOutput.token(1)
    yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def never_looks(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    """An engine that reaches its limit before the deadline."""
    refuse_more(request, 10_000)
    for _ in range(request.stop_conditions.max_tokens or 4):
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def looks_once(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    refuse_more(request, 4)
    if context.is_stopped:
        yield LLMEngineOutput.cancelled()
        return
    for _ in range(min(4, request.stop_conditions.max_tokens or 4)):
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def ends_silently_when_stopped(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    refuse_more(request, 1)
    yield LLMEngineOutput.token(7)
    if not context.is_stopped:
        yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def ends_silently_when_stopped_between(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    refuse_more(request, 1)
    if context.is_stopped:
        yield LLMEngineOutput.cancelled()
        return
    yield LLMEngineOutput.token(7)
    if not context.is_stopped:
        yield LLMEngineOutput.length()


@breaks("AbortFailed")
class AbortRaises(Sevens):
    async def abort(self, context: GenerateContext) -> None:
        raise KeyError(context.id)


@breaks("AbortFailed")
class AbortHangs(Sevens):
    async def abort(self, context: GenerateContext) -> None:
        await anyio.sleep_forever()


# -- a stop in a wait


def in_wait(then: Any) -> Generate:
    """Checks for a stop between tokens, and runs `then` when the stop comes while it waits for a token."""

    async def generate(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 10_000)
        count = request.stop_conditions.max_tokens or 4
        for sent in range(count):
            if context.is_stopped:
                yield LLMEngineOutput.cancelled()
                return
            with anyio.move_on_after(TOKEN_S):
                await context.stopped()
            if context.is_stopped:
                async with aclosing(then(sent)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            yield LLMEngineOutput.token(sent)
        yield LLMEngineOutput.length()

    generate.__name__ = then.__name__
    return generate


@breaks("StopInWaitIgnored")
@in_wait
async def calls_a_stop_in_its_wait_a_limit(sent: int) -> Chunks:
    yield LLMEngineOutput.length()


@breaks("StopInWaitIgnored")
@in_wait
async def calls_a_stop_in_its_wait_an_end(sent: int) -> Chunks:
    yield LLMEngineOutput.token(sent)
    yield LLMEngineOutput.stop()


@breaks("StopInWaitUnanswered")
@in_wait
async def ends_silently_in_its_wait(sent: int) -> Chunks:
    if sent < 0:
        yield LLMEngineOutput.cancelled()


@breaks("StopInWaitUnanswered")
@in_wait
async def ends_behind_a_token_in_its_wait(sent: int) -> Chunks:
    yield LLMEngineOutput.token(sent)


@breaks("StopUsageMismatch")
@in_wait
async def counts_the_token_it_waited_for(sent: int) -> Chunks:
    yield LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(3, sent + 1))


@breaks("TokenRepeatedAfterStop")
@in_wait
async def repeats_its_last_token_in_its_wait(sent: int) -> Chunks:
    yield LLMEngineOutput.cancelled().with_tokens([sent - 1] if sent else [])


@breaks("E3")
async def takes_many_chunks_to_stop(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        begun = False
        async for chunk in chunks:
            if begun and context.is_stopped:
                for _ in range(20):
                    yield LLMEngineOutput([])
            begun = True
            yield chunk


@breaks("AbortIgnored")
class AbortWakesNothing(Sevens):
    """Checks for a stop only between its tokens, which are far apart."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 10_000)
        for sent in range(request.stop_conditions.max_tokens or 4):
            if context.is_stopped:
                yield LLMEngineOutput.cancelled()
                return
            yield LLMEngineOutput.token(sent)
            await anyio.sleep(3)
        yield LLMEngineOutput.length()

    async def abort(self, context: GenerateContext) -> None:
        """Do nothing, where it should end the wait."""


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(
    broken: BrokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.conformance.answers.MOST_CHUNKS", 12_000)  # still above the long request
    await expect_its_failures(broken)


def test_every_ending_by_a_stop_has_an_engine_that_fails_it() -> None:
    assert BROKEN.names == {
        *("CancellationNotObserved", "CancellationIgnored", "StopInWaitIgnored", "StopInWaitUnanswered"),
        *("StopUsageMismatch", "TokenRepeatedAfterStop", "E3", "AbortFailed", "AbortIgnored"),
    }
