"""What the passes of an engine take is found from their times, and only where it can be told."""

from __future__ import annotations

from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import pass_rates
from engines.pass_rates import CHANGE, EVERY_S, LEAST, LONGEST, RECENT, PassMeter
from pipeline.protocols.kv import PassRates

Rates = tuple[float, float, float, float]
"""Nanoseconds of a pass with prompts, of each of their tokens, of a step of answers, of each token in use."""
USUAL: Rates = (16_500_000, 15_000, 5_740_000, 51.5)


def time_ns(rates: Rates, prompt_tokens: int, held_tokens: int | None) -> int:
    a_pass, prompt_token, step, held_token = rates
    time = a_pass + prompt_token * prompt_tokens if prompt_tokens else 0.0
    return round(time if held_tokens is None else time + step + held_token * held_tokens)


def run(meter: PassMeter, rates: Rates, passes: int, seed: int = 0, noise: float = 0.0) -> None:
    """Passes of every kind: with prompts, with a step of answers, with both."""
    rng = Random(seed)
    for _ in range(passes):
        prompt, held = rng.choice([0, rng.randrange(1, 8192)]), rng.choice([None, rng.randrange(200_000)])
        time = time_ns(rates, prompt, held) * rng.uniform(1 - noise, 1 + noise)
        meter.passed(round(time), prompt, held)


def found(meter: PassMeter, now_s: float = 0.0) -> PassRates:
    rates = meter.news(now_s)
    assert rates is not None
    return rates


def close(rates: Rates, part: float) -> Any:
    """The rates of a report that differs from these by that part of each at most."""
    return PassRates(*(pytest.approx(1000 * each, rel=part) for each in rates))  # type: ignore[arg-type]


engines = st.tuples(st.floats(1e5, 1e8), st.floats(500, 1e6), st.floats(1e5, 1e8), st.floats(1, 1e3))


@settings(max_examples=40)
@given(engines, st.integers(0, 2**32))
def test_the_rates_of_any_engine_are_found(rates: Rates, seed: int) -> None:
    meter = PassMeter()
    for second in range(4):
        run(meter, rates, 400, seed + second)
        news = meter.news(second * EVERY_S)
        if second == 0:
            assert news is not None, "of steps at least"
    meter._reported = PassRates()
    assert found(meter, 100.0) == close(rates, 0.05)


@settings(max_examples=40)
@given(engines, engines, st.integers(0, 2**32))
def test_passes_of_before_are_forgotten(before: Rates, now: Rates, seed: int) -> None:
    """Also where all of them take many times as long or short as before."""
    meter = PassMeter()
    with patch.object(pass_rates, "RECENT", 64):
        run(meter, before, 400, seed)
        meter.news(0.0)
        for second in range(1, 16):
            run(meter, now, 400, seed + second)
            meter.news(float(second))
        meter._reported = PassRates()
        assert found(meter, 100.0) == close(now, 0.05)


def test_times_that_vary_by_chance_are_averaged() -> None:
    meter = PassMeter()
    for second in range(6):
        run(meter, USUAL, 1000, second, noise=0.2)
        meter.news(float(second))
    meter._reported = PassRates()
    assert found(meter, 100.0) == close(USUAL, 0.2)


@pytest.mark.parametrize(("prompt_tokens", "held_tokens"), [(2048, None), (0, 50_000), (2048, 50_000)])
def test_of_passes_that_are_alike_nothing_is_reported(prompt_tokens: int, held_tokens: int | None) -> None:
    meter = PassMeter()
    for second in range(5):
        for _ in range(200):
            meter.passed(time_ns(USUAL, prompt_tokens, held_tokens), prompt_tokens, held_tokens)
        assert meter.news(float(second)) is None


def test_of_few_passes_nothing_is_reported() -> None:
    meter = PassMeter()
    for tokens in range(1, LEAST):
        meter.passed(time_ns(USUAL, 100 * tokens, None), 100 * tokens, None)
        meter.passed(time_ns(USUAL, 0, 1000 * tokens), 0, 1000 * tokens)
    assert meter.news(0.0) is None


