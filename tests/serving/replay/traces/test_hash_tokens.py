"""Hash ids in the tokens of a model: equal blocks stay equal, different ones differ."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import InvalidArgument
from serving.replay import Prompt, SyntheticLoad
from serving.replay.traces import hash_tokens

HASH_IDS = st.integers(0, 2**32 - 1)
VOCABULARIES = st.builds(lambda first, size: range(first, first + size), st.integers(0, 2000), st.integers(2, 40_000))


@settings(max_examples=60, deadline=None)
@given(st.sets(HASH_IDS, min_size=2, max_size=20), VOCABULARIES, st.integers(32, 600))
def test_a_block_depends_on_its_hash_id_only(hash_ids: set[int], vocabulary: range, tokens: int) -> None:
    """Of the given length, in the vocabulary, the same each time; any two differ in their first 32 tokens."""
    blocks = [hash_tokens(hash_id, tokens, vocabulary) for hash_id in sorted(hash_ids)]
    assert blocks == [hash_tokens(hash_id, tokens, vocabulary) for hash_id in sorted(hash_ids)]
    assert all(len(block) == tokens and set(block) <= set(vocabulary) for block in blocks)
    assert len({tuple(block[:32]) for block in blocks}) == len(blocks)


def test_blocks_differ_in_their_first_three_tokens_in_a_vocabulary_of_some_size() -> None:
    few = range(1000, 2626)
    for one, other in [(7, 7 + 1626), (7, 7 + 1626**2), (0, 2**32 - 1)]:
        assert hash_tokens(one, 16, few)[:3] != hash_tokens(other, 16, few)[:3]
    assert hash_tokens(7, 512, few)[0] != hash_tokens(8, 512, few)[0]


def test_a_block_does_not_repeat_one_token() -> None:
    assert len(set(hash_tokens(5, 512, range(1000, 32_000)))) > 450


def test_a_prompt_keeps_its_length_and_its_shared_blocks() -> None:
    vocabulary = range(1000, 32_000)
    plain = [Prompt(array("I", ids), 1100, 512) for ids in ([1, 2, 3], [1, 2, 4])]
    one, other = (Prompt(p.hash_ids, p.tokens, 512, vocabulary).token_ids() for p in plain)
    assert len(one) == len(other) == 1100
    assert one[:1024] == other[:1024]
    assert one[1024] != other[1024]


def test_a_spelled_trace_is_the_same_trace() -> None:
    made = SyntheticLoad(input_tokens=100, output_tokens=5, request_count=3, turns=2, arrival_interval_ms=1.0).make()
    translated = made.with_vocabulary(range(32, 127))
    assert (translated.requests, translated.input_tokens, translated.output_tokens) == (6, 600, 30)
    assert [one.arrival_ms for one in translated.sessions] == [one.arrival_ms for one in made.sessions]
    tokens = [turn.prompt.token_ids() for one in translated.sessions for turn in one.turns]
    assert all(set(ids) <= set(range(32, 127)) for ids in tokens)


@pytest.mark.parametrize("vocabulary", [range(5, 6), range(0), range(-3, 9), range(9, 3, -1), range(2**32, 2**33)])
def test_a_vocabulary_has_two_tokens_at_least(vocabulary: range) -> None:
    made = SyntheticLoad(input_tokens=4, output_tokens=5, request_count=1, arrival_interval_ms=1.0).make()
    with pytest.raises(InvalidArgument):
        made.with_vocabulary(vocabulary)
