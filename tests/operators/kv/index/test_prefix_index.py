"""The prefix index, case by case; `test_index_model` holds it to its rules under random events."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from operators.kv import KvIndex, PromptBlocks, WorkerRank
from operators.kv.index import BlockNotFound, CapacityExhausted, InvalidBlockSequence, Outcome, ParentBlockNotFound
from pipeline import InvalidArgument
from pipeline.protocols.kv import KvCleared, KvEvent, KvRemoved, KvStored, RouterEvent, StorageTier, StoredBlock

A, B = WorkerRank(0), WorkerRank(1)


def store(index: KvIndex, rank: WorkerRank, local: list[int], *, below: Sequence[int] = (), own: int = 0) -> Outcome:
    """Stores the blocks below those, all named by their path; `own` makes the names another engine's."""
    path, blocks = list(below), []
    for block in local:
        path.append(block)
        blocks.append(StoredBlock(name(path, own), block))
    return apply(index, rank, KvStored(name(below, own) if below else None, blocks))


def name(path: Sequence[int], own: int = 0) -> int:
    return hash((tuple(path), own)) % 2**64


def remove(index: KvIndex, rank: WorkerRank, *paths: Sequence[int], own: int = 0) -> Outcome:
    return apply(index, rank, KvRemoved([name(path, own) for path in paths]))


def apply(index: KvIndex, rank: WorkerRank, data: Any, tier: StorageTier = "device") -> Outcome:
    return index.apply(RouterEvent(rank.worker_id, KvEvent(1, data, rank.dp_rank), tier))


def test_a_score_is_the_length_of_the_prefix_held() -> None:
    index = KvIndex()
    store(index, A, [1, 2, 3])
    assert index.find_matches([1, 2, 3]) == {A: 3}
    assert index.find_matches([1, 2, 999]) == {A: 2}
    assert index.find_matches([]) == {}
    assert index.find_matches([9]) == {}


def test_workers_leave_where_their_prefix_ends() -> None:
    index = KvIndex()
    store(index, A, [1, 2])
    store(index, B, [1, 3])
    assert index.find_matches([1]) == {A: 1, B: 1}
    assert index.find_matches([1, 2]) == {A: 2, B: 1}
    index = KvIndex()
    store(index, A, [1, 2, 3, 4, 5, 6])
    store(index, B, [1, 2, 3])
    store(index, B, [4, 5, 6], below=[1, 2, 3])
    store(index, B, [7, 8, 9], below=[1, 2, 3, 4, 5, 6])
    assert index.find_matches(list(range(1, 10))) == {A: 6, B: 9}


@pytest.mark.parametrize("other", [B, WorkerRank(0, 1)])
def test_a_parent_is_a_block_of_the_same_rank(other: WorkerRank) -> None:
    index = KvIndex()
    with pytest.raises(ParentBlockNotFound, match="Failed to find parent block"):
        store(index, A, [3], below=[1, 2])
    assert (index.dump(), index.workers()) == ([], [])
    store(index, A, [1, 2])
    with pytest.raises(ParentBlockNotFound):
        store(index, other, [3], below=[1, 2])
    assert index.find_matches([1, 2, 3]) == {A: 2}


def test_a_store_sent_again_changes_nothing_and_is_counted_so() -> None:
    index = KvIndex()
    assert store(index, A, [1, 2, 3]) is Outcome.OK
    before = index.dump()
    assert store(index, A, [1, 2, 3]) is Outcome.DUPLICATE_STORE
    assert store(index, A, [2, 3], below=[1]) is Outcome.DUPLICATE_STORE
    assert index.dump() == before
    assert store(index, A, [4], below=[1, 2, 3]) is Outcome.OK
    assert store(index, B, [1, 2, 3]) is Outcome.OK
    assert store(index, A, []) is Outcome.OK


def test_a_removed_block_ends_the_prefix() -> None:
    index = KvIndex()
    store(index, A, [1, 2, 3])
    index.remove_worker(999)
    with pytest.raises(BlockNotFound, match="Failed to find block"):
        apply(index, A, KvRemoved([998, 999]))
    with pytest.raises(BlockNotFound):
        apply(index, B, KvRemoved([998]))
    assert index.find_matches([1, 2, 3]) == {A: 3}
    remove(index, A, [1, 2, 3])
    assert index.find_matches([1, 2, 3]) == {A: 2}
    assert index.find_matches([1, 2]) == {A: 2}
    assert remove(index, A, [1], [1, 2]) is Outcome.OK
    assert index.find_matches([1, 2, 3]) == {}
    assert remove(index, A) is Outcome.OK


