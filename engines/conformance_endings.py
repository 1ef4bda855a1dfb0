"""The checks of the conformance kit on answers that are stopped, killed or closed, and on requests beside them.

Source: dynamo lib/backend-common/src/testing.rs. Other than there the deadline after a stop covers the whole rest of
the stream, a stop is also tried in the middle of one, with `abort` as a host calls it, and kill and close are checked.
"""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

from pipeline.protocols import FinishReason, LLMEngineOutput

from .conformance_answer import Answer, Trial, bounded
from .conformance_checks import CONCURRENT, CONCURRENTLY, check_concurrent, gathered
from .conformance_failure import ConformanceFailure, failed
from .generate_context import GenerateContext

TURNS = (0, 1, 5)
"""Turns of the loop that a reader is given before a kill: not begun, just begun, and waiting for the engine."""


async def check_stop_before(trial: Trial) -> None:
    """A stop before the first read. Raises CancellationNotObserved and CancellationIgnored."""
    async with trial.answer(long=True) as (answer, context):
        context.stop_generating()
        await answer.drain("CancellationNotObserved", trial.deadline_s)
        if not is_cancelled(last := answer.expect_some()):
            raise failed("CancellationIgnored", f"the last chunk is {last!r}")
        answer.expect_counted()


async def check_stop_between(trial: Trial) -> None:
    """A stop behind the first chunk, of which `abort` tells the engine, too. Raises the same, and AbortFailed."""

    async def abort() -> None:
        await bounded("AbortFailed", "abort", lambda: trial.engine.abort(context), trial.deadline_s)

    async def go_on() -> None:
        more = await answer.drain("CancellationNotObserved", trial.deadline_s)
        # An engine that was done when the stop came may say so with the chunks that were left, one for each choice.
        was_done = answer.is_complete and more <= answer.choices
        if not was_done and not is_cancelled(last := answer.expect_some()):
            raise failed("CancellationIgnored", f"after {more} more chunks the last one is {last!r}")
        answer.expect_counted()

    async with trial.answer(long=True) as (answer, context):
        await answer.begin(trial.within_s)
        context.stop_generating()
        for failure in await gathered([go_on, abort]):
            raise failure


def is_cancelled(chunk: LLMEngineOutput) -> bool:
    """Whether the chunk says that its request was given up."""
    return chunk.finish_reason == FinishReason.CANCELLED


async def check_kill(trial: Trial) -> None:
    """Kills at several turns of the loop. Raises KillNotHeard."""
    for is_begun in (False, True):
        for turns in TURNS:
            async with trial.answer(long=True) as (answer, context):
                if is_begun:
                    await answer.begin(trial.within_s)
                await _expect_end_after_kill(trial, answer, context, turns)


async def _expect_end_after_kill(trial: Trial, answer: Answer, context: GenerateContext, turns: int) -> None:
    """Kills while a reader is inside the stream; one chunk may still come out, which nobody delivers."""
    within_s = trial.at_once_s if trial.engine.hears_kill else trial.deadline_s
    ended, is_heard = anyio.Event(), False

    async def read_on() -> None:
        after_kill = 0
        try:
            while after_kill < 2:
                if not await answer.advance():
                    break
                after_kill += context.is_killed
                await checkpoint()
            else:
                return
        except ConformanceFailure:
            pass  # that, too, is an end; the other checks report it
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_on)
        for _ in range(turns):
            await checkpoint()
        context.kill()
        with anyio.move_on_after(within_s):
            await ended.wait()
        is_heard = ended.is_set()
        tasks.cancel_scope.cancel()
    if not is_heard:
        raise failed("KillNotHeard", f"it still ran {within_s:g} s later, or went on to yield chunks")


async def check_close(trial: Trial, requests: int = CONCURRENT) -> None:
    """Closes behind the first chunk, so many at a time. Raises CloseFailed."""

    async def close() -> None:
        async with trial.answer(long=True) as (answer, _):
            await answer.begin(trial.within_s)

    for failure in await gathered([close] * requests):
        raise failure


async def check_neighbours(trial: Trial, alone: ConformanceFailure | None) -> None:
    """Requests beside one that is stopped and one that is killed. Raises ConcurrentGenerateFailed."""

    async def stop() -> None:
        async with trial.answer(long=True) as (answer, context):
            await answer.begin(trial.within_s)
            context.stop_generating()
            await answer.drain("CancellationNotObserved", trial.deadline_s)

    async def kill() -> None:
        async with trial.answer(long=True) as (answer, context):
            await answer.begin(trial.within_s)
            context.kill()

    async def neighbour() -> None:
        await check_concurrent(trial, alone, requests=2)

    disturbed_or_not = await gathered([neighbour, stop, kill])
    for failure in disturbed_or_not:
        if failure.name == CONCURRENTLY:
            raise failure
