"""run_conformance: check an LLMEngine against its contract with one call.

    async def test_my_engine_holds_the_contract() -> None:
        await run_conformance(MyEngine)

The checks come in this order; what would only fail again for a reason that was found is left out:

    alone ──► the same again ──► at the same time ──► with limits ──► closed, stopped, killed ──► hosted

Source: dynamo lib/backend-common/src/testing.rs, run_conformance. Other than there all failures are reported, not only
the first one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from inspect import isawaitable

import anyio

from pipeline.protocols import PreprocessedRequest

from ..llm import EngineConfig, GenerateContext, LLMEngine
from . import answer_checks, engine_checks, offer_checks, stop_checks
from .answers import Check, Trial
from .bounded_calls import Call, Watchdog, watchdog
from .contexts import mock_context
from .failures import AFTERWARDS, ConformanceFailure, FailureLog
from .inspection import CANCEL_SCOPE, LOCK, TASK_GROUP, Rest, Running, Turns, watch_turns

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

    `factory` makes an engine, now or as a coroutine. One is started, used and cleaned up twice; a second one is only
    cleaned up. `request` is sent to it (None: the prompt 1, 2, 3 without limits, and the same tokens in another order),
    also with limits, with two choices, and with a limit of 10,000 tokens or what its context holds, and disturbed.
    `bad_request` is one it cannot serve; without, L5 is not checked. `deadline_s` bounds closing and the rest of a
    stream behind a stop or a kill, `at_once_s` the rest behind a kill that the engine promises to end at, `within_s`
    every other step, a start included; a step that runs out of time is named. Works in real and in virtual time; an
    engine with threads of its own needs real time. What the factory raises goes to the caller.
    """
    with _watched() as turns:
        before, found = Running.now(), FailureLog(within_s)
        engine = await _made(factory)

        async def check(config: EngineConfig) -> None:
            sent = request or PreprocessedRequest([1, 2, 3], model=config.model)
            trial = Trial(engine, sent, config, found, deadline_s, within_s, at_once_s, turns, before.threads)
            await check_started(trial, bad_request, varies=request is None)

        await _live(engine, found, check)
        if "CleanupFailed" not in found:
            await found.note(engine_checks.check_left_by_cleanup(before, deadline_s))
        await found.note(engine_checks.clean_up("CleanupWithoutStartFailed", await _made(factory), within_s))
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


async def _live(engine: LLMEngine, found: FailureLog, check: Callable[[EngineConfig], Awaitable[None]]) -> None:
    """The engine's life, from its start, through the check, until it was cleaned up twice."""
    background = Call(engine.background)
    async with anyio.create_task_group() as tasks:
        try:
            if (config := await found.note(engine_checks.start(engine, found.within_s))) is not None:
                with anyio.CancelScope() as checks:
                    tasks.start_soon(_watch, background, found, checks)
                    await check(config)
                if not checks.cancelled_caught:
                    await found.note(engine_checks.drain(engine, found.within_s))
        finally:
            await found.note(engine_checks.clean_up("CleanupFailed", engine, found.within_s))
            background.is_cancelled = True
        if "CleanupFailed" not in found:
            await found.note(engine_checks.clean_up("SecondCleanupFailed", engine, found.within_s))
        tasks.cancel_scope.cancel()


async def _watch(background: Call[None], found: FailureLog, checks: anyio.CancelScope) -> None:
    """Run the background as a host does; end the checks if it fails."""
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
        context.stop()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_later)
        try:
            yield context
        except Exception as error:  # not in the group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


_WAITS = ((0, True), (0, False), (1, True), (1, False), (2, True))
"""Behind how many chunks a wait is disturbed, and whether in its middle or at its beginning."""
_LAST = {"GenerateFailed", "LoopBlocked", LOCK, CANCEL_SCOPE, TASK_GROUP}
"""After these in the first answer the checks end: every further one would find them again, and take as long."""
_OF_THE_CONFIG = {
    *("EmptyModelInConfig", "KvEventSourcesFailed", "KvEventSourcesNotIdempotent", "BadRequestServed"),
    *("SetupMetricsFailed", "ComponentMetricsNotIdempotent"),
}
"""After these the rules of AsyncEngine are checked, too; what fails them otherwise has failed before."""


