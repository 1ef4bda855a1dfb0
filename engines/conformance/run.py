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
from attrs import evolve, frozen

from pipeline.protocols import PreprocessedRequest

from ..llm import EngineConfig, GenerateContext, LLMEngine
from . import answer_checks, engine_checks, stop_checks
from .answers import Baseline, Trial, mock_context
from .bounded_calls import Call, Watchdog, watchdog
from .failures import AFTERWARDS, ConformanceFailure, FailureLog
from .inspection import CANCEL_SCOPE, LOCK, TASK_GROUP, Running, Turns, watch_turns

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
            trial = Trial(engine, sent, config, deadline_s, within_s, at_once_s, turns, before.threads)
            await check_started(trial, found, bad_request, varies=request is None)

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


async def check_started(
    trial: Trial, found: FailureLog, bad_request: PreprocessedRequest | None, *, varies: bool
) -> None:
    """Check a started engine. With `varies` it also gets other prompts than that of the trial."""
    await found.note_each(
        partial(engine_checks.check_model, trial.config),
        partial(engine_checks.check_kv_event_sources, trial.engine, trial.within_s),
        partial(engine_checks.check_setup_metrics, trial.engine, trial.within_s),
    )
    if bad_request is not None:
        await found.note(answer_checks.check_bad(trial, bad_request))
    rest = await engine_checks.Rest.of(trial)
    trial.turns.clear()
    known, alone = await _alone(trial, found)
    if not found.failures.keys().isdisjoint(_LAST):
        return
    course = _Course(found, known, alone, rest)
    if alone is None:
        trial = await course.again(trial, varies=varies)
    together = "TokensLeftOver" not in found and await found.note_each(  # they would be in these, too
        partial(answer_checks.check_concurrent, trial, known, alone),
        partial(answer_checks.check_paused_reader, trial, alone),
    )
    if alone is None:
        trial = await course.limit(trial)
    await found.note_each(partial(engine_checks.check_loop_since, trial))
    await course.disturb(trial, together=together)
    if found.failures.keys() <= _OF_THE_CONFIG:
        for failure in await engine_checks.check_hosted(
            trial, known, None if "BadRequestServed" in found else bad_request
        ):
            found.add(failure)
    await found.note_each(partial(engine_checks.check_loop_since, trial))


async def _alone(trial: Trial, found: FailureLog) -> tuple[Baseline, ConformanceFailure | None]:
    """One request; returns what is known then, and what it failed with."""
    try:
        known, alone = await answer_checks.check_alone(trial), None
    except ConformanceFailure as failure:
        known, alone = Baseline(), failure
        found.add(failure)
    if alone is None or alone.name not in _LAST:
        await found.note_each(partial(engine_checks.check_loop, trial, known.natural.length or 1), but=alone)
    return known, alone


@frozen
class _Course:
    """What is behind the first request, which failed with `alone` or not. The engine was at rest before."""

    found: FailureLog
    known: Baseline
    alone: ConformanceFailure | None
    rest: engine_checks.Rest

    async def again(self, trial: Trial, *, varies: bool) -> Trial:
        """Check the same and other requests, one at a time; return the trial for the checks that follow."""
        trial = await self.found.note(answer_checks.shortened(trial, self.known)) or trial
        await self.found.note_each(partial(answer_checks.check_same, trial, self.known))
        await answer_checks.learn_others(trial, self.known, varies=varies)
        await self.found.note_each(
            partial(answer_checks.check_nothing_left_over, trial, self.known, "behind a short one")
        )
        return trial

    async def limit(self, trial: Trial) -> Trial:
        """Check requests with limits; return the trial for the checks that follow."""
        found, known = self.found, self.known
        await found.note_each(
            partial(answer_checks.check_max_tokens, trial, known),
            partial(answer_checks.check_nothing_left_over, trial, known, "behind a limited one"),
        )
        if "TokensLeftOver" in found:
            return trial  # they would be in all that follow
        await found.note_each(
            partial(answer_checks.check_min_tokens, trial, known),
            partial(answer_checks.check_ignore_eos, trial, known),
            partial(answer_checks.check_choices, trial, known),
            partial(answer_checks.check_nothing_left_over, trial, known, "behind others with limits"),
        )
        trial = evolve(trial, goes_on=known.goes_on)
        await found.note_each(partial(answer_checks.learn_beginning, trial, known))
        return trial

    async def disturb(self, trial: Trial, *, together: bool) -> None:
        """Requests that are closed, stopped or killed, and others behind and beside them."""
        found, known, alone = self.found, self.known, self.alone
        left_by_close = partial(engine_checks.check_left_by_close, trial, self.rest, known.gap_s)
        left_by_stop = partial(engine_checks.check_left_by_stop, trial, self.rest, known.gap_s)
        leaves_nothing = await found.note_behind(left_by_close)
        went_well = await self._stop(trial) and leaves_nothing
        await found.note_each(partial(engine_checks.check_loop_since, trial))
        went_well &= await found.note_behind(
            partial(self._nothing_left_over, trial, "behind stopped ones"),
            partial(stop_checks.check_close, trial, answer_checks.CONCURRENT if together else 1),
            partial(engine_checks.check_loop_since, trial),
        )
        if "CloseFailed" not in found:  # what is killed is closed, too
            went_well &= await found.note_behind(
                partial(self._nothing_left_over, trial, "behind closed ones"),
                partial(stop_checks.check_kill, trial),
                partial(self._nothing_left_over, trial, "behind killed ones"),
                partial(stop_checks.check_cancelled_reader, trial),
                *([left_by_stop] if leaves_nothing else []),
            )
        if (
            went_well
            and together
            and await found.note_each(partial(answer_checks.check_concurrent, trial, known, alone, name=AFTERWARDS))
        ):
            await found.note_each(partial(stop_checks.check_neighbours, trial, known, alone))

    async def _nothing_left_over(self, trial: Trial, after: str) -> None:
        if self.alone is None:  # else the request fails behind others, too
            await answer_checks.check_nothing_left_over(trial, self.known, after)

    async def _stop(self, trial: Trial) -> bool:
        """Whether stops at all moments go well. What fails without a wait is not tried in one."""
        return await self.found.note_behind(
            partial(stop_checks.check_stop_before, trial, self.known),
            partial(stop_checks.check_stop_between, trial, self.known),
            but=self.alone,
        ) and await self.found.note_behind(
            *(
                partial(stop_checks.check_stop_in_wait, trial, self.known, behind, timed=timed)
                for behind, timed in _WAITS
            ),
            but=self.alone,
        )
