"""Checks of answers that end early: stopped, killed, closed or cancelled, and of the requests beside them.

Source: dynamo lib/backend-common/src/testing.rs. Other than there the deadline after a stop covers the whole rest of
the stream, stops also come in the middle of one, with `abort` as a host calls it, and the tokens are checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from pipeline.protocols import FinishReason, LLMEngineOutput

from ..llm import GenerateContext, LLMEngine
from .answer_checks import CONCURRENT, check_concurrent, gathered
from .answers import Answer, Trial
from .bounded_calls import Call, bounded, run_beside
from .failures import CONCURRENTLY, ConformanceFailure, failed

_TURNS = 5
"""Turns of the loop in which a reader comes to wait for the engine."""


def is_cancelled(chunk: LLMEngineOutput) -> bool:
    """Return whether the chunk has finish reason cancelled."""
    return chunk.finish_reason == FinishReason.CANCELLED


def overrides_abort(engine: LLMEngine) -> bool:
    return type(engine).abort is not LLMEngine.abort


@frozen
class Stopped:
    """How far an answer had come when it was stopped."""

    chunks: int
    generated: list[list[int]]

    @classmethod
    def now(cls, answer: Answer, context: GenerateContext) -> Stopped:
        """Stop the request."""
        context.stop()
        return cls(len(answer.chunks), [list(tokens) for tokens in answer.generated])

    def more(self, answer: Answer) -> list[list[int]]:
        """The tokens of each choice since then."""
        return [now[len(then) :] for then, now in zip(self.generated, answer.generated, strict=True)]


async def check_stop_before(trial: Trial) -> None:
    """A stop before the first read. Raises CancellationNotObserved and CancellationIgnored."""
    async with trial.answer(long=True) as (answer, context):
        stopped = Stopped.now(answer, context)
        # There is nothing to abort yet, and a host only logs what this raises.
        abort_early = partial(gathered, [partial(abort, trial, context)])
        await _all(lambda: answer.drain("CancellationNotObserved", trial.deadline_s), abort_early)
        if not is_cancelled(last := answer.expect_some()):
            raise failed("CancellationIgnored", f"the last chunk is {last!r}")
        _expect_counted(answer, stopped, trial)


async def check_stop_between(trial: Trial) -> None:
    """A stop behind the first chunk. Raises the same, TokenRepeatedAfterStop, AbortFailed and AbortIgnored."""

    async with trial.answer(long=True, is_begun=True) as (answer, context):
        stopped = Stopped.now(answer, context)
        observed = not_observed(trial)
        await _all(lambda: answer.drain(observed, trial.deadline_s), lambda: abort(trial, context))
        more = len(answer.chunks) - stopped.chunks
        if not _was_done(answer, trial, more) and not is_cancelled(last := answer.expect_some()):
            raise failed("CancellationIgnored", f"after {more} more chunks the last one is {last!r}")
        _expect_counted(answer, stopped, trial)


async def check_stop_in_wait(trial: Trial, behind: int, *, timed: bool) -> None:
    """A stop while a reader waits for the next chunk, from another task, `timed` in the middle of the usual wait.

    Raises StopInWaitIgnored, StopInWaitUnanswered, and what a stop between two chunks may raise.
    """
    async with trial.answer(long=True) as (answer, context):
        for _ in range(behind):
            if not await answer.begin(trial.within_s) or answer.is_complete:
                return
        stopped: Stopped | None = None
        wait_s = trial.gap_s / 2 if timed else 0.0

        async def stop() -> None:
            nonlocal stopped
            for _ in range(_TURNS):
                await checkpoint()
            await anyio.sleep(wait_s)
            if not answer.is_complete:
                stopped = Stopped.now(answer, context)
                await abort(trial, context)

        await _all(lambda: answer.drain(not_observed(trial), wait_s + trial.deadline_s), stop)
        if stopped is not None:
            _expect_answered(answer, stopped, trial)


def _expect_answered(answer: Answer, stopped: Stopped, trial: Trial) -> None:
    more = len(answer.chunks) - stopped.chunks
    if not more:
        raise failed("StopInWaitUnanswered", f"it just ended behind {stopped.chunks} chunks")
    # One chunk may have been ready when the stop came.
    last = answer.chunks[-1]
    if not is_cancelled(last) and not _was_done(answer, trial, more - answer.choices):
        name = "StopInWaitUnanswered" if last.finish_reason is None else "StopInWaitIgnored"
        raise failed(name, f"after {more} more chunks the last one is {last!r}")
    _expect_counted(answer, stopped, trial)


async def abort(trial: Trial, context: GenerateContext) -> None:
    """Calls `abort` as a host does. Raises AbortFailed."""
    await bounded("AbortFailed", "abort", lambda: trial.engine.abort(context), trial.deadline_s)


def not_observed(trial: Trial) -> str:
    """The failure of an engine that goes on behind a stop and its `abort`."""
    return "AbortIgnored" if overrides_abort(trial.engine) else "CancellationNotObserved"


async def _all(*acts: Callable[[], Awaitable[object]]) -> None:
    """Do all of it at the same time. Raises the first failure."""
    for failure in await gathered(acts):
        raise failure


def _was_done(answer: Answer, trial: Trial, more: int) -> bool:
    """Whether the engine had nothing left to do when the stop came but to end each choice."""
    if not answer.is_complete or more > answer.choices:
        return False
    if trial.is_steady:
        return answer.tokens >= sum(map(len, trial.plain.tokens))
    return FinishReason.LENGTH not in answer.reasons


def _expect_counted(answer: Answer, stopped: Stopped, trial: Trial) -> None:
    """Raises StopUsageMismatch, and TokenRepeatedAfterStop where the engine's answers are known."""
    begins, more = trial.begins, stopped.more(answer)
    if begins is not None and not begins.continues(answer.generated):
        name = "TokenRepeatedAfterStop" if begins.continues(stopped.generated) else "TokensLeftOver"
        raise failed(name, f"the answer is {answer.generated}, and begins with {begins.tokens} when it is not stopped")
    if begins is None and any(
        _is_repeated(then, now, trial) for then, now in zip(stopped.generated, more, strict=True)
    ):
        raise failed("TokenRepeatedAfterStop", f"behind {stopped.generated} came {more}")
    answer.expect_counted("StopUsageMismatch")


