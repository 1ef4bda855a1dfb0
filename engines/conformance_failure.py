"""ConformanceFailure: which check of the conformance kit an engine failed, and with what figures.

Source: dynamo lib/backend-common/src/testing.rs, ConformanceFailure.
"""

from __future__ import annotations

from pipeline import ContractViolation

MEANINGS: dict[str, tuple[str, str]] = {
    "StartFailed": ("", "`start` raised, hung, or gave no EngineConfig"),
    "EmptyModelInConfig": ("", "the config of `start` names no model"),
    "BackgroundFailed": ("", "`background` raised, after which a host gives the engine up"),
    "KvEventSourcesFailed": ("", "`kv_event_sources` raised, hung, or named a rank twice"),
    "KvEventSourcesNotIdempotent": ("", "`kv_event_sources` named other ranks, or in another order, when asked again"),
    "SetupMetricsFailed": ("", "`setup_metrics` raised, hung, or named a rank twice"),
    "ComponentMetricsNotIdempotent": ("", "`setup_metrics` named other ranks, or in another order, when asked again"),
    "GenerateFailed": ("", "`generate` raised, hung, or gave no async iterator that ends"),
    "NoChunksYielded": ("L1", "the stream ended without any chunk"),
    "StreamYieldedError": ("", "the stream raised, or its last chunk says that it failed or was given up"),
    "NotAChunk": ("L1", "the stream yielded something that is no LLMEngineOutput, or cannot be sent as one"),
    "ChunkAfterTerminal": ("L1", "a chunk followed the terminal one"),
    "NoTerminalChunk": ("L1", "the stream ended without its terminal chunk"),
    "CompletionTokensMismatch": ("L4", "the usage of the last chunk does not count the tokens of the stream"),
    "ConcurrentGenerateFailed": ("L6", "a request that was served alone was not among others"),
    "BadRequestServed": ("L5", "a request that cannot be served did not raise InvalidArgument before its first chunk"),
    "CancellationNotObserved": ("L2", "the stream did not end in time after a stop"),
    "CancellationIgnored": ("L2", "the stream ended after a stop with something else than a cancelled chunk"),
    "AbortFailed": ("", "`abort` raised or hung"),
    "KillNotHeard": ("", "the stream did not end at once after a kill, by itself if `hears_kill` promises that"),
    "CloseFailed": ("L3", "closing the stream raised or hung"),
    "NotServedAfterwards": ("L3", "a request was not served after others had been stopped, killed or closed"),
    "DrainFailed": ("", "`drain` raised or hung"),
    "CleanupFailed": ("", "`cleanup` raised or hung"),
    "SecondCleanupFailed": ("L7", "`cleanup` raised or hung when called again"),
    "CleanupWithoutStartFailed": ("L7", "`cleanup` raised or hung on an engine that was never started"),
}
"""Name of each failure -> the rule of `LLMEngine` it breaks, where it has a number, and what it means.

Ours are `BackgroundFailed`, `NotAChunk`, `BadRequestServed`, `AbortFailed`, `KillNotHeard`, `CloseFailed`,
`NotServedAfterwards` and `DrainFailed`.
"""


class ConformanceFailure(ContractViolation):
    """One failed check; `name` is a key of `MEANINGS`.

    `counted_tokens` and `reported_tokens` are set where they differ, `after_s` where the engine took longer than that.
    """

    def __init__(
        self,
        message: str = "",
        *,
        name: str = "",
        rule: str = "",
        counted_tokens: int | None = None,
        reported_tokens: int | None = None,
        after_s: float | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, rule=rule, cause=cause)
        self.name = name
        self.counted_tokens = counted_tokens
        self.reported_tokens = reported_tokens
        self.after_s = after_s


def failed(name: str, detail: str = "", *, cause: BaseException | None = None) -> ConformanceFailure:
    """The failure of that name, with its meaning as message."""
    rule, meaning = MEANINGS[name]
    return ConformanceFailure(_message(name, meaning, detail), name=name, rule=rule, cause=cause)


def overdue(name: str, what: str, after_s: float) -> ConformanceFailure:
    """The failure of that name for something that took too long."""
    failure = failed(name, f"{what} took more than {after_s:g} s")
    failure.after_s = after_s
    return failure


def miscounted(counted_tokens: int, reported_tokens: int) -> ConformanceFailure:
    """The failure of a usage that disagrees with the stream."""
    failure = failed("CompletionTokensMismatch", f"{counted_tokens} came, {reported_tokens} are reported")
    failure.counted_tokens, failure.reported_tokens = counted_tokens, reported_tokens
    return failure


def _message(name: str, meaning: str, detail: str) -> str:
    return f"{name}: {meaning}" + (f" ({detail})" if detail else "")
