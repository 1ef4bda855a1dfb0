"""What a router observes of its workers, and what it makes of it."""

from __future__ import annotations

from itertools import permutations
from math import isfinite
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.pace import LEAST, MOST_CONGESTION, MOST_RETURNS, PAUSE_WEIGHTS, UNOBSERVED, Pace, PaceMeter
from operators.kv.types import WorkerRank

FAST, SLOW = WorkerRank(0), WorkerRank(1)


def answer(meter: PaceMeter, rank: WorkerRank, tokens: int, by_token_s: float, *, output: int = 100) -> None:
    """A request that meets nothing: its first token takes a fixed time and that of its tokens."""
    meter.booked(0, tokens, 2 * tokens)
    meter.answered(rank, tokens, 0.016 + by_token_s * tokens)
    meter.ended(output, output * 0.01)


def observed(slow: float, seconds: int = 60, seed: int = 0) -> tuple[PaceMeter, Pace]:
    """Ten requests a second, half of them on a rank that takes so many times as long."""
    meter, rng = PaceMeter(), Random(seed)
    for second in range(seconds):
        meter.pace(float(second))
        for rank, factor in ((FAST, 1.0), (SLOW, slow)) * 5:
            tokens = rng.randrange(500, 20_000)
            meter.booked(0, tokens, 2 * tokens)
            meter.answered(rank, tokens, factor * (0.016 + 0.000_015 * tokens) * rng.uniform(0.7, 1.3))
            meter.ended(100, factor)
    return meter, meter.pace(float(seconds))


def test_before_enough_requests_the_figures_are_the_defaults() -> None:
    meter = PaceMeter()
    for _ in range(LEAST - 1):
        answer(meter, FAST, 1000, 0.00001)
    assert meter.pace(0.0) == UNOBSERVED
    assert UNOBSERVED.multipliers([FAST]) is None


def test_a_pause_counts_by_the_waits_for_a_first_token_beside_the_answers() -> None:
    meter = PaceMeter()
    for _ in range(LEAST):
        meter.booked(1000, 1000, 5000)
        meter.answered(FAST, 2000, 0.2)
        meter.ended(400, 4.0)
    found = meter.pace(0.0)
    assert found.pause_weight == pytest.approx(0.05)
    assert found.answer_tokens == 400
    assert found.congestion == pytest.approx(1 + 1000 / 2024)
    assert found.returns == pytest.approx(4)


def test_a_prompt_that_is_cached_as_a_whole_returns_no_more_often_than_the_most() -> None:
    meter = PaceMeter()
    for _ in range(LEAST):
        meter.booked(0, 0, 5000)
    assert meter.pace(0.0).returns == MOST_RETURNS


def test_answers_of_one_token_do_not_pause() -> None:
    meter = PaceMeter()
    for _ in range(LEAST):
        answer(meter, FAST, 1000, 0.001, output=0)
    assert meter.pace(0.0).pause_weight == 0.0


def test_figures_change_once_a_second() -> None:
    meter = PaceMeter()
    assert meter.pace(5.0) == UNOBSERVED
    for _ in range(LEAST):
        answer(meter, FAST, 1000, 0.001)
    assert meter.pace(5.9) == UNOBSERVED
    assert meter.pace(6.0) != UNOBSERVED


def test_a_rank_that_takes_twice_as_long_is_found_and_equal_ones_are_not() -> None:
    _, even = observed(1.0)
    assert even.slowness == {}
    _, found = observed(2.0)
    assert found.slowness[SLOW] > 1.0 > found.slowness[FAST]
    assert found.multipliers([SLOW, WorkerRank(7)]) == [found.slowness[SLOW], 1.0]


def test_a_rank_that_gets_nothing_more_is_tried_again() -> None:
    meter, found = observed(4.0)
    assert SLOW in found.slowness
    for second in range(100, 3000, 100):
        meter.pace(float(second))
    assert meter.pace(3000.0).slowness == {}


def test_a_worker_that_left_is_forgotten() -> None:
    meter, found = observed(4.0)
    meter.forget(SLOW.worker_id)
    assert meter.pace(60.0).slowness.keys() == found.slowness.keys() - {SLOW}
    assert SLOW not in meter.pace(61.0).slowness


def test_the_order_of_what_happens_in_a_second_makes_no_difference() -> None:
    """Requests of different workers end in the same moment, in either order."""
    events = [(FAST, 1001, 0.1), (SLOW, 20_003, 0.3), (FAST, 7, 1 / 3), (SLOW, 5_000_000, 1e-9)]
    found = set()
    for order in permutations(events):
        meter, _ = observed(3.0, seconds=10)
        for rank, tokens, wait_s in order:
            meter.booked(tokens, 1, 7)
            meter.answered(rank, tokens, wait_s)
            meter.ended(tokens, wait_s)
        pace = meter.pace(20.0)
        found.add(
            (pace.pause_weight, pace.answer_tokens, pace.congestion, tuple(sorted(pace.slowness.items())), pace.returns)
        )
    assert len(found) == 1


events = st.tuples(
    st.integers(0, 3), st.integers(0, 10**7), st.integers(0, 10**7), st.floats(0, 1e6), st.floats(0, 1e6)
)


@given(st.lists(events, max_size=120), st.integers(1, 40))
def test_every_figure_stays_within_its_bounds(
    given_events: list[tuple[int, int, int, float, float]], step: int
) -> None:
    meter = PaceMeter()
    for place, (worker, before, tokens, wait_s, after_s) in enumerate(given_events):
        meter.booked(before, tokens, tokens + before % 1000)
        meter.answered(WorkerRank(worker), before + tokens, wait_s)
        meter.ended(tokens, after_s)
        if place % step == 0:
            meter.pace(float(place))
    found = meter.pace(1e6)
    least, most = PAUSE_WEIGHTS
    assert found.pause_weight == 0 or least <= found.pause_weight <= most
    assert 1 <= found.congestion <= MOST_CONGESTION
    assert found.answer_tokens >= 0
    assert 0 <= found.returns <= MOST_RETURNS
    assert all(isfinite(slow) and 0.1 < slow < 8 for slow in found.slowness.values())
