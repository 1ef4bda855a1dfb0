"""Sequence: tokens into blocks, blocks into the pool, and back."""

from __future__ import annotations

from typing import Any

import pytest

from engines.mocker.scheduling import BlockPool, Sequence
from engines.mocker.tokens import Output
from pipeline import ContractViolation, InvalidArgument
from pipeline.llm import block_hashes, sequence_hashes
from pipeline.protocols.kv import KvEventData, KvStored

BLOCK = 16


def setting(tokens: int, max_output_tokens: int = 100) -> tuple[Sequence, BlockPool, list[KvEventData]]:
    events: list[KvEventData] = []
    return Sequence(range(tokens), max_output_tokens, block_size=BLOCK), BlockPool(20, events.append), events


def compute(sequence: Sequence, pool: BlockPool, tokens: int | None = None) -> None:
    """Compute the sequence as a pass does."""
    sequence.computed = sequence.length if tokens is None else tokens
    assert sequence.allocate(pool, sequence.computed)
    sequence.publish(pool)


def parents(events: list[KvEventData]) -> list[int | None]:
    return [event.parent_hash for event in events if isinstance(event, KvStored)]


def test_an_incomplete_block_is_a_nameless_one() -> None:
    sequence, pool, events = setting(15)
    compute(sequence, pool)
    assert (len(sequence.blocks), pool.names(), events) == (1, set(), [])


def test_the_token_that_fills_a_block_takes_no_new_block() -> None:
    sequence, pool, _ = setting(15)
    compute(sequence, pool)
    sequence.generate()
    compute(sequence, pool)
    assert len(sequence.blocks) == 1


def test_a_block_gets_its_name_when_it_is_computed_below_the_one_before_it() -> None:
    """With 49 tokens the fourth block begins; the third is named as a child of the second."""
    sequence, pool, events = setting(15)
    compute(sequence, pool)
    while sequence.length < 3 * BLOCK + 1:
        sequence.generate()
        compute(sequence, pool)
    names = sequence.names(3)
    assert parents(events) == [None, names[0], names[1]]
    assert len(sequence.blocks) == 4


def test_taking_a_token_back_takes_back_the_block_it_began() -> None:
    sequence, pool, _ = setting(BLOCK)
    compute(sequence, pool)
    sequence.generate()
    compute(sequence, pool)
    assert (len(sequence.blocks), pool.active) == (2, 2)
    sequence.pop(pool)
    assert (sequence.length, len(sequence.blocks), pool.active) == (BLOCK, 1, 1)
    sequence.generate()
    compute(sequence, pool)
    assert len(sequence.blocks) == 2
    pool.check()


def test_a_prompt_cannot_be_taken_back() -> None:
    sequence, pool, _ = setting(3)
    with pytest.raises(ContractViolation):
        sequence.pop(pool)


def test_tokens_within_a_block_change_nothing_in_the_pool() -> None:
    """A sequence of 14 tokens gets two more."""
    sequence, pool, events = setting(14, 5)
    compute(sequence, pool)
    for _ in range(2):
        sequence.generate()
    assert (sequence.missing_blocks(sequence.length), events) == (0, [])


def test_the_first_token_of_a_block_names_the_one_before_it_and_takes_the_next() -> None:
    """A sequence of 14 tokens gets three more."""
    sequence, pool, events = setting(14, 5)
    compute(sequence, pool)
    for _ in range(3):
        sequence.generate()
    assert sequence.missing_blocks(sequence.length) == 1
    compute(sequence, pool)
    assert [type(event) for event in events] == [KvStored]
    assert (len(sequence.blocks), pool.active) == (2, 2)


def test_blocks_are_given_back_from_the_last_to_the_first() -> None:
    sequence, pool, _ = setting(2 * BLOCK + 3)
    compute(sequence, pool)
    names = sequence.names(2)
    sequence.free(pool)
    assert (pool.active, pool.inactive, sequence.blocks) == (0, 2, [])
    assert [pool.evict(), pool.evict()] == [names[1], names[0]]


def test_tokens_handed_on_before_a_preemption_are_not_handed_on_again() -> None:
    sequence, pool, _ = setting(10, 9)
    compute(sequence, pool)
    assert [sequence.generate() for _ in range(7)] == [1] * 7
    before = sequence.output_tokens()
    sequence.reset(pool)
    assert (sequence.length, sequence.emitted, pool.active) == (10, 7, 0)
    assert [sequence.generate() for _ in range(9)] == [0] * 7 + [1, 1]
    assert sequence.output_tokens()[:7] == before


def test_of_a_burst_over_the_border_only_the_new_tokens_are_handed_on() -> None:
    sequence, pool, _ = setting(10, 9)
    sequence.generate(3)
    sequence.reset(pool)
    assert (sequence.generate(2), sequence.generate(3)) == (0, 2)
    assert sequence.new_token_ids() == sequence.output_tokens(3, 5)


