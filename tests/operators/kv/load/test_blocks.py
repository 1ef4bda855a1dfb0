"""ActiveBlocks and ActivePrefixes: blocks counted once, decay, and a slow model that agrees."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.load import ActiveBlocks, ActivePrefixes, HeldBlocks
from operators.kv.numbers import numbers_in


def acquired(blocks: ActiveBlocks, hashes: list[int]) -> tuple[HeldBlocks, Sequence[int]]:
    """A prompt that was added to the blocks, and those of its blocks that are new."""
    held = HeldBlocks()
    return held, blocks.acquire(held, hashes)


def test_a_shared_prefix_counts_once_and_goes_with_its_last_holder() -> None:
    blocks = ActiveBlocks()
    short, new = acquired(blocks, [1, 2])
    long, more = acquired(blocks, [1, 2, 3])
    assert (list(new), list(more), blocks.active_blocks) == ([1, 2], [3], 3)
    assert list(blocks.release(short)) == []
    assert sorted(blocks.release(long)) == [1, 2, 3]
    assert blocks.active_blocks == 0


def test_decay_takes_what_only_this_request_holds_and_stays_where_it_becomes_shared() -> None:
    """The table of output blocks and decay, step by step."""
    blocks = ActiveBlocks()
    first, _ = acquired(blocks, [1, 2, 3])
    counted = [blocks.active_blocks]
    blocks.add_output_block(first, 0.5)
    counted.append(blocks.active_blocks)
    second, _ = acquired(blocks, [1, 2])
    counted.append(blocks.active_blocks)
    blocks.add_output_block(first, 0.0)
    counted.append(blocks.active_blocks)
    blocks.release(first)
    counted.append(blocks.active_blocks)  # the two left weigh 0.5 each
    blocks.release(second)
    assert [*counted, blocks.active_blocks] == [3, 2, 2, 1, 1, 0]


def test_an_output_block_without_decay_weighs_one_and_changes_no_other() -> None:
    blocks = ActiveBlocks()
    path, _ = acquired(blocks, [1, 2])
    blocks.add_output_block(path, 0.25)
    blocks.add_output_block(path, None)
    assert blocks.active_blocks == floor(2 * 0.25 + 0.25 + 1 + 0.5)


def test_half_blocks_are_rounded_up() -> None:
    """Python's own rounding would give 2 for 2.5."""
    blocks = ActiveBlocks()
    path, _ = acquired(blocks, [1, 2, 3, 4])
    blocks.add_output_block(path, 0.5)
    assert blocks.active_blocks == 3


def test_an_account_without_blocks_weighs_nothing_whatever_was_rounded() -> None:
    blocks = ActiveBlocks()
    paths = [acquired(blocks, [n, n + 100])[0] for n in range(50)]
    for path in paths:
        for weight in (0.1, 0.7, 0.3):
            blocks.add_output_block(path, weight)
    for path in paths:
        blocks.release(path)
    assert (blocks._decayed_weight, blocks._output_weight) == (0.0, 0.0)


@pytest.mark.parametrize("hostile", [[9, 2, 3], [3, 2, 1], [5, 5, 5], [1, 3], [2]])
def test_a_hash_below_another_parent_is_counted_and_not_shared(hostile: list[int]) -> None:
    blocks = ActiveBlocks()
    good, _ = acquired(blocks, [1, 2, 3])
    bad, new = acquired(blocks, hostile)
    assert set(new).isdisjoint({1, 2, 3})
    shared = 1 if hostile == [1, 3] else 0
    assert blocks.active_blocks == 3 + len(hostile) - shared
    blocks.release(good)
    assert blocks.active_blocks == len(hostile)
    blocks.release(bad)
    assert (blocks.active_blocks, blocks._more, blocks._parents) == (0, {}, {})


Prompt = list[int]
prompts = st.lists(st.integers(0, 2), max_size=6).map(
    lambda tokens: [hash((n, *tokens[: n + 1])) % 2**64 for n in range(len(tokens))]
)
"""Sequence hashes as they are: each stands for all before it."""


class SlowBlocks:
    """The same account, worked out anew from the requests each time."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[Prompt, list[float]]] = {}
        self.weights: dict[int, float] = {}

    def holders(self, block: int) -> int:
        return sum(block in prompt for prompt, _ in self.requests.values())

    def add_output(self, name: int, weight: float | None) -> None:
        prompt, outputs = self.requests[name]
        outputs.append(1.0)
        if weight is not None:
            outputs[:] = [weight] * len(outputs)
            for block in reversed(prompt):
                if self.holders(block) > 1:
                    break
                self.weights[block] = weight

    def release(self, name: int) -> None:
        del self.requests[name]
        self.weights = {block: weight for block, weight in self.weights.items() if self.holders(block)}

    def weight(self) -> float:
        held = {block for prompt, _ in self.requests.values() for block in prompt}
        outputs = sum(sum(outputs) for _, outputs in self.requests.values())
        return sum(self.weights.get(block, 1.0) for block in held) + outputs


@given(
    st.lists(
        st.tuples(st.integers(0, 4), prompts, st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])), max_size=40
    )
)
def test_the_account_agrees_with_one_worked_out_from_the_requests(
    steps: list[tuple[int, Prompt, float | None]],
) -> None:
    """Weights are binary fractions, so both are exact."""
    blocks, slow, paths, prefixes = ActiveBlocks(), SlowBlocks(), dict[int, HeldBlocks](), ActivePrefixes()
    for name, prompt, weight in steps:
        if name not in paths:
            paths[name], new = acquired(blocks, prompt)
            prefixes.add(3, new)
            slow.requests[name] = (prompt, [])
        elif weight is not None or prompt:
            blocks.add_output_block(paths[name], weight)
            slow.add_output(name, weight)
        else:
            prefixes.drop(3, blocks.release(paths.pop(name)))
            slow.release(name)
        assert blocks.active_blocks == floor(slow.weight() + 0.5)
        active = sum(1 for block in prompt if slow.holders(block))
        assert prefixes.shared_blocks(prompt) == ([(active, 1 << 3)] if active else [])


def test_the_shared_part_is_a_prefix_not_a_set() -> None:
    prefixes = ActivePrefixes()
    prefixes.add(0, [1, 2, 4, 5])
    assert prefixes.shared_blocks([1, 2, 3, 5]) == [(2, 1 << 0)]


def test_slots_are_grouped_by_how_much_they_share() -> None:
    prefixes = ActivePrefixes()
    for slot, depth in enumerate([3, 1, 0, 3, 2]):
        prefixes.add(slot, [10, 20, 30][:depth])
    assert prefixes.shared_blocks([10, 20, 30, 40]) == [(1, 0b00010), (2, 0b10000), (3, 0b01001)]
    assert prefixes.shared_blocks([]) == prefixes.shared_blocks([99]) == []


@given(st.integers(1, 700), st.randoms(use_true_random=False))
def test_many_slots_are_distinguished(slots: int, rng: Random) -> None:
    prefixes, held = ActivePrefixes(), {slot: rng.randrange(4) for slot in range(slots)}
    for slot, depth in held.items():
        prefixes.add(slot, [1, 2, 3][:depth])
    found = {slot: depth for depth, group in prefixes.shared_blocks([1, 2, 3]) for slot in numbers_in(group)}
    assert found == {slot: depth for slot, depth in held.items() if depth}
