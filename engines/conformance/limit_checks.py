"""Checks of the limits and choices of requests (L9).

Without the model it is not known where an answer would end. So the engine first gets a request without limits, then
ones for fewer tokens than its answer has, and for more.
"""

from __future__ import annotations

from attrs import evolve

from pipeline.protocols import FinishReason, PreprocessedRequest

from .answers import Answer, Baseline, Outcome, Trial, limited
from .failures import ConformanceFailure, failed

_FEW = (1, 2)
"""Limits below what an answer has without one."""
_MORE = 3
"""Tokens beyond those that an answer has by itself."""
_MOST_OF_EACH = 4
"""Tokens of each of two choices."""
_FAR = 16
"""Tokens beyond an engine's own limit, to see whether an answer ends by itself there."""
MOST_TOKENS = 512
"""Requests for longer answers are not repeated."""


async def check_max_tokens(trial: Trial, known: Baseline) -> None:
    """Raises MaxTokensIgnored, LimitNotNamed and LimitUsageMismatch."""
    natural = known.natural.length
    for limit in (*_FEW, natural + _MORE):
        if not _may_ask(trial, known, limit):
            continue
        answer = await _limited(trial, known, max_tokens=limit)
        _expect_within(answer, known, limit, limit if known.is_steady and limit <= natural else 0)
        if known.is_steady and limit < natural and any(reason != FinishReason.LENGTH for reason in answer.reasons):
            raise failed("LimitNotNamed", f"of {natural} tokens max_tokens={limit} left {Outcome.of(answer)}")


async def _limited(trial: Trial, known: Baseline, **limits: int | bool | None) -> Answer:
    """The answer. Raises TokensLeftOver instead of a miscount where tokens came that are of something else."""
    async with trial.answer(limited(trial.request, **limits)) as (answer, _):
        await answer.drain("GenerateFailed", trial.within_s)
        try:
            answer.expect_whole("LimitUsageMismatch")
        except ConformanceFailure as failure:
            if failure.name == "LimitUsageMismatch" and known.is_steady and not known.continues(answer):
                raise failed("TokensLeftOver", f"{answer.generated}, of {known.plain}", cause=failure) from failure
            raise
    return answer


def _expect_within(answer: Answer, known: Baseline, limit: int, least: int = 0) -> None:
    own_limit = known.natural.length if known.natural.is_limited else limit
    for tokens, reason in zip(answer.generated, answer.reasons, strict=True):
        is_cut_early = reason == FinishReason.LENGTH and len(tokens) < min(limit, own_limit)
        if not least <= len(tokens) <= limit or is_cut_early:
            raise failed("MaxTokensIgnored", f"with max_tokens={limit} there are {len(tokens)} ({reason})")


async def check_min_tokens(trial: Trial, known: Baseline) -> None:
    """Answers that must not end where they would by themselves. Raises MinTokensIgnored."""
    if (tokens := await _beyond_the_end(trial, known)) is None:
        return
    for most in (tokens, None):
        answer = await _unless_refused(trial, known, min_tokens=tokens, max_tokens=most)
        # Without max_tokens a limit of the engine's own may come first.
        if answer is not None and not _has(answer, tokens, but_for_length=most is None):
            detail = f"with min_tokens={tokens} and max_tokens={most} there are {Outcome.of(answer)}"
            raise failed("MinTokensIgnored", detail)


async def check_ignore_eos(trial: Trial, known: Baseline) -> None:
    """Answers that must go on to their limit. Raises IgnoreEosIgnored."""
    tokens = await _beyond_the_end(trial, known)
    if tokens is None:
        return
    answer = await _unless_refused(trial, known, ignore_eos=True, max_tokens=tokens)
    if answer is not None and not _has(answer, tokens):
        raise failed("IgnoreEosIgnored", f"of {tokens} tokens came {Outcome.of(answer)}")
    known.goes_on = answer is not None


async def _beyond_the_end(trial: Trial, known: Baseline) -> int | None:
    """A few tokens more than an answer has by itself; None if that is unknown, or too much."""
    if (end := await _natural_end(trial, known)) is None:
        return None
    tokens = trial.room(end + _MORE, trial.request)
    return tokens if end < tokens and _may_ask(trial, known, tokens) else None


def _may_ask(trial: Trial, known: Baseline, tokens: int) -> bool:
    """Whether there is room and time for an answer of so many tokens."""
    return tokens <= min(MOST_TOKENS, trial.room(tokens, trial.request), known.tokens_in(trial.within_s / 2))


def _has(answer: Answer, tokens: int, *, but_for_length: bool = False) -> bool:
    return all(
        len(generated) >= tokens or (but_for_length and reason == FinishReason.LENGTH)
        for generated, reason in zip(answer.generated, answer.reasons, strict=True)
    )


async def _natural_end(trial: Trial, known: Baseline) -> int | None:
    """After how many tokens an answer ends by itself, as far as is known; None if a limit of the engine comes first."""
    natural = known.natural.length
    if not known.natural.is_limited:
        return natural
    more = trial.room(natural + _FAR, trial.request)
    if more <= natural or not _may_ask(trial, known, more):
        return None
    answer = Outcome.of(await _limited(trial, known, max_tokens=more))
    return None if answer.is_limited and answer.length < more else answer.length


async def _unless_refused(trial: Trial, known: Baseline, **limits: int | bool | None) -> Answer | None:
    """The answer, which has no more tokens than it may have; None if the engine refuses to give it."""
    try:
        answer = await _limited(trial, known, **limits)
    except ConformanceFailure as failure:
        if failure.is_refusal:
            return None
        raise
    if (limit := limits.get("max_tokens")) is not None:
        _expect_within(answer, known, limit)
    return answer


async def check_choices(trial: Trial, known: Baseline) -> None:
    """Two choices. Raises ChoicesIgnored, and whatever is wrong with a stream."""
    if len(known.plain.tokens) > 1:
        return  # all requests had several choices
    try:
        limit = max(1, min(known.plain.length, _MOST_OF_EACH))
        async with trial.answer(_two_of(trial.request, limit)) as (answer, _):
            await _drain_choices(trial, answer)
            missing = [index for index, reason in enumerate(answer.reasons) if reason is None]
            empty = [index for index, tokens in enumerate(answer.generated) if not tokens and known.plain.length]
            if answer.chunks and (missing or (empty and known.is_steady)):
                raise failed("ChoicesIgnored", f"choice {(missing or empty)[0]} of 2 did not come")
            answer.expect_whole("LimitUsageMismatch")
            _expect_within(answer, known, limit)
    except ConformanceFailure as failure:
        if not failure.is_refusal:
            raise


def _two_of(request: PreprocessedRequest, tokens: int) -> PreprocessedRequest:
    two = limited(request, max_tokens=tokens)
    return evolve(two, sampling_options=evolve(request.sampling_options, n=2))


async def _drain_choices(trial: Trial, answer: Answer) -> None:
    try:
        await answer.drain("GenerateFailed", trial.within_s)
    except ConformanceFailure as failure:
        if failure.name == "ChunkAfterTerminal" and not answer.generated[1]:
            raise failed("ChoicesIgnored", "all chunks are of choice 0", cause=failure) from failure
        raise
