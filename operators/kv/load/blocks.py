"""ActiveBlocks: the blocks that running requests hold on one rank, shared prefixes counted once.

Source: dynamo lib/kv-router/src/sequences/block_tracker.rs, BlockTracker. Other than there a prompt is an end in a tree
of all ranks, see `PrefixTree`, and what only one request holds is told by counts in its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor

from attrs import define, field

from ..hash_arrays import Hashes
from ..prefix_tree import PrefixPart, PrefixTree


@define(eq=False)
class HeldBlocks:
    """The blocks one request holds on its rank: those of its prompt, and a count of its output blocks."""

    end: PrefixPart | None = field(default=None, init=False, repr=False)
    """Where its prompt ends in the tree; None before it holds anything."""
    output_blocks: int = field(default=0, init=False)
    output_weight: float = field(default=0.0, init=False)
    """The weight of all output blocks together; a block weighs 1 until a decay is set."""

    @property
    def hashes(self) -> Sequence[int]:
        """The hashes of its prompt's blocks, while it holds them."""
        return () if self.end is None else self.end.path()


@define(eq=False)
class ActiveBlocks:
    """The account of one rank. A block goes when no request holds it; it weighs 1 until its request decays it.

    One request is entered and taken out in time proportional to the parts of its prompt, see `PrefixTree`.
    """

    tree: PrefixTree = field(factory=PrefixTree)
    """That of all ranks."""
    number: int = 0
    """The rank's, in the tree."""
    _blocks: int = field(default=0, init=False)
    _decayed_blocks: int = field(default=0, init=False)
    _decayed_weight: float = field(default=0.0, init=False)
    _output_blocks: int = field(default=0, init=False)
    _output_weight: float = field(default=0.0, init=False)

    @property
    def active_blocks(self) -> int:
        """The weight of all blocks, rounded half up."""
        return floor(self._blocks - self._decayed_blocks + self._decayed_weight + self._output_weight + 0.5)

    def acquire(self, held: HeldBlocks, hashes: Hashes) -> None:
        """Add a prompt to what the request holds."""
        held.end, added = self.tree.hold(self.number, hashes)
        self._blocks += added

    def release(self, held: HeldBlocks) -> None:
        """Remove a request. Call it once for a request."""
        self._output_blocks -= held.output_blocks
        # An account without blocks weighs exactly nothing, whatever the sums before it lost in rounding.
        self._output_weight = self._output_weight - held.output_weight if self._output_blocks else 0.0
        if self._decayed_blocks:
            self._forget_decay(held)
        end, held.end = held.end, None
        if end is not None:
            self._blocks -= self.tree.let_go(self.number, end)

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
        for part in self._own_parts(held):
            if part.weights is None:
                part.weights = {}
            blocks, before = len(part.hashes), part.weights.get(self.number)
            if before is None:
                self._decayed_blocks, before = self._decayed_blocks + blocks, 0.0
            self._decayed_weight += blocks * (weight - before)
            part.weights[self.number] = weight

    def _forget_decay(self, held: HeldBlocks) -> None:
        """Take what goes with the request out of the weights."""
        for part in self._own_parts(held):
            if part.weights is not None and (weight := part.weights.pop(self.number, None)) is not None:
                self._decayed_blocks -= len(part.hashes)
                self._decayed_weight -= len(part.hashes) * weight
        if not self._decayed_blocks:
            self._decayed_weight = 0.0

    def _own_parts(self, held: HeldBlocks) -> Iterator[PrefixPart]:
        """The parts at the end of its prompt that no other request of the rank holds, the last first."""
        part = held.end
        while part is not None and part.parent is not None and (part.more is None or self.number not in part.more):
            yield part
            part = part.parent
