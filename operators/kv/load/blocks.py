"""ActiveBlocks: the blocks that running requests hold on one rank, shared prefixes counted once.

Source: dynamo lib/kv-router/src/sequences/block_tracker.rs, BlockTracker. Other than there, blocks are kept one by one,
and a sequence whose hash is known below another parent does not confuse the account: from there on no other request
shares its blocks.

ActivePrefixes: how much of a prompt is active on which ranks, for all ranks at once.

Source: dynamo lib/kv-router/src/sequences/prompt_membership_trie.rs. Other than there a plain dict: a sequence hash
stands for its whole prefix, so a bit mask of the ranks that hold it is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count, repeat
from math import floor

from attrs import define, field

_ABSENT = object()


@define(eq=False)
class HeldBlocks:
    """The blocks one request holds on its rank: those of its prompt by hash, and a count of its output blocks."""

    hashes: Sequence[int] = field(default=(), init=False)
    output_blocks: int = field(default=0, init=False)
    output_weight: float = field(default=0.0, init=False)
    """The weight of all output blocks together; a block weighs 1 until a decay is set."""


@define
class ActiveBlocks:
    """Prompt blocks as a tree of sequence hashes; a block goes when nothing hangs on it any more.

    A branch or an end hangs on each block; `_more` counts those beyond the first, which only few blocks have. A block
    weighs 1 until its request decays it. One request is entered and taken out in time proportional to its blocks, at
    a few nanoseconds for each that it shares.
    """

    _parents: dict[int, int | None] = field(factory=dict)
    _more: dict[int, int] = field(factory=dict)
    _decayed: dict[int, float] = field(factory=dict)
    _decayed_weight: float = 0.0
    _output_blocks: int = 0
    _output_weight: float = 0.0
    _unnamed: count[int] = field(factory=lambda: count(-1, -1))

    @property
    def active_blocks(self) -> int:
        """The weight of all blocks, rounded half up."""
        return floor(len(self._parents) - len(self._decayed) + self._decayed_weight + self._output_weight + 0.5)

    def acquire(self, held: HeldBlocks, hashes: Sequence[int]) -> Sequence[int]:
        """Add a prompt to what the request holds; return the blocks that are new here, which follow the shared ones."""
        shared = self._shared_blocks(hashes)
        new, parent = list(hashes[shared:]), hashes[shared - 1] if shared else None
        if not (self._parents.keys().isdisjoint(new) and self._enter(new, parent)):
            # A hash below two parents: these blocks get names of their own.
            new = [next(self._unnamed) for _ in new]
            self._enter(new, parent)
        if parent is not None:
            self._more[parent] = self._more.get(parent, 0) + 1
        held.hashes = [*hashes[:shared], *new]
        return new

    def release(self, held: HeldBlocks) -> Sequence[int]:
        """Remove a request; return the prompt blocks that no other request holds. Call it once for a request."""
        self._output_blocks -= held.output_blocks
        # An account without blocks weighs exactly nothing, whatever the sums before it lost in rounding.
        self._output_weight = self._output_weight - held.output_weight if self._output_blocks else 0.0
        kept = self._needed_blocks(held)
        if kept:
            self._let_go(held.hashes[kept - 1])
        gone = held.hashes[kept:]
        for block in gone:
            del self._parents[block]
        if self._decayed:
            self._decayed_weight -= sum(self._decayed.pop(block, 0.0) for block in gone)
        if not self._decayed:
            self._decayed_weight = 0.0
        return gone

    def add_output_block(self, held: HeldBlocks, weight: float | None) -> None:
        """Adds an output block. With a weight, all output blocks of the request and the end of its prompt that no
        other request needs weigh that much from now on, and keep it when the end becomes shared."""
        grown = held.output_weight + 1.0 if weight is None else (held.output_blocks + 1) * weight
        held.output_blocks += 1
        self._output_blocks += 1
        self._output_weight += grown - held.output_weight
        held.output_weight = grown
        if weight is None:
            return
        for block in held.hashes[self._needed_blocks(held) :]:
            self._decayed_weight += weight - self._decayed.get(block, 0.0)
            self._decayed[block] = weight

    def _enter(self, new: Sequence[int], parent: int | None) -> bool:
        """Puts blocks that are not there below each other; False, and nothing done, if two of them are the same."""
        before = len(self._parents)
        self._parents.update(zip(new, [parent, *new], strict=False))
        if len(self._parents) - before == len(new):
            return True
        for block in set(new):
            del self._parents[block]
        return False

    def _needed_blocks(self, held: HeldBlocks) -> int:
        """How many blocks at the start of what a request holds are held by others too."""
        more, hashes = self._more, held.hashes
        if not more or more.keys().isdisjoint(hashes):
            return 0
        return next(place for place in range(len(hashes), 0, -1) if hashes[place - 1] in more)

    def _let_go(self, block: int) -> None:
        """One branch or end less hangs on a block on which more than one does."""
        if self._more[block] > 1:
            self._more[block] -= 1
        else:
            del self._more[block]

    def _shared_blocks(self, hashes: Sequence[int]) -> int:
        """How many blocks at the start are active, each below the one before it."""
        parents, parent, shared = self._parents, None, 0
        for block in hashes:
            if parents.get(block, _ABSENT) != parent:
                break
            parent, shared = block, shared + 1
        return shared


_EVERY_SLOT = -1


@define
class ActivePrefixes:
    """Sequence hash -> bit mask of the slots on which it is active."""

    _masks: dict[int, int] = field(factory=dict)

    def add(self, slot: int, hashes: Iterable[int]) -> None:
        masks, bit = self._masks, 1 << slot
        before, after = 0, bit
        for block in hashes:
            if (mask := masks.get(block, 0)) != before:
                before, after = mask, mask | bit
            masks[block] = after  # neighbours share one number: hundreds of slots make it a large one

    def drop(self, slot: int, hashes: Iterable[int]) -> None:
        """Forgets hashes of a slot, which must hold them."""
        masks, bit = self._masks, 1 << slot
        before, after = bit, 0
        for block in hashes:
            if (mask := masks[block]) != before:
                before, after = mask, mask ^ bit
            if after:
                masks[block] = after
            else:
                del masks[block]

    def shared_blocks(self, hashes: Iterable[int]) -> list[tuple[int, int]]:
        """Masks of slots by how many blocks of the prompt's start are active on them; slots with none are left out.

        Reads the hashes once and no further than some slot shares them.
        """
        groups: list[tuple[int, int]] = []
        alive, depth = _EVERY_SLOT, 0
        for mask in map(self._masks.get, hashes, repeat(0)):
            if mask != alive:  # in a chain of prefixes the next block mostly has the same holders
                still = alive & mask
                if depth and still != alive:
                    groups.append((depth, alive ^ still))
                alive = still
                if not alive:
                    return groups
            depth += 1
        if depth:
            groups.append((depth, alive))
        return groups