def test_the_known_blocks_of_a_removal_go_though_another_is_unknown() -> None:
    index = KvIndex()
    store(index, A, [1, 2, 3])
    with pytest.raises(BlockNotFound):
        apply(index, A, KvRemoved([998, name([1, 2, 3]), 999, name([1, 2])]))
    assert index.find_matches([1, 2, 3]) == {A: 1}
    with pytest.raises(BlockNotFound):
        remove(index, A, [1], [1])
    assert index.find_matches([1]) == {}


def test_a_block_removed_from_the_middle_takes_along_what_is_below() -> None:
    """The rank's stale end does not come back with the block."""
    index = KvIndex()
    store(index, A, [1, 2, 3, 4, 5])
    remove(index, A, [1, 2, 3])
    assert index.find_matches([1, 2, 3, 4, 5]) == {A: 2}
    assert index.find_matches([1, 2]) == {A: 2}
    with pytest.raises(ParentBlockNotFound):
        store(index, A, [5], below=[1, 2, 3, 4])
    store(index, A, [3], below=[1, 2])
    assert index.find_matches([1, 2, 3, 4, 5]) == {A: 3}
    store(index, A, [4, 5], below=[1, 2, 3])
    assert index.find_matches([1, 2, 3, 4, 5]) == {A: 5}
    assert index.held_blocks(A) == 5


def test_a_removal_from_the_middle_is_one_ranks_own() -> None:
    index = KvIndex()
    store(index, A, [1, 2, 3, 4])
    store(index, B, [1, 2, 3, 4])
    store(index, A, [9], below=[1, 2])
    remove(index, A, [1, 2])
    assert index.find_matches([1, 2, 3, 4]) == {A: 1, B: 4}
    assert index.find_matches([1, 2, 9]) == {A: 1, B: 2}
    assert (index.held_blocks(A), index.block_count()) == (1, 4)


def test_a_clear_is_one_ranks() -> None:
    index = KvIndex()
    ranks = [WorkerRank(0, 0), WorkerRank(0, 1)]
    for rank in ranks:
        store(index, rank, [1, 2, 3])
    apply(index, ranks[0], KvCleared())
    assert index.find_matches([1, 2, 3]) == {ranks[1]: 3}
    with pytest.raises(ParentBlockNotFound):
        store(index, ranks[0], [4], below=[1, 2, 3])
    store(index, ranks[0], [1, 2, 3])
    assert index.find_matches([1, 2, 3]) == {ranks[0]: 3, ranks[1]: 3}
    assert apply(index, WorkerRank(5), KvCleared()) is Outcome.OK
    assert index.workers() == [0]


def test_a_cleared_worker_stays_known_and_a_removed_one_does_not() -> None:
    index = KvIndex()
    for rank in range(3):
        store(index, WorkerRank(1, rank), [1, 2])
    index.clear_worker(1)
    assert index.find_matches([1, 2]) == {}
    assert index.workers() == [1]
    index.remove_worker(1)
    assert index.workers() == []


def test_one_rank_can_be_removed_and_its_siblings_stay() -> None:
    index = KvIndex()
    for rank in (WorkerRank(1, 0), WorkerRank(1, 1), B):
        store(index, rank, [1, 2])
    index.remove_rank(WorkerRank(1, 0))
    index.remove_rank(WorkerRank(7, 7))
    assert index.find_matches([1, 2]) == {WorkerRank(1, 1): 2}
    store(index, WorkerRank(8), [1])  # takes the place that came free
    assert index.find_matches([1, 2]) == {WorkerRank(1, 1): 2, WorkerRank(8): 1}


