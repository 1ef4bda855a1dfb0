"""Batcher: admission, chunks, prefix reuse, preemption, and blocks that all come back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from engines.torch import KvBytes, News, Stage, TorchSettings, groups, share_budget
from pipeline import InvalidArgument
from pipeline.errors import BackendUnknown
from pipeline.protocols import FinishReason
from pipeline.protocols.kv import KvEventData, KvRemoved, KvStored

from .worlds import BLOCK, World, answer_to, order


@pytest.mark.parametrize(
    ("pending", "budget", "shares"),
    [
        ([1, 1, 1], 8, [1, 1, 1]),
        ([100, 1, 30, 1], 50, [48, 1, 0, 1]),
        ([20, 1, 30], 50, [20, 1, 29]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([], 5, []),
    ],
)
def test_running_answers_come_before_parts_of_prompts(pending: list[int], budget: int, shares: list[int]) -> None:
    assert share_budget(pending, budget) == shares


def test_chunks_of_one_length_are_computed_together() -> None:
    world = World.of(64)
    for length in (5, 9, 5):
        world.add(order(range(length)))
    plan = world.begin()
    assert plan is not None
    assert [[chunk.count for chunk in group] for group in groups(plan.chunks)] == [[5, 5], [9]]


def test_a_step_that_is_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_num_seqs"):
        TorchSettings(max_num_seqs=8, max_num_batched_tokens=7)


def test_a_long_prompt_is_computed_in_parts_beside_running_answers() -> None:
    world = World.of(64, max_num_batched_tokens=16)
    world.add(order([1, 2], max_tokens=20))
    world.step()
    world.add(order(range(40), max_tokens=1))
    assert [sorted(chunk.count for chunk in plan.chunks) for plan in (world.step() for _ in range(4)) if plan] == [
        [1, 15],
        [1, 15],
        [1, 10],
        [1],
    ]
    world.run()
    assert world.answers == {0: answer_to([1, 2], 20), 1: answer_to(range(40), 1)}


def test_no_more_choices_run_than_there_are_places() -> None:
    world = World.of(64, max_num_seqs=2)
    choices = [world.add(order([n], max_tokens=3)) for n in range(3)]
    world.step()
    assert [choice.stage for choice in choices] == [Stage.RUNNING, Stage.RUNNING, Stage.WAITING]
    world.run()
    assert world.answers == {n: answer_to([n], 3) for n in range(3)}


def test_an_answer_ends_with_its_reason() -> None:
    world = World.of(64)
    world.add(order([1, 2, 3], max_tokens=2))
    world.run()
    assert [news.finish for news in world.news] == [None, FinishReason.LENGTH]


def test_a_prefix_is_computed_once_and_at_least_one_token_again() -> None:
    world = World.of(64)
    prompt = list(range(8))
    world.add(order(prompt, max_tokens=1))
    world.run()
    again, longer = world.add(order(prompt, max_tokens=1)), world.add(order([*prompt, 8, 9], max_tokens=1))
    world.run()
    assert (again.cached_tokens, longer.cached_tokens) == (4, 8)
    assert world.computed == [8, 4 + 2]
    assert world.answers[0] == world.answers[1] == answer_to(prompt, 1)
    assert world.answers[2] == answer_to([*prompt, 8, 9], 1)


def test_an_answer_is_part_of_the_cache_for_the_next_turn() -> None:
    world = World.of(64)
    prompt = list(range(8))
    world.add(order(prompt, max_tokens=5))
    world.run()
    following = world.add(order([*prompt, *world.answers[0], 1, 2], max_tokens=1))
    world.run()
    assert following.cached_tokens == 12


def test_another_tenant_finds_nothing() -> None:
    world = World.of(64)
    world.add(order(range(8), max_tokens=1))
    world.run()
    other = world.add(evolve(order(range(8), max_tokens=1), hash_seed=99))
    world.run()
    assert other.cached_tokens == 0


def test_nothing_is_cached_if_that_is_turned_off() -> None:
    world = World.of(64, caches_prefixes=False)
    for _ in range(2):
        world.add(order(range(8), max_tokens=1))
        world.run()
    assert world.computed == [8, 8]
    assert world.batcher.pool.inactive == 0


def test_a_block_of_the_same_name_with_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "engines.torch.batching.block_hashes", lambda tokens, size, *, seed: [5] * (len(tokens) // size)
    )
    world = World.of(64)
    for first in (0, 100):
        world.add(order(range(first, first + 9), max_tokens=2))
        world.run()
    assert world.answers == {0: answer_to(range(9), 2), 1: answer_to(range(100, 109), 2)}


def test_choices_of_one_prompt_wait_for_the_first_and_share_its_blocks() -> None:
    world = World.of(64)
    asked = order(range(9), max_tokens=3)
    first = world.add(asked)
    others = [world.add(asked, index=index, leader=first) for index in (1, 2)]
    world.step()
    assert {choice.stage for choice in others} == {Stage.WAITING}
    world.step()
    assert {choice.cached_tokens for choice in others} == {8}
    world.run()
    assert list(world.answers.values()) == [answer_to(range(9), 3, index) for index in range(3)]


def test_choices_whose_first_one_is_gone_begin_alone() -> None:
    world = World.of(64)
    asked = order(range(9), max_tokens=2)
    first = world.add(asked)
    world.add(asked, index=1, leader=first)
    world.batcher.remove(first)
    world.run()
    assert world.answers[1] == answer_to(range(9), 2, 1)


def test_the_youngest_gives_way_when_blocks_run_out_and_ends_with_the_same_tokens() -> None:
    world = World.of(8, caches_prefixes=False)
    for first in (0, 50):
        world.add(order(range(first, first + 8), max_tokens=16))
    world.run()
    assert world.batcher.preemptions >= 1
    assert world.answers == {0: answer_to(range(8), 16), 1: answer_to(range(50, 58), 16)}


def test_an_answer_may_use_all_blocks() -> None:
    world = World.of(4)
    world.add(order(range(8), max_tokens=8))
    world.run()
    assert world.answers[0] == answer_to(range(8), 8)


def test_a_choice_removed_during_a_step_frees_its_blocks_at_once() -> None:
    world = World.of(8)
    gone, stays = world.add(order(range(8), max_tokens=4)), world.add(order(range(50, 58), max_tokens=4))
    plan = world.begin()
    assert plan is not None
    world.batcher.remove(gone)
    world.batcher.remove(gone)
    assert world.batcher.pool.active == 2
    world.finish(plan)
    world.run()
    assert stays.stage is Stage.OVER
    assert world.answers == {0: [], 1: answer_to(range(50, 58), 4)}
    assert world.batcher.pool.active == 0


def test_a_failed_step_ends_its_choices_and_no_other() -> None:
    world = World.of(64, max_num_seqs=1)
    for first in (0, 50):
        world.add(order(range(first, first + 8), max_tokens=2))
    plan = world.begin()
    assert plan is not None
    world.batcher.fail(plan, BackendUnknown("no memory"))
    assert [type(news.error) for news in world.news] == [BackendUnknown]
    assert world.batcher.pool.names() == set()
    world.run()
    assert world.answers == {0: [], 1: answer_to(range(50, 58), 2)}


def test_imported_kv_is_written_and_only_the_last_token_computed() -> None:
    world, prompt = World.of(64), list(range(10))
    choice = world.add(order(prompt, max_tokens=3), imported=KvBytes(10, bytes(prompt)))
    plan = world.step()
    assert plan is not None
    assert [(load.start, load.kv.tokens) for load in plan.loads] == [(0, 10)]
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(9, 1)]
    world.run()
    assert world.answers[0] == answer_to(prompt, 3)
    assert choice.cached_tokens == 0


def test_imported_kv_is_written_behind_what_is_cached() -> None:
    world, prompt = World.of(64), list(range(10))
    world.add(order(prompt[:5], max_tokens=1))
    world.run()
    world.add(order(prompt, max_tokens=3), imported=KvBytes(10, bytes(prompt)))
    plan = world.step()
    assert plan is not None
    assert [load.start for load in plan.loads] == [4]
    world.run()
    assert world.answers[1] == answer_to(prompt, 3)


def test_blocks_of_a_prompt_are_held_until_they_are_released() -> None:
    world, prompt = World.of(8), list(range(10))
    choice = world.add(order(prompt, max_tokens=1), keeps_blocks=True)
    world.run()
    held = world.batcher.take_held(choice)
    assert len(held.block_ids) == 3
    assert [world.cells.blocks[held.block_ids[place // BLOCK]][place % BLOCK] for place in range(10)] == prompt
    world.batcher.remove(choice)
    assert world.batcher.pool.active == 3
    world.batcher.release_held(held)
    assert world.batcher.pool.active == 0


def test_blocks_that_are_kept_and_not_taken_go_with_their_choice() -> None:
    world = World.of(8)
    choice = world.add(order(range(10), max_tokens=1), keeps_blocks=True)
    world.run()
    world.batcher.remove(choice)
    assert world.batcher.pool.active == 0


def test_events_describe_what_is_cached() -> None:
    world, events = World.of(4), list[KvEventData]()
    world.batcher.pool.on_event = events.append
    world.add(order(range(8), max_tokens=1))
    world.run()
    world.add(order(range(50, 62), max_tokens=1))
    world.run()
    names = set[int]()
    for event in events:
        if isinstance(event, KvStored):
            names |= {block.block_hash for block in event.blocks}
        elif isinstance(event, KvRemoved):
            names -= set(event.block_hashes)
    assert names == world.batcher.pool.names()
    assert any(isinstance(event, KvRemoved) for event in events)


Case = tuple[list[int], int, int]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 9), st.integers(0, 9))),
    st.integers(6, 14),
    st.integers(1, 4),
    st.integers(4, 20),
    st.randoms(use_true_random=False),
)
def test_whatever_comes_goes_and_collides_each_answer_is_its_own(
    cases: list[Case], blocks: int, seqs: int, budget: int, random: Random
) -> None:
    world = World.of(blocks, max_num_seqs=seqs, max_num_batched_tokens=budget)
    removed = set[int]()
    live: list[tuple[int, Any]] = []
    for number, (prompt, tokens, luck) in enumerate(cases):
        live.append((number, world.add(order(prompt, max_tokens=tokens))))
        for _ in range(luck % 4):
            world.step()
        if luck > 7:
            victim, choice = live.pop(random.randrange(len(live)))
            removed.add(victim)
            world.batcher.remove(choice)
    world.run()
    for number, (prompt, tokens, _) in enumerate(cases):
        whole = answer_to(prompt, tokens)
        got = world.answers[number]
        assert got == whole[: len(got)]
        assert number in removed or got == whole
    assert world.batcher.pool.active == 0
    assert not world.batcher.running
    assert not world.batcher.waiting


def test_news_name_their_choice() -> None:
    world = World.of(8)
    choice = world.add(order([1], max_tokens=1), index=3)
    world.run()
    assert isinstance(world.news[0], News)
    assert world.news[0].choice is choice
