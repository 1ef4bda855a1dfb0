"""Fewer changes with the same effect."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from operators.kv import KvIndex, WorkerRank
from operators.kv.index import KvIndexError
from pipeline.llm.kv_events import DuplicateFilter, EngineChange, merged
from pipeline.protocols.kv import (
    KvCleared,
    KvEvent,
    KvRemoved,
    KvStored,
    RouterEvent,
    StorageTier,
    StoredBlock,
)


def stored(parent: int | None, *names: int, rank: int = 0, tier: StorageTier = "device") -> EngineChange:
    return EngineChange(rank, KvStored(parent, [StoredBlock(name, name) for name in names]), tier)


def removed(*names: int, rank: int = 0, tier: StorageTier = "device") -> EngineChange:
    return EngineChange(rank, KvRemoved(list(names)), tier)


CLEARED = EngineChange(0, KvCleared())


def test_stores_that_continue_each_other_are_one() -> None:
    assert merged([stored(None, 1), stored(1, 2, 3), stored(3, 4)]) == [stored(None, 1, 2, 3, 4)]
    assert merged([removed(1), removed(2, 3)]) == [removed(1, 2, 3)]


def test_a_merged_event_has_at_most_128_blocks() -> None:
    chain = [stored(name - 1 if name > 1 else None, name) for name in range(1, 258)]
    found = merged(chain)
    assert found == [stored(None, *range(1, 129)), stored(128, *range(129, 257)), stored(256, 257)]
    whole = stored(None, *range(1, 130))
    assert merged([whole, stored(129, 130)]) == [whole, stored(129, 130)]
    assert [change.change for change in merged([removed(name) for name in range(130)])] == [
        KvRemoved(list(range(128))),
        KvRemoved([128, 129]),
    ]


def test_what_differs_in_rank_tier_kind_or_place_stays_apart() -> None:
    apart = [
        [stored(None, 1), stored(1, 2, rank=1)],
        [stored(None, 1), stored(1, 2, tier="disk")],
        [stored(None, 1), stored(None, 2)],
        [stored(None, 1), stored(7, 2)],
        [stored(None), stored(None, 2)],
        [stored(None, 1), removed(1), stored(None, 1)],
        [removed(1), CLEARED, removed(2)],
        [CLEARED, CLEARED],
        [removed(1), removed(2, tier="disk")],
    ]
    for changes in apart:
        assert merged(changes) == changes


def test_a_block_is_gone_when_it_was_removed_as_often_as_stored() -> None:
    duplicates = DuplicateFilter()
    for _ in range(2):
        assert duplicates.passed(stored(None, 9)) == stored(None, 9)
    assert duplicates.passed(removed(9)) is None
    assert duplicates.passed(removed(9)) == removed(9)
    assert duplicates.passed(removed(9)) == removed(9)
    for change in (stored(None, 1, 2, 3), stored(None, 1), stored(None, 3)):
        duplicates.passed(change)
    assert duplicates.passed(removed(1, 2, 3)) == removed(2)


def test_counts_are_of_a_rank_and_tier_and_end_with_a_clear() -> None:
    duplicates = DuplicateFilter()
    for rank in (0, 1):
        for _ in range(2):
            duplicates.passed(stored(None, 1, rank=rank))
    assert duplicates.passed(removed(1, tier="disk")) == removed(1, tier="disk")
    assert duplicates.passed(CLEARED) is CLEARED
    assert duplicates.passed(removed(1)) == removed(1)
    assert duplicates.passed(removed(1, rank=1)) is None


def applied(changes: list[EngineChange]) -> list[RouterEvent]:
    index = KvIndex()
    for change in changes:
        with suppress(KvIndexError):
            index.apply(RouterEvent(1, KvEvent(1, change.change, change.dp_rank), change.storage_tier))
    return [*index.dump(WorkerRank(1)), *index.dump(WorkerRank(1, 1))]


@given(st.integers(0, 2**32))
def test_merged_events_leave_the_same_index(seed: int) -> None:
    random, names = Random(seed), {0: [0], 1: [0]}
    changes: list[EngineChange] = []
    for name in range(1, 40):
        rank = random.choice([0, 0, 0, 1])
        if random.random() < 0.3:
            gone = [names[rank].pop() for _ in range(min(len(names[rank]) - 1, 2))]
            changes.append(removed(*gone, rank=rank))
        else:
            changes.append(stored(names[rank][-1] or None, name, rank=rank))
            names[rank].append(name)
    assert applied(merged(changes, 4)) == applied(changes)