async def check_started(trial: Trial, bad_request: PreprocessedRequest | None, *, varies: bool) -> None:
    """Check a started engine. With `varies` it also gets other prompts than that of the trial."""
    found = trial.found
    await trial.passes(
        engine_checks.check_model, engine_checks.check_kv_event_sources, engine_checks.check_setup_metrics
    )
    if bad_request is not None:
        await found.note(answer_checks.check_bad(trial, bad_request))
    trial.rest = await Rest.now(trial.turns, trial.other_threads)
    trial.turns.clear()
    await _alone(trial)
    if not found.failures.keys().isdisjoint(_LAST):
        return
    if trial.alone is None:
        await _again(trial, varies=varies)
    together = "TokensLeftOver" not in found and await trial.passes(  # they would be in these, too
        answer_checks.check_concurrent, answer_checks.check_paused_reader
    )
    if trial.alone is None:
        await _limit(trial)
    await trial.passes(engine_checks.check_loop_since)
    await _disturb(trial, together=together)
    if found.failures.keys() <= _OF_THE_CONFIG:
        await engine_checks.check_hosted(trial, None if "BadRequestServed" in found else bad_request)
    await trial.passes(engine_checks.check_loop_since)


async def _alone(trial: Trial) -> None:
    """Check one request."""
    try:
        await answer_checks.check_alone(trial)
    except ConformanceFailure as failure:
        trial.alone = failure
        trial.found.add(failure)
    if trial.alone is None or trial.alone.name not in _LAST:
        await trial.passes(engine_checks.check_loop, but=trial.alone)


async def _again(trial: Trial, *, varies: bool) -> None:
    """Check the same and other requests, one at a time."""
    await trial.found.note(answer_checks.shorten(trial))
    await trial.passes(answer_checks.check_same, offer_checks.check_offers)
    await answer_checks.learn_others(trial, varies=varies)
    await trial.passes(_left_over("behind a short one"))


async def _limit(trial: Trial) -> None:
    """Check requests with limits."""
    await trial.passes(answer_checks.check_max_tokens, _left_over("behind a limited one"))
    if "TokensLeftOver" not in trial.found:  # they would be in all that follow
        await trial.passes(
            answer_checks.check_min_tokens,
            answer_checks.check_ignore_eos,
            answer_checks.check_choices,
            _left_over("behind others with limits"),
        )
        await trial.passes(answer_checks.learn_longest, answer_checks.learn_beginning)


def _left_over(after: str) -> Check:
    return partial(answer_checks.check_nothing_left_over, after=after)


async def _disturb(trial: Trial, *, together: bool) -> None:
    """Requests that are closed, stopped or killed, and others behind and beside them."""
    leaves_nothing = await trial.passes(engine_checks.check_left_by_close, is_behind=True)
    went_well = await _stop(trial) and leaves_nothing
    await trial.passes(engine_checks.check_loop_since)
    went_well &= await trial.passes(
        _left_over("behind stopped ones"),
        partial(stop_checks.check_close, requests=answer_checks.CONCURRENT if together else 1),
        engine_checks.check_loop_since,
        is_behind=True,
    )
    if "CloseFailed" not in trial.found:  # what is killed is closed, too
        went_well &= await trial.passes(
            _left_over("behind closed ones"),
            stop_checks.check_kill,
            _left_over("behind killed ones"),
            stop_checks.check_cancelled_reader,
            *([engine_checks.check_left_by_stop] if leaves_nothing else []),
            is_behind=True,
        )
    if went_well and together and await trial.passes(partial(answer_checks.check_concurrent, name=AFTERWARDS)):
        await trial.passes(stop_checks.check_neighbours)


async def _stop(trial: Trial) -> bool:
    """Whether stops at all moments go well. What fails without a wait is not tried in one."""
    in_waits = [partial(stop_checks.check_stop_in_wait, behind=behind, timed=timed) for behind, timed in _WAITS]
    return await trial.passes(
        stop_checks.check_stop_before, stop_checks.check_stop_between, but=trial.alone, is_behind=True
    ) and await trial.passes(*in_waits, but=trial.alone, is_behind=True)
