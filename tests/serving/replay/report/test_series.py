"""The series of a replay, by interval."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay import Samples, make_report
from serving.replay.report import Series
from serving.replay.report.series import IntervalMeans
from serving.replay.samples import Status, count_sorted, interval_of


def series(samples: Samples) -> Series:
    made = make_report(samples).series
    assert made is not None
    return made


def request(
    samples: Samples, arrival: float, tokens: Sequence[float], end: float, status: Status = Status.COMPLETED
) -> None:
    sample = samples.arrived("r", arrival, input_tokens=100)
    sample.routed(len(samples.requests) % 2, arrival)
    sample.cached_tokens = 50
    for at in tokens:
        sample.tokens(at)
    samples.ended(sample, end, status)


def test_arrivals_ends_and_tokens_count_where_they_are() -> None:
    samples = Samples(interval_ms=100)
    request(samples, 0, [90, 99.9, 100, 250], 250)
    request(samples, 100, [140], 140, Status.FAILED)
    made = series(samples)
    assert (made.arrivals, made.completions) == ([1, 1, 0], [0, 0, 1])
    assert made.output_tok_s == [20.0, 20.0, 1 / 0.05]
    assert made.running == [1.0, 1.4, 1.0]
    assert made.mean_ttft_ms == made.p99_ttft_ms == [90.0, None, None]


def test_each_worker_has_its_load_and_hit_rate() -> None:
    samples = Samples(interval_ms=100)
    samples.worker_joined(2, 0)
    request(samples, 0, [90], 150)
    request(samples, 120, [130], 200)
    zero, one, two = series(samples).workers
    assert (zero.worker, zero.load, zero.hit_rate) == (0, [0.0, 0.8, 0.0], [None, 0.5, None])
    assert (one.worker, one.load, one.hit_rate) == (1, [1.0, 0.5, 0.0], [0.5, None, None])
    assert (two.worker, two.load, two.hit_rate) == (2, [0.0] * 3, [None] * 3)


def test_a_request_that_moves_loads_each_worker_for_its_time() -> None:
    samples = Samples(interval_ms=100)
    sample = samples.arrived("r", 0, input_tokens=1)
    sample.routed(0, 20)
    sample.routed(1, 60)
    samples.ended(sample, 100)
    zero, one = series(samples).workers
    assert (zero.load, one.load) == ([0.4, 0.0], [0.4, 0.0])


@pytest.mark.parametrize("interval_ms", [0, -1.0, math.inf, math.nan])
def test_an_interval_lasts_some_time(interval_ms: float) -> None:
    with pytest.raises(InvalidArgument):
        Samples(interval_ms=interval_ms)


def test_a_report_has_no_series_without_requests_or_if_switched_off() -> None:
    assert make_report(Samples(), series=False).series is None
    assert series(Samples()).arrivals == []


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=10),
    st.sampled_from([1.0, 7.5, 100.0]),
)
def test_interval_means_add_up_to_the_whole_time(spans: list[tuple[float, float]], width: float) -> None:
    lasting = IntervalMeans(width)
    for begin, length in spans:
        lasting.add(begin, begin + length)
    end = max(begin + length for begin, length in spans)
    intervals = int(end // width) + 1
    means = lasting.means(intervals, end)
    lasted = [min(width, end - at * width) for at in range(intervals)]
    total = sum(mean * time for mean, time in zip(means, lasted, strict=True))
    assert total == pytest.approx(sum(length for _, length in spans), abs=1e-6)
    assert all(-1e-6 <= mean <= len(spans) + 1e-6 for mean, time in zip(means, lasted, strict=True) if time > 1e-3)


@given(st.lists(st.floats(0, 1000), max_size=30), st.sampled_from([0.1, 7.5, 100.0, 5000.0]))
def test_times_in_order_are_counted_as_one_by_one(times: list[float], width: float) -> None:
    assert count_sorted(sorted(times), width) == Counter(interval_of(at, width) for at in times)


def test_a_replay_that_ends_with_an_interval_loses_no_token() -> None:
    samples = Samples(interval_ms=100)
    request(samples, 0, [50, 100], 100)
    made = series(samples)
    assert made.output_tok_s == [10.0, 10.0]
    assert made.running == [1.0, 0.0]
