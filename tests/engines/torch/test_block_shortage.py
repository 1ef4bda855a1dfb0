"""Batcher where blocks are few: who waits, who gives way, what is held, and what is published of it."""

from __future__ import annotations

from engines.torch import KvBytes, Stage
from pipeline.errors import BackendUnknown
from pipeline.protocols.kv import KvEventData, KvStored

from .worlds import World, answer_to, order


def test_a_choice_waits_until_each_running_one_can_grow_by_a_block() -> None:
    world = World.of(4)
    world.add(order(range(8), max_tokens=4))
    waits = world.add(order(range(50, 58), max_tokens=4))
    world.step()
    assert (waits.stage, world.batcher.pool.available) == (Stage.WAITING, 2)
    world.run()
    assert world.batcher.preemptions == 0
    assert world.answers == {0: answer_to(range(8), 4), 1: answer_to(range(50, 58), 4)}


def test_cached_blocks_that_no_choice_holds_count_as_taken() -> None:
    world = World.of(5)
    world.add(order(range(8), max_tokens=1))
    world.run()
    world.add(order(range(50, 62), max_tokens=3))
    found = world.add(order([*range(8), 70], max_tokens=2))
    world.step()
    assert found.stage is Stage.WAITING
    world.run()
    assert (found.cached_tokens, world.batcher.preemptions) == (4, 0)
    assert world.answers[2] == answer_to([*range(8), 70], 2)


def test_the_choice_admitted_last_gives_way_and_comes_back_first() -> None:
    world = World.of(8, caches_prefixes=False, max_num_seqs=2)
    first, second, third = (world.add(order(range(n, n + 8), max_tokens=16)) for n in (0, 50, 100))
    while not world.batcher.preemptions:
        world.step()
    assert [choice.stage for choice in (first, second, third)] == [Stage.RUNNING, Stage.WAITING, Stage.WAITING]
    assert list(world.batcher.waiting) == [second, third]
    world.run()
    assert world.answers == {n: answer_to(range(50 * n, 50 * n + 8), 16) for n in range(3)}


def test_what_is_found_after_giving_way_does_not_count_as_cached() -> None:
    world = World.of(8)
    choices = [world.add(order(range(n, n + 8), max_tokens=16)) for n in (0, 50)]
    world.run()
    assert world.batcher.preemptions > 0
    assert sum(world.computed) < 2 * 24 + 16, "of the one that gave way something was still cached"
    assert [choice.cached_tokens for choice in choices] == [0, 0]


def test_a_failed_step_ends_each_of_its_choices() -> None:
    world = World.of(64)
    for first in (0, 50, 100):
        world.add(order(range(first, first + 8), max_tokens=2))
    plan = world.begin()
    assert plan is not None
    world.batcher.fail(plan, BackendUnknown("no memory"))
    assert [type(news.error) for news in world.news] == [BackendUnknown] * 3
    assert (world.batcher.pool.active, world.batcher.running) == (0, [])


def test_of_a_held_choice_the_blocks_behind_its_prompt_are_free() -> None:
    world = World.of(8)
    choice = world.add(order(range(8), max_tokens=6), keeps_blocks=True)
    world.run()
    assert world.batcher.pool.active == 4
    held = world.batcher.take_held(choice)
    assert (len(held.block_ids), world.batcher.pool.active) == (2, 2)
    world.batcher.remove(choice)
    assert world.batcher.pool.active == 2


def test_held_blocks_that_another_choice_shares_stay_its_own() -> None:
    world, prompt = World.of(8), list(range(9))
    first = world.add(order(prompt, max_tokens=1), keeps_blocks=True)
    world.run()
    held = world.batcher.take_held(first)
    shares = world.add(order(prompt, max_tokens=4))
    world.step()
    world.batcher.release_held(held)
    world.batcher.pool.check()
    assert world.batcher.pool.active == len(shares.blocks) == 3
    world.run()
    assert world.answers[1] == answer_to(prompt, 4)
    assert world.batcher.pool.active == 0


def test_imported_kv_is_dropped_once_it_is_written() -> None:
    world = World.of(8)
    choice = world.add(order(range(10), max_tokens=3), imported=KvBytes(10, bytes(range(10))))
    world.step()
    assert choice.imported is None


def test_each_stored_block_names_the_one_before_it() -> None:
    world, events = World.of(16, max_num_batched_tokens=16), list[KvEventData]()
    world.batcher.pool.on_event = events.append
    world.add(order(range(24), max_tokens=9))
    world.run()
    stored = [event for event in events if isinstance(event, KvStored)]
    assert len(stored) == 4  # two parts of the prompt, two blocks of the answer
    last: int | None = None
    for event in stored:
        assert event.parent_hash == last
        last = event.blocks[-1].block_hash


def test_the_same_tokens_have_other_names_in_another_engine() -> None:
    names = []
    for salt in (1, 2):
        world = World.of(8, salt=salt)
        world.add(order(range(8), max_tokens=1))
        world.run()
        names.append(world.batcher.pool.names())
    assert len(names[0]) == 2
    assert not names[0] & names[1]
