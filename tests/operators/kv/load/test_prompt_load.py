"""PromptLoad: how much prompt work is left, with and without a model of its duration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.load import MissingDuration, PromptLoad


def load(*prompts: tuple[str, int, float | None, float]) -> PromptLoad:
    """Prompts of (id, tokens, duration in seconds, start)."""
    made = PromptLoad()
    for prompt in prompts:
        made.add(*prompt)
    return made


def test_without_prompts_nothing_is_left() -> None:
    empty = load()
    assert (empty.tokens_at(9.0), empty.remaining_ms_at(9.0), empty.timed) == (0, 0, 0)


def test_time_is_taken_off_the_sum_while_all_prompts_have_durations() -> None:
    two = load(("p1", 100, 10.0, 0.0), ("p2", 60, 6.0, 2.0))
    assert [two.tokens_at(t) for t in (2.0, 5.0, 12.0)] == [140, 110, 40]
    assert [two.remaining_ms_at(t) for t in (2.0, 12.0, 17.0)] == [14_000, 4_000, 0]


def test_work_never_falls_below_zero() -> None:
    one = load(("p1", 100, 10.0, 0.0))
    assert (one.tokens_at(1e6), one.remaining_ms_at(1e6)) == (0, 0)


def test_beside_an_unmodelled_prompt_only_the_oldest_shrinks() -> None:
    mixed = load(("p1", 100, 10.0, 0.0), ("p2", 60, None, 0.0))
    assert [mixed.tokens_at(t) for t in (0.0, 5.0, 12.0)] == [160, 110, 60]
    with pytest.raises(MissingDuration):
        mixed.remaining_ms_at(12.0)


def test_what_is_left_of_the_oldest_is_rounded_up() -> None:
    mixed = load(("p1", 10, 3.0, 0.0), ("p2", 60, None, 0.0))
    assert mixed.tokens_at(1.0) == 60 + 7


def test_unmodelled_prompts_count_in_full() -> None:
    unmodelled = load(("p1", 100, None, 0.0))
    assert (unmodelled.tokens_at(50.0), unmodelled.timed) == (100, 0)


def test_a_prompt_that_takes_no_time_counts_nothing_while_it_is_oldest() -> None:
    instant = load(("p1", 100, 0.0, 0.0), ("p2", 60, 6.0, 0.0))
    assert instant.tokens_at(0.0) == 60


def test_removing_an_unmodelled_younger_prompt_leaves_the_clock_alone() -> None:
    mixed = load(("p1", 100, 10.0, 0.0), ("p2", 40, None, 0.0))
    assert mixed.remove("p2", 5.0)
    assert mixed.tokens_at(5.0) == 50


def test_removing_the_oldest_starts_the_next_one_now() -> None:
    two = load(("p1", 100, 10.0, 0.0), ("p2", 40, 8.0, 0.0))
    assert two.remove("p1", 3.0)
    assert (two.tokens_at(3.0), two.tokens_at(5.0), two.remaining_ms_at(5.0)) == (40, 30, 6_000)


@pytest.mark.parametrize(("removed_s", "tokens", "remaining_ms"), [(5.0, 90, 9_000), (2.0, 100, 10_000)])
def test_removing_a_modelled_younger_prompt_takes_its_progress_along(
    removed_s: float, tokens: int, remaining_ms: int
) -> None:
    """A second later a second more is done: progress is never owed."""
    two = load(("p1", 100, 10.0, 0.0), ("p2", 40, 4.0, 0.0))
    if removed_s == 5.0:
        assert (two.tokens_at(5.0), two.remaining_ms_at(5.0)) == (90, 9_000)
    two.remove("p2", removed_s)
    assert (two.tokens_at(removed_s), two.remaining_ms_at(removed_s)) == (tokens, remaining_ms)
    assert (two.tokens_at(removed_s + 1), two.remaining_ms_at(removed_s + 1)) == (tokens - 10, remaining_ms - 1_000)


def test_removing_an_unknown_block_is_an_error() -> None:
    assert not load(("p1", 1, None, 0.0)).remove("p2", 0.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200), st.none() | st.integers(0, 9), st.booleans())))
def test_the_figures_never_leave_their_bounds_and_end_at_zero(
    steps: list[tuple[int, int, int | None, bool]],
) -> None:
    kept, active = PromptLoad(), dict[str, tuple[int, int | None]]()
    for now, (name, tokens, duration, add) in enumerate(steps):
        if add and str(name) not in active:
            kept.add(str(name), tokens, duration, float(now))
            active[str(name)] = tokens, duration
        else:
            assert kept.remove(str(name), float(now)) == (active.pop(str(name), None) is not None)
        assert 0 <= kept.tokens_at(float(now)) <= sum(tokens for tokens, _ in active.values())
        assert kept.timed == sum(duration is not None for _, duration in active.values())
    for left in list(active):
        kept.remove(left, 1e3)
    assert kept.tokens_at(1e3) == kept.remaining_ms_at(1e3) == 0
