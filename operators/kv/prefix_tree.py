"""PrefixTree: which ranks hold which beginnings of prompts, each prompt counted as often as it is held.

    root ─┬─ 11 12 13 ─┬─ 14 15 16      prompts 11..16 and 11..13 27 28: a part ends where they leave each other
          │            └─ 27 28
          └─ 31 32

A part is a line of blocks that is held as a whole, so holding, letting go and finding take time by the parts of a
prompt, not by its blocks; their hashes are compared as memory. Blocks are known by their place: a hash may stand in
several places, so local hashes will do as well as sequence hashes, but one tree has one kind.

The load book holds a prompt while its request runs, the index of own routing until its time is over.

Source: dynamo lib/kv-router/src/sequences/block_tracker.rs, BlockTracker, and prompt_membership_trie.rs. Other than
there both are one tree, of parts instead of blocks, and a block is known by its place, not by its hash alone.
"""

from __future__ import annotations

from attrs import define

from .hash_arrays import Hashes, first_difference, hashes

_EVERY_RANK = -1


@define(eq=False)
class PrefixPart:
    """Blocks that follow those of `parent`; only the root has none and no parent."""

    parent: PrefixPart | None
    hashes: Hashes
    holders: int
    """The ranks that hold it, and so all before it, as bits by their numbers."""
    more: dict[int, int] | None = None
    """How often a rank holds it beyond the first time, by number, where it does."""
    below: dict[int, PrefixPart] | None = None
    """What follows, by the first hash."""
    weights: dict[int, float] | None = None
    """What each of its blocks weighs on a rank, by number, where that was set."""

    def path(self) -> Hashes:
        """Return the hashes from the first block to the end of this part."""
        parts, part = list[Hashes](), self
        while part.parent is not None:
            parts.append(part.hashes)
            part = part.parent
        path = hashes()
        for piece in reversed(parts):
            path += piece
        return path


class PrefixTree:
    """See the module. Ranks are given as their numbers, hashes as arrays, which are copied."""

    def __init__(self) -> None:
        self.root = PrefixPart(None, hashes(), _EVERY_RANK)
        """Where a prompt without blocks ends."""

    def find(self, prompt: Hashes) -> list[tuple[int, int]]:
        """Masks of ranks by how many blocks of the prompt's start they hold; ranks that hold none are left out."""
        groups: list[tuple[int, int]] = []
        alive, depth, length, below = _EVERY_RANK, 0, len(prompt), self.root.below
        while below is not None and depth < length and (part := below.get(prompt[depth])) is not None:
            if part.holders != alive:
                if depth:
                    groups.append((depth, alive ^ part.holders))
                alive = part.holders
            own = part.hashes
            end = depth + len(own)
            if prompt[depth:end] != own:
                depth += _shared(prompt[depth:end], own)
                break
            depth, below = end, part.below
        if depth:
            groups.append((depth, alive))
        return groups

    def end_of(self, prompt: Hashes) -> PrefixPart | None:
        """Return the part that ends where the prompt does; None if there is none."""
        part, depth, length = self.root, 0, len(prompt)
        while depth < length:
            if part.below is None or (below := part.below.get(prompt[depth])) is None:
                return None
            end = depth + len(below.hashes)
            if prompt[depth:end] != below.hashes:
                return None
            part, depth = below, end
        return part

    def hold(self, number: int, prompt: Hashes) -> tuple[PrefixPart, int]:
        """Hold a prompt on a rank; return its end, and how many of its blocks the rank did not hold before.

        The end stays the prompt's end, whatever else is held and let go.
        """
        part, depth, length, added, bit = self.root, 0, len(prompt), 0, 1 << number
        while depth < length:
            first = prompt[depth]
            if part.below is None:
                part.below = {}
            if (below := part.below.get(first)) is None:
                part.below[first] = end = PrefixPart(part, prompt[depth:], bit)
                return end, added + length - depth
            own = below.hashes
            if (here := prompt[depth : depth + len(own)]) != own:
                below = _split(part, below, _shared(here, own))
            if not below.holders & bit:
                below.holders |= bit
                added += len(below.hashes)
            elif below.more is None:
                below.more = {number: 1}
            else:
                below.more[number] = below.more.get(number, 0) + 1
            part, depth = below, depth + len(below.hashes)
        return part, added

    def let_go(self, number: int, end: PrefixPart) -> int:
        """Let go of a prompt of the rank, by its end; return how many of its blocks the rank holds no longer."""
        part, bit, gone = end, 1 << number, 0
        while (parent := part.parent) is not None:
            if (more := part.more) is not None and (count := more.get(number)) is not None:
                if count > 1:
                    more[number] = count - 1
                else:
                    del more[number]
                    if not more:
                        part.more = None
            else:
                gone += len(part.hashes)
                part.holders ^= bit
                if part.weights is not None:
                    part.weights.pop(number, None)
            if not part.holders:
                _remove(parent, part)
            elif part.below is not None and len(part.below) == 1:
                _join(parent, part)
            part = parent
        return gone


def _shared(left: Hashes, right: Hashes) -> int:
    """How many blocks at the start of both are the same; they differ, or one of them is longer."""
    length = min(len(left), len(right))
    left, right = left[:length], right[:length]
    return length if left == right else first_difference(left, right)


def _split(parent: PrefixPart, part: PrefixPart, count: int) -> PrefixPart:
    """Make the first blocks of a part one of their own, which is returned; prompts that end in the part still do."""
    more = None if part.more is None else part.more.copy()
    weights = None if part.weights is None else part.weights.copy()
    front, rest = part.hashes[:count], part.hashes[count:]
    before = PrefixPart(parent, front, part.holders, more, {rest[0]: part}, weights)
    assert parent.below is not None
    parent.below[front[0]] = before
    part.parent, part.hashes = before, rest
    return before


def _remove(parent: PrefixPart, part: PrefixPart) -> None:
    """Remove a part that no rank holds, so that nothing is below it."""
    assert parent.below is not None
    del parent.below[part.hashes[0]]
    if not parent.below:
        parent.below = None


def _join(parent: PrefixPart, part: PrefixPart) -> None:
    """Join a part and the only one below it, if both are held alike: then no prompt ends between them."""
    assert part.below is not None
    assert parent.below is not None
    (rest,) = part.below.values()
    if rest.holders == part.holders and rest.more == part.more and (rest.weights or None) == (part.weights or None):
        rest.hashes, rest.parent = part.hashes + rest.hashes, parent
        parent.below[rest.hashes[0]] = rest