def test_parents_stand_before_their_children_in_a_dump() -> None:
    index = KvIndex()
    for rank in (B, A, WorkerRank(0, 2)):
        store(index, rank, [1, 2, 3])
        store(index, rank, [4, 5], below=[1, 2])
        store(index, rank, [6 + rank.dp_rank], below=[1, 2, 4])
    dumped = index.dump()
    known: set[tuple[WorkerRank, int | None]] = set()
    for number, event in enumerate(dumped):
        change, rank = event.event.data, WorkerRank(event.worker_id, event.event.dp_rank)
        assert isinstance(change, KvStored)
        assert event.event.event_id == number
        assert change.parent_hash is None or (rank, change.parent_hash) in known
        known |= {(rank, block.block_hash) for block in change.blocks}
    restored = KvIndex()
    for event in dumped:
        restored.apply(event)
    assert restored.dump() == dumped
    assert restored.find_matches([1, 2, 4, 8]) == index.find_matches([1, 2, 4, 8])
    assert index.dump(A) == [event for event in dumped if (event.worker_id, event.event.dp_rank) == A]


def test_equal_blocks_may_follow_each_other() -> None:
    index = KvIndex()
    store(index, A, [5, 5, 5])
    assert index.find_matches([5, 5, 5, 5]) == {A: 3}
    assert index.find_matches([5]) == {A: 1}


@pytest.mark.parametrize("where", [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 319, 320, 321, 1343, 1344, 1345])
def test_a_query_that_differs_scores_to_where_it_does(where: int) -> None:
    """The last ones are where a longer chain is compared in steps."""
    index = KvIndex()
    chain = list(range(1, 129 if where < 128 else 1500))
    store(index, A, chain)
    assert index.find_matches([*chain[:where], 999_999, *chain[where + 1 :]]) == ({A: where} if where else {})


def test_continuations_make_one_prefix() -> None:
    index = KvIndex()
    chain = list(range(1, 201))
    for start in range(0, 200, 10):
        store(index, A, chain[start : start + 10], below=chain[:start])
    assert index.find_matches(chain) == {A: 200}
    assert index.find_matches(chain[:75]) == {A: 75}


def test_private_ends_do_not_count() -> None:
    index = KvIndex()
    shared = list(range(1, 101))
    store(index, A, shared)
    for worker in (1, 2):
        store(index, WorkerRank(worker), [*shared[:40], worker * 1000, worker * 1000 + 1])
    assert index.find_matches(shared) == {A: 100, WorkerRank(1): 40, WorkerRank(2): 40}
    store(index, A, [1000, 1001])
    assert index.find_matches([1, 1000])[A] == 1


def test_an_adapters_blocks_match_only_its_own_prompts() -> None:
    index, tokens = KvIndex(), list(range(8))
    prompts = {
        A: PromptBlocks(tokens, 4),
        B: PromptBlocks(tokens, 4, "adapter-a"),
        WorkerRank(2): PromptBlocks(tokens, 4, "adapter-b"),
        WorkerRank(3): PromptBlocks(tokens, 4, None, "tenant-a"),
    }
    for rank, prompt in prompts.items():
        assert index.store(rank, None, prompt.sequence_hashes, prompt.local_hashes) is Outcome.OK
    for rank, prompt in prompts.items():
        assert index.find_matches(prompt.local_hashes) == {rank: 2}


def test_each_rank_may_name_blocks_its_own_way() -> None:
    """Section 2.2.3: the second writer's names work for its later events, and the first one's still do."""
    index = KvIndex()
    store(index, A, [1, 2, 3])
    store(index, B, [1, 2, 3], own=7)
    store(index, B, [4], below=[1, 2, 3], own=7)
    store(index, A, [4], below=[1, 2, 3])
    assert index.find_matches([1, 2, 3, 4]) == {A: 4, B: 4}
    remove(index, B, [1, 2, 3], own=7)
    assert index.find_matches([1, 2, 3, 4]) == {A: 4, B: 2}
    with pytest.raises(BlockNotFound):
        remove(index, B, [1, 2])


@pytest.mark.parametrize(
    ("parent", "names"),
    [
        (name([1]), [name([1])]),
        (None, [50, 51, 50]),
        (name([1, 2]), [50, name([1])]),
        (name([1, 2]), [50, name([1, 2])]),
        (None, [-1]),
        (None, [2**64]),
    ],
)
def test_a_block_is_never_below_itself(parent: int | None, names: list[int]) -> None:
    """Section 2.2.5: what would be a cycle is refused, and nothing changes."""
    index = KvIndex()
    store(index, A, [1, 2])
    before = index.dump()
    with pytest.raises(InvalidBlockSequence):
        apply(index, A, KvStored(parent, [StoredBlock(n, 60 + i) for i, n in enumerate(names)]))
    assert index.dump() == before
    assert index.held_blocks(A) == 2


