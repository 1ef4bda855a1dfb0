"""How figures are written, and which of them is best."""

from __future__ import annotations

import pytest

from serving.replay import Report
from serving.replay.report import Distribution
from serving.replay.report.figures import HIGHER, LOWER, NEITHER, best, difference, figure_named, number


def test_a_figure_has_its_label_unit_and_better_way_by_its_name_in_json() -> None:
    ttft, reuse = figure_named("p99_ttft_ms"), figure_named("prefix_cache_reused_ratio")
    assert (ttft.title, ttft.better) == ("Time to first token (ms), p99", LOWER)
    assert (reuse.title, reuse.better) == ("Prefix reuse", HIGHER)
    assert (figure_named("max_ttst_of_mine_ms").better, figure_named("mine").better) == (LOWER, HIGHER)


def test_every_listed_figure_is_in_the_json_of_a_report() -> None:
    from serving.replay.report import figures

    plain = Report().figures
    absent = {"worker_count", "wall_time_ms", *(one.name for one in figures.GOODPUT)}
    assert {name for name in figures._BY_NAME if name not in plain} == absent


def test_a_figure_of_no_sample_is_not_known() -> None:
    empty, some = Report(), Report(ttft=Distribution.of([2.0]), duration_ms=1500.0)
    assert figure_named("mean_ttft_ms").value(empty) is None
    assert figure_named("mean_ttft_ms").value(some) == 2.0
    assert figure_named("duration_ms").value(some) == 1.5


@pytest.mark.parametrize(
    ("values", "better", "found"),
    [
        ([3.0, None, 1.0], LOWER, [False, False, True]),
        ([3.0, None, 1.0], HIGHER, [True, False, False]),
        ([3.0, 1.0], NEITHER, [False, False]),
        ([2.0, 2.0], LOWER, [False, False]),
        ([None, 2.0], LOWER, [False, False]),
    ],
)
def test_the_best_stands_out_where_there_is_a_choice(
    values: list[float | None], better: int, found: list[bool]
) -> None:
    assert best(values, better) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "N/A"),
        (float("nan"), "N/A"),
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
def test_numbers_have_at_least_three_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("value", "digits", "text"), [(2619.6, 2, "2,619.60"), (0.5, 0, "0"), (None, 2, "N/A")])
def test_digits_can_be_given(value: float | None, digits: int, text: str) -> None:
    assert number(value, digits) == text


@pytest.mark.parametrize(
    ("first", "other", "text"),
    [
        (100.0, 50.0, "-50.0 %"),
        (100.0, 250.0, "+150.0 %"),
        (0, 0, "="),
        (0.0, 1.0, ""),
        (1.0, None, ""),
        (None, 1.0, ""),
        (100.0, 100.001, "="),
        (0.001, 5.0, "+499,900.0 %"),
        (1.0, float("inf"), ""),
        (-10.0, -5.0, "+50.0 %"),
    ],
)
def test_a_difference_has_its_sign(first: float | None, other: float | None, text: str) -> None:
    assert difference(first, other) == text
