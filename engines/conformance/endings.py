"""The checks of the conformance kit on answers that are killed or closed, and on requests beside them."""

from __future__ import annotations

from functools import partial

from anyio.lowlevel import checkpoint

from ..llm import GenerateContext
from .answer import Answer, Trial
from .calls import Call, run_beside
from .checks import CONCURRENT, check_concurrent, gathered
from .failure import CONCURRENTLY, ConformanceFailure, failed
from .known import Known

TURNS = (0, 1, 5)
"""Turns of the loop that a reader is given before a kill: not begun, just begun, and waiting for the engine."""


async def check_kill(trial: Trial) -> None:
    """Kills at several turns of the loop, and several requests at a time. Raises KillNotHeard."""

    async def kill(turns: int, *, is_begun: bool = True) -> None:
        async with trial.answer(long=True) as (answer, context):
            if is_begun:
                await answer.begin(trial.within_s)
            await _expect_end_after_kill(trial, answer, context, turns)

    for is_begun in (False, True):
        for turns in TURNS:
            await kill(turns, is_begun=is_begun)
    for failure in await gathered([partial(kill, 1)] * CONCURRENT):
        raise failure


async def _expect_end_after_kill(trial: Trial, answer: Answer, context: GenerateContext, turns: int) -> None:
    """Kills while a reader is inside the stream; one chunk may still come out, which is not delivered."""
    within_s = trial.at_once_s if trial.engine.hears_kill else trial.deadline_s
    is_going_on = False

    async def read_on() -> None:
        nonlocal is_going_on
        after_kill = 0
        try:
            while await answer.advance():
                after_kill += context.is_killed
                if after_kill == 2:
                    is_going_on = True
                    return
                await checkpoint()
        except ConformanceFailure:
            pass  # that, too, is an end; the other checks report it

    call, is_ended = Call(read_on), False

    async def kill() -> None:
        nonlocal is_ended
        for _ in range(turns):
            await checkpoint()
        context.kill()
        await call.waited_for("the end after a kill", within_s)
        is_ended = call.is_over and not is_going_on

    await run_beside(call, kill)
    if not is_ended:
        raise failed("KillNotHeard", f"it still ran {within_s:g} s later, or went on to yield chunks")


async def check_cancelled_reader(trial: Trial) -> None:
    """Cancels tasks that read, at several turns of the loop and several at a time. Raises CancellationSwallowed."""

    async def cancel(turns: int) -> None:
        async with trial.answer(long=True) as (answer, _):

            async def read_on() -> None:
                while await answer.advance():
                    await checkpoint()

            async def wait() -> None:
                for _ in range(turns):
                    await checkpoint()

            call = Call(read_on)
            await run_beside(call, wait)
            if call.is_dropped:
                raise failed("CancellationSwallowed", "it went on whenever it was cancelled")

    for turns in TURNS:
        await cancel(turns)
    for failure in await gathered([partial(cancel, TURNS[-1])] * CONCURRENT):
        raise failure


async def check_close(trial: Trial, requests: int = CONCURRENT) -> None:
    """Closes behind the first chunk, so many at a time. Raises CloseFailed."""

    async def close() -> None:
        async with trial.answer(long=True) as (answer, _):
            await answer.begin(trial.within_s)

    for failure in await gathered([close] * requests):
        raise failure


async def check_neighbours(trial: Trial, known: Known, alone: ConformanceFailure | None) -> None:
    """Requests beside one that is stopped and one that is killed. Raises what concurrent requests may raise."""

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
        await check_concurrent(trial, known, alone, requests=2)

    disturbed_or_not = await gathered([neighbour, stop, kill])
    for failure in disturbed_or_not:
        if failure.name in (CONCURRENTLY, "StreamsShareState"):
            raise failure
