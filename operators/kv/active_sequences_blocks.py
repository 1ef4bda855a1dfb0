"""ActiveBlocks: the blocks that running requests hold on one rank, shared prefixes counted once.

Source: dynamo lib/kv-router/src/sequences/block_tracker.rs, BlockTracker. Other than there, blocks are kept one by one,
and a sequence whose hash is known below another parent does not confuse the account: from there on its blocks are
shared with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import floor

from attrs import define, field

_ABSENT = object()


@define(eq=False)
class BlockPath:
    """What one request holds: its prompt blocks by name, and its output blocks, which have none."""

    hashes: Sequence[int]
    output_blocks: int = 0
    output_weight: float = 0.0


@define
class ActiveBlocks:
    """Prompt blocks as a tree of sequence hashes, each with the number of branches and ends that hang on it.

    A block weighs 1 until its request decays it; it goes when nothing hangs on it any more. One request is entered
    and taken out in time proportional to the blocks it does not share.
    """

    _hanging: dict[int, int] = field(factory=dict)
    _parents: dict[int, int | None] = field(factory=dict)
    _decayed: dict[int, float] = field(factory=dict)
    _decayed_weight: float = 0.0
    _output_blocks: int = 0
    _output_weight: float = 0.0
    _unnamed: count[int] = field(factory=lambda: count(-1, -1))

    @property
    def active_blocks(self) -> int:
        """The weight of all blocks, rounded half up."""
        return floor(len(self._hanging) - len(self._decayed) + self._decayed_weight + self._output_weight + 0.5)

    def acquire(self, hashes: Sequence[int]) -> tuple[BlockPath, Sequence[int]]:
        """Enters a prompt; also returns the blocks that were not there before, which follow the shared ones."""
        shared = self._shared_blocks(hashes)
        new, parent = list(hashes[shared:]), hashes[shared - 1] if shared else None
        if new and (len(set(new)) < len(new) or not self._hanging.keys().isdisjoint(new)):
            # A hash below two parents: these blocks get names nobody else has.
            new = [next(self._unnamed) for _ in new]
        self._hanging.update(dict.fromkeys(new, 1))
        self._parents.update(zip(new, [parent, *new], strict=False))
        if parent is not None:
            self._hanging[parent] += 1
        return BlockPath([*hashes[:shared], *new]), new

    def release(self, path: BlockPath) -> Sequence[int]:
        """Takes a request out; returns the prompt blocks that went with it. A path is released once."""
        self._output_blocks -= path.output_blocks
        # An account without blocks weighs exactly nothing, whatever the sums before it lost in rounding.
        self._output_weight = self._output_weight - path.output_weight if self._output_blocks else 0.0
        gone = []
        for block in reversed(path.hashes):
            self._hanging[block] -= 1
            if self._hanging[block]:
                break
            gone.append(block)
            del self._hanging[block], self._parents[block]
            self._decayed_weight -= self._decayed.pop(block, 0.0)
        if not self._decayed:
            self._decayed_weight = 0.0
        return gone

    def add_output_block(self, path: BlockPath, weight: float | None) -> None:
        """Adds an output block. With a weight, all output blocks of the request and the end of its prompt that no
        other request needs weigh that much from now on, and keep it when the end becomes shared."""
        grown = path.output_weight + 1.0 if weight is None else (path.output_blocks + 1) * weight
        path.output_blocks += 1
        self._output_blocks += 1
        self._output_weight += grown - path.output_weight
        path.output_weight = grown
        if weight is None:
            return
        for block in reversed(path.hashes):
            if self._hanging[block] != 1:
                break
            self._decayed_weight += weight - self._decayed.get(block, 0.0)
            self._decayed[block] = weight

    def _shared_blocks(self, hashes: Sequence[int]) -> int:
        """How many blocks at the start are active, each below the one before it."""
        parents, parent, shared = self._parents, None, 0
        for block in hashes:
            if parents.get(block, _ABSENT) != parent:
                break
            parent, shared = block, shared + 1
        return shared
