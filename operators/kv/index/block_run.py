"""A run: a line of blocks kept as arrays, the ranks that hold a beginning of it, and the runs that leave it.

    root ─┬─ 11 12 13 14 15 16          rank A holds 6, rank B holds 3
          │         └─ 27 28            leaves the run above behind its block 3; B holds 2
          └─ 31 32                      C holds 2

A rank that holds a block holds all blocks before it, so its share of a run is one number and a run is never split: a
sequence that differs in the middle leaves it there. To compare a query with a run is to compare memory.

Source: dynamo lib/kv-router/src/indexer/radix_tree.rs, which has a tree with a node for each block instead.

The errors of the prefix index, for an event or a query that it cannot take; none of them stops the index.

Source: dynamo lib/kv-router/src/indexer, KvCacheEventError and KvRouterError; `status` is the label under which an
event with this end is counted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import ClassVar

from attrs import define, field

from pipeline import PenstockError

from ..hash_arrays import Hashes, first_difference, hashes

_FIRST_STEP_BLOCKS, _STEP_GROWTH = 64, 4


@define(eq=False)
class BlockRun:
    """Leaves `parent` behind its first `at` blocks; only the root, which has no blocks itself, has no parent.

    `local` are the hashes of the blocks' own tokens; `names` are the engine's, of the rank that stored them first.
    `ends`: which ranks, a bit each, hold exactly so many blocks from the start; every holder is in one of the masks.
    `branches` are the runs that leave this one: blocks before -> first local hash -> run. `number` is its own.
    """

    parent: BlockRun | None = None
    at: int = 0
    local: Hashes = field(factory=hashes)
    names: Hashes = field(factory=hashes)
    ends: dict[int, int] = field(factory=dict)
    branches: dict[int, dict[int, BlockRun]] = field(factory=dict)
    number: int = field(factory=count().__next__, init=False)

    def shared(self, other: Sequence[int], start: int, own_start: int = 0) -> int:
        """Return how many blocks of `other` from `start` on equal the blocks of this run from `own_start` on.

        Raises as `hashes` if it meets an item that is not a u64.
        """
        mine, length = self.local, min(len(self.local) - own_start, len(other) - start)
        done, step = 0, _FIRST_STEP_BLOCKS
        while done < length:  # in growing steps: a long run that differs early is not read to its end
            step = min(step, length - done)
            here, there = own_start + done, start + done
            left, right = mine[here : here + step], hashes(other[there : there + step])
            if left != right:
                return done + first_difference(left, right)
            done += step
            step *= _STEP_GROWTH
        return length

    def branch(self, at: int, first: int) -> BlockRun | None:
        """Return the run that leaves here with this block, if there is one."""
        leaving = self.branches.get(at)
        return leaving.get(first) if leaving is not None else None

    def grow(self, local: Hashes, names: Hashes) -> None:
        """Append these blocks; with its first blocks the run leaves its parent."""
        if not self.local and self.parent is not None:
            self.parent.branches.setdefault(self.at, {})[local[0]] = self
        self.local += local
        self.names += names

    def branches_behind(self, at: int, end: int) -> list[BlockRun]:
        """The runs that leave after more than `at` blocks and at most `end`."""
        if not self.branches:
            return []
        places = range(at + 1, end + 1) if end - at < len(self.branches) else self.branches
        return [run for p in places if at < p <= end for run in self.branches.get(p, {}).values()]

    def move_end(self, bit: int, old: int, new: int) -> None:
        """Note that a rank that held `old` blocks now holds `new`; 0 for none."""
        ends = self.ends
        if old:
            if others := ends[old] & ~bit:
                ends[old] = others
            else:
                del ends[old]
        if new:
            ends[new] = ends.get(new, 0) | bit

    def trim(self) -> None:
        """Drop the blocks that no rank holds, and the run itself if none is left."""
        longest = max(self.ends, default=0)
        if longest == 0 and self.parent is not None and len(self.local):
            leaving = self.parent.branches[self.at]
            del leaving[self.local[0]]
            if not leaving:
                del self.parent.branches[self.at]
        del self.local[longest:], self.names[longest:]


class KvIndexError(PenstockError):
    """An event that was not applied, or not fully."""

    status: ClassVar[str] = "failed"


class ParentBlockNotFound(KvIndexError):
    """A store continues a block this rank does not hold. Nothing changed."""

    status = "parent_block_not_found"


class BlockNotFound(KvIndexError):
    """A removal names a block this rank does not hold. The other blocks it names are removed."""

    status = "block_not_found"


class InvalidBlockSequence(KvIndexError):
    """An impossible store: a block below itself, twice in one sequence, or with a name that is not a u64. Nothing
    changed."""

    status = "invalid_block"


class CapacityExhausted(KvIndexError):
    """A store would give one rank more blocks than the index keeps of a rank. Nothing changed."""

    status = "capacity_exhausted"


class UnsupportedResidencyDomain(KvIndexError):
    """An event about blocks outside of the worker's own cache. Nothing changed."""

    status = "unsupported_residency_domain"