def test_more_tokens_than_allowed_are_an_error_of_the_program() -> None:
    sequence, _, _ = setting(10, 2)
    sequence.generate(2)
    assert sequence.length == sequence.end
    with pytest.raises(ContractViolation):
        sequence.generate()


def test_names_are_the_chained_hashes_of_prompt_and_output() -> None:
    sequence, _, _ = setting(20, 60)
    tokens = [*range(20), *sequence.output_tokens(0, 60)]
    assert sequence.names(1) == sequence_hashes(block_hashes(tokens, BLOCK))[:1], "of the prompt first"
    assert sequence.names(5) == sequence_hashes(block_hashes(tokens, BLOCK))
    assert sequence.token_hashes(5) == block_hashes(tokens, BLOCK)
    assert sequence.block_tokens(1, 3) == tokens[16:48]
    assert sequence.block_tokens(2, 4) == tokens[32:64]


@pytest.mark.parametrize("prompt_tokens", [3, 16, 20])
@pytest.mark.parametrize("max_output_tokens", [1, 40, 600])
def test_output_that_is_hashed_ahead_is_emitted_as_it_is_without(prompt_tokens: int, max_output_tokens: int) -> None:
    def emitted(hashes_ahead: bool) -> list[int]:
        sequence, tokens = Sequence(range(prompt_tokens), max_output_tokens, block_size=BLOCK), list[int]()
        for _ in range(max_output_tokens):
            sequence.generate()
            if hashes_ahead:
                whole = (sequence.length - 1) // BLOCK
                assert len(sequence.names(whole)) == whole
            tokens += sequence.new_token_ids()
        known = [*range(prompt_tokens), *tokens]
        assert sequence.token_hashes(len(known) // BLOCK) == block_hashes(known, BLOCK)
        return tokens

    assert emitted(True) == emitted(False)


def test_planned_output_is_hashed_no_further_than_it_goes() -> None:
    planned = list(range(30))
    sequence = Sequence(range(4), 30, block_size=BLOCK, output=Output(planned=planned))
    assert sequence.names(1) == sequence_hashes(block_hashes([*range(4), *planned], BLOCK))[:1]
    assert sequence.names(2) == sequence_hashes(block_hashes([*range(4), *planned], BLOCK))


def test_another_hash_seed_gives_other_names() -> None:
    assert Sequence(range(16), 1, block_size=16, hash_seed=5).names(1) != Sequence(range(16), 1, block_size=16).names(1)


@pytest.mark.parametrize(("tokens", "reusable"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_block_of_the_last_token_is_always_computed(tokens: int, reusable: int) -> None:
    assert setting(tokens)[0].reusable_blocks() == reusable


def test_a_sequence_without_output_may_come_from_the_cache_as_a_whole() -> None:
    assert setting(32, 0)[0].reusable_blocks() == 2


def test_too_few_blocks_change_nothing() -> None:
    sequence = Sequence(range(40), 1, block_size=BLOCK)
    pool = BlockPool(2)
    assert not sequence.allocate(pool, 40)
    assert (sequence.blocks, pool.active) == ([], 0)


@pytest.mark.parametrize(("prompt", "max_output_tokens"), [([], 1), ([1], -1)])
def test_no_prompt_and_a_negative_output_are_refused(prompt: list[int], max_output_tokens: int) -> None:
    with pytest.raises(InvalidArgument):
        Sequence(prompt, max_output_tokens, block_size=4)


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, None])
@pytest.mark.parametrize("field", ["token_ids", "output_token_ids"])
def test_an_invalid_token_is_refused_at_submission_and_not_in_a_pass_with_others(field: str, token: Any) -> None:
    tokens = {"token_ids": [1, 2], "output_token_ids": [3, 4], field: [5, token]}
    with pytest.raises(InvalidArgument) as caught:
        Sequence(tokens["token_ids"], 1, block_size=4, output=Output(planned=tokens["output_token_ids"]))
    assert caught.value.field == field


def test_a_sequence_carries_what_its_owner_gave_it() -> None:
    owner = object()
    sequence = Sequence([1], 1, block_size=4, owner=owner, dp_rank=3, output=Output(1))
    assert (sequence.owner, sequence.dp_rank) == (owner, 3)


def test_a_prompt_that_is_hashed_in_pieces_has_the_hashes_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(1, 1000))
    for block_size in (1, 7, 64, 999, 1000):
        whole = Sequence(prompt, 5, block_size=block_size)
        blocks = len(prompt) // block_size
        for at_once in (1, 10, 64, 500, 5000):
            monkeypatch.setattr("engines.mocker.scheduling.sequence.AT_ONCE_TOKENS", at_once)
            pieces = Sequence(prompt, 5, block_size=block_size)
            for _ in range(-(-blocks // max(1, at_once // block_size)) - 1):
                assert pieces.hash_some()
            assert not pieces.hash_some()
            assert pieces.names(blocks) == whole.names(blocks)
            assert pieces.token_hashes(blocks) == whole.token_hashes(blocks)
