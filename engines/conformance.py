"""run_conformance: prove an LLMEngine against its contract with one call.

    async def test_my_engine_holds_the_contract() -> None:
        await run_conformance(MyEngine)

Source: dynamo lib/backend-common/src/testing.rs, run_conformance. Other than there all failures are reported, not only
the first one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import TypeVar

import anyio
from attrs import evolve

from pipeline.protocols import PreprocessedRequest

from .conformance_answer import Trial, long_max_tokens, mock_context
from .conformance_checks import (
    AFTERWARDS,
    CONCURRENT,
    CONCURRENTLY,
    check_alone,
    check_bad,
    check_concurrent,
    check_kv_event_sources,
    check_model,
    check_setup_metrics,
    clean_up,
    drain,
    start,
)
from .conformance_endings import check_close, check_kill, check_neighbours, check_stop_before, check_stop_between
from .conformance_failure import MEANINGS, ConformanceFailure, failed
from .generate_context import GenerateContext
from .llm import EngineConfig, LLMEngine

__all__ = ["MEANINGS", "ConformanceFailure", "cancelling_context", "mock_context", "run_conformance"]

T = TypeVar("T")

Found = dict[str, ConformanceFailure]
EngineFactory = Callable[[], LLMEngine | Awaitable[LLMEngine]]


async def run_conformance(
    factory: EngineFactory,
    *,
    request: PreprocessedRequest | None = None,
    bad_request: PreprocessedRequest | None = None,
    deadline_s: float = 2.0,
    within_s: float = 300.0,
    at_once_s: float = 0.5,
) -> None:
    """Checks `LLMEngine`'s contract; raises an ExceptionGroup of ConformanceFailures, each name once.

    `factory` makes an engine, now or as a coroutine. One is started, asked and cleaned up twice; a second one is only
    cleaned up. `request` is what it is asked (None: the prompt 1, 2, 3 and no limits); it is also sent with a limit of
    10,000 tokens, or what its context holds, and disturbed. `bad_request` is one it cannot serve; without, L5 is not
    checked. `deadline_s` bounds closing and the rest of a stream behind a stop or a kill, `at_once_s` the rest behind a
    kill that the engine promises to hear, `within_s` every other step, a start included. Works in real and in virtual
    time. What the factory raises goes on.
    """
    found: Found = {}
    engine = await _made(factory)
    async with anyio.create_task_group() as tasks:
        try:
            if (config := await _note(found, start(engine, within_s))) is not None:
                with anyio.CancelScope() as checks:
                    tasks.start_soon(_run_background, engine, found, checks)
                    asked = request or PreprocessedRequest([1, 2, 3], model=config.model)
                    trial = Trial(engine, asked, long_max_tokens(config, asked), deadline_s, within_s, at_once_s)
                    await _check_started(config, trial, bad_request, found)
                if not checks.cancelled_caught:
                    await _note(found, drain(engine, within_s))
        finally:
            await _note(found, clean_up("CleanupFailed", engine, within_s))
        if "CleanupFailed" not in found:
            await _note(found, clean_up("SecondCleanupFailed", engine, within_s))
        tasks.cancel_scope.cancel()
    await _note(found, clean_up("CleanupWithoutStartFailed", await _made(factory), within_s))
    if found:
        text = f"{type(engine).__name__} fails {len(found)} checks of the engine contract"
        raise ExceptionGroup(text, list(found.values()))


async def _run_background(engine: LLMEngine, found: Found, checks: anyio.CancelScope) -> None:
    """As a host does; an engine whose background fails is asked nothing more."""
    try:
        await engine.background()
    except Exception as error:
        failure = failed("BackgroundFailed", repr(error), cause=error)
        found[failure.name] = failure
        checks.cancel()


async def _check_started(
    config: EngineConfig, trial: Trial, bad_request: PreprocessedRequest | None, found: Found
) -> None:
    await _note(found, check_model(config))
    await _note(found, check_kv_event_sources(trial.engine, trial.within_s))
    await _note(found, check_setup_metrics(trial.engine, trial.within_s))
    if bad_request is not None:
        await _note(found, check_bad(evolve(trial, request=bad_request)))
    await _check_answers(trial, found)


async def _check_answers(trial: Trial, found: Found) -> None:
    alone = await _failure_of(check_alone(trial))
    if alone is not None:
        found[alone.name] = alone
        if alone.name == "GenerateFailed":
            return  # each further check would only say so again, and where it hangs take as long again
    so_far = len(found)
    await _note(found, check_concurrent(trial, alone))
    closes = 1 if CONCURRENTLY in found else CONCURRENT
    await _note(found, _disturbed(check_stop_before(trial)))
    await _note(found, _disturbed(check_stop_between(trial)))
    await _note(found, _disturbed(check_close(trial, closes)))
    if "CloseFailed" not in found:  # what is killed is closed, too
        await _note(found, _disturbed(check_kill(trial)))
    # What failed above would fail here again.
    if len(found) == so_far:
        await _note(found, check_concurrent(trial, alone, name=AFTERWARDS))
    if len(found) == so_far:
        await _note(found, check_neighbours(trial, alone))


async def _disturbed(check: Awaitable[None]) -> None:
    """The check; a request that got no answer in time had one when it was alone, so others still hold what it needs."""
    try:
        await check
    except ConformanceFailure as failure:
        if failure.name == "GenerateFailed" and failure.after_s is not None:
            raise failed(AFTERWARDS, str(failure), cause=failure) from failure
        raise


async def _failure_of(check: Awaitable[None]) -> ConformanceFailure | None:
    found: Found = {}
    await _note(found, check)
    return next(iter(found.values()), None)


async def _note(found: Found, check: Awaitable[T]) -> T | None:
    """What the check gives; its failure is noted instead, unless there is one of that name."""
    try:
        return await check
    except ConformanceFailure as failure:
        found.setdefault(failure.name, failure)
        return None


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
