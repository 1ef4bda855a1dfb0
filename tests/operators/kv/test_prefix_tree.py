"""PrefixTree: what it finds is what a list of the held prompts has; parts end where prompts leave each other."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import takewhile
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.kv.numbers import numbers_in
from operators.kv.prefix_tree import PrefixPart, PrefixTree

Prompt = tuple[int, ...]


def hashes(*prompt: int) -> array[int]:
    return array("Q", prompt)


def shared(left: Prompt, right: Prompt) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def parts(part: PrefixPart) -> Iterator[PrefixPart]:
    for below in (part.below or {}).values():
        yield below
        yield from parts(below)


def test_ranks_are_grouped_by_how_much_they_share() -> None:
    tree = PrefixTree()
    for number, depth in enumerate([3, 1, 0, 3, 2]):
        tree.hold(number, hashes(10, 20, 30)[:depth])
    assert tree.find(hashes(10, 20, 30, 40)) == [(1, 0b00010), (2, 0b10000), (3, 0b01001)]
    assert tree.find(hashes(10, 20)) == [(1, 0b00010), (2, 0b11001)]
    assert tree.find(hashes()) == tree.find(hashes(99)) == []


def test_the_shared_part_is_a_prefix_not_a_set() -> None:
    tree = PrefixTree()
    tree.hold(0, hashes(1, 2, 4, 5))
    assert tree.find(hashes(1, 2, 3, 5)) == [(2, 1)]


def test_a_prompt_is_copied() -> None:
    tree, prompt = PrefixTree(), hashes(1, 2, 3)
    end, _ = tree.hold(0, prompt)
    prompt[1] = 9
    assert (end.path(), tree.find(hashes(1, 2, 3))) == (hashes(1, 2, 3), [(3, 1)])


def test_a_part_is_split_where_prompts_leave_and_joined_when_one_has_gone() -> None:
    tree = PrefixTree()
    first, _ = tree.hold(0, hashes(1, 2, 3, 4))
    second, added = tree.hold(0, hashes(1, 2, 7))
    assert (added, sorted(list(part.hashes) for part in parts(tree.root))) == (1, [[1, 2], [3, 4], [7]])
    assert tree.let_go(0, second) == 1
    assert [list(part.hashes) for part in parts(tree.root)] == [[1, 2, 3, 4]]
    assert first.path() == hashes(1, 2, 3, 4)
    assert (tree.let_go(0, first), tree.root.below) == (4, None)


def test_parts_in_which_ranks_or_ends_differ_stay_apart() -> None:
    tree = PrefixTree()
    long, _ = tree.hold(0, hashes(1, 2, 3))
    short, _ = tree.hold(1, hashes(1, 2))
    assert [list(part.hashes) for part in parts(tree.root)] == [[1, 2], [3]]
    tree.let_go(1, short)
    again, _ = tree.hold(0, hashes(1, 2))
    assert [list(part.hashes) for part in parts(tree.root)] == [[1, 2], [3]]
    assert tree.end_of(hashes(1, 2)) is again
    assert tree.let_go(0, long) == 1
    assert (tree.end_of(hashes(1, 2)), tree.end_of(hashes(1, 2, 3)), tree.end_of(hashes(1))) == (again, None, None)


def test_parts_in_which_weights_differ_stay_apart() -> None:
    tree = PrefixTree()
    long, _ = tree.hold(0, hashes(1, 2, 3))
    short, _ = tree.hold(0, hashes(1, 2))
    long.weights = {0: 0.5}
    tree.let_go(0, short)
    assert [(list(part.hashes), part.weights) for part in parts(tree.root)] == [([1, 2], None), ([3], {0: 0.5})]


prompts = st.lists(st.integers(1, 2), max_size=6).map(tuple)
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 2), prompts), max_size=60)


@given(steps)
def test_it_agrees_with_a_list_of_the_held_prompts(script: list[tuple[bool, int, Prompt]]) -> None:
    """The model knows each prompt that is held, and works everything out from them."""
    tree, held = PrefixTree(), list[tuple[int, Prompt, PrefixPart]]()

    def blocks(number: int) -> set[Prompt]:
        return {prompt[:depth] for one, prompt, _ in held if one == number for depth in range(1, len(prompt) + 1)}

    for is_held, number, prompt in script:
        before = blocks(number)
        if is_held or not held:
            end, added = tree.hold(number, hashes(*prompt))
            held.append((number, prompt, end))
            assert added == len(blocks(number) - before)
        else:
            number, _, end = held.pop(sum(prompt) % len(held))
            before = blocks(number) | {tuple(end.path()[:depth]) for depth in range(1, len(end.path()) + 1)}
            assert tree.let_go(number, end) == len(before - blocks(number))
        depths = {one: max(shared(prompt, two) for o, two, _ in held if o == one) for one, _, _ in held}
        found = tree.find(hashes(*prompt))
        assert {one: depth for depth, ranks in found for one in numbers_in(ranks)} == {
            one: depth for one, depth in depths.items() if depth
        }
        assert [depth for depth, _ in found] == sorted({depth for depth in depths.values() if depth})
        for _, path, end in held:
            assert tuple(end.path()) == path
            assert tree.end_of(hashes(*path)) is end
        for part in parts(tree.root):
            assert part.holders
            assert len(part.hashes)
            below = list((part.below or {}).values())
            if len(below) == 1:
                assert (below[0].holders, below[0].more) != (part.holders, part.more), "they could be joined"
    for number, _, end in held:
        tree.let_go(number, end)
    assert tree.root.below is None


@given(st.integers(1, 700), st.randoms(use_true_random=False))
def test_many_ranks_are_distinguished(ranks: int, rng: Random) -> None:
    tree, held = PrefixTree(), {number: rng.randrange(4) for number in range(ranks)}
    for number, depth in held.items():
        tree.hold(number, hashes(1, 2, 3)[:depth])
    found = {number: depth for depth, group in tree.find(hashes(1, 2, 3)) for number in numbers_in(group)}
    assert found == {number: depth for number, depth in held.items() if depth}


@pytest.mark.parametrize("is_deepest_first", [False, True])
def test_thousands_of_prompts_within_each_other_are_held_and_let_go(is_deepest_first: bool) -> None:
    """A part for each block, the most there can be; nothing recurses."""
    tree, prompt = PrefixTree(), hashes(*range(3000))
    ends = [tree.hold(0, prompt[:depth])[0] for depth in range(1, 3001)]
    assert tree.find(prompt) == [(3000, 1)]
    for end in reversed(ends) if is_deepest_first else ends:
        tree.let_go(0, end)
    assert tree.root.below is None
