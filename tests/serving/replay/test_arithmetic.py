"""Arithmetic on many times: with numpy and without, the same bits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.replay.arithmetic import WORTH_TOKENS, Arithmetic, VectorArithmetic, rounded

PLAIN, VECTORS = Arithmetic(), VectorArithmetic(numpy)
VALUES = st.floats(0, 1e9) | st.integers(0, 10**13).map(lambda n: (n + 0.5) / 1e6) | st.sampled_from([0.0, 1e-9, 7.5])
MANY = st.lists(VALUES, max_size=80).map(lambda values: array("d", values))


def bits(values: Sequence[float]) -> list[str]:
    assert all(type(value) is float for value in values)
    return [value.hex() for value in values]


@given(st.lists(VALUES), st.sampled_from([6, 9]))
def test_many_values_are_rounded_as_each_alone(values: list[float], digits: int) -> None:
    assert rounded(values, digits) == [round(value, digits) for value in values]


@pytest.mark.parametrize("odd", [-1e-9, -0.5, 1e300, 2.0**52 + 0.5, float("inf")])
def test_values_beyond_exact_arithmetic_are_rounded_too(odd: float) -> None:
    assert list(map(repr, rounded([0.1234565, odd], 6))) == [repr(round(value, 6)) for value in (0.1234565, odd)]


@given(MANY, st.sampled_from([0.0, 0.1, 12.3456789]))
def test_times_since_the_beginning_are_the_same(times_s: array[float], began_s: float) -> None:
    assert bits(VECTORS.since_ms(times_s, began_s)) == bits(PLAIN.since_ms(times_s, began_s))


@given(MANY, st.sampled_from([6, 9]))
def test_rounded_times_are_the_same(times_ms: array[float], digits: int) -> None:
    assert bits(VECTORS.rounded(times_ms, digits)) == bits(PLAIN.rounded(times_ms, digits))


@given(st.lists(MANY, max_size=8), st.booleans())
def test_gaps_of_many_requests_are_the_same_also_between_times_that_are_not_in_order(
    requests: list[array[float]], are_in_order: bool
) -> None:
    if are_in_order:
        requests = [array("d", sorted(times_ms)) for times_ms in requests]
    together = array("d", chain.from_iterable(requests))
    ends = list(accumulate(map(len, requests)))
    gaps = [round(later - time, 9) for times_ms in requests for time, later in pairwise(times_ms)]
    assert bits(PLAIN.gaps_ms(together, ends)) == bits(gaps)
    assert bits(VECTORS.gaps_ms(together, ends)) == bits(gaps)


@given(MANY, VALUES)
def test_order_squares_and_rates_are_the_same(values: array[float], mean: float) -> None:
    assert bits(VECTORS.ordered(values)) == bits(PLAIN.ordered(values))
    assert bits(list(VECTORS.squares(values, mean))) == bits(list(PLAIN.squares(values, mean)))
    positive = array("d", (value for value in values if value >= 1e-9))  # gaps are of whole picoseconds
    assert bits(VECTORS.rates(positive)) == bits(PLAIN.rates(positive))


def test_numpy_is_imported_for_many_tokens_only_and_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(Arithmetic.of(WORTH_TOKENS)) is VectorArithmetic
    assert type(Arithmetic.of(WORTH_TOKENS - 1)) is Arithmetic
    monkeypatch.setattr("serving.replay.arithmetic._numpy", lambda: None)
    assert type(Arithmetic.of(WORTH_TOKENS)) is Arithmetic
