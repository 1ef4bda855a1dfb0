"""Log probabilities of an engine's output: complete, or absent."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from engines.chunks import extract_logprobs
from pipeline.protocols import TopLogprob


@frozen
class Info:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@frozen
class Bare:
    logprob: float


POSITIONS = [{7: Info(-0.5, 2, "a"), 8: Info(-0.1, 1, "b")}, {9: Info(-1, 1)}]


def test_each_token_has_its_own_log_probability_and_its_candidates_by_likelihood() -> None:
    chosen, top = extract_logprobs(POSITIONS, [7, 9])
    assert chosen == [-0.5, -1.0]
    assert top == [[TopLogprob(1, 8, -0.1, "b"), TopLogprob(2, 7, -0.5, "a")], [TopLogprob(1, 9, -1.0)]]


def test_tokens_emitted_before_are_left_out() -> None:
    assert extract_logprobs(POSITIONS, [7, 9], emitted_tokens=1) == ([-1.0], [[TopLogprob(1, 9, -1.0)]])


@pytest.mark.parametrize(
    ("positions", "token_ids"),
    [
        (POSITIONS, [7, 5]),
        (POSITIONS, [5, 9]),
        ([POSITIONS[0], None], [7, 9]),
        ([POSITIONS[0], -0.5], [7, 9]),
        (POSITIONS[:1], [7, 9]),
        (POSITIONS, [7]),
        ([-0.5], [7, 9]),
        ([], []),
        (None, [7]),
    ],
)
def test_one_missing_log_probability_drops_them_all(positions: Any, token_ids: list[int]) -> None:
    assert extract_logprobs(positions, token_ids) == (None, None)


def test_plain_numbers_have_no_candidates() -> None:
    assert extract_logprobs([-0.5, -1], [7, 9]) == ([-0.5, -1.0], None)


def test_a_rank_that_is_not_given_is_the_place_by_likelihood() -> None:
    _, top = extract_logprobs([{1: Bare(-3.0), 2: Bare(-1.0), 3: Bare(-2.0)}], [1])
    assert top == [[TopLogprob(1, 2, -1.0), TopLogprob(2, 3, -2.0), TopLogprob(3, 1, -3.0)]]


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 3))), max_size=6), st.integers(0, 6))
def test_there_is_one_entry_for_each_new_token_or_nothing(steps: list[tuple[int, set[int]]], emitted: int) -> None:
    tokens = [token for token, _ in steps]
    chosen, top = extract_logprobs([{t: Bare(-float(t)) for t in known} for _, known in steps], tokens, emitted)
    new = steps[emitted:]
    if new and all(token in known for token, known in new):
        assert chosen == [-float(token) for token, _ in new]
        assert top is not None
        assert [{candidate.token_id for candidate in entry} for entry in top] == [known for _, known in new]
    else:
        assert (chosen, top) == (None, None)
