"""RankNumbers and Matches: numbers used again, masks read with the ranks of their time, groups joined."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.index import KvIndex, ParentBlockNotFound
from operators.kv.numbers import Matches, RankNumbers, deepest, numbers_in, within
from operators.kv.types import WorkerRank

A, B, C = WorkerRank(7), WorkerRank(7, 1), WorkerRank(8)
SCORES = st.dictionaries(st.integers(0, 40).map(WorkerRank), st.integers(1, 5))


def matches(scores: dict[WorkerRank, int], numbers: RankNumbers) -> Matches:
    groups: dict[int, int] = {}
    for rank, depth in scores.items():
        groups[depth] = groups.get(depth, 0) | 1 << numbers.hold(rank)
    return Matches(list(groups.items()), numbers.ranks)


def test_a_rank_has_one_number_until_nothing_holds_it() -> None:
    numbers = RankNumbers()
    first = numbers.hold(A)
    assert (numbers.hold(A), numbers.hold(B)) == (first, first + 1)
    numbers.let_go(first)
    assert numbers.hold(C) == first + 2, "the index or the load book still holds it"
    numbers.let_go(first)
    assert numbers.hold(WorkerRank(9)) == first
    assert 0 not in {first, first + 1, first + 2}


def test_what_was_found_names_the_ranks_of_its_time() -> None:
    index = KvIndex()
    index.store(A, None, [1], [1])
    unread, read = index.find_matches([1]), index.find_matches([1])
    assert read == {A: 1}
    index.remove_rank(A)
    index.store(B, None, [1], [1])
    assert dict(unread) == dict(read) == {A: 1}
    assert (dict(index.find_matches([1])), len(unread), list(unread)) == ({B: 1}, 1, [A])


def test_a_refused_store_leaves_no_number_behind() -> None:
    numbers = RankNumbers()
    index = KvIndex(numbers=numbers)
    for worker in range(5):
        with pytest.raises(ParentBlockNotFound):
            index.store(WorkerRank(worker), 99, [1], [1])
    assert len(numbers.ranks) == 2


@given(SCORES, SCORES)
def test_the_deeper_of_what_is_held_and_predicted_counts(
    one: dict[WorkerRank, int], other: dict[WorkerRank, int]
) -> None:
    numbers = RankNumbers()
    joined = deepest(matches(one, numbers), matches(other, numbers))
    assert joined == {rank: max(one.get(rank, 0), other.get(rank, 0)) for rank in one | other}
    assert len(joined) == len(one | other)


@given(st.integers(0, 2**80), st.lists(st.integers(0, 2**80), max_size=5))
def test_groups_within_a_mask_hold_each_of_its_ranks_once(mask: int, ranks: list[int]) -> None:
    taken, groups = 0, []
    for what, some in enumerate(ranks, 1):
        groups.append((what, some & ~taken))
        taken |= some
    found = within(groups, mask)
    by_number = {number: what for what, some in found for number in numbers_in(some)}
    assert sorted(by_number) == numbers_in(mask) == [n for n in range(81) if mask >> n & 1]
    wanted = {number: what for what, some in groups for number in numbers_in(some)}
    assert by_number == {number: wanted.get(number, 0) for number in by_number}


def test_many_ranks_are_read_like_few() -> None:
    rng, numbers = Random(1), RankNumbers()
    scores = {WorkerRank(worker): rng.randrange(1, 4) for worker in range(500)}
    found = matches(scores, numbers)
    assert dict(found) == scores
    assert repr(found) == repr(found.by_rank())
