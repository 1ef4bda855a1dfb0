"""Cooldowns: each instance is left out until its own time, whatever happens to others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.pool import cooldown_s
from operators.pool.health import Cooldowns
from pipeline import InvalidArgument

IDS = [1, 2, 3]


def first(instance_id: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("text", "duration_s"), [(None, 5), ("17", 17), ("0", 0), ("invalid", 5), ("-1", 5), ("1.5", 5), (" 7 ", 7)]
)
def test_the_environment_may_set_how_long(text: str | None, duration_s: float) -> None:
    assert cooldown_s({} if text is None else {"DYN_RUNTIME_INHIBITED_DURATION_SECS": text}) == duration_s


def test_who_is_left_out_is_heard_of() -> None:
    exclusions, heard = Cooldowns(5), list[int]()
    exclusions.added.subscribe(heard.append)
    exclusions.add(2, 0, 10.0)
    assert list(exclusions.without(IDS, first, 10.0)) == [1, 3]
    assert heard == [2]


def test_for_no_time_nobody_is_left_out() -> None:
    exclusions = Cooldowns(0)
    exclusions.add(2, 0, 10.0)
    assert not exclusions
    assert list(exclusions.without(IDS, first, 10.0)) == IDS


def test_one_that_is_not_there_is_not_left_out() -> None:
    exclusions = Cooldowns(5)
    exclusions.add(2, -1, 10.0)
    assert not exclusions


def test_only_the_arrival_that_was_at_fault_is_left_out() -> None:
    exclusions = Cooldowns(5)
    exclusions.add(2, 7, 10.0)
    assert list(exclusions.without(IDS, {1: 0, 2: 7, 3: 2}.__getitem__, 10.0)) == [1, 3]
    assert list(exclusions.without(IDS, {1: 0, 2: 8, 3: 2}.__getitem__, 10.0)) == IDS
    exclusions.add(2, 8, 10.0)
    exclusions.add(2, 7, 13.0)  # a late word of the incarnation before
    assert list(exclusions.without(IDS, {1: 0, 2: 8, 3: 2}.__getitem__, 14.9)) == [1, 3]
    assert exclusions.first_end_s() == 15.0


def test_who_is_back_first_is_one_of_those_that_are_there() -> None:
    """One that has left, or has come back since, keeps its entry and means nothing."""
    exclusions, incarnations = Cooldowns(5), {1: 0, 2: 1, 3: 9}
    for instance_id, at_s in ((3, 10.0), (1, 11.0), (2, 12.0)):
        exclusions.add(instance_id, {1: 0, 2: 1, 3: 2}[instance_id], at_s)
    assert exclusions.first_end_s() == 15.0
    assert exclusions.first_back_s([1, 2, 3], incarnations.__getitem__) == 16.0
    assert exclusions.first_back_s([2], incarnations.__getitem__) == 17.0
    assert exclusions.first_back_s([3], incarnations.__getitem__) is None


@pytest.mark.parametrize("duration_s", [-1.0, float("inf"), float("nan")])
def test_a_duration_that_cannot_be_is_refused(duration_s: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Cooldowns(duration_s)
    assert caught.value.field == "cooldown_s"


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=12), st.integers(0, 30))
def test_each_is_left_out_for_the_duration_after_its_last_fault(faults: Any, asked_after: int) -> None:
    exclusions, now_s, last = Cooldowns(5), 0, dict[int, int]()
    for instance_id, later in faults:
        now_s += later
        exclusions.add(instance_id, 0, now_s)
        last[instance_id] = now_s
    now_s += asked_after
    out = {i for i, at_s in last.items() if now_s < at_s + 5}
    assert [i for i in IDS if i not in out] == list(exclusions.without(IDS, first, now_s))
    assert bool(exclusions) == bool(out)
    assert exclusions.first_end_s() == min((last[i] + 5 for i in out), default=None)
