"""Synthetic load."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeline import InvalidArgument
from serving.replay import SyntheticLoad


def load(**settings: Any) -> SyntheticLoad:
    return SyntheticLoad(
        **{"input_tokens": 100, "output_tokens": 5, "request_count": 4, "trace_block_size": 10} | settings
    )


def test_every_request_has_the_given_length_and_shares_no_block() -> None:
    trace = load().make()
    assert (trace.requests, trace.input_tokens, trace.output_tokens) == (4, 400, 20)
    assert len({token for session in trace.sessions for token in session.turns[0].prompt.token_ids()}) == 40


def test_requests_are_sessions_when_there_are_turns() -> None:
    trace = load(turns=3, inter_turn_delay_ms=50).make()
    assert len(trace.sessions) == 4
    assert [turn.delay_ms for turn in trace.sessions[0].turns] == [0.0, 50.0, 50.0]


def test_requests_of_a_group_share_their_first_blocks() -> None:
    trace = load(request_count=30, shared_prefix_ratio=0.25, num_prefix_groups=2).make()
    prefixes = {tuple(session.turns[0].prompt.hash_ids[:3]) for session in trace.sessions}
    rest = {one for session in trace.sessions for one in session.turns[0].prompt.hash_ids[3:]}
    assert len(prefixes) == 2
    assert len(rest) == 30 * 7
    assert rest.isdisjoint(one for prefix in prefixes for one in prefix)


def test_nothing_is_shared_without_groups() -> None:
    trace = load(shared_prefix_ratio=1.0).make()
    assert len({one for session in trace.sessions for one in session.turns[0].prompt.hash_ids}) == 40


def test_arrivals_are_even_at_random_or_all_at_once() -> None:
    assert [session.arrival_ms for session in load(arrival_interval_ms=7).make().sessions] == [0, 7, 14, 21]
    assert [session.arrival_ms for session in load().make().sessions] == [0, 0, 0, 0]
    last = load(request_count=2001, request_rate=50).make().sessions[-1].arrival_ms
    assert last == pytest.approx(40_000, rel=0.1)


def test_the_same_seed_makes_the_same_trace() -> None:
    settings: dict[str, Any] = {"request_rate": 3, "shared_prefix_ratio": 0.5, "num_prefix_groups": 3}
    assert load(**settings).make() == load(**settings).make()
    assert load(**settings).make() != load(**settings, seed=1).make()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_tokens", 0),
        ("output_tokens", -1),
        ("request_count", 0),
        ("turns", 0),
        ("shared_prefix_ratio", 1.5),
        ("num_prefix_groups", -1),
        ("inter_turn_delay_ms", -1.0),
        ("arrival_interval_ms", math.inf),
        ("request_rate", 0.0),
        ("trace_block_size", 0),
    ],
)
def test_an_invalid_argument_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(**{field: value})
    assert caught.value.field == field


def test_arrivals_are_even_or_at_random_but_not_both() -> None:
    with pytest.raises(InvalidArgument, match="either"):
        load(arrival_interval_ms=1, request_rate=1)
