"""The index of our own routing: what was sent where, for how long, and how much of it."""

from __future__ import annotations

import tracemalloc
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv import PromptBlocks, WorkerRank
from operators.kv.index import PredictedIndex
from pipeline import InvalidArgument

A, A1, B = WorkerRank(7), WorkerRank(7, 1), WorkerRank(8)


def record(index: PredictedIndex, rank: WorkerRank, local: list[int], now_s: float) -> None:
    index.record(rank, local, now_s)


def test_a_prompt_is_expected_where_it_was_sent() -> None:
    index, prompt = PredictedIndex(), PromptBlocks([1, 2, 3, 4], 4, "adapter-a")
    index.record(A, prompt.local_hashes, 0.0)
    assert index.find_matches(prompt.local_hashes, 1.0) == {A: 1}
    assert index.find_matches(PromptBlocks([1, 2, 3, 4], 4).local_hashes, 1.0) == {}


def test_a_block_is_forgotten_after_its_time_rounded_up() -> None:
    index = PredictedIndex(ttl_s=0.025)
    record(index, A, [1], 0.0)
    assert index.find_matches([1], 0.099) == {A: 1}
    assert index.find_matches([1], 0.15) == {}
    index = PredictedIndex()
    record(index, A, [1], 0.3)
    assert index.find_matches([1], 120.29) == {A: 1}
    assert index.find_matches([1], 120.31) == {}


def test_without_time_nothing_is_kept() -> None:
    index = PredictedIndex(ttl_s=0.0)
    record(index, A, [1, 2], 0.0)
    assert index.find_matches([1], 0.0) == {}


def test_a_prompt_that_begins_alike_renews_the_beginning_only() -> None:
    index = PredictedIndex(ttl_s=10.0)
    record(index, A, [1, 2, 3], 0.0)
    record(index, A, [1, 2, 4], 6.0)
    record(index, B, [1], 6.0)
    assert index.find_matches([1, 2, 3], 9.0) == {A: 3, B: 1}
    assert index.find_matches([1, 2, 3], 11.0) == {A: 2, B: 1}
    assert index.find_matches([1, 2, 4], 15.0) == {A: 3, B: 1}
    assert index.find_matches([1, 2, 4], 16.1) == {}


def test_a_record_never_shortens_a_life() -> None:
    index = PredictedIndex(ttl_s=10.0)
    record(index, A, [1], 5.0)
    record(index, A, [1], 1.0)
    assert index.find_matches([1], 14.9) == {A: 1}


def test_removing_a_rank_or_a_worker_leaves_the_others() -> None:
    index = PredictedIndex(ttl_s=10.0)
    for rank in (A, A1, B):
        record(index, rank, [1, 2], 0.0)
    index.remove_rank(A)
    assert index.find_matches([1, 2], 1.0) == {A1: 2, B: 2}
    record(index, A, [1, 2], 5.0)
    assert index.find_matches([1, 2], 11.0) == {A: 2}
    record(index, B, [1], 11.0)
    index.remove_worker(7)
    assert index.find_matches([1, 2], 11.0) == {B: 1}
    assert index.held_blocks == 1


@pytest.mark.parametrize("hashes", [[-1], [2**64], [1, 0.5]])
def test_what_is_no_hash_is_refused_and_not_recorded(hashes: list[Any]) -> None:
    index = PredictedIndex()
    with pytest.raises(InvalidArgument):
        index.record(A, hashes, 0.0)
    with pytest.raises(InvalidArgument):
        index.find_matches(hashes, 0.0)
    assert (index.held_blocks, index.blocks_of(A)) == (0, 0)


def test_over_the_limit_what_would_go_first_goes() -> None:
    index = PredictedIndex(ttl_s=100.0, limit_blocks=10, pruned_share=0.8)
    for i in range(5):
        record(index, A, [10 + i, 20 + i], float(i))
    record(index, A, [10, 20], 5.0)
    assert index.held_blocks == 10
    record(index, B, [1], 6.0)
    assert index.held_blocks == 7
    assert index.find_matches([11, 21], 6.0) == {}
    assert index.find_matches([12, 22], 6.0) == {}
    assert index.find_matches([10, 20], 6.0) == {A: 2}


def test_what_a_later_prompt_needs_stays_when_another_is_pruned() -> None:
    """Both end at the same time and begin alike."""
    index = PredictedIndex(ttl_s=100.0, limit_blocks=4, pruned_share=1.0)
    for local in ([1, 2], [1, 3], [8, 9]):
        record(index, A, local, 0.0)
    assert index.held_blocks == 4
    assert index.find_matches([1, 2], 0.0) == {A: 1}
    assert index.find_matches([1, 3], 0.0) == {A: 2}


def test_a_prompt_sent_again_and_again_is_kept_once() -> None:
    index, local = PredictedIndex(ttl_s=1000.0), list(range(500))
    index.record(A, local, 0.0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(300):
            index.record(A, local, i * 0.1)
        assert tracemalloc.get_traced_memory()[0] - before < 100 * 300, "not even a hundred bytes each"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wrong", [{"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"ttl_s": 1.0, "pruned_share": 1.1}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        PredictedIndex(**wrong)


@given(st.integers(0, 2**32))
def test_what_is_expected_is_what_was_recorded_within_the_time(seed: int) -> None:
    random, index, now_s = Random(seed), PredictedIndex(ttl_s=1.0), 0.0
    ends: dict[tuple[WorkerRank, tuple[int, ...]], float] = {}
    for _ in range(40):
        now_s = round(now_s + random.choice([0.0, 0.1, 0.2, 0.5]), 1)
        rank, local = random.choice([A, A1, B]), random.choices([1, 2], k=random.randint(0, 4))
        record(index, rank, local, now_s)
        ends |= {(rank, tuple(local[:i])): round(now_s + 1.0, 1) for i in range(1, len(local) + 1)}
        ends = {key: end for key, end in ends.items() if end > now_s}
        if random.random() < 0.1:
            index.remove_rank(rank)
            ends = {key: end for key, end in ends.items() if key[0] != rank}
        query = random.choices([1, 2], k=4)
        depths = {key[0]: 0 for key in ends}
        for held, path in ends:
            if tuple(query[: len(path)]) == path:
                depths[held] = max(depths[held], len(path))
        assert index.find_matches(query, now_s) == {held: depth for held, depth in depths.items() if depth}
        assert index.held_blocks == len(ends)


@given(st.integers(0, 2**32))
def test_pruned_or_not_nothing_is_left_when_all_had_its_time(seed: int) -> None:
    random, index = Random(seed), PredictedIndex(ttl_s=1.0, limit_blocks=6, pruned_share=0.5)
    for step in range(30):
        local = random.choices([1, 2], k=random.randint(1, 5))
        record(index, random.choice([A, B]), local, step * 0.05)
        assert index.held_blocks == sum(index.blocks_of(rank) for rank in (A, B)) <= 6
    index.expire(3.0)
    assert (index.held_blocks, index._tree.root.below, len(index._ends)) == (0, None, 0)
