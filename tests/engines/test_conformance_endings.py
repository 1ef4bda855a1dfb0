"""Each failure of the conformance kit at a stop, a kill or a close has engines with just this failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from engines import ConformanceFailure, EngineConfig, LLMEngine, run_conformance
from pipeline.protocols import CompletionUsage, LLMEngineOutput

pytestmark = pytest.mark.anyio

TOKEN_S = 0.01
Tokens = AsyncGenerator[LLMEngineOutput, None]
Saying = Callable[[Any, Any], Any]

BROKEN: list[tuple[str, Callable[[], LLMEngine]]] = []
"""Name of the failure -> an engine that has it."""


def breaks(name: str, *, hears_kill: bool = False) -> Callable[[Any], Any]:
    """Notes a class, or a function that takes the place of `generate`, as broken in this one way."""

    def note(broken: Any) -> Any:
        made = broken
        if not isinstance(broken, type):
            made = type(broken.__name__, (Good,), {"generate": staticmethod(broken), "hears_kill": hears_kill})
        BROKEN.append((name, made))
        return broken

    return note


async def sevens(request: Any, context: Any) -> Tokens:
    """Says 7 until there are `max_tokens`, four without."""
    count = request.stop_conditions.max_tokens or 4
    for said in range(count):
        await anyio.sleep(TOKEN_S)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled().with_usage(CompletionUsage.of(3, said))
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length().with_usage(CompletionUsage.of(3, count))


class Good(LLMEngine):
    """Every engine below changes it in one place."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="sevens")

    def generate(self, request: Any, context: Any) -> Any:
        return sevens(request, context)

    async def cleanup(self) -> None:
        """There is nothing to release."""


# -- stop


def when_stopped(then: Any) -> Saying:
    """Says sevens, and once it is stopped what `then` gives instead."""

    async def generate(request: Any, context: Any) -> Tokens:
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
async def hangs_after_stop() -> Tokens:
    """BE-101."""
    await anyio.sleep_forever()
    yield LLMEngineOutput.cancelled()


@breaks("CancellationNotObserved")
@when_stopped
async def takes_long_to_stop() -> Tokens:
    await anyio.sleep(2.1)
    yield LLMEngineOutput.cancelled()


@breaks("CancellationNotObserved")
@when_stopped
async def drips_after_stop() -> Tokens:
    """Each chunk comes in time, their end does not."""
    for _ in range(5):
        await anyio.sleep(0.5)
        yield LLMEngineOutput.token(1)
    yield LLMEngineOutput.cancelled()


@breaks("CancellationNotObserved")
@when_stopped
async def runs_on_after_stop() -> Tokens:
    while True:
        yield LLMEngineOutput.token(1)


@breaks("CancellationIgnored")
@when_stopped
async def calls_a_stop_a_limit() -> Tokens:
    yield LLMEngineOutput.token(1)
    yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def never_looks(request: Any, context: Any) -> Tokens:
    """BE-100: reaches its limit in time."""
    for _ in range(request.stop_conditions.max_tokens or 4):
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def looks_once(request: Any, context: Any) -> Tokens:
    if context.is_stopped:
        yield LLMEngineOutput.cancelled()
        return
    for _ in range(4):
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def ends_silently_when_stopped(request: Any, context: Any) -> Tokens:
    yield LLMEngineOutput.token(7)
    if not context.is_stopped:
        yield LLMEngineOutput.length()


@breaks("CancellationIgnored")
async def ends_silently_when_stopped_between(request: Any, context: Any) -> Tokens:
    if context.is_stopped:
        yield LLMEngineOutput.cancelled()
        return
    yield LLMEngineOutput.token(7)
    if not context.is_stopped:
        yield LLMEngineOutput.length()


@breaks("AbortFailed")
class AbortRaises(Good):
    async def abort(self, context: Any) -> None:
        raise KeyError(context.id)


@breaks("AbortFailed")
class AbortHangs(Good):
    async def abort(self, context: Any) -> None:
        await anyio.sleep_forever()


# -- kill and close


@breaks("KillNotHeard", hears_kill=True)
async def looks_every_second(request: Any, context: Any) -> Tokens:
    for _ in range(4):
        await anyio.sleep(1)
        if context.is_stopped:
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("KillNotHeard", hears_kill=True)
async def hears_kill_only_at_first(request: Any, context: Any) -> Tokens:
    with anyio.move_on_after(1):
        await context.stopped()
    if not context.is_stopped:
        yield LLMEngineOutput.token(7)
        await anyio.sleep(1)
    yield LLMEngineOutput.cancelled() if context.is_stopped else LLMEngineOutput.length()


@breaks("KillNotHeard", hears_kill=True)
async def tells_kill_from_stop(request: Any, context: Any) -> Tokens:
    """Never waits, and goes on after a kill."""
    for _ in range(request.stop_conditions.max_tokens or 4):
        if context.is_stopped and not context.is_killed:
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.token(7)
    yield LLMEngineOutput.length()


@breaks("KillNotHeard")
async def shields_its_waits(request: Any, context: Any) -> Tokens:
    for _ in range(4):
        if context.is_stopped:
            yield LLMEngineOutput.cancelled()
            return
        yield LLMEngineOutput.token(7)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0 if context.is_stopped else 3)
    yield LLMEngineOutput.length()


def when_closed(then: Any) -> Saying:
    """Says sevens, and does what `then` does when it is closed among them."""

    async def generate(request: Any, context: Any) -> Tokens:
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
async def cannot_be_closed(request: Any, context: Any) -> Tokens:
    async with aclosing(sevens(request, context)) as chunks:
        try:
            async for chunk in chunks:
                yield chunk
        except GeneratorExit:
            yield LLMEngineOutput.cancelled()


# -- afterwards


class Leaks(Good):
    """A request that does not come to its own end keeps its slot."""

    def __init__(self, slots: int) -> None:
        self.slots = anyio.Semaphore(slots)

    async def generate(self, request: Any, context: Any) -> Tokens:
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


@breaks("NotServedAfterwards")
class FailsOnceClosed(Good):
    """Forgets that another request may come."""

    is_closed = False

    async def generate(self, request: Any, context: Any) -> Tokens:
        if self.is_closed and request.stop_conditions.max_tokens is None:
            raise RuntimeError("closed")
        try:
            async with aclosing(sevens(request, context)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except GeneratorExit:
            self.is_closed = True
            raise


@pytest.mark.parametrize(("name", "factory"), BROKEN, ids=lambda part: getattr(part, "__name__", None))
async def test_a_broken_engine_fails_its_check_and_no_other(
    name: str, factory: Callable[[], LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.conformance_answer.MOST_CHUNKS", 12_000)  # still above the long request
    with pytest.raises(ExceptionGroup) as caught:
        await run_conformance(factory)
    (failure,) = caught.value.exceptions
    assert isinstance(failure, ConformanceFailure)
    assert failure.name == name
    assert str(failure).startswith(f"{name}: ")


def test_every_ending_has_an_engine_that_fails_it() -> None:
    assert {name for name, _ in BROKEN} == {
        "CancellationNotObserved",
        "CancellationIgnored",
        "AbortFailed",
        "KillNotHeard",
        "CloseFailed",
        "NotServedAfterwards",
    }
