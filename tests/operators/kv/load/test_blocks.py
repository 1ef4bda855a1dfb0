"""ActiveBlocks: blocks counted once, decay, and a slow model that agrees."""

from __future__ import annotations

from array import array
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.load import ActiveBlocks, HeldBlocks
from operators.kv.numbers import numbers_in
from operators.kv.prefix_tree import PrefixTree


def acquired(blocks: ActiveBlocks, hashes: list[int]) -> HeldBlocks:
    """A prompt that was added to the blocks."""
    held = HeldBlocks()
    blocks.acquire(held, array("Q", hashes))
    return held


def test_a_shared_prefix_counts_once_and_goes_with_its_last_holder() -> None:
    blocks = ActiveBlocks()
    short = acquired(blocks, [1, 2])
    assert blocks.active_blocks == 2
    long = acquired(blocks, [1, 2, 3])
    assert (blocks.active_blocks, list(short.hashes), list(long.hashes)) == (3, [1, 2], [1, 2, 3])
    blocks.release(short)
    assert (blocks.active_blocks, list(short.hashes), list(long.hashes)) == (3, [], [1, 2, 3])
    blocks.release(long)
    assert blocks.active_blocks == 0


def test_decay_takes_what_only_this_request_holds_and_stays_where_it_becomes_shared() -> None:
    """The table of output blocks and decay, step by step."""
    blocks = ActiveBlocks()
    first = acquired(blocks, [1, 2, 3])
    counted = [blocks.active_blocks]
    blocks.add_output_block(first, 0.5)
    counted.append(blocks.active_blocks)
    second = acquired(blocks, [1, 2])
    counted.append(blocks.active_blocks)
    blocks.add_output_block(first, 0.0)
    counted.append(blocks.active_blocks)
    blocks.release(first)
    counted.append(blocks.active_blocks)  # the two left weigh 0.5 each
    blocks.release(second)
    assert [*counted, blocks.active_blocks] == [3, 2, 2, 1, 1, 0]


def test_an_output_block_without_decay_weighs_one_and_changes_no_other() -> None:
    blocks = ActiveBlocks()
    path = acquired(blocks, [1, 2])
    blocks.add_output_block(path, 0.25)
    blocks.add_output_block(path, None)
    assert blocks.active_blocks == floor(2 * 0.25 + 0.25 + 1 + 0.5)


def test_half_blocks_are_rounded_up() -> None:
    """Python's own rounding would give 2 for 2.5."""
    blocks = ActiveBlocks()
    path = acquired(blocks, [1, 2, 3, 4])
    blocks.add_output_block(path, 0.5)
    assert blocks.active_blocks == 3


def test_an_account_without_blocks_weighs_nothing_whatever_was_rounded() -> None:
    blocks = ActiveBlocks()
    paths = [acquired(blocks, [n, n + 100]) for n in range(50)]
    for path in paths:
        for weight in (0.1, 0.7, 0.3):
            blocks.add_output_block(path, weight)
    for path in paths:
        blocks.release(path)
    assert (blocks._decayed_weight, blocks._output_weight) == (0.0, 0.0)


@pytest.mark.parametrize("hostile", [[9, 2, 3], [3, 2, 1], [5, 5, 5], [1, 3], [2]])
def test_a_hash_below_another_parent_is_counted_and_not_shared(hostile: list[int]) -> None:
    blocks = ActiveBlocks()
    good, bad = acquired(blocks, [1, 2, 3]), acquired(blocks, hostile)
    shared = 1 if hostile == [1, 3] else 0
    assert blocks.active_blocks == 3 + len(hostile) - shared
    blocks.release(good)
    assert (blocks.active_blocks, list(bad.hashes)) == (len(hostile), hostile)
    blocks.release(bad)
    assert (blocks.active_blocks, blocks.tree.root.below) == (0, None)


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
        st.tuples(st.integers(0, 7), prompts, st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])), max_size=60
    )
)
def test_the_account_agrees_with_one_worked_out_from_the_requests(
    steps: list[tuple[int, Prompt, float | None]],
) -> None:
    """Two ranks share a tree; the last bit of a request's name is its rank. Weights are binary fractions, so both are
    exact."""
    tree = PrefixTree()
    blocks = [ActiveBlocks(tree, 3), ActiveBlocks(tree, 5)]
    slow, held = [SlowBlocks(), SlowBlocks()], dict[int, HeldBlocks]()
    for name, prompt, weight in steps:
        at = name % 2
        if name not in held:
            held[name] = acquired(blocks[at], prompt)
            slow[at].requests[name] = (prompt, [])
        elif weight is not None or prompt:
            blocks[at].add_output_block(held[name], weight)
            slow[at].add_output(name, weight)
        else:
            blocks[at].release(held.pop(name))
            slow[at].release(name)
        assert [one.active_blocks for one in blocks] == [floor(one.weight() + 0.5) for one in slow]
        assert all(list(one.hashes) == slow[name % 2].requests[name][0] for name, one in held.items())
        active = [sum(1 for block in prompt if one.holders(block)) for one in slow]
        found = {number: depth for depth, ranks in tree.find(array("Q", prompt)) for number in numbers_in(ranks)}
        assert found == {number: depth for number, depth in zip((3, 5), active, strict=True) if depth}
    for name, one in held.items():
        blocks[name % 2].release(one)
    assert all((one._blocks, one._decayed_blocks, one._decayed_weight) == (0, 0, 0.0) for one in blocks)
    assert tree.root.below is None