def test_a_block_stored_elsewhere_has_moved() -> None:
    index = KvIndex()
    store(index, A, [1, 2, 3])
    apply(index, A, KvStored(None, [StoredBlock(name([1, 2]), 9)]))
    assert index.find_matches([1, 2, 3]) == {A: 1}
    assert index.find_matches([9]) == {A: 1}
    assert index.held_blocks(A) == 2


@pytest.mark.parametrize("count", [3, 40])
def test_blocks_that_move_from_several_chains_go_with_what_is_below(count: int) -> None:
    index = KvIndex()
    first, second = list(range(1, 101)), list(range(501, 601))
    store(index, A, first)
    store(index, A, second, below=first[:50])
    moved = [name(first[:i]) for i in range(60, 60 + count)] + [name([*first[:50], *second[:i]]) for i in (30, 20, 10)]
    apply(index, A, KvStored(None, [StoredBlock(n, 900 + i) for i, n in enumerate(moved)]))
    assert index.find_matches(first) == {A: 59}
    assert index.find_matches([*first[:50], *second]) == {A: 59}
    assert index.find_matches([900 + i for i in range(len(moved))]) == {A: len(moved)}
    assert index.held_blocks(A) == 59 + 9 + len(moved)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_one_removal_may_name_the_ends_of_several_branches(keep: int, order: int) -> None:
    index = KvIndex()
    for rank in (A, B):
        index.store(rank, None, [1, 2, 3, 4], [1, 2, 3, 4])
    index.store(A, 2, [7, 8], [7, 8])
    trunk, branch = [1, 2, 3, 4][keep:], [7, 8] if keep < 4 else [8]
    index.remove(A, [*trunk, *branch][::order])
    deepest = {A: keep, B: 4} if keep else {B: 4}
    assert index.find_matches([1, 2, 3, 4]) == deepest
    on_branch = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3}[keep]
    assert index.find_matches([1, 2, 7, 8]) == ({A: on_branch, B: 2} if on_branch else {B: 2})
    index.remove(B, [4, 3, 2, 1])
    index.clear_rank(A)
    assert index.block_count() == 0


def test_what_cannot_be_a_name_removes_nothing() -> None:
    index = KvIndex()
    index.store(A, None, [1, 2, 3], [1, 2, 3])
    with pytest.raises(TypeError):
        index.remove(A, [3, []])  # type: ignore[list-item]
    assert index.find_matches([1, 2, 3]) == {A: 3}
    index.remove(A, [3])
    assert index.held_blocks(A) == 2


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 60])
def test_of_blocks_removed_from_the_middle_the_first_counts(count: int) -> None:
    """In any order; few and many are looked for in different ways."""
    index, chain = KvIndex(), list(range(1, 101))
    store(index, A, chain)
    gone = [name(chain[:i]) for i in range(30, 30 + count)]
    Random(count).shuffle(gone)
    apply(index, A, KvRemoved(gone))
    assert index.find_matches(chain) == {A: 29}
    assert index.held_blocks(A) == 29


def test_ranks_that_come_and_go_leave_nothing_behind() -> None:
    """Worker ids of the whole range, each new; the numbers of those gone are used again."""
    index, random, here = KvIndex(), Random(1), list[WorkerRank]()
    for i in range(500):
        rank = WorkerRank(random.getrandbits(64), random.getrandbits(32))
        store(index, rank, [1, 2, 3 + i])
        here.append(rank)
        if len(here) > 8:
            index.remove_rank(here.pop(random.randrange(8)))
        assert index.find_matches([1, 2, 3 + i]) == {other: 3 if other == rank else 2 for other in here}
    assert index.block_count() == 2 + len(here)
    assert len(index._numbers.ranks) <= 10


