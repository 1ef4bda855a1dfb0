"""BlockPool: counts, names, the order of eviction, and its events."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.block_pool import BlockPool
from pipeline.protocols.kv import KvCleared, KvEventData, KvRemoved, KvStored, StoredBlock


def pool_with_events(capacity: int) -> tuple[BlockPool, list[KvEventData]]:
    events: list[KvEventData] = []
    return BlockPool(capacity, events.append), events


def stored(pool: BlockPool, *names: int, parent: int | None = None) -> list[int]:
    """Return blocks of these names, held once."""
    blocks = taken(pool, len(names))
    pool.store(blocks, names, [-name for name in names], parent)
    return blocks


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.take(count)
    assert blocks is not None
    return blocks


def names_of(*names: int) -> list[StoredBlock]:
    return [StoredBlock(name, -name) for name in names]


def test_a_pool_gives_as_many_blocks_as_it_has() -> None:
    pool = BlockPool(10)
    assert len(set(taken(pool, 10))) == 10
    assert (pool.active, pool.available) == (10, 0)
    pool.check()


def test_a_block_too_many_is_refused_and_changes_nothing() -> None:
    pool, events = pool_with_events(10)
    stored(pool, *range(9))
    pool.release(stored(pool, 9))
    before = pool.names(), pool.active, list(events)
    assert pool.take(2) is None
    assert (pool.names(), pool.active, events) == before
    assert pool.inactive == 1
    pool.check()


def test_an_active_block_is_used_once_more_without_an_event() -> None:
    pool, events = pool_with_events(2)
    blocks = stored(pool, 1)
    del events[:]
    pool.reuse(pool.match([1]))
    assert (pool.active, events) == (1, [])
    pool.release(blocks)
    assert pool.active == 1, "the second holder still has it"


def test_an_inactive_block_becomes_active_without_an_event() -> None:
    pool, events = pool_with_events(2)
    pool.release(stored(pool, 1))
    del events[:]
    pool.reuse(pool.match([1]))
    assert (pool.active, pool.inactive, events) == (1, 0, [])
    pool.check()


def test_a_block_held_twice_stays_active_when_one_lets_go() -> None:
    pool = BlockPool(1)
    blocks = stored(pool, 1)
    pool.reuse(blocks)
    pool.release(blocks)
    assert (pool.active, pool.inactive) == (1, 0)
    pool.release(blocks)
    assert (pool.active, pool.inactive) == (0, 1)
    pool.check()


def test_released_blocks_stay_findable_and_nameless_ones_are_free() -> None:
    pool, events = pool_with_events(2)
    pool.release(stored(pool, 1) + taken(pool, 1))
    assert (pool.names(), pool.inactive, pool.active) == ({1}, 1, 0)
    assert [type(event) for event in events] == [KvStored]
    pool.check()


def test_blocks_are_evicted_in_the_order_they_became_inactive() -> None:
    """The blocks 4, 3, 2, 1, 5 are released; then 1, 4 and 2 are used again."""
    pool = BlockPool(5)
    for name in (4, 3, 2, 1, 5, 1, 4, 2):
        found = pool.match([name])
        if found:
            pool.reuse(found)
        pool.release(found or stored(pool, name))
    assert [pool.evict() for _ in range(6)] == [3, 5, 1, 4, 2, None]
    pool.check()


def test_an_empty_pool_evicts_nothing() -> None:
    pool, events = pool_with_events(3)
    assert pool.evict() is None
    stored(pool, 1)
    del events[:]
    assert pool.evict() is None, "what is held is not evicted"
    assert events == []


def test_a_kept_lookup_shows_that_an_eviction_made_it_stale() -> None:
    pool = BlockPool(1)
    pool.release(stored(pool, 1))
    before = pool.changes
    pool.evict()
    assert pool.changes > before


def test_of_one_sequence_the_tail_is_evicted_first() -> None:
    pool = BlockPool(3)
    pool.release(stored(pool, 1, 2, 3))
    assert [pool.evict() for _ in range(3)] == [3, 2, 1]


def test_the_first_block_of_a_sequence_has_no_parent() -> None:
    pool, events = pool_with_events(2)
    stored(pool, 7)
    assert events == [KvStored(None, names_of(7))]


def test_a_later_block_names_the_one_before_it() -> None:
    pool, events = pool_with_events(2)
    stored(pool, 7)
    stored(pool, 8, parent=7)
    assert events[1:] == [KvStored(7, names_of(8))]


def test_consecutive_new_names_are_one_event() -> None:
    pool, events = pool_with_events(3)
    stored(pool, 1, 2, 3)
    assert events == [KvStored(None, names_of(1, 2, 3))]


def test_room_is_made_by_one_removal_before_the_store() -> None:
    pool, events = pool_with_events(3)
    pool.release(stored(pool, 1, 2, 3))
    del events[:]
    stored(pool, 4, 5)
    assert events == [KvRemoved([3, 2]), KvStored(None, names_of(4, 5))]
    pool.check()


def test_free_blocks_are_taken_before_anything_is_evicted() -> None:
    pool, events = pool_with_events(3)
    pool.release(stored(pool, 1, 2))
    taken(pool, 1)
    assert pool.names() == {1, 2}
    assert not any(isinstance(event, KvRemoved) for event in events)


def test_a_second_copy_sends_no_event_and_only_the_last_removal_does() -> None:
    pool, events = pool_with_events(4)
    first, second = stored(pool, 1), stored(pool, 1)
    assert first != second
    assert events == [KvStored(None, names_of(1))]
    pool.release(first)
    pool.release(second)
    assert pool.evict() == 1
    assert pool.names() == {1}
    assert len(events) == 1, "a copy is left"
    assert pool.match([1]) == second
    assert pool.evict() == 1
    assert events[1:] == [KvRemoved([1])]
    pool.check()


def test_a_copy_in_the_middle_splits_the_stored_event() -> None:
    pool, events = pool_with_events(8)
    stored(pool, 2)
    stored(pool, 9)
    del events[:]
    stored(pool, 1, 2, 3, 4, parent=9)
    assert events == [KvStored(9, names_of(1)), KvStored(2, names_of(3, 4))]
    pool.check()


def test_destroyed_blocks_are_forgotten_unless_another_holder_remains() -> None:
    pool, events = pool_with_events(3)
    blocks = [*stored(pool, 1, 2), *taken(pool, 1)]
    pool.reuse(pool.match([1]))
    del events[:]
    pool.destroy(blocks)
    assert events == [KvRemoved([2])]
    assert (pool.names(), pool.active, pool.inactive) == ({1}, 1, 0)
    pool.check()


def test_clearing_forgets_every_name_and_takes_nothing_from_holders() -> None:
    pool, events = pool_with_events(3)
    held = stored(pool, 1)
    pool.release(stored(pool, 2))
    del events[:]
    assert pool.clear() == 2
    assert events == [KvCleared()]
    assert (pool.names(), pool.active, pool.inactive) == (set(), 1, 0)
    pool.release(held)
    assert len(taken(pool, 3)) == 3
    pool.check()


def test_below_a_block_that_was_cleared_nothing_is_stored() -> None:
    pool, events = pool_with_events(4)
    held = [*stored(pool, 1), *taken(pool, 1)]
    pool.clear()
    del events[:]
    pool.store(held[1:], [2], [-2], parent=1)
    assert (events, pool.names()) == ([], set())
    pool.release(held)
    assert (pool.active, pool.inactive) == (0, 0)
    pool.check()


def test_clearing_an_empty_cache_sends_no_event() -> None:
    pool, events = pool_with_events(1)
    assert pool.clear() == 0
    assert events == []


@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from(["new", "reuse", "release", "evict"]), st.integers(0, 9))))
def test_blocks_are_evicted_in_the_order_of_their_last_release(capacity: int, steps: list[tuple[str, int]]) -> None:
    pool, inactive, held = BlockPool(capacity), list[int](), list[tuple[list[int], list[int]]]()
    fresh = itertools.count()
    for kind, number in steps:
        if kind == "new" and (count := 1 + number % 3) <= pool.available:
            evicted = max(0, len(inactive) - (pool.available - count))
            del inactive[:evicted]
            names = [next(fresh) for _ in range(count)]
            held.append((names, stored(pool, *names)))
        elif kind == "reuse" and inactive:
            name = inactive.pop(number % len(inactive))
            pool.reuse(blocks := pool.match([name]))
            held.append(([name], blocks))
        elif kind == "release" and held:
            names, blocks = held.pop(number % len(held))
            pool.release(blocks)
            inactive += reversed(names)
        elif kind == "evict":
            assert pool.evict() == (inactive.pop(0) if inactive else None)
        pool.check()
    assert [pool.evict() for _ in inactive] == inactive


def test_a_prefix_that_is_used_again_and_again_takes_no_more_memory() -> None:
    pool = BlockPool(8)
    pool.release(stored(pool, 1, 2, 3, 4))
    for _ in range(1_000):
        pool.reuse(blocks := pool.match([1, 2, 3, 4]))
        pool.release(blocks)
        assert pool._queued <= 16
    pool.check()
    assert [pool.evict() for _ in range(4)] == [4, 3, 2, 1]


def replay(events: list[KvEventData]) -> set[int]:
    """The cache as a listener reconstructs it; it rejects a name stored twice or removed while absent."""
    cached: set[int] = set()
    for event in events:
        if isinstance(event, KvStored):
            fresh = {block.block_hash for block in event.blocks}
            assert len(fresh) == len(event.blocks)
            assert not fresh & cached
            cached |= fresh
        elif isinstance(event, KvRemoved):
            assert cached.issuperset(event.block_hashes)
            assert len(set(event.block_hashes)) == len(event.block_hashes)
            cached -= set(event.block_hashes)
        else:
            cached.clear()
    return cached


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, 9)), max_size=40))
def test_the_pool_stays_consistent_and_its_events_describe_its_content(
    capacity: int, steps: list[tuple[int, int, int]]
) -> None:
    pool, events = pool_with_events(capacity)
    held: list[list[int]] = []
    for kind, count, name in steps:
        act: dict[int, Any] = {3: pool.evict, 4: pool.clear}
        if kind == 0 and (blocks := pool.take(count)) is not None:
            pool.store(blocks[:-1], range(name, name + count - 1), range(count - 1))
            held.append(blocks)
        elif kind == 1 and held:
            pool.release(held.pop(name % len(held)))
        elif kind == 2:
            found = pool.match(range(name, name + count))
            pool.reuse(found)
            held.append(found)
        elif kind == 5 and held:
            pool.destroy(held.pop(name % len(held)))
        elif kind in act:
            act[kind]()
        pool.check()
        assert replay(events) == pool.names()
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert pool.active == 0
