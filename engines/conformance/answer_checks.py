"""The checks of the conformance kit on an engine's life and its undisturbed answers.

Each is a function that raises the ConformanceFailure it finds. Source: dynamo lib/backend-common/src/testing.rs. Other
than there an answer has to be what can be sent, and concurrent ones are checked as one alone is.

Limits and choices (L9): without the model it is not known where an answer would end. So the engine first gets a request
without limits, then ones for fewer tokens than its answer has, and for more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import pairwise

import anyio
from attrs import evolve

from pipeline.protocols import FinishReason, PreprocessedRequest

from .answers import Answer, Outcome, Trial, limited
from .failures import CONCURRENTLY, ConformanceFailure, failed, not_served

CONCURRENT = 8
"""Requests at the same time."""
_HANDOVERS = 4
"""So many chunks of an undisturbed answer are each read by a task of its own."""
_FEWEST, _PLENTY, _LONG_S = 4, 32, 2.0
"""Tokens of an answer that show what is to be seen of it, and how long it may take for that."""
_SHORT = 2
"""Tokens of a request that is shorter than the others."""
_SAME = 3
"""An engine that gives the same answer so often is taken to give it always."""
_BEGINNING = 8
"""Tokens of the long answer to know it by."""


async def answered(
    trial: Trial,
    request: PreprocessedRequest | None = None,
    *,
    miscount: str = "CompletionTokensMismatch",
    raced: bool = True,
) -> Answer:
    """One undisturbed answer, whole. Raises GenerateFailed and whatever is wrong with it."""
    async with trial.answer(request, raced=raced) as (answer, _):
        for _ in range(_HANDOVERS):
            if not await answer.begin(trial.within_s):
                break
        else:
            await answer.drain("GenerateFailed", trial.within_s)
        answer.expect_whole(miscount)
    return answer


async def check_alone(trial: Trial) -> None:
    """One request, of which the rest is learnt. Raises GenerateFailed and whatever is wrong with a stream."""
    # Not raced: a race has scopes of its own, which would be in disorder before the engine's are seen.
    answer = await answered(trial, raced=False)
    times = answer.times_s
    trial.natural = trial.plain = Outcome.of(answer)
    trial.gap_s = max((after - before for before, after in pairwise(times)), default=0.0)
    trial.alone_s = times[-1] - times[0]


async def shorten(trial: Trial) -> None:
    """Put a limit on the trial's request where the answer is long: it is repeated about a hundred times.

    Raises what is wrong with a stream.
    """
    tokens = max(_FEWEST, int(min(_PLENTY, trial.tokens_in(_LONG_S))))
    if trial.natural.length > tokens:
        request = limited(trial.request, max_tokens=tokens)
        trial.plain, trial.request = Outcome.of(await answered(trial, request)), request


async def check_same(trial: Trial) -> None:
    """The same request again. Raises TokensLeftOver, and what is wrong with a stream."""
    again = [await answered(trial) for _ in range(_SAME)]
    for one in map(Outcome.of, again):
        if one.tokens != trial.plain.tokens and _has_left_over(trial.plain, one):
            raise failed("TokensLeftOver", f"the same request got {trial.plain}, then {one}")
    trial.is_steady = all(Outcome.of(answer) == trial.plain for answer in again)
    trial.repeated = [(trial.request, trial.plain if trial.is_steady else None)]


def _has_left_over(first: Outcome, second: Outcome) -> bool:
    """Whether the second answer is the first one behind tokens of something else."""
    for before, now in zip(first.tokens, second.tokens, strict=False):
        for size in range(2, len(now)):
            if now[-size:] == before[:size] and (len(now) > len(before) or size > len(before) / 2):
                return True
    return False


async def learn_longest(trial: Trial) -> None:
    """How many tokens the long request may have: an engine may refuse more than it has. Raises TokensLeftOver."""
    while trial.long_tokens > trial.natural.length:
        try:
            async with trial.answer(long=True, is_begun=True):
                break
        except ConformanceFailure as failure:
            if not failure.is_refusal:
                break  # the checks that follow find it, too
            trial.long_tokens = max(trial.natural.length, trial.long_tokens // 2)
    await check_nothing_left_over(trial, "behind a closed one")


async def learn_beginning(trial: Trial) -> None:
    """How the answer to the long request begins. Raises TokensLeftOver, and what is wrong with a stream."""
    if not trial.is_steady:
        return
    begins: list[Outcome] = []
    for _ in range(2):
        async with trial.answer(long=True) as (answer, _):
            while len(answer.chunks) < _BEGINNING and await answer.begin(trial.within_s):
                pass
        begins.append(Outcome.of(answer))
        await check_nothing_left_over(trial, "behind a closed one")
    first, second = begins
    trial.begins = first if first == second else None


async def learn_others(trial: Trial, *, varies: bool) -> None:
    """Learns what other requests get alone: a short one and, with `varies`, the same tokens in another order.

    One that the engine does not serve is left out.
    """
    ids, requests = trial.request.token_ids, list[PreprocessedRequest]()
    if varies:
        requests += [evolve(deepcopy(trial.request), token_ids=ids) for ids in (ids[::-1], [*ids[1:], *ids[:2]])]
    if trial.plain.length > _SHORT:
        requests.append(limited(trial.request, max_tokens=_SHORT))
    for request in requests:
        try:
            generated = Outcome.of(await answered(trial, request))
            trial.repeated.append((request, generated if trial.is_steady else None))
        except ConformanceFailure:
            continue


async def check_concurrent(
    trial: Trial,
    *,
    requests: int = CONCURRENT,
    name: str = CONCURRENTLY,
) -> None:
    """Requests that take turns: half begin together, the others one by one, a short one last.

    Raises StreamsShareState, or the failure of that name for what one alone did not show.
    """
    sent = [request for request, _ in trial.repeated] or [trial.request]
    within_s = trial.within_s + requests * trial.alone_s  # they may be served one behind the other
    begun = [anyio.Event() for _ in range(requests)]

    async def one(number: int) -> None:
        if number >= requests // 2:
            await begun[number - 1].wait()
        request = sent[(number - requests) % len(sent)]
        try:
            async with trial.answer(request) as (answer, _):
                await answer.begin(within_s)
                begun[number].set()
                await answer.drain("GenerateFailed", within_s)
                if trial.contradicts(request, answer):
                    raise failed("StreamsShareState", f"the prompt {request.token_ids} got {Outcome.of(answer)}")
                answer.expect_whole()
        finally:
            begun[number].set()

    found = await gathered([partial(one, number) for number in range(requests)])
    if news := [failure for failure in found if not trial.failed_alone(failure)]:
        raise _concurrent_failure(name, news, requests, trial.within_s)


def _concurrent_failure(
    name: str, news: list[ConformanceFailure], requests: int, within_s: float
) -> ConformanceFailure:
    """One failure for what several requests failed with."""
    for failure in news:
        if failure.name == "StreamsShareState":
            return failure
        if failure.name == "PromptTokensMismatch":
            return failed("StreamsShareState", str(failure), cause=failure)
    detail = f"{len(news)} of {requests}, one of them {news[0]}"
    return failed(name, detail, cause=news[0], after_s=news[0].after_s and within_s)


async def check_nothing_left_over(trial: Trial, after: str) -> None:
    """Requests alone, behind others that were disturbed. Raises TokensLeftOver and NotServedAfterwards."""
    if trial.alone is not None:
        return  # it fails behind others, too
    for request, expected in trial.repeated or [(trial.request, None)]:
        try:
            async with trial.answer(request) as (answer, _):
                await answer.drain("GenerateFailed", trial.within_s)
                if trial.contradicts(request, answer):
                    got = f"got {Outcome.of(answer)}, before that {expected}"
                    raise failed("TokensLeftOver", f"{after}, {request.token_ids} {got}")
                answer.expect_whole()
        except ConformanceFailure as failure:
            raise failure if failure.name == "TokensLeftOver" else not_served(after, failure) from failure


async def gathered(checks: Sequence[Callable[[], Awaitable[object]]]) -> list[ConformanceFailure]:
    """Runs the checks at the same time; what they found."""
    found: list[ConformanceFailure] = []

    async def one(check: Callable[[], Awaitable[object]]) -> None:
        try:
            await check()
        except ConformanceFailure as failure:
            found.append(failure)

    async with anyio.create_task_group() as tasks:
        for check in checks:
            tasks.start_soon(one, check)
    return found


async def check_paused_reader(trial: Trial) -> None:
    """A request beside one that is begun and not read on. Raises HeldUpByPausedReader and ConcurrentGenerateFailed."""
    if (trial.config.max_num_seqs or 2) < 2:
        return  # it serves one at a time, as it declares
    failures: list[ConformanceFailure] = []
    try:
        async with trial.answer() as (paused, _):
            if await paused.begin(trial.within_s) and not paused.is_complete:
                failures = await gathered([partial(answered, trial)])
    except ConformanceFailure:
        if not failures:
            raise
    if not failures or trial.failed_alone(failures[0]):
        return
    found = failures[0]
    name = CONCURRENTLY if found.after_s is None else "HeldUpByPausedReader"
    raise failed(name, f"beside one that is not read on: {found}", cause=found, after_s=found.after_s)


async def check_bad(trial: Trial, bad_request: PreprocessedRequest) -> None:
    """A request that cannot be served. Raises BadRequestServed."""
    try:
        async with trial.answer(bad_request) as (answer, _):
            await answer.begin(trial.within_s)
    except ConformanceFailure as failure:
        if failure.is_refusal:
            return
        raise failed("BadRequestServed", str(failure), cause=failure) from failure
    raise failed("BadRequestServed", f"its first chunk is {answer.last!r}")


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


async def check_max_tokens(trial: Trial) -> None:
    """Raises MaxTokensIgnored, LimitNotNamed and LimitUsageMismatch."""
    natural = trial.natural.length
    for limit in (*_FEW, natural + _MORE):
        if not _may_ask(trial, limit):
            continue
        answer = await _unless_refused(trial, max_tokens=limit)
        if answer is None and limit > natural:
            continue
        if answer is None:
            raise failed("MaxTokensIgnored", f"with max_tokens={limit} the request is refused")
        _expect_within(answer, trial, limit, limit if trial.is_steady and limit <= natural else 0)
        if trial.is_steady and limit < natural and any(reason != FinishReason.LENGTH for reason in answer.reasons):
            raise failed("LimitNotNamed", f"of {natural} tokens max_tokens={limit} left {Outcome.of(answer)}")


async def _limited(trial: Trial, **limits: int | bool | None) -> Answer:
    """The answer. Raises TokensLeftOver instead of a miscount where tokens came that are of something else."""
    async with trial.answer(limited(trial.request, **limits)) as (answer, _):
        await answer.drain("GenerateFailed", trial.within_s)
        try:
            answer.expect_whole("LimitUsageMismatch")
        except ConformanceFailure as failure:
            if failure.name == "LimitUsageMismatch" and trial.is_steady and not trial.plain.continues(answer.generated):
                raise failed("TokensLeftOver", f"{answer.generated}, of {trial.plain}", cause=failure) from failure
            raise
    return answer


def _expect_within(answer: Answer, trial: Trial, limit: int, least: int = 0) -> None:
    own_limit = trial.natural.length if trial.natural.is_limited else limit
    for tokens, reason in zip(answer.generated, answer.reasons, strict=True):
        is_cut_early = reason == FinishReason.LENGTH and len(tokens) < min(limit, own_limit)
        if not least <= len(tokens) <= limit or is_cut_early:
            raise failed("MaxTokensIgnored", f"with max_tokens={limit} there are {len(tokens)} ({reason})")


async def check_min_tokens(trial: Trial) -> None:
    """Answers that must not end where they would by themselves. Raises MinTokensIgnored."""
    if (tokens := await _beyond_the_end(trial)) is None:
        return
    for most in (tokens, None):
        answer = await _unless_refused(trial, min_tokens=tokens, max_tokens=most)
        # Without max_tokens a limit of the engine's own may come first.
        if answer is not None and not _has(answer, tokens, but_for_length=most is None):
            detail = f"with min_tokens={tokens} and max_tokens={most} there are {Outcome.of(answer)}"
            raise failed("MinTokensIgnored", detail)


async def check_ignore_eos(trial: Trial) -> None:
    """Answers that must go on to their limit. Raises IgnoreEosIgnored."""
    tokens = await _beyond_the_end(trial)
    if tokens is None:
        return
    answer = await _unless_refused(trial, ignore_eos=True, max_tokens=tokens)
    if answer is not None and not _has(answer, tokens):
        raise failed("IgnoreEosIgnored", f"of {tokens} tokens came {Outcome.of(answer)}")
    trial.goes_on = answer is not None


async def _beyond_the_end(trial: Trial) -> int | None:
    """A few tokens more than an answer has by itself; None if that is unknown, or too much."""
    if (end := await _natural_end(trial)) is None:
        return None
    tokens = trial.room(end + _MORE, trial.request)
    return tokens if end < tokens and _may_ask(trial, tokens) else None


def _may_ask(trial: Trial, tokens: int) -> bool:
    """Whether there is room and time for an answer of so many tokens."""
    return tokens <= min(MOST_TOKENS, trial.room(tokens, trial.request), trial.tokens_in(trial.within_s / 2))


def _has(answer: Answer, tokens: int, *, but_for_length: bool = False) -> bool:
    return all(
        len(generated) >= tokens or (but_for_length and reason == FinishReason.LENGTH)
        for generated, reason in zip(answer.generated, answer.reasons, strict=True)
    )


async def _natural_end(trial: Trial) -> int | None:
    """After how many tokens an answer ends by itself, as far as is known; None if a limit of the engine comes first."""
    natural = trial.natural.length
    if not trial.natural.is_limited:
        return natural
    more = trial.room(natural + _FAR, trial.request)
    if more <= natural or not _may_ask(trial, more):
        return None
    if (found := await _unless_refused(trial, max_tokens=more)) is None:
        return None
    answer = Outcome.of(found)
    return None if answer.is_limited and answer.length < more else answer.length


async def _unless_refused(trial: Trial, **limits: int | bool | None) -> Answer | None:
    """The answer, which has no more tokens than it may have; None if the engine refuses to give it."""
    try:
        answer = await _limited(trial, **limits)
    except ConformanceFailure as failure:
        if failure.is_refusal:
            return None
        raise
    if (limit := limits.get("max_tokens")) is not None:
        _expect_within(answer, trial, limit)
    return answer


async def check_choices(trial: Trial) -> None:
    """Two choices. Raises ChoicesIgnored, and whatever is wrong with a stream."""
    if len(trial.plain.tokens) > 1:
        return  # all requests had several choices
    try:
        limit = max(1, min(trial.plain.length, _MOST_OF_EACH))
        two = evolve(
            limited(trial.request, max_tokens=limit), sampling_options=evolve(trial.request.sampling_options, n=2)
        )
        async with trial.answer(two) as (answer, _):
            await _drain_choices(trial, answer)
            missing = [index for index, reason in enumerate(answer.reasons) if reason is None]
            empty = [index for index, tokens in enumerate(answer.generated) if not tokens and trial.plain.length]
            if answer.chunks and (missing or (empty and trial.is_steady)):
                raise failed("ChoicesIgnored", f"choice {(missing or empty)[0]} of 2 did not come")
            answer.expect_whole("LimitUsageMismatch")
            _expect_within(answer, trial, limit)
    except ConformanceFailure as failure:
        if not failure.is_refusal:
            raise


async def _drain_choices(trial: Trial, answer: Answer) -> None:
    try:
        await answer.drain("GenerateFailed", trial.within_s)
    except ConformanceFailure as failure:
        if failure.name == "ChunkAfterTerminal" and not answer.generated[1]:
            raise failed("ChoicesIgnored", "all chunks are of choice 0", cause=failure) from failure
        raise