def test_the_ends_of_the_range_are_hashes_like_others() -> None:
    index, end = KvIndex(), 2**64 - 1
    apply(index, A, KvStored(None, [StoredBlock(0, end), StoredBlock(end, 0)]))
    apply(index, A, KvStored(end, [StoredBlock(2**63, 0), StoredBlock(1, end)]))
    assert index.find_matches([end, 0, 0, end]) == {A: 4}
    apply(index, A, KvStored(0, [StoredBlock(2**56, 5)]))
    apply(index, A, KvRemoved([end]))
    assert index.find_matches([end, 0, 0, end]) == {A: 1}
    assert index.find_matches([end, 5]) == {A: 2}
    apply(index, A, KvRemoved([0]))
    assert index.held_blocks(A) == 0


def test_a_block_under_a_new_name_keeps_its_place_and_what_is_below() -> None:
    """Also where the blocks sent again lead into another chain, whose names are the same as before."""
    index = KvIndex()
    store(index, A, [1, 2, 3])
    store(index, A, [7, 8], below=[1, 2])
    again = [(name([1]), 1), (50, 2), (name([1, 2, 7]), 7), (name([1, 2, 7, 8]), 8)]
    apply(index, A, KvStored(None, [StoredBlock(*pair) for pair in again]))
    assert index.find_matches([1, 2, 7, 8]) == {A: 4}
    assert index.find_matches([1, 2, 3]) == {A: 3}
    assert index.held_blocks(A) == 5
    with pytest.raises(ParentBlockNotFound):
        store(index, A, [4], below=[1, 2])
    apply(index, A, KvStored(50, [StoredBlock(51, 4)]))
    assert index.find_matches([1, 2, 4]) == {A: 3}


def test_a_name_is_found_where_it_is_and_not_across_two_others() -> None:
    index = KvIndex()
    apply(index, A, KvStored(None, [StoredBlock(n, 10 + i) for i, n in enumerate([65536, 256, 5])]))
    apply(index, A, KvRemoved([256]))
    assert index.find_matches([10, 11, 12]) == {A: 1}


def test_a_rank_holds_at_most_the_limit() -> None:
    index = KvIndex(limit_blocks=3)
    store(index, A, [1, 2])
    with pytest.raises(CapacityExhausted):
        store(index, A, [3, 4], below=[1, 2])
    assert index.find_matches([1, 2, 3]) == {A: 2}
    store(index, A, [1, 2])
    store(index, A, [3], below=[1, 2])
    store(index, B, [1, 2, 3])
    apply(index, B, KvStored(None, [StoredBlock(name([1, 2, 3]), 9)]))
    assert index.find_matches([9]) == {B: 1}
    with pytest.raises(CapacityExhausted):
        apply(index, B, KvStored(None, [StoredBlock(name([1, 2]), 9), StoredBlock(77, 8), StoredBlock(78, 7)]))
    assert index.find_matches([1, 2]) == {A: 2, B: 2}
    with pytest.raises(CapacityExhausted):
        store(index, WorkerRank(5), [1, 2, 3, 4])
    assert index.workers() == [0, 1]


def test_the_index_is_about_the_device_tier() -> None:
    index = KvIndex()
    change = KvStored(None, [StoredBlock(1, 1)])
    assert apply(index, A, change, "host_pinned") is Outcome.OTHER_TIER
    assert index.find_matches([1]) == {}
    store(index, A, [1])
    assert apply(index, A, KvCleared(), "disk") is Outcome.OTHER_TIER
    assert index.find_matches([1]) == {A: 1}


def test_many_workers_are_distinguished() -> None:
    index = KvIndex()
    ranks = [WorkerRank(worker, rank) for worker in range(100) for rank in range(3)]
    for i, rank in enumerate(ranks):
        store(index, rank, list(range(1, 2 + i % 7)))
    assert index.find_matches(list(range(1, 8))) == {rank: 1 + i % 7 for i, rank in enumerate(ranks)}


@pytest.mark.parametrize("wrong", [[-1], [2**64], ["a"], [1, None]])
def test_a_query_of_other_than_hashes_is_refused(wrong: Any) -> None:
    index = KvIndex()
    store(index, A, [1, 2])
    if wrong[0] == 1:
        with pytest.raises(InvalidArgument):
            index.find_matches(wrong)
    else:
        assert index.find_matches(wrong) == {}
