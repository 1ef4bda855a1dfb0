"""Whether a request migrates, as tables: errors, pins, limits; and the request that the next worker gets."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from operators.migration import Failure, Verdict, continuation, decide, is_pinned, is_too_long, restriction
from pipeline import (
    Cancelled,
    CannotConnect,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    ResourceExhausted,
    ResponseTimeout,
    StreamIncomplete,
    Unavailable,
    Unknown,
    WorkerOverloaded,
)
from pipeline.errors import BackendUnknown, ConnectionTimeout
from pipeline.protocols import (
    BootstrapInfo,
    GuidedDecodingOptions,
    MigrationState,
    PrefillResult,
    PreprocessedRequest,
    RequestPhase,
    RequestTracker,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TraceLink,
)

GONE = Disconnected("gone")


def request(**fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest([1, 2, 3], **fields)


def broken(**facts: Any) -> Failure:
    return Failure(**{"error": GONE, "attempts_left": 3, **facts})


def in_phase(phase: RequestPhase | None) -> RequestTracker | None:
    if phase is None:
        return None
    tracker = RequestTracker(lambda: 0.0, lambda: 0, lambda: None)  # type: ignore[arg-type, return-value]
    tracker.phase = phase
    return tracker


@pytest.mark.parametrize(
    ("error", "moves"),
    [
        (CannotConnect("x"), True),
        (ConnectionTimeout("x"), True),
        (Disconnected("x"), True),
        (ResponseTimeout("x"), True),
        (EngineShutdown("x"), True),
        (StreamIncomplete("x"), True),
        (WorkerOverloaded("x"), True),
        (Unknown("x", cause=Disconnected("y")), True),
        (Cancelled("x"), False),
        (ResourceExhausted("x"), False),
        (Unavailable("x"), False),
        (InvalidArgument("x"), False),
        (BackendUnknown("x"), False),
        (ValueError("x"), False),
        (Disconnected("x", cause=Cancelled("y")), False),
        (Disconnected("x", cause=ResourceExhausted("y")), False),
    ],
)
def test_which_errors_move_a_request(error: Exception, moves: bool) -> None:
    assert decide(broken(error=error), request()) is (Verdict.RETRY if moves else Verdict.PASS_ON)


PREFILL, DECODE, BOTH = RequestPhase.PREFILL, RequestPhase.DECODE, RequestPhase.AGGREGATED


@pytest.mark.parametrize(
    ("hints", "pinned_in"),
    [
        (None, set()),
        (RoutingHints(), set()),
        (RoutingHints(allowed_worker_ids={1}, priority=3, lora_name="a"), set()),
        (RoutingHints(backend_instance_id=7), {PREFILL, DECODE, BOTH, None}),
        (RoutingHints(backend_instance_id=0), {PREFILL, DECODE, BOTH, None}),
        (RoutingHints(prefill_worker_id=7), {PREFILL, None}),
        (RoutingHints(decode_worker_id=7), {DECODE, BOTH, None}),
        (RoutingHints(dp_rank=0), {DECODE, BOTH, None}),
        (RoutingHints(prefill_dp_rank=0), {PREFILL, None}),
    ],
)
@pytest.mark.parametrize("phase", [PREFILL, DECODE, BOTH, None])
def test_a_request_is_pinned_by_what_names_a_worker_for_its_phase(
    hints: RoutingHints | None, pinned_in: set[RequestPhase | None], phase: RequestPhase | None
) -> None:
    """Without a tracker the phase is unknown: any named worker pins the request."""
    original = request(routing=hints, tracker=in_phase(phase))
    assert is_pinned(original) is (phase in pinned_in)
    assert decide(broken(), original) is (Verdict.PASS_ON if phase in pinned_in else Verdict.RETRY)


@pytest.mark.parametrize(
    ("sampling", "embeds", "why"),
    [
        (SamplingOptions(), None, None),
        (SamplingOptions(n=1, best_of=4, seed=3, frequency_penalty=1.0), None, None),
        (SamplingOptions(n=2), None, "several choices"),
        (SamplingOptions(guided_decoding=GuidedDecodingOptions(json={})), None, "guided decoding"),
        (SamplingOptions(), "AAAA", "prompt embeddings"),
    ],
)
def test_what_a_request_may_not_contain(sampling: SamplingOptions, embeds: str | None, why: str | None) -> None:
    reason = restriction(request(sampling_options=sampling, prompt_embeds=embeds))
    assert (None if reason is None else reason.partition(":")[0]) == why


PINNED = RoutingHints(backend_instance_id=7)


@pytest.mark.parametrize(
    ("facts", "fields", "cap", "verdict"),
    [
        ({}, {}, None, Verdict.RETRY),
        ({"attempts_left": 0}, {}, None, Verdict.PASS_ON),
        ({"is_finished": True, "attempts_left": 0}, {}, None, Verdict.END),
        ({"is_finished": True, "error": BackendUnknown("x")}, {}, None, Verdict.PASS_ON),
        ({"is_finished": True, "is_stopped": True}, {}, None, Verdict.END),
        ({"is_stopped": True, "attempts_left": 0}, {}, None, Verdict.END_CANCELLED),
        ({"is_stopped": True}, {"routing": PINNED}, None, Verdict.END_CANCELLED),
        ({"is_stopped": True, "error": BackendUnknown("x")}, {}, None, Verdict.PASS_ON),
        ({"delivered_tokens": 4}, {"stop_conditions": StopConditions(max_tokens=4)}, None, Verdict.END_LENGTH),
        (
            {"delivered_tokens": 4, "attempts_left": 0},
            {"stop_conditions": StopConditions(max_tokens=4)},
            5,
            Verdict.END_LENGTH,
        ),
        ({"delivered_tokens": 3}, {"stop_conditions": StopConditions(max_tokens=4)}, None, Verdict.RETRY),
        ({}, {"stop_conditions": StopConditions(max_tokens=0)}, None, Verdict.RETRY),
        ({"delivered_tokens": 2}, {}, 5, Verdict.RETRY),
        ({"delivered_tokens": 3}, {}, 5, Verdict.PASS_ON),
        ({}, {}, 2, Verdict.PASS_ON),
        ({"had_stream": False}, {}, 2, Verdict.RETRY),
        ({"has_more_than_tokens": True}, {}, None, Verdict.PASS_ON),
        ({"has_more_than_tokens": True, "delivered_tokens": 1}, {}, None, Verdict.RETRY),
    ],
)
def test_the_first_case_that_holds_decides(
    facts: dict[str, Any], fields: dict[str, Any], cap: int | None, verdict: Verdict
) -> None:
    assert decide(broken(**facts), request(**fields), cap) is verdict


@given(st.integers(0, 20), st.integers(1, 30))
def test_too_long_is_past_the_cap_not_at_it(delivered: int, cap: int) -> None:
    assert is_too_long(request(), delivered, cap) is (3 + delivered > cap)
    assert not is_too_long(request(), delivered, None)


# -- the request that goes on

optional_tokens = st.none() | st.integers(0, 40)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), optional_tokens, optional_tokens, optional_tokens)
def test_what_was_delivered_is_prompt_and_no_longer_requested(
    delivered: list[int], most: int | None, least: int | None, thinking: int | None
) -> None:
    conditions = StopConditions(max_tokens=most, min_tokens=least, max_thinking_tokens=thinking, stop=["x"])
    original = request(stop_conditions=conditions, annotations=["a"])
    again = continuation(original, delivered, None, MigrationState())
    left = again.stop_conditions
    assert again.token_ids == [1, 2, 3, *delivered]
    for before, after in (
        (most, left.max_tokens),
        (least, left.min_tokens),
        (thinking, left.max_thinking_tokens),
    ):
        assert after == (None if before is None else max(0, before - len(delivered)))
    unchanged = evolve(again, token_ids=[1, 2, 3], stop_conditions=conditions, migration_state=None)
    assert unchanged == original
    assert original.token_ids == [1, 2, 3]
    assert conditions == StopConditions(max_tokens=most, min_tokens=least, max_thinking_tokens=thinking, stop=["x"])


def test_the_link_of_the_worker_before_replaces_an_older_one() -> None:
    older, newer = TraceLink("1" * 32, "1" * 16), TraceLink("2" * 32, "2" * 16)
    original = request(migration_link=older)
    assert continuation(original, [], None, MigrationState()).migration_link == older
    assert continuation(original, [4], newer, MigrationState()).migration_link == newer
    assert original.migration_link == older


def test_a_prefill_of_the_shorter_prompt_is_not_given_to_the_next_worker() -> None:
    result, bootstrap = PrefillResult({"handle": 1}), BootstrapInfo("h", 1, 2)
    original = request(prefill_result=result, bootstrap_info=bootstrap)
    same, longer = (continuation(original, delivered, None, MigrationState()) for delivered in ([], [4]))
    assert (same.prefill_result, same.bootstrap_info) == (result, bootstrap)
    assert (longer.prefill_result, longer.bootstrap_info) == (None, None)
    assert (original.prefill_result, original.bootstrap_info) == (result, bootstrap)


def test_the_state_is_shared_and_the_hints_are_not() -> None:
    original, state = request(routing=RoutingHints(priority=1)), MigrationState()
    one, other = continuation(original, [], None, state), continuation(original, [4], None, state)
    assert one.migration_state is other.migration_state is state
    assert one.routing == other.routing == original.routing
    assert len({id(one.routing), id(other.routing), id(original.routing)}) == 3


def test_a_failed_worker_is_noted_once_with_the_last_error() -> None:
    state = MigrationState()
    first, second = Disconnected("a"), WorkerOverloaded("b")
    for worker_id, error in ((4, first), (2, first), (4, second)):
        state.exclude(worker_id, error)
    assert (state.excluded_worker_ids, state.last_error) == ([4, 2], second)
