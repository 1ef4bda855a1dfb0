"""Where values stand on a chart, and how they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replay.page_axes import Axis, around, from_zero, latency, logarithmic, percentile, percentiles, time
from serving.replay.page_text import number, percent

values = st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=5)


@given(values)
def test_every_value_has_its_place_on_the_axis(found: list[float]) -> None:
    for axis in (from_zero(found), around(found), latency(found, "ms"), logarithmic(found, "ms")):
        places = [axis.part(value) for value in sorted(found)]
        assert places == sorted(places)
        assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
        assert all(-1e-6 <= axis.part(value) <= 1 + 1e-6 for value, _ in axis.ticks)
        assert len(axis.ticks) <= 25


@given(st.floats(0, 1e9))
def test_time_ends_with_the_replay_in_a_unit_that_suits(end_ms: float) -> None:
    axis, unit_ms = time(end_ms)
    assert axis.high * unit_ms == pytest.approx(end_ms or unit_ms)
    assert 1 <= len(axis.ticks) <= 9


def test_ticks_are_round() -> None:
    assert [text for _, text in from_zero([0.0, 11.7]).ticks] == ["0", "5", "10", "15"]
    assert [text for _, text in from_zero([6_000_000]).ticks][-1] == "6,000,000"
    assert [text for _, text in from_zero([]).ticks] == ["0", "0.2"]
    assert next(text for _, text in around([1163, 1164]).ticks) == "1,162.5"
    assert [text for _, text in logarithmic([30, 700], "ms").ticks] == ["20", "50", "100", "200", "500", "1,000"]
    assert [text for _, text in logarithmic([3, 70_000], "ms").ticks] == ["10", "100", "1,000", "10,000", "100,000"]


def test_what_has_no_place_is_not_shown() -> None:
    assert not Axis(1, 10, (), is_log=True).shows(0.0)
    assert Axis(0, 10, ()).shows(0.0)
    assert not any(Axis(0, 10, ()).shows(value) for value in (None, float("nan"), float("inf")))


def test_each_nine_has_the_same_room() -> None:
    assert percentile(0) == 0
    assert percentile(99) - percentile(90) == pytest.approx(percentile(90))
    assert percentile(100) == percentiles().high
    assert [text for _, text in percentiles().ticks] == ["min", "p50", "p75", "p90", "p95", "p99", "max"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\N{EN DASH}"),
        (float("nan"), "\N{EN DASH}"),
        (0.0, "0"),
        (12031, "12,031"),
        (1, "1"),
        (0.08213, "0.0821"),
        (0.14, "0.140"),
        (12.64, "12.64"),
        (520.015, "520.0"),
        (2619.6, "2,620"),
        (144793823.0, "144,793,823"),
        (-3.5, "-3.50"),
    ],
)
def test_numbers_have_as_many_digits_as_say_something(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "base", "text"),
    [
        (50.0, 100.0, "\N{MINUS SIGN}50.0 %"),
        (250.0, 100.0, "+150.0 %"),
        (0, 0, "±0 %"),
        (1.0, 0.0, ""),
        (None, 1.0, ""),
        (1.0, None, ""),
        (100.001, 100.0, "≈0 %"),
        (5.0, 0.001, "+499,900.0 %"),
        (float("inf"), 1.0, ""),
    ],
)
def test_a_difference_has_its_sign(value: float | None, base: float | None, text: str) -> None:
    assert percent(value, base) == text