def _is_repeated(generated: list[int], more: list[int], trial: Trial) -> bool:
    """Whether the tokens are the last ones again, of an engine that never generates a token twice in a row."""
    plain = trial.plain
    if not more or generated[-len(more) :] != more:
        return False
    return plain.length > 1 and all(one != two for tokens in plain.tokens for one, two in pairwise(tokens))


TURNS = (0, 1, 5)
"""Turns of the loop that a reader is given before a kill: not begun, just begun, and waiting for the engine."""


async def check_kill(trial: Trial) -> None:
    """Kills at several turns of the loop, and several requests at a time. Raises KillIgnored."""

    async def kill(turns: int, *, is_begun: bool = True) -> None:
        async with trial.answer(long=True, is_begun=is_begun) as (answer, context):
            await _expect_end_after_kill(trial, answer, context, turns)

    for is_begun in (False, True):
        for turns in TURNS:
            await kill(turns, is_begun=is_begun)
    await _all(*[partial(kill, 1)] * CONCURRENT)


async def _expect_end_after_kill(trial: Trial, answer: Answer, context: GenerateContext, turns: int) -> None:
    """Kills while a reader is inside the stream; one chunk may still come out, which is not delivered."""
    within_s = trial.at_once_s if trial.engine.ends_on_kill else trial.deadline_s
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
        raise failed("KillIgnored", f"it still ran {within_s:g} s later, or went on to yield chunks")


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
    await _all(*[partial(cancel, TURNS[-1])] * CONCURRENT)


async def check_close(trial: Trial, requests: int = CONCURRENT) -> None:
    """Closes behind the first chunk, so many at a time. Raises CloseFailed."""

    async def close() -> None:
        async with trial.answer(long=True, is_begun=True):
            pass

    await _all(*[close] * requests)


async def check_neighbours(trial: Trial) -> None:
    """Requests beside one that is stopped and one that is killed. Raises what concurrent requests may raise."""

    async def stop() -> None:
        async with trial.answer(long=True, is_begun=True) as (answer, context):
            context.stop()
            await answer.drain("CancellationNotObserved", trial.deadline_s)

    async def kill() -> None:
        async with trial.answer(long=True, is_begun=True) as (_, context):
            context.kill()

    async def neighbour() -> None:
        await check_concurrent(trial, requests=2)

    disturbed_or_not = await gathered([neighbour, stop, kill])
    for failure in disturbed_or_not:
        if failure.name in (CONCURRENTLY, "StreamsShareState"):
            raise failure
