"""Each failure of the conformance kit at a kill or a close, and behind them, has engines with just this failure."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import pytest

from engines import EngineConfig, GenerateContext
from pipeline.protocols import LLMEngineOutput, PreprocessedRequest, StopConditions
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


# -- kill and close


@breaks("KillIgnored", ends_on_kill=True)
async def looks_every_second(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    refuse_more(request, 4)
    for _ in range(min(4, request.stop_conditions.max_tokens or 4)):
        await anyio.sleep(1)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("KillIgnored", ends_on_kill=True)
async def notices_kill_only_at_first(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    refuse_more(request, 1)
    with anyio.move_on_after(1):
        await context.stopped()
    if not context.is_stopped:
        yield LLMEngineOutput.token(7)
        await anyio.sleep(1)
    yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.length()


@breaks("KillIgnored", ends_on_kill=True)
async def ends_on_stop_but_not_on_kill(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    """Never waits, and continues after a kill."""
    refuse_more(request, 10_000)
    for _ in range(request.stop_conditions.max_tokens or 4):
        if context.is_stopped and not context.is_killed:
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("KillIgnored")
async def shields_its_waits(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    refuse_more(request, 4)
    for _ in range(min(4, request.stop_conditions.max_tokens or 4)):
        if context.is_stopped:
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.token(7)
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(1):
                await context.killed()
            await anyio.sleep(3 if context.is_killed else 0)
    yield LLMEngineOutput.length()


def when_closed(then: Any) -> Generate:
    """Yields sevens, and runs `then` when it is closed among them."""

    async def generate(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        async with aclosing(sevens(request, context)) as chunks:
            try:
                async for chunk in chunks:
                    yield chunk
            except GeneratorExit:
                await then()

    generate.__name__ = then.__name__
    return generate


@breaks("CloseFailed")
@when_closed
async def close_raises() -> None:
    raise RuntimeError("was not done")


@breaks("CloseFailed")
@when_closed
async def close_hangs() -> None:
    await anyio.sleep_forever()


@breaks("CloseFailed")
async def cannot_be_closed(request: PreprocessedRequest, context: GenerateContext) -> Chunks:
    async with aclosing(sevens(request, context)) as chunks:
        try:
            async for chunk in chunks:
                yield chunk
        except GeneratorExit:
            yield LLMEngineOutput.cancelled()


@breaks("CancellationSwallowed")
class WaitsOutItsCancellation(Sevens):
    """Waits again after a cancellation, unless the wait was short, so that a kill takes effect."""

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        refuse_more(request, 10_000)
        for sent in range(request.stop_conditions.max_tokens or 4):
            while not context.is_stopped:
                try:
                    await anyio.sleep(TOKEN_S)
                except BaseException:
                    continue
                break
            if context.is_stopped:
                yield LLMEngineOutput.cancelled()
                return
            yield LLMEngineOutput.token(sent)
        yield LLMEngineOutput.length()


# -- afterwards


class Leaks(Sevens):
    """Keeps the slot of a request that does not run to its end."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = anyio.Semaphore(slots)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        await self.slots.acquire()
        async with aclosing(sevens(request, context)) as chunks:
            async for chunk in chunks:
                yield chunk
        self.slots.release()


@breaks("NotServedAfterwards")
class LeaksOneOfEight(Leaks):
    def __init__(self) -> None:
        super().__init__(8)


@breaks("NotServedAfterwards")
class LeaksItsOnlySlot(Leaks):
    def __init__(self) -> None:
        super().__init__(1)

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="sevens", max_num_seqs=1)


class LeaksOneOfEightWhen(Sevens):
    """Keeps the slot of a request whose end is of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = anyio.Semaphore(8)

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        await self.slots.acquire()
        how = "ended"
        try:
            async with aclosing(sevens(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except GeneratorExit:
            how = "closed"
            raise
        except BaseException:
            how = "cancelled"
            raise
        finally:
            if not self.leaks("killed" if context.is_killed else how):
                self.slots.release()

    def leaks(self, how: str) -> bool:
        raise NotImplementedError


@breaks("NotServedAfterwards")
class LeaksOneOfEightWhenKilled(LeaksOneOfEightWhen):
    def leaks(self, how: str) -> bool:
        return how == "killed"


@breaks("NotServedAfterwards")
class LeaksOneOfEightWhenCancelled(LeaksOneOfEightWhen):
    def leaks(self, how: str) -> bool:
        return how == "cancelled"


@breaks("NotServedAfterwards")
class FailsOnceClosed(Sevens):
    """Serves no further request after a close."""

    is_closed = False

    async def generate(self, request: PreprocessedRequest, context: GenerateContext) -> Chunks:
        if self.is_closed and request.stop_conditions == StopConditions():
            raise RuntimeError("closed")
        try:
            async with aclosing(sevens(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except GeneratorExit:
            self.is_closed = True
            raise


@pytest.mark.parametrize("broken", BROKEN, ids=str)
async def test_a_broken_engine_fails_its_check_and_no_other(
    broken: BrokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.conformance.answers.MOST_CHUNKS", 12_000)  # still above the long request
    await expect_its_failures(broken)


def test_every_ending_by_a_kill_or_a_close_has_an_engine_that_fails_it() -> None:
    assert BROKEN.names == {"KillIgnored", "CancellationSwallowed", "CloseFailed", "NotServedAfterwards"}
