"""Whether a request whose stream broke goes on with another worker, as what request, and how its answer looks. Pure.

Source: dynamo lib/llm/src/migration.rs, RetryManager. Other than there, a request of prompt embeddings stays where it
is, an answer that is complete is ended instead of sent again, thinking budgets shrink too, counts of the later workers
are made counts of the whole answer, and the error that is shown carries why no other worker could go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from enum import Enum, auto
from typing import Any, TypeAlias

from attrs import evolve, fields, frozen

from pipeline import Annotated, Cancelled
from pipeline.errors import chain, may_migrate
from pipeline.protocols import (
    BackendOutput,
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    MigrationState,
    PreprocessedRequest,
    RequestPhase,
    StopConditions,
    TraceLink,
)

from ..records import shallow_copy


class Verdict(Enum):
    """What becomes of a request that broke."""

    RETRY = auto()
    """Another worker goes on with it."""
    PASS_ON = auto()
    """The caller gets the error."""
    END = auto()
    """The answer is complete, although its stream broke."""
    END_CANCELLED = auto()
    """The caller has stopped it: the answer ends as cancelled."""
    END_LENGTH = auto()
    """The answer has all the tokens it may have: it ends with `length`, as its worker would have ended it."""


@frozen(kw_only=True)
class Failure:
    """One failure, and how far the request had come."""

    error: Exception
    attempts_left: int
    delivered_tokens: int = 0
    had_stream: bool = True
    """Whether a worker had taken the request."""
    is_stopped: bool = False
    is_finished: bool = False
    """Whether the caller has a finish reason."""
    has_more_than_tokens: bool = False
    """Whether the caller has output without token ids, which no prompt can continue."""


def restriction(request: PreprocessedRequest) -> str | None:
    """Return why this request may never migrate; None if it may."""
    sampling = request.sampling_options
    if sampling.guided_decoding is not None:
        return "guided decoding: another worker cannot resume the grammar"
    if (sampling.n or 1) > 1:
        return "several choices: which of them has come how far is not kept"
    if request.prompt_embeds is not None:
        return "prompt embeddings: they take the place of the tokens that would be appended"
    return None


def is_pinned(request: PreprocessedRequest) -> bool:
    """Whether the request names its worker for the phase it is in, so that no other worker may have it.

    Without a tracker the phase is not known, and a pin for any phase counts; so does a rank without its worker.
    """
    hints = request.routing
    if hints is None:
        return False
    if hints.backend_instance_id is not None:
        return True
    phase = None if request.tracker is None else request.tracker.phase
    for_prefill = hints.prefill_worker_id is not None or hints.prefill_dp_rank is not None
    for_decode = hints.decode_worker_id is not None or hints.dp_rank is not None
    return (for_prefill and phase in (None, RequestPhase.PREFILL)) or (for_decode and phase is not RequestPhase.PREFILL)


def is_migratable(request: PreprocessedRequest, error: Exception) -> bool:
    """Whether the error is one after which another worker may have this request."""
    return may_migrate(error) and not is_pinned(request)


def decide(failure: Failure, request: PreprocessedRequest, max_seq_len_tokens: int | None = None) -> Verdict:
    """What becomes of the request. The first case that holds decides:

    1. PASS_ON: after such an error no other worker would do better
    2. END: the caller has a finish reason already
    3. END_CANCELLED: the caller has stopped the request
    4. END_LENGTH: as many tokens as it may have are delivered
    5. PASS_ON: it is pinned, has no attempt left or nothing that could be continued, or is too long
    6. RETRY
    """
    if not may_migrate(failure.error):
        return Verdict.PASS_ON
    if failure.is_finished:
        return Verdict.END
    if failure.is_stopped:
        return Verdict.END_CANCELLED
    max_tokens = request.stop_conditions.max_tokens
    if failure.delivered_tokens and max_tokens is not None and failure.delivered_tokens >= max_tokens:
        return Verdict.END_LENGTH
    if is_pinned(request) or not failure.attempts_left:
        return Verdict.PASS_ON
    if failure.has_more_than_tokens and not failure.delivered_tokens:
        return Verdict.PASS_ON
    if failure.had_stream and is_too_long(request, failure.delivered_tokens, max_seq_len_tokens):
        return Verdict.PASS_ON
    return Verdict.RETRY


def is_too_long(request: PreprocessedRequest, delivered_tokens: int, max_seq_len_tokens: int | None) -> bool:
    """Whether prompt and answer together are longer than requests that migrate may be."""
    return max_seq_len_tokens is not None and len(request.token_ids) + delivered_tokens > max_seq_len_tokens


def continuation(
    request: PreprocessedRequest, delivered: Sequence[int], link: TraceLink | None, state: MigrationState
) -> PreprocessedRequest:
    """Return the request for the rest of the answer, after the delivered tokens; `link` is the span of the last worker.

    Its routing hints are a copy, so that what the router writes there for one worker does not reach the next.
    """
    rest = shallow_copy(request)
    rest.migration_state = state
    if request.routing is not None:
        rest.routing = shallow_copy(request.routing)
    if link is not None:
        rest.migration_link = link
    if delivered:
        rest.token_ids = [*request.token_ids, *delivered]
        rest.stop_conditions = _remaining(request.stop_conditions, len(delivered))
        rest.prefill_result = rest.bootstrap_info = None  # blocks of the prompt as it was, and for one worker only
    return rest


def _remaining(conditions: StopConditions, delivered_tokens: int) -> StopConditions:
    """Return the conditions for the rest of the answer: limits in tokens shrink, never below 0."""

    def less(tokens: int | None) -> int | None:
        return None if tokens is None else max(0, tokens - delivered_tokens)

    return evolve(
        conditions,
        max_tokens=less(conditions.max_tokens),
        min_tokens=less(conditions.min_tokens),
        max_thinking_tokens=less(conditions.max_thinking_tokens),
    )


Output: TypeAlias = LLMEngineOutput | BackendOutput
Item: TypeAlias = Annotated[Any]
"""An item of an engine, or of the detokenizer above it: its data is an Output."""


def behind(delivered_tokens: int, last: Output | None) -> Callable[[Item], Item]:
    """Return a function that makes an item of a later worker one of the whole answer; `last` is the last before it.

    To the worker the delivered tokens are prompt: its usage counts them there, and its cumulative log probability
    leaves them out. An item that has neither is returned as it is.
    """
    before = None if last is None else last.cum_log_probs
    usage_before = None if last is None else last.completion_usage
    spent = None if usage_before is None else usage_before.completion_tokens_details

    def whole(item: Item) -> Item:
        data = item.data
        if data is None or not delivered_tokens:
            return item
        usage, cum_log_probs = data.completion_usage, data.cum_log_probs
        if usage is None and (before is None or cum_log_probs is None):
            return item
        changed = copy(data)
        if usage is not None:
            changed.completion_usage = _moved(usage, delivered_tokens, spent)
        if before is not None and cum_log_probs is not None:
            changed.cum_log_probs = before + cum_log_probs
        return item.transfer(changed)

    return whole


def _moved(usage: CompletionUsage, delivered_tokens: int, spent: CompletionTokensDetails | None) -> CompletionUsage:
    """Return the usage with the delivered tokens counted as completion, not prompt; `spent` has their details."""
    prompt_tokens = max(0, usage.prompt_tokens - delivered_tokens)
    found = usage.prompt_tokens_details
    if found is not None and found.cached_tokens is not None:
        found = evolve(found, cached_tokens=min(found.cached_tokens, prompt_tokens))
    moved = CompletionUsage.of(prompt_tokens, usage.completion_tokens + delivered_tokens)
    return evolve(
        moved, prompt_tokens_details=found, completion_tokens_details=_sum(spent, usage.completion_tokens_details)
    )


def _sum(one: CompletionTokensDetails | None, other: CompletionTokensDetails | None) -> CompletionTokensDetails | None:
    """Return both together; a count that only one of them has is taken as it is."""
    if one is None or other is None:
        return one or other
    counts = {field.name: (getattr(one, field.name), getattr(other, field.name)) for field in fields(type(one))}
    known = {name: [count for count in pair if count is not None] for name, pair in counts.items()}
    return CompletionTokensDetails(**{name: sum(pair) if pair else None for name, pair in known.items()})


def ending(
    kind: type[Output] | None, finish_reason: FinishReason, last: Output | None, usage: CompletionUsage | None = None
) -> Item | None:
    """Return the last item of an answer that its worker did not end, after `last`; None if there was no item yet."""
    if kind is None:
        return None
    made: Output = BackendOutput([], []) if kind is BackendOutput else LLMEngineOutput([])
    made.finish_reason, made.completion_usage = finish_reason, usage
    made.index = None if last is None else last.index
    return Annotated(made)


def error_shown(broke: Exception, ended: Exception) -> Exception:
    """Return the error of an answer that broke with the first, and could not be continued because of the second.

    That is the second if it is a cancellation; else a copy of the first, with the second as the last of its causes.
    """
    if any(isinstance(link, Cancelled) for link in chain(ended)):
        return ended
    known = list(chain(broke))
    if any(link is one for link in chain(ended) for one in known):
        return broke
    shown: BaseException = ended
    try:
        for link in reversed(known):
            cause, shown = shown, copy(link)
            shown.__cause__ = cause
            shown.__traceback__ = link.__traceback__
    except Exception:  # a foreign error that cannot be copied
        return broke
    return shown if isinstance(shown, Exception) else broke
