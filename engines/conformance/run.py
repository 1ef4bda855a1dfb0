"""run_conformance: prove an LLMEngine against its contract with one call.

    async def test_my_engine_holds_the_contract() -> None:
        await run_conformance(MyEngine)

Source: dynamo lib/backend-common/src/testing.rs, run_conformance. Other than there all failures are reported, not only
the first one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from inspect import isawaitable

import anyio

from pipeline.protocols import PreprocessedRequest

from ..llm import EngineConfig, GenerateContext, LLMEngine
from .answer import Trial, mock_context
from .calls import Call
from .checks import clean_up, drain, start
from .course import check_started
from .failure import ConformanceFailure, Found
from .left import Running, check_left_by_cleanup
from .turns import Turns, watch_turns
from .watchdog import Watchdog, watchdog

EngineFactory = Callable[[], LLMEngine | Awaitable[LLMEngine]]


async def run_conformance(
    factory: EngineFactory,
    *,
    request: PreprocessedRequest | None = None,
    bad_request: PreprocessedRequest | None = None,
    deadline_s: float = 2.0,
    within_s: float = 30.0,
    at_once_s: float = 0.5,
) -> None:
    """Check `LLMEngine`'s contract; raise an ExceptionGroup of ConformanceFailures, each name once.

    `factory` makes an engine, now or as a coroutine. One is started, asked and cleaned up twice; a second one is only
    cleaned up. `request` is what it is asked (None: the prompt 1, 2, 3 and no limits, and the same tokens in another
    order); it is also sent with limits, with two choices, and with a limit of 10,000 tokens, or what its context holds,
    and disturbed. `bad_request` is one it cannot serve; without, L5 is not checked. `deadline_s` bounds closing and the
    rest of a stream behind a stop or a kill, `at_once_s` the rest behind a kill that the engine promises to end at,
    `within_s` every other step, a start included; what runs out of time is named. Works in real and in virtual time; an
    engine with threads of its own needs real time. What the factory raises goes on.
    """
    with _watched() as turns:
        before, found = Running.now(), Found(within_s)
        engine = await _made(factory)

        async def check(config: EngineConfig) -> None:
            asked = request or PreprocessedRequest([1, 2, 3], model=config.model)
            trial = Trial(engine, asked, config, deadline_s, within_s, at_once_s, turns, before.threads)
            await check_started(trial, found, bad_request, varies=request is None)

        await _live(engine, found, check)
        if "CleanupFailed" not in found:
            await found.note(check_left_by_cleanup(before, deadline_s))
        await found.note(clean_up("CleanupWithoutStartFailed", await _made(factory), within_s))
    if failures := list(found.failures.values()):
        raise ExceptionGroup(f"{type(engine).__name__} fails {len(failures)} checks of the engine contract", failures)


@contextmanager
def _watched() -> Iterator[Turns]:
    """Watches the loop's turns, and the clock on the wall beside them."""
    watch = Watchdog()
    token = watchdog.set(watch)
    try:
        with watch_turns() as turns:
            yield turns
    finally:
        watchdog.reset(token)
        watch.close()


async def _live(engine: LLMEngine, found: Found, check: Callable[[EngineConfig], Awaitable[None]]) -> None:
    """The engine's life, from its start, through the check, until it was cleaned up twice."""
    background = Call(engine.background)
    async with anyio.create_task_group() as tasks:
        try:
            if (config := await found.note(start(engine, found.within_s))) is not None:
                with anyio.CancelScope() as checks:
                    tasks.start_soon(_watch, background, found, checks)
                    await check(config)
                if not checks.cancelled_caught:
                    await found.note(drain(engine, found.within_s))
        finally:
            await found.note(clean_up("CleanupFailed", engine, found.within_s))
            background.is_cancelled = True
        if "CleanupFailed" not in found:
            await found.note(clean_up("SecondCleanupFailed", engine, found.within_s))
        tasks.cancel_scope.cancel()


async def _watch(background: Call[None], found: Found, checks: anyio.CancelScope) -> None:
    """As a host does; an engine whose background fails is asked nothing more."""
    await background.run()
    try:
        background.result("BackgroundFailed", "it")
    except ConformanceFailure as failure:
        if not background.is_cancelled:
            found.add(failure)
            checks.cancel()


async def _made(factory: EngineFactory) -> LLMEngine:
    made = factory()
    return await made if isawaitable(made) else made


@asynccontextmanager
async def cancelling_context(after_s: float) -> AsyncIterator[GenerateContext]:
    """A context that is stopped after some time, unless the block has ended before."""
    context = mock_context()
    failure: Exception | None = None

    async def stop_later() -> None:
        await anyio.sleep(after_s)
        context.stop_generating()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_later)
        try:
            yield context
        except Exception as error:  # not in the group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