def test_times_that_have_another_reason_are_not_reported() -> None:
    meter, rng = PassMeter(), Random(1)
    for _ in range(300):
        meter.passed(rng.choice([10**6, 10**9]), rng.randrange(1000, 2000), None)
    assert meter.news(0.0) is None


def test_a_worker_that_only_computes_prompts_reports_what_these_take() -> None:
    meter = PassMeter()
    for tokens in range(100, 8100, 100):
        meter.passed(time_ns(USUAL, tokens, None), tokens, None)
    assert found(meter) == PassRates(pytest.approx(1.65e10), pytest.approx(1.5e7))  # type: ignore[arg-type]


def test_a_worker_that_only_writes_answers_reports_what_steps_take() -> None:
    meter = PassMeter()
    for tokens in range(1000, 81_000, 1000):
        meter.passed(time_ns(USUAL, 0, tokens), 0, tokens)
    step, held = pytest.approx(5.74e9), pytest.approx(51_500, rel=1e-3)
    assert found(meter) == PassRates(step_ps=step, held_token_ps=held)  # type: ignore[arg-type]


def test_a_step_that_takes_as_long_however_much_is_held_reads_for_nothing() -> None:
    meter = PassMeter()
    for tokens in range(1000, 81_000, 1000):
        meter.passed(7_000_000, 0, tokens)
    assert found(meter) == PassRates(step_ps=7_000_000_000, held_token_ps=0)


def test_one_pass_that_waits_for_something_counts_as_a_few_times_its_time() -> None:
    meter = PassMeter()
    run(meter, USUAL, 2000)
    meter.news(0.0)
    run(meter, USUAL, 500, 1)
    meter.passed(60 * 10**9, 3000, 50_000)
    run(meter, USUAL, 500, 2)
    meter.news(1.0)
    meter._reported = PassRates()
    assert found(meter, 2.0) == close(USUAL, 0.02 * LONGEST)


@pytest.mark.parametrize("time", [0, -5])
def test_a_pass_that_took_no_time_is_left_out(time: int) -> None:
    meter = PassMeter()
    for tokens in range(100):
        meter.passed(time, tokens, 10 * tokens)
    assert meter.news(0.0) is None


def test_rates_are_fitted_once_a_second_and_reported_when_they_have_changed() -> None:
    meter = PassMeter()
    assert meter.news(0.0) is None
    run(meter, USUAL, 3000)
    assert meter.news(0.9 * EVERY_S) is None
    assert meter.news(1.0) is not None
    slower = tuple(rate * (1 + CHANGE / 2) for rate in USUAL)
    for second in range(2, 6):
        run(meter, slower, 3000, second)  # type: ignore[arg-type]
        assert second == 2 or meter.news(float(second)) is None
    slower = tuple(rate * (1 + 4 * CHANGE) for rate in USUAL)
    run(meter, slower, 3000)  # type: ignore[arg-type]
    assert meter.news(7.0) is not None


def test_what_is_no_longer_known_is_reported_as_it_was() -> None:
    meter = PassMeter()
    run(meter, USUAL, 3000)
    meter.news(0.0)
    run(meter, USUAL, 3000)
    first = meter.news(1.0) or meter._reported
    for second in range(2, 6):
        for tokens in range(1000, 1000 + RECENT):
            meter.passed(2 * time_ns(USUAL, 0, tokens * 10), 0, tokens * 10)
            meter.passed(2 * time_ns(USUAL, 2048, None), 2048, None)
        meter.news(float(second))
    now = meter._reported
    assert (now.pass_ps, now.prompt_token_ps) == (first.pass_ps, first.prompt_token_ps)
    assert now.held_token_ps == pytest.approx(2 * 51_500, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 10**6)), min_size=1, max_size=60), st.integers(1, 7))
def test_steps_count_the_same_one_by_one_and_many_at_once(steps: list[tuple[int, int]], at_once: int) -> None:
    one, other = PassMeter(), PassMeter()
    for turn in range(4):
        for time, held in steps:
            for _ in range(at_once):
                one.passed(time, 0, held)
            other.stepped([time] * at_once, held)
        assert one.news(float(turn)) == other.news(float(turn))
        assert one._steps.sums == other._steps.sums
