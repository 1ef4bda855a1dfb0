"""Figures of many samples."""

from __future__ import annotations

import statistics
from array import array
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replay.arithmetic import Arithmetic
from serving.replay.report import Distribution, gaps_and_rates, rank

SAMPLES = st.lists(st.floats(0, 1e9), min_size=1, max_size=60)


def test_percentiles_are_samples_by_their_rounded_index() -> None:
    """The index is (n - 1) * p / 100 of sorted samples, a half rounded up."""
    figures = Distribution.of([float(at) for at in range(1, 11)])
    assert (figures.median, figures.p75, figures.p90, figures.p95, figures.p99) == (6, 8, 9, 10, 10)
    assert (figures.min, figures.max, figures.mean, figures.samples) == (1, 10, 5.5, 10)


def test_there_is_a_percentile_for_each_percent_to_draw() -> None:
    figures = Distribution.of([float(at) for at in range(1000, 0, -1)])
    assert figures.percentiles == sorted(figures.percentiles)
    assert len(figures.percentiles) == 101
    assert (figures.percentiles[0], figures.percentiles[50], figures.percentiles[99]) == (
        1,
        figures.median,
        figures.p99,
    )
    assert figures.percentiles[100] == 1000


def test_a_half_rounds_up() -> None:
    assert Distribution.of([1.0, 2.0]).median == 2.0
    assert Distribution.of([1.0, 2.0, 3.0, 4.0]).median == 3.0


def test_the_deviation_is_that_of_the_population() -> None:
    assert Distribution.of([2.0, 4.0]).std == 1.0


def test_of_nothing_all_is_0() -> None:
    assert Distribution.of([]) == Distribution()
    assert gaps_and_rates(array("d"), Arithmetic()) == (Distribution(), Distribution())


@given(SAMPLES, st.randoms(use_true_random=False))
def test_the_order_of_samples_leaves_no_mark(samples: list[float], rng: object) -> None:
    shuffled = list(samples)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert Distribution.of(shuffled) == Distribution.of(samples)


@given(st.integers(1, 10_000), st.sampled_from([50, 75, 90, 95, 99]))
def test_a_rank_is_the_nearest_index_and_never_beyond_the_last(count: int, percent: int) -> None:
    exact = Fraction(count - 1) * percent / 100
    assert 0 <= rank(count, percent) < count
    assert abs(rank(count, percent) - exact) <= Fraction(1, 2)


@given(SAMPLES)
def test_figures_are_those_of_the_textbook(samples: list[float]) -> None:
    figures, ordered = Distribution.of(samples), sorted(samples)
    assert figures.mean == pytest.approx(statistics.fmean(samples))
    assert figures.std == pytest.approx(statistics.pstdev(samples), rel=1e-6, abs=1e-3)
    for percent, value in ((50, figures.median), (75, figures.p75), (90, figures.p90), (99, figures.p99)):
        assert ordered[rank(len(ordered), percent)] == value


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0, 400.0]), max_size=40))
def test_gaps_and_rates_are_each_figures_of_their_own(gaps: list[float]) -> None:
    """There is a rate 1000 / gap for each gap that is not zero."""
    both = gaps_and_rates(array("d", gaps), Arithmetic())
    assert both == (Distribution.of(gaps), Distribution.of([1000 / gap for gap in gaps if gap]))
