"""Output of a simulated model: made up, thinking, planned; and how many tokens a step yields."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.mocker import ReasoningArgs
from engines.mocker.scheduling import Burst, Sequence, accept_rates
from engines.mocker.tokens import Output, thinking_tokens
from pipeline import InvalidArgument

START, END = 7, 8


def thinking(ratio: float) -> ReasoningArgs:
    return ReasoningArgs(start_thinking_token_id=START, end_thinking_token_id=END, thinking_ratio=ratio)


def generated(prompt: list[int], count: int, output: Output) -> list[int]:
    return Sequence(prompt, count, block_size=4, output=output).output_tokens(0, count)


prompts = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)


@given(prompts, st.integers(0, 2**64), st.integers(1, 40), st.data())
def test_a_request_that_moved_goes_on_as_if_it_had_stayed(
    prompt: list[int], seed: int, count: int, data: st.DataObject
) -> None:
    whole = generated(prompt, count, Output(seed))
    at = data.draw(st.integers(0, count))
    assert generated(prompt + whole[:at], count - at, Output(seed)) == whole[at:]


@given(prompts, st.floats(0, 1), st.integers(1, 20), st.data())
def test_a_thinking_request_that_moved_goes_on_as_if_it_had_stayed(
    prompt: list[int], ratio: float, count: int, data: st.DataObject
) -> None:
    whole = generated(prompt, count, Output.thought(thinking(ratio), count, seed=5))
    at = data.draw(st.integers(0, count))
    rest = Output.thought(thinking(ratio), count - at, emitted_before_tokens=at, seed=5)
    assert generated(prompt + whole[:at], count - at, rest) == whole[at:]


@given(prompts, st.integers(0, 2**64), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=2))
def test_a_token_follows_from_its_place_the_token_before_and_the_request(
    prompt: list[int], seed: int, replaced: list[tuple[int, int]]
) -> None:
    prime, last, expected = 998_244_353, prompt[-1], list[int]()
    factor = 1 + (prompt[0] * 411_208_127 + seed) % (prime - 1)
    for at in range(10):
        last = 1000 + ((at + len(prompt)) * 592_821_211 + last * 735_632_797) % prime * factor % prime % 1000
        last = dict(replaced).get(at, last)
        expected.append(last)
    assert generated(prompt, 10, Output(seed, thinking=tuple(replaced))) == expected


def test_tokens_do_not_depend_on_how_they_are_drawn() -> None:
    whole = generated([1, 2, 3], 20, Output(9))
    sequence = Sequence([1, 2, 3], 20, block_size=4, output=Output(9))
    assert sequence.output_tokens(15, 20) == whole[15:]
    assert sequence.output_tokens(0, 20) == whole


def test_made_up_tokens_are_of_the_range_and_vary() -> None:
    tokens = generated([1], 5000, Output())
    assert set(tokens) <= set(range(1000, 2000))
    assert len(set(tokens)) > 900
    assert tokens[:100] != tokens[100:200]
    assert set(generated([1], 500, Output(token_ids=range(10, 20, 2)))) == {10, 12, 14, 16, 18}


@pytest.mark.parametrize("other", [([2, 2, 3], 0), ([1, 2, 4], 0), ([1, 2, 3, 3], 0), ([1, 2, 3], 1)])
def test_tokens_depend_on_both_ends_of_the_prompt_its_length_and_the_seed(other: tuple[list[int], int]) -> None:
    prompt, seed = other
    assert generated(prompt, 20, Output(seed)) != generated([1, 2, 3], 20, Output(0))


@pytest.mark.parametrize(
    ("output_tokens", "ratio", "count"),
    [(0, 1, 0), (1, 1, 0), (2, 1, 2), (10, 0, 0), (10, 0.09, 0), (10, 0.1, 2), (10, 0.55, 5), (10, 1, 10), (3, 0.5, 2)],
)
def test_thinking_is_a_part_of_the_output_of_at_least_its_two_borders(
    output_tokens: int, ratio: float, count: int
) -> None:
    assert thinking_tokens(output_tokens, ratio) == count


def test_thinking_begins_and_ends_with_its_tokens() -> None:
    tokens = generated([1], 10, Output.thought(thinking(0.5), 10))
    assert (tokens[0], tokens[4]) == (START, END)
    assert not {START, END} & {*tokens[1:4], *tokens[5:]}


def test_without_thinking_nothing_is_replaced() -> None:
    assert generated([1], 10, Output.thought(thinking(0), 10)) == generated([1], 10, Output())


def test_planned_tokens_are_emitted_unchanged() -> None:
    assert generated([1], 3, Output(planned=[5, 6, 7, 8])) == [5, 6, 7]


def test_a_plan_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        Sequence([1], 3, block_size=4, output=Output(planned=[5, 6]))


def test_every_draft_of_rate_one_is_accepted_and_none_behind_one_of_rate_zero() -> None:
    assert Burst((1.0, 1.0), Random(1)).draw(10) == 3
    assert Burst((0.0, 1.0), Random(1)).draw(10) == 1
    assert Burst((1.0, 0.0, 1.0), Random(1)).draw(10) == 2


def test_a_burst_ends_with_the_output() -> None:
    assert Burst((1.0, 1.0), Random(1)).draw(2) == 2


def test_burst_lengths_follow_their_rates() -> None:
    burst = Burst((0.7, 0.5, 0.2), Random(42))
    mean = sum(burst.draw(10) for _ in range(20_000)) / 20_000
    assert mean == pytest.approx(1 + 0.7 + 0.7 * 0.5 + 0.7 * 0.5 * 0.2, abs=0.03)


def test_equal_seeds_draw_equal_bursts() -> None:
    left, right = (Burst((0.5, 0.5), Random(3)) for _ in range(2))
    assert [left.draw(9) for _ in range(50)] == [right.draw(9) for _ in range(50)]


@pytest.mark.parametrize(
    ("drafts", "text", "rates"),
    [
        (3, None, (0.85, 0.3, 0)),
        (3, " ", (0.85, 0.3, 0)),
        (1, None, (0.85,)),
        (3, "1, 0.5", (1, 0.5, 0)),
        (2, "1,0.5,0.25", (1, 0.5)),
    ],
)
def test_rates_are_filled_up_with_zeros_and_cut(drafts: int, text: str | None, rates: tuple[float, ...]) -> None:
    assert accept_rates(drafts, text) == rates
