"""ConformanceFailure: which check of the conformance kit an engine failed, with what figures; and all of one run.

Source: dynamo lib/backend-common/src/testing.rs, ConformanceFailure.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from attrs import define, field

from pipeline import ContractViolation

T = TypeVar("T")

CONCURRENTLY, AFTERWARDS = "ConcurrentGenerateFailed", "NotServedAfterwards"

MEANINGS: dict[str, tuple[str, str]] = {
    # its life
    "StartFailed": ("", "`start` raised, hung, or gave no EngineConfig"),
    "EmptyModelInConfig": ("", "the config of `start` names no model"),
    "BackgroundFailed": ("", "`background` raised, after which a host gives the engine up"),
    "KvEventSourcesFailed": ("", "`kv_event_sources` raised, hung, or named a rank twice"),
    "KvEventSourcesNotIdempotent": (
        "",
        "`kv_event_sources` named other ranks, or in another order, at the second call",
    ),
    "SetupMetricsFailed": ("", "`setup_metrics` raised, hung, or named a rank twice"),
    "ComponentMetricsNotIdempotent": ("", "`setup_metrics` named other ranks, or in another order, at the second call"),
    "DrainFailed": ("", "`drain` raised or hung"),
    "CleanupFailed": ("", "`cleanup` raised or hung"),
    "SecondCleanupFailed": ("L7", "`cleanup` raised or hung when called again"),
    "CleanupWithoutStartFailed": ("L7", "`cleanup` raised or hung on an engine that was never started"),
    "TasksLeftByCleanup": ("L7", "tasks of the engine still run after its `cleanup`"),
    "ThreadsLeftByCleanup": ("L7", "threads of the engine still live after its `cleanup`"),
    # one answer
    "GenerateFailed": ("", "`generate` raised, hung, or gave no async iterator that ends"),
    "NoChunksYielded": ("L1", "the stream ended without any chunk"),
    "StreamYieldedError": ("", "the stream raised, or its last chunk has finish reason error or cancelled"),
    "NotAChunk": ("L1", "the stream yielded an object that is not an LLMEngineOutput, or cannot be sent as one"),
    "ChunkAfterTerminal": ("L1", "a chunk followed the terminal one"),
    "NoTerminalChunk": ("L1", "the stream ended without its terminal chunk"),
    "CompletionTokensMismatch": ("L4", "the usage of the last chunk does not count the tokens of the stream"),
    "PromptTokensMismatch": ("L4", "a usage does not count the tokens of the prompt, or its sum is wrong"),
    "RequestChanged": ("L10", "the request was changed while it was answered"),
    "ChunkChanged": ("L10", "a chunk was changed after it had been yielded"),
    "LoopBlocked": ("L11", "the loop stood still while a request was answered"),
    "LockHeldOverYield": ("L12", "a lock is held over a `yield`"),
    "CancelScopeHeldOverYield": ("L12", "a cancel scope or deadline is open over a `yield`"),
    "TaskGroupHeldOverYield": ("L12", "a task group is open over a `yield`"),
    # limits and choices
    "MaxTokensIgnored": ("L9", "an answer has not the tokens that `max_tokens` leaves it"),
    "LimitNotNamed": ("L9", "an answer that `max_tokens` cut ended with another finish reason than length"),
    "LimitUsageMismatch": ("L4", "at `max_tokens` the usage does not count the tokens of the stream"),
    "MinTokensIgnored": ("L9", "an answer ended by itself before `min_tokens`"),
    "IgnoreEosIgnored": ("L9", "with `ignore_eos` an answer ended before `max_tokens`"),
    "ChoicesIgnored": ("L9", "the answer lacks some of the `n` choices"),
    "BadRequestServed": ("L5", "a request that cannot be served did not raise InvalidArgument before its first chunk"),
    # several requests
    "ConcurrentGenerateFailed": ("L6", "a request that was served alone was not among others"),
    "StreamsShareState": ("L6", "a request got another answer among others than alone"),
    "HeldUpByPausedReader": ("L6", "a request waited for another one whose reader paused"),
    "TokensLeftOver": ("L8", "a request got tokens that belong to one before it, or not all of its own"),
    "OfferedTokensMismatch": ("L8", "an answer has other tokens where those that the engine offers are taken"),
    "OfferedUsageMismatch": ("L4", "the usage does not count tokens that were taken as they were offered"),
    # stop, kill and close
    "CancellationNotObserved": ("L2", "the stream did not end in time after a stop"),
    "CancellationIgnored": ("L2", "the stream ended after a stop with something else than a cancelled chunk"),
    "StopInWaitIgnored": ("L2", "the stream ended after a stop during a wait, but not with a cancelled chunk"),
    "StopInWaitUnanswered": ("L2", "the stream ended after a stop during a wait without any terminal chunk"),
    "StopUsageMismatch": ("L4", "after a stop the usage does not count the tokens of the stream"),
    "TokenRepeatedAfterStop": ("L8", "after a stop came tokens that do not continue the answer"),
    "AbortFailed": ("", "`abort` raised or hung"),
    "AbortIgnored": ("L2", "the engine went on with a request after its `abort`"),
    "KillIgnored": ("", "the stream did not end at once after a kill, by itself if `ends_on_kill` promises that"),
    "CancellationSwallowed": ("L3", "the stream went on although the task that reads it was cancelled"),
    "CloseFailed": ("L3", "closing the stream raised or hung"),
    "TasksLeftByStream": ("L3", "tasks of a request still run after its stream was closed"),
    "ThreadsLeftByStream": ("L3", "threads of a request still run after its stream was closed"),
    "WorkLeftByStream": ("L3", "the engine still works on a request after its stream was closed"),
    "NotServedAfterwards": ("L3", "a request was not served after others had been stopped, killed or closed"),
    # as an AsyncEngine
    **{f"E{n}": (f"E{n}", "as an AsyncEngine it breaks a rule of that contract") for n in range(1, 14)},
}
"""Name of each failure -> the rule of `LLMEngine` it breaks, where it has a number, and what it means.

