"""The schedule: when each request is due."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay import Prompt, Schedule, Session, SyntheticLoad, Trace, Turn
from serving.replay.schedule import SAME_MOMENT_MS, DueRequest
from serving.replay.traces import TraceFormat

from .worlds import TraceOf, row


def names(due: Sequence[DueRequest]) -> list[str]:
    return [one.name for one in due]


def test_arrivals_are_sorted_shifted_to_0_and_divided_by_the_speed_up(trace_of: TraceOf) -> None:
    schedule = Schedule.open_loop(trace_of(row(timestamp=200), row(timestamp=100)), speed_up=10)
    due = schedule.take_due(1e9)
    assert [(one.name, one.due_ms) for one in due] == [("line:1", 0.0), ("line:0", 10.0)]


def test_nothing_is_due_before_its_time_and_nothing_twice(trace_of: TraceOf) -> None:
    schedule = Schedule.open_loop(trace_of(row(timestamp=0), row(timestamp=5)))
    assert names(schedule.take_due(4.9)) == ["line:0"]
    assert schedule.next_due_ms() == 5.0
    assert schedule.take_due(4.9) == []
    assert names(schedule.take_due(5.0)) == ["line:1"]
    assert schedule.next_due_ms() is None
    assert (schedule.in_flight, schedule.sent_requests, schedule.finished) == (2, 2, False)


def test_the_rounding_of_a_clock_in_seconds_does_not_delay_a_request(trace_of: TraceOf) -> None:
    arrivals = [Random(1).random() * 3.6e6 for _ in range(100)]
    schedule = Schedule.open_loop(trace_of(*(row(timestamp=at) for at in [0, *sorted(arrivals)])))
    start_s = 123_456.789
    while (due_ms := schedule.next_due_ms()) is not None:
        now_ms = ((start_s + due_ms / 1000) - start_s) * 1000
        assert abs(now_ms - due_ms) < SAME_MOMENT_MS
        assert schedule.take_due(now_ms)


def test_requests_of_one_time_come_by_session_then_turn(trace_of: TraceOf) -> None:
    schedule = Schedule.open_loop(
        trace_of(
            row(session_id="a", timestamp=0),
            row(session_id="b", timestamp=10),
            row(session_id="a", delay=10),
            row(session_id="c", timestamp=10),
        )
    )
    (first,) = schedule.take_due(0)
    schedule.ended(first, 0)
    assert names(schedule.take_due(10)) == ["a:1", "b:0", "c:0"]


def test_a_turn_is_due_its_think_time_after_the_end_of_the_one_before(trace_of: TraceOf) -> None:
    trace = trace_of(row(session_id="s", timestamp=0), row(session_id="s", timestamp=100))
    schedule = Schedule.open_loop(trace, speed_up=2)
    (first,) = schedule.take_due(0)
    assert schedule.next_due_ms() is None
    schedule.ended(first, 30)
    assert schedule.next_due_ms() == 80.0
    (second,) = schedule.take_due(80)
    assert (second.turn_index, second.session.session_id) == (1, "s")
    schedule.ended(second, 90)
    assert schedule.finished


def test_a_closed_loop_keeps_so_many_sessions_and_their_places_while_they_think(trace_of: TraceOf) -> None:
    trace = trace_of(
        row(session_id="a", timestamp=0),
        row(session_id="a", delay=5),
        row(session_id="b", timestamp=9000),
        row(session_id="c"),
    )
    schedule = Schedule.closed_loop(trace, 1)
    (a,) = schedule.take_due(0)
    schedule.ended(a, 10)
    assert schedule.take_due(10) == []
    assert schedule.next_due_ms() == 15.0
    (a,) = schedule.take_due(15)
    assert schedule.next_due_ms() is None
    schedule.ended(a, 20)
    (b,) = schedule.take_due(20)
    assert (b.name, b.due_ms) == ("b:0", 20.0)
    schedule.ended(b, 21)
    assert names(schedule.take_due(21)) == ["c:0"]


def test_a_failed_turn_ends_its_session_and_frees_its_place(trace_of: TraceOf) -> None:
    trace = trace_of(row(session_id="a"), row(session_id="a", delay=5), row(session_id="a", delay=5), row())
    schedule = Schedule.closed_loop(trace, 1)
    (first,) = schedule.take_due(0)
    schedule.ended(first, 3, goes_on=False)
    assert schedule.unsent_requests == 2
    (last,) = schedule.take_due(3)
    schedule.ended(last, 4)
    assert (last.name, schedule.finished, schedule.sent_requests) == ("line:3", True, 2)


def test_an_end_counts_once(trace_of: TraceOf) -> None:
    schedule = Schedule.open_loop(trace_of(row(timestamp=0)))
    (due,) = schedule.take_due(0)
    schedule.ended(due, 1)
    with pytest.raises(InvalidArgument, match="'line:0' is not in flight"):
        schedule.ended(due, 1)


def test_without_arrivals_there_is_only_a_closed_loop(trace_of: TraceOf) -> None:
    trace = trace_of(row(timestamp=0), row())
    with pytest.raises(InvalidArgument, match="line 2: session 'request_2' has no timestamp to begin at"):
        Schedule.open_loop(trace)
    assert len(Schedule.closed_loop(trace, 9).take_due(0)) == 2


@pytest.mark.parametrize("speed_up", [0, -1, math.inf, math.nan])
def test_a_speed_up_is_finite_and_above_0(trace_of: TraceOf, speed_up: float) -> None:
    trace = trace_of(row(timestamp=0))
    with pytest.raises(InvalidArgument) as caught:
        Schedule.open_loop(trace, speed_up=speed_up)
    assert caught.value.field == "arrival_speedup_ratio"
    with pytest.raises(InvalidArgument, match="finite and above 0"):
        Schedule.closed_loop(trace, 1, speed_up=speed_up)


def test_a_closed_loop_has_at_least_one_session(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Schedule.closed_loop(trace_of(row()), 0)
    assert caught.value.field == "replay_concurrency"


def test_a_turn_of_a_delta_trace_follows_all_prompts_and_answers_before_it(trace_of: TraceOf) -> None:
    rows = [
        row(session_id="s", timestamp=0, hash_ids=[at], input_length=2, delay=None if at == 1 else 1)
        for at in (1, 2, 3)
    ]
    schedule = Schedule.open_loop(trace_of(*rows, trace_format="mooncake-delta"))
    (first,) = schedule.take_due(0)
    assert (first.token_ids(), first.input_tokens) == ([1, 1], 2)
    schedule.ended(first, 0, output_token_ids=[7, 8])
    (second,) = schedule.take_due(1)
    assert (second.token_ids(), second.input_tokens) == ([1, 1, 7, 8, 2, 2], 6)
    schedule.ended(second, 1)
    (third,) = schedule.take_due(2)
    assert third.token_ids() == [1, 1, 7, 8, 2, 2, 3, 3]
    assert third.packed() == array("I", third.token_ids())
    assert second.token_ids() == [1, 1, 7, 8, 2, 2]


def test_a_full_prompt_does_not_grow(trace_of: TraceOf) -> None:
    schedule = Schedule.open_loop(trace_of(row(session_id="s", timestamp=0), row(session_id="s", delay=0)))
    (first,) = schedule.take_due(0)
    schedule.ended(first, 0, output_token_ids=[7, 8])
    (second,) = schedule.take_due(0)
    assert second.token_ids() == [1] * 512


def agentic(trace_of: TraceOf, *rows: tuple[str, list[str], float]) -> Trace:
    return trace_of(
        *(
            row(request_id=name, wait_for=wait_for, **({"delay": at} if wait_for else {"timestamp": at}))
            for name, wait_for, at in rows
        ),
        trace_format="agentic_mooncake",
    )


def test_a_request_waits_for_the_last_of_those_before_it(trace_of: TraceOf) -> None:
    schedule = Schedule.open_loop(agentic(trace_of, ("a", [], 50), ("b", [], 60), ("c", ["a", "b"], 8)), speed_up=2)
    a, b = schedule.take_due(5)
    assert (a.due_ms, b.due_ms) == (0.0, 5.0)
    schedule.ended(b, 20)
    assert schedule.next_due_ms() is None
    schedule.ended(a, 30)
    (c,) = schedule.take_due(34)
    assert c.due_ms == 34.0


def test_nothing_comes_after_a_request_that_failed(trace_of: TraceOf) -> None:
    trace = agentic(trace_of, ("a", [], 0), ("b", [], 0), ("c", ["a", "b"], 0), ("d", ["c"], 0), ("e", ["b"], 0))
    schedule = Schedule.open_loop(trace)
    a, b = schedule.take_due(0)
    schedule.ended(a, 1, goes_on=False)
    assert schedule.unsent_requests == 2
    schedule.ended(b, 2)
    (e,) = schedule.take_due(2)
    schedule.ended(e, 3)
    assert (e.name, schedule.finished, schedule.unsent_requests) == ("e", True, 2)


def test_requests_that_wait_for_each_other_have_no_closed_loop(trace_of: TraceOf) -> None:
    with pytest.raises(InvalidArgument, match="have an order already"):
        Schedule.closed_loop(agentic(trace_of, ("a", [], 0)), 2)


def run(schedule: Schedule, rng: Random) -> list[tuple[DueRequest, float]]:
    """Return all due requests with their ends, each after a random time, and check each one that is sent."""
    ends: list[tuple[float, DueRequest]] = []
    done, now_ms = [], 0.0
    while not schedule.finished:
        due_ms = schedule.next_due_ms()
        end_ms = min((at for at, _ in ends), default=math.inf)
        now_ms = max(now_ms, min(math.inf if due_ms is None else due_ms, end_ms))
        for one in [one for one in ends if one[0] <= now_ms]:
            ends.remove(one)
            schedule.ended(one[1], now_ms)
            done.append((one[1], now_ms))
        due = schedule.take_due(now_ms)
        order = [(one.due_ms, one.session_index, one.turn_index) for one in due]
        assert order == sorted(order)
        assert all(one.due_ms <= now_ms + SAME_MOMENT_MS for one in due)
        ends += [(now_ms + rng.choice((0, 1, 7, 30)), one) for one in due]
        assert schedule.in_flight == len(ends)
    return done


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_every_turn_is_sent_once_after_the_one_before(sessions: int, turns: int, places: int, rng: Random) -> None:
    load = SyntheticLoad(1, 1, sessions, turns=turns, inter_turn_delay_ms=rng.choice((0.0, 3.0)), arrival_interval_ms=2)
    trace = load.make()
    schedule = Schedule.closed_loop(trace, places) if places else Schedule.open_loop(trace)
    done = run(schedule, rng)
    assert sorted(one.name for one, _ in done) == sorted(turn.name for each in trace.sessions for turn in each.turns)
    ended = {(one.session_index, one.turn_index): at for one, at in done}
    for one, _ in done:
        if one.turn_index:
            assert one.due_ms == ended[one.session_index, one.turn_index - 1] + load.inter_turn_delay_ms
        elif not places:
            assert one.due_ms == one.session_index * 2
    if places:
        begun = sorted((one.due_ms, 1) for one, _ in done if one.turn_index == 0)
        over = [(ended[index, turns - 1], -1) for index in range(sessions)]
        at_a_time = 0
        for _, change in sorted([*begun, *over], key=lambda each: (each[0], each[1])):
            at_a_time += change
            assert at_a_time <= places


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_every_request_comes_after_all_it_waits_for(count: int, rng: Random) -> None:
    sessions = []
    for index in range(count):
        before = tuple(str(at) for at in rng.sample(range(index), rng.randint(0, min(3, index))))
        turn = Turn(str(index), index + 1, Prompt.of(_ID, 1), 1, rng.choice((0.0, 4.0)), wait_for=before)
        sessions.append(Session(str(index), (turn,), None if before else rng.choice((0.0, 5.0))))
    schedule = Schedule.open_loop(Trace(tuple(sessions), TraceFormat.AGENTIC_MOONCAKE))
    done = run(schedule, rng)
    ended = {one.name: at for one, at in done}
    assert len(ended) == len(done) == count
    for one, _ in done:
        if one.turn.wait_for:
            assert one.due_ms == max(ended[name] for name in one.turn.wait_for) + one.turn.delay_ms


_ID = SyntheticLoad(1, 1, 1).make().sessions[0].turns[0].prompt.hash_ids
