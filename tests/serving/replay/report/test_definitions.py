"""Every figure of a report against its definition, computed from the tokens of a replay in the plainest way."""

from __future__ import annotations

import statistics
from fractions import Fraction
from itertools import pairwise
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replay import Limits, Report, Samples, make_report

LIMITS = Limits(ttft_ms=40.0, itl_ms=6.0, e2e_ms=90.0)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 60), st.lists(st.integers(0, 12), max_size=9), st.integers(0, 300)),
    min_size=1,
    max_size=12,
)
"""For each request: arrival, time to its first token, gaps between tokens and time after the last; in ms."""


def replayed(requests: list[tuple[int, int, list[int], int]], limits: Limits | None) -> tuple[Report, list[list[int]]]:
    """The report, and the token times of each request; every third one has none."""
    samples, tokens = Samples(), list[list[int]]()
    samples.worker_joined(0, 0)
    for at, (arrival, first, gaps, behind) in enumerate(requests):
        times = [] if at % 3 == 2 else [arrival + first + sum(gaps[:index]) for index in range(len(gaps) + 1)]
        sample = samples.arrived(str(at), arrival, input_tokens=100)
        sample.cached_tokens, sample.first_cached_tokens = 10 * (at % 4), 5 * (at % 3)
        for time in times:
            sample.tokens(time)
        samples.ended(sample, (times[-1] if times else arrival) + behind)
        tokens.append(times)
    return make_report(samples, limits=limits, gpus_per_worker=2), tokens


def figures(samples: list[float]) -> dict[str, float]:
    """Percentiles by the rounded index, a half up; the deviation of the population."""
    if not samples:
        return dict.fromkeys(("mean", "min", "max", "median", "p75", "p90", "p95", "p99", "std"), 0.0)
    ordered = sorted(samples)
    ranks = {"median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}
    found = {
        name: ordered[floor(Fraction((len(ordered) - 1) * percent, 100) + Fraction(1, 2))]
        for name, percent in ranks.items()
    }
    spread = {"mean": statistics.fmean(samples), "std": statistics.pstdev(samples)}
    return found | spread | {"min": ordered[0], "max": ordered[-1]}


@given(REQUESTS)
def test_every_distribution_is_that_of_its_name(requests: list[tuple[int, int, list[int], int]]) -> None:
    report, tokens = replayed(requests, None)
    arrivals = [arrival for arrival, *_ in requests]
    spoken = [(arrival, times) for arrival, times in zip(arrivals, tokens, strict=True) if times]
    gaps = [float(later - one) for _, times in spoken for one, later in pairwise(times)]
    wanted: dict[str, list[float]] = {
        "ttft_ms": [times[0] - arrival for arrival, times in spoken],
        "ttst_ms": [times[1] - times[0] for _, times in spoken if len(times) > 1],
        "tpot_ms": [(times[-1] - times[0]) / (len(times) - 1) for _, times in spoken if len(times) > 1],
        "itl_ms": gaps,
        "e2e_latency_ms": [times[-1] - arrival for arrival, times in spoken],
        "output_token_throughput_per_user": [1000 / gap for gap in gaps if gap],
    }
    plain = report.to_plain()
    for name, samples in wanted.items():
        for figure, value in figures([float(one) for one in samples]).items():
            assert plain[f"{figure}_{name}"] == pytest.approx(value, rel=1e-9, abs=1e-9), f"{figure}_{name}"
    assert plain["max_itl_ms"] == max(gaps, default=0.0)


@given(REQUESTS)
def test_every_count_and_rate_is_that_of_its_name(requests: list[tuple[int, int, list[int], int]]) -> None:
    """A request without tokens lasts until its end, and counts as good by that time only."""
    report, tokens = replayed(requests, LIMITS)
    ends = [
        (times[-1] if times else arrival) + behind
        for (arrival, *_, behind), times in zip(requests, tokens, strict=True)
    ]
    seconds = max(ends) / 1000
    answered, count = sum(map(len, tokens)), len(requests)

    def per_second(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    wanted = {
        "num_requests": count,
        "completed_requests": count,
        "total_input_tokens": 100 * count,
        "total_output_tokens": answered,
        "processed_tokens": 100 * count + answered,
        "duration_ms": max(ends),
        "request_throughput_rps": per_second(count),
        "input_throughput_tok_s": per_second(100 * count),
        "output_throughput_tok_s": per_second(answered),
        "total_throughput_tok_s": per_second(100 * count + answered),
        "prefix_cache_reused_ratio": sum(10 * (at % 4) for at in range(count)) / (100 * count),
        "first_admission_prefix_cache_reused_ratio": sum(5 * (at % 3) for at in range(count)) / (100 * count),
        "worker_seconds": seconds,
        "gpu_hours": seconds * 2 / 3600,
    }
    good = [
        times
        for (arrival, *_), times in zip(requests, tokens, strict=True)
        if times
        and times[0] - arrival <= 40
        and times[-1] - arrival <= 90
        and (len(times) < 2 or (times[-1] - times[0]) / (len(times) - 1) <= 6)
    ]
    wanted |= {
        "goodput_completed_requests": len(good),
        "goodput_request_throughput_rps": per_second(len(good)),
        "goodput_output_throughput_tok_s": per_second(sum(map(len, good))),
    }
    plain = report.to_plain()
    assert {name: plain[name] for name in wanted} == pytest.approx(wanted)
    whole_times = [
        (times[-1] if times else end) - arrival
        for (arrival, *_), times, end in zip(requests, tokens, ends, strict=True)
    ]
    goodput = replayed(requests, Limits(e2e_ms=90.0))[0].goodput
    assert goodput is not None
    assert goodput.completed_requests == sum(time <= 90 for time in whole_times)
