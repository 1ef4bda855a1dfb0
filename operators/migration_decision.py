"""Whether a request that broke goes on with another worker, and as what request. Pure.

Source: dynamo lib/llm/src/migration.rs, RetryManager. Other than there, a request of prompt embeddings stays where it
is, an answer that lacks nothing any more is ended instead of sent again, and thinking budgets shrink too.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from attrs import evolve, frozen

from pipeline.errors import may_migrate
from pipeline.protocols import (
    MigrationState,
    PreprocessedRequest,
    RequestPhase,
    RoutingHints,
    StopConditions,
    TraceLink,
)

from .copied import copied


class Verdict(Enum):
    """What becomes of a request that broke."""

    RETRY = auto()
    """Another worker goes on with it."""
    PASS_ON = auto()
    """The caller gets the error."""
    END = auto()
    """The answer is complete: nobody misses what its worker might have said."""
    END_CANCELLED = auto()
    """The caller has stopped it: it ends as cancelled."""
    END_LENGTH = auto()
    """Its worker has said all it was asked for: it ends as if that had told so."""


@frozen(kw_only=True)
class Break:
    """One failure, and how far the request had come.

    `had_stream`: whether a worker had taken it. `is_finished`: whether the caller has seen a finish reason.
    `has_more_than_tokens`: whether the caller has seen output that had no token ids, so that none can be appended.
    """

    error: Exception
    attempts_left: int
    delivered_tokens: int = 0
    had_stream: bool = True
    is_stopped: bool = False
    is_finished: bool = False
    has_more_than_tokens: bool = False


def restriction(request: PreprocessedRequest) -> str | None:
    """Why this request may never migrate; None if it may."""
    sampling = request.sampling_options
    if sampling.guided_decoding is not None:
        return "guided decoding: another worker cannot resume the grammar"
    if (sampling.n or 1) > 1:
        return "several choices: which of them has come how far is not kept"
    if request.prompt_embeds is not None:
        return "prompt embeddings: they take the place of the tokens that would be appended"
    return None


def is_pinned(request: PreprocessedRequest) -> bool:
    """Whether the request names its worker for the phase it is in, so that no other one may have it.

    Without a tracker the phase is not known, and a pin for any phase counts; so does a rank without its worker.
    """
    hints = request.routing
    if hints is None:
        return False
    if hints.backend_instance_id is not None:
        return True
    phase = None if request.tracker is None else request.tracker.phase
    return _is_pinned_for_prefill(hints, phase) or _is_pinned_for_decode(hints, phase)


def _is_pinned_for_prefill(hints: RoutingHints, phase: RequestPhase | None) -> bool:
    named = hints.prefill_worker_id is not None or hints.prefill_dp_rank is not None
    return named and phase in (None, RequestPhase.PREFILL)


def _is_pinned_for_decode(hints: RoutingHints, phase: RequestPhase | None) -> bool:
    named = hints.decode_worker_id is not None or hints.dp_rank is not None
    return named and phase is not RequestPhase.PREFILL


def is_migratable(request: PreprocessedRequest, error: Exception) -> bool:
    """Whether the error is one after which another worker may have this request."""
    return may_migrate(error) and not is_pinned(request)


def decide(broken: Break, request: PreprocessedRequest, max_seq_len_tokens: int | None = None) -> Verdict:
    """What becomes of the request. The first case that holds decides:

    1. the error says that no other worker would do better: the caller gets it
    2. the caller has a finish reason already: the end
    3. the caller has stopped the request: cancelled
    4. as many tokens as it may have are delivered: length
    5. pinned, no attempt left, nothing that could be continued, too long: the caller gets the error
    6. another worker goes on
    """
    if not may_migrate(broken.error):
        return Verdict.PASS_ON
    if broken.is_finished:
        return Verdict.END
    if broken.is_stopped:
        return Verdict.END_CANCELLED
    max_tokens = request.stop_conditions.max_tokens
    if broken.delivered_tokens and max_tokens is not None and broken.delivered_tokens >= max_tokens:
        return Verdict.END_LENGTH
    if is_pinned(request) or not broken.attempts_left:
        return Verdict.PASS_ON
    if broken.has_more_than_tokens and not broken.delivered_tokens:
        return Verdict.PASS_ON
    if broken.had_stream and is_too_long(request, broken.delivered_tokens, max_seq_len_tokens):
        return Verdict.PASS_ON
    return Verdict.RETRY


def is_too_long(request: PreprocessedRequest, delivered_tokens: int, max_seq_len_tokens: int | None) -> bool:
    """Whether prompt and answer are past the length up to which requests migrate."""
    return max_seq_len_tokens is not None and len(request.token_ids) + delivered_tokens > max_seq_len_tokens


def continuation(
    request: PreprocessedRequest, delivered: Sequence[int], link: TraceLink | None, state: MigrationState
) -> PreprocessedRequest:
    """The request that asks for what is still to come behind the delivered tokens; `link` is the worker before.

    Its routing hints are its own, so that what one worker's router writes there is not seen by the next one's.
    """
    asked = copied(request)
    asked.migration_state = state
    if request.routing is not None:
        asked.routing = copied(request.routing)
    if link is not None:
        asked.migration_link = link
    if delivered:
        asked.token_ids = [*request.token_ids, *delivered]
        asked.stop_conditions = _remaining(request.stop_conditions, len(delivered))
        asked.prefill_result = asked.bootstrap_info = None  # blocks of the prompt as it was, and for one worker only
    return asked


def _remaining(conditions: StopConditions, delivered_tokens: int) -> StopConditions:
    """The conditions for the rest of the answer: what counts tokens counts fewer, never below 0."""

    def less(tokens: int | None) -> int | None:
        return None if tokens is None else max(0, tokens - delivered_tokens)

    return evolve(
        conditions,
        max_tokens=less(conditions.max_tokens),
        min_tokens=less(conditions.min_tokens),
        max_thinking_tokens=less(conditions.max_thinking_tokens),
    )