Those of the source are `StartFailed` to `ComponentMetricsNotIdempotent` but for `BackgroundFailed`, the three of
`cleanup` that failed, `GenerateFailed` to `CompletionTokensMismatch` but for `NotAChunk`, `ConcurrentGenerateFailed`,
`CancellationNotObserved` and `CancellationIgnored`.
"""


class ConformanceFailure(ContractViolation):
    """One failed check; see `failed`, which makes one."""

    name = ""
    """A key of `MEANINGS`."""
    counted_tokens: int | None = None
    """Tokens of the stream, where they differ from the reported ones."""
    reported_tokens: int | None = None
    """Tokens of the usage, likewise."""
    after_s: float | None = None
    """Set where the engine took longer than that."""
    is_refusal = False
    """Whether the engine refused the request as one that it cannot serve."""


def failed(
    name: str, detail: str = "", *, cause: BaseException | None = None, after_s: float | None = None
) -> ConformanceFailure:
    """The failure of that name, with its meaning as message."""
    rule, meaning = MEANINGS[name]
    message = f"{name}: {meaning}" + (f" ({detail})" if detail else "")
    failure = ConformanceFailure(message, rule=rule, cause=cause)
    failure.name, failure.after_s = name, after_s
    return failure


def not_served(after: str, failure: ConformanceFailure) -> ConformanceFailure:
    """The failure of a request behind others, though alone it had been served."""
    return failed(AFTERWARDS, f"{after}: {failure}", cause=failure, after_s=failure.after_s)


@define
class FailureLog:
    """The failures of one run, each name once. `within_s` is how long a step that is not disturbed may take."""

    within_s: float
    failures: dict[str, ConformanceFailure] = field(factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.failures

    @property
    def is_out_of_time(self) -> bool:
        """Whether some step that was not disturbed took as long as any may, or the loop is blocked again and again."""
        took = (failure.after_s or 0.0 for failure in self.failures.values())
        return "LoopBlocked" in self or any(after_s >= self.within_s for after_s in took)

    def add(self, failure: ConformanceFailure) -> None:
        self.failures.setdefault(failure.name, failure)

    async def note(self, check: Awaitable[T]) -> T | None:
        """Return the result of the check; None if it fails."""
        try:
            return await check
        except ConformanceFailure as failure:
            self.add(failure)
            return None
